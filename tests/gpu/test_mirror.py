"""Parameters on the host and on the device, kept in step, and a run whose ops are the device's."""

import logging

import numpy as np
import pytest

from mamba_ops.config import BatchesConfig, MambaConfig, TrainConfig
from mamba_ops.cpu import open_cpu
from mamba_ops.mirror import Mirror, compare
from mamba_ops.optimizer import adam_state
from mamba_ops.parameters import EMBEDDING, init
from mamba_ops.run_folder import checkpoints, ops_before
from mamba_ops.train import start, train

CONFIG = MambaConfig(vocab_size=40, hidden_size=8, num_hidden_layers=2, state_size=4)
IDS = np.random.default_rng(0).integers(0, 40, 200)
BATCHES = BatchesConfig(seq_len=19, batch_size=2)


def settings(**changes):
    return TrainConfig(**({"learning_rate": 1e-2, "max_steps": 8, "save_steps": 4} | changes))


def test_both_sides_hold_the_same_bytes(gpu_once):
    params = init(CONFIG, 0)
    mirror = Mirror(gpu_once, params, adam_state(params, params))
    host, device = mirror.verify()
    assert host == device
    assert not mirror.one_side
    mirror.close()
    assert gpu_once.held_bytes() == 0


@pytest.mark.parametrize("limit", [512, None])
def test_the_host_leads(gpu_once, monkeypatch, limit):
    monkeypatch.setattr(gpu_once.device, "binding_limit", limit or gpu_once.device.binding_limit)
    params = init(CONFIG, 0)
    mirror = Mirror(gpu_once, params)
    params[EMBEDDING] *= 2
    params["backbone.norm_f.weight"][0] = 7
    assert len(set(mirror.verify())) == 2
    mirror.push([EMBEDDING, "backbone.norm_f.weight"])
    assert len(set(mirror.verify())) == 1


def test_the_device_leads(gpu_once):
    params = init(CONFIG, 0)
    mirror = Mirror(gpu_once, params, adam_state(params, [EMBEDDING]))
    gpu_once.zero(mirror.params[EMBEDDING])
    first, second = mirror.adam.moments[EMBEDDING]
    gpu_once.write_parameter(second, np.full(second.shape, 3, np.float32))
    mirror.pull()
    assert len(set(mirror.verify())) == 1
    assert not params[EMBEDDING].any()
    assert (gpu_once.read(first) == 0).all()


def test_logits_of_both_sides_agree(gpu):
    params = init(CONFIG, 0)
    mirror = Mirror(gpu, params)
    found = compare(mirror, CONFIG)
    assert found.agrees
    assert found.nbytes == sum(value.nbytes for value in params.values())
    gpu.write_parameter(mirror.params["backbone.norm_f.weight"], params["backbone.norm_f.weight"] * np.float32(1.01))
    found = compare(mirror, CONFIG)
    assert not found.agrees
    assert found.host != found.device
    assert found.difference == pytest.approx(0.01 * found.largest, rel=0.1)


def test_one_changed_bit_is_seen(gpu_once):
    params = init(CONFIG, 0)
    mirror = Mirror(gpu_once, params)
    params[EMBEDDING][39, 7] = np.nextafter(params[EMBEDDING][39, 7], np.float32(1))
    found = compare(mirror, CONFIG)
    assert found.difference <= 1e-3 * found.largest
    assert not found.agrees


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_does_not_agree(gpu_once, bad):
    params = init(CONFIG, 0)
    params[EMBEDDING][3] = bad
    assert not compare(Mirror(gpu_once, params), CONFIG).agrees


def test_on_the_processor_both_are_one():
    params = init(CONFIG, 0)
    mirror = Mirror(open_cpu(threads=1), params, adam_state(params, params))
    assert mirror.one_side
    assert len(set(mirror.verify())) == 1


def test_a_run_on_the_device_resumes_bit_for_bit_there_and_goes_on_on_the_processor(gpu_with, tmp_path, caplog):
    def run(folder, ops, stop_after=None):
        state = start(CONFIG, seed=0)
        found = []
        for metrics in train(state, IDS, settings(), BATCHES, ops=ops, folder=folder):
            found.append(metrics.loss)
            if metrics.step == stop_after:
                break
        return state, found

    whole, losses = run(tmp_path / "whole", gpu_with())
    cpu, expected = run(tmp_path / "cpu", open_cpu(threads=1))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    for folder, ops in (("device", gpu_with()), ("processor", open_cpu(threads=1))):
        ops_then = gpu_with()
        run(tmp_path / folder, ops_then, stop_after=6)
        assert [path.name for path in checkpoints(tmp_path / folder)] == ["step-00000004"]
        assert ops_before(tmp_path / folder) == ops_then.name
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            state, rest = run(tmp_path / folder, ops)
        assert len(rest) == 4
        same = [state.params[name].tobytes() == value.tobytes() for name, value in whole.params.items()]
        assert all(same) == (folder == "device")
        assert ("not bit for bit from here" in caplog.text) == (folder == "processor")
        for name, value in cpu.params.items():
            np.testing.assert_allclose(state.params[name], value, atol=1e-3)
