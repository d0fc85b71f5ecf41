"""The graph on a device, and what goes wrong there: each fault is a failed step that leaves the last checkpoint.

The adapter is that of the kernel tests: MAMBA_TEST_ADAPTER, `llvmpipe` unless set.
"""

import json
import os
import shutil
from contextlib import contextmanager

import dagster as dg
import numpy as np
import pytest

from mamba_ops.accelerator import open_ops
from mamba_ops.mirror import Mirror
from mamba_ops.run_folder import checkpoints, ops_before
from pipelines import resources, sides, training
from pipelines.io import newest
from pipelines.ways import LORA, WSLA

from .running import (
    REPOSITORY,
    UPSTREAM,
    Finished,
    adapting,
    execute,
    failure,
    materialized,
    pointers,
    run,
    tiny,
    verdicts,
    versions,
    write_texts,
)

ADAPTER = os.environ.get("MAMBA_TEST_ADAPTER", "llvmpipe")

ABORTING = """
import os, resource
from pipelines import definitions, training

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
real = training.train

def aborting(*arguments, **options):
    for metrics in real(*arguments, **options):
        if metrics.step == 7:
            os.abort()
        yield metrics

training.train = aborting
"""


def on(config, adapter):
    return config | {"resources": config["resources"] | {"accelerator": {"config": {"adapter": adapter}}}}


@pytest.fixture(scope="session")
def adapter():
    """The name of the adapter under test, as it is set."""
    try:
        with open_ops(ADAPTER):
            return ADAPTER
    except RuntimeError as error:
        if "MAMBA_TEST_ADAPTER" in os.environ:
            pytest.fail(f"MAMBA_TEST_ADAPTER: {error}", pytrace=False)
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def finished_there(adapter, tmp_path_factory) -> Finished:
    """One run of the whole graph on the adapter, not to be changed."""
    folder = tmp_path_factory.mktemp("finished_there")
    config = on(tiny(write_texts(folder / "texts"), folder / "data"), adapter)
    instance = dg.DagsterInstance.ephemeral(str(folder / "instance"))
    return Finished(run(config, instance=instance), folder / "data", config, instance)


def messages(instance, result, step):
    """What a step wrote to its log."""
    entries = instance.all_logs(result.run_id)
    return [entry.user_message for entry in entries if entry.step_key == step and not entry.is_dagster_event]


def test_the_graph_on_a_device(finished, finished_there):
    result, _, _, instance = finished_there
    assert all(verdicts(result).values())
    assert set(verdicts(result)) == set(verdicts(finished.result))
    for step in ("weights_mirror", "trained_weights", "perplexity", "samples"):
        said = [text for text in messages(instance, result, step) if "this process waits" not in text]
        assert said[0].endswith(": it runs the model")
    found = materialized(result)["weights_mirror"].metadata
    assert found["driver"].value in found["adapter"].value
    assert found["bytes_on_device"].value == 4 * found["parameters"].value
    assert 0 <= found["largest_difference"].value <= 1e-3 * found["largest_logit"].value
    here = pointers(finished.root)["perplexity"].facts
    there = pointers(finished_there.root)["perplexity"].facts
    assert there["after"] == pytest.approx(here["after"], rel=1e-3)
    assert versions(result)["weights_mirror"] == versions(finished.result)["weights_mirror"]


@pytest.mark.parametrize("way", [WSLA, LORA], ids=lambda way: way.job)
def test_the_other_ways_on_a_device(adapted, finished_there, config, root, adapter, way):
    shutil.copytree(finished_there.root, root)
    result = run(on(adapting(config, way.job), adapter), way.job, [way.weights, way.perplexity])
    assert all(verdicts(result).values())
    here, there = (newest(place, way.perplexity).facts for place in (adapted[way.job].root, root))
    assert there["before"] == pytest.approx(here["before"], rel=1e-3)
    assert there["difference"] == pytest.approx(here["difference"], rel=1e-2)


def test_auto_without_hardware_is_the_processor(finished, config, instance, monkeypatch):
    adapters = pytest.importorskip("mamba_ops.gpu.adapters")
    monkeypatch.setattr(adapters, "list_adapters", list)
    result = run(on(config, "auto"), instance=instance)
    assert versions(result) == versions(finished.result)
    first = messages(instance, result, "trained_weights")[0]
    assert first == "no hardware adapter (no adapter at all): NumPy runs the model on the processor"


def test_an_adapter_that_is_not_there_fails_the_step(config, root):
    failed = run(on(config, "no such card"), assets=UPSTREAM, fails=True)
    assert "adapter 'no such card': no such name or index; found: " in failure(failed)
    assert verdicts(failed)["weights_mirror", "mirror_agrees"] is False
    assert "weights_mirror" not in pointers(root)


@pytest.mark.parametrize(
    ("value", "variable", "expected"), [("", None, "auto"), ("", "gpu", "gpu"), ("cpu", "gpu", "cpu")]
)
def test_the_setting_comes_before_the_environment(monkeypatch, value, variable, expected):
    @contextmanager
    def open_ops(wanted, say):
        yield resources.Opened(None, wanted)

    monkeypatch.setattr(resources, "open_ops", open_ops)
    if variable:
        monkeypatch.setenv("MAMBA_ADAPTER", variable)
    with resources.Accelerator(adapter=value).opened(dg.build_asset_context()) as opened:
        assert opened.reason == expected


def changing(name, change):
    """Return a mirror whose device holds another parameter than the host."""

    class Changed(Mirror):
        def __init__(self, ops, params):
            super().__init__(ops, params)
            ops.write_parameter(self.params[name], change(params[name]))

    return Changed


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("backbone.norm_f.weight", lambda value: value * np.float32(1.5)),
        ("backbone.layers.0.mixer.D", lambda value: np.nextafter(value, np.float32(9))),
    ],
)
def test_sides_that_differ_fail_the_mirror(config, root, adapter, monkeypatch, name, change):
    monkeypatch.setattr(sides, "Mirror", changing(name, change))
    failed = run(on(config, adapter), assets=UPSTREAM, fails=True)
    assert "check mirror_agrees of weights_mirror failed: found " in failure(failed)
    assert verdicts(failed)["weights_mirror", "mirror_agrees"] is False
    assert verdicts(failed)["weights_mirror", "weights_finite"] is True
    assert "weights_mirror" not in pointers(root)


def lose(device, monkeypatch):
    device.wgpu.destroy()


def refuse(device, monkeypatch):
    import wgpu

    def create_buffer(**_):
        raise wgpu.GPUOutOfMemoryError("Not enough memory left.")

    monkeypatch.setattr(device.wgpu, "create_buffer", create_buffer)


FAULTS = {"lost": (lose, "the device was lost"), "refused": (refuse, "out of memory: Not enough memory left.")}


def failing_after(step, fault, monkeypatch):
    """Return `train` on a device that something happens to after a step; buffers of the pools are not found again."""
    real = training.train

    def train(*arguments, ops, **options):
        for metrics in real(*arguments, ops=ops, **options):
            yield metrics
            if metrics.step == step:
                ops._free.clear()
                fault(ops.device, monkeypatch)

    return train


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_training_leaves_the_last_checkpoint(
    finished_there, config, root, adapter, monkeypatch, instance, name
):
    fault, message = FAULTS[name]
    there = on(config, adapter)
    with monkeypatch.context() as patch:
        patch.setattr(training, "train", failing_after(7, fault, patch))
        failed = run(there, fails=True)
    assert message in failure(failed)
    assert verdicts(failed)["trained_weights", "optimizer_steps"] is False
    assert "trained_weights" not in pointers(root)
    (folder,) = (root / training.RUNS).iterdir()
    assert checkpoints(folder)[-1].name == "step-00000005"
    again = run(there, instance=instance)
    assert not [text for text in messages(instance, again, "trained_weights") if "not bit for bit" in text]
    assert versions(again) == versions(finished_there.result)


def test_a_run_of_a_device_goes_on_on_the_processor(config, root, adapter, monkeypatch, instance):
    with monkeypatch.context() as patch:
        patch.setattr(training, "train", failing_after(7, lose, patch))
        run(on(config, adapter), fails=True)
    (folder,) = (root / training.RUNS).iterdir()
    name = ops_before(folder)
    again = run(config, instance=instance)
    told = f"NumPy continues what {name} began: from here on not bit for bit the same run"
    assert told in messages(instance, again, "trained_weights")
    assert pointers(root)["trained_weights"].facts["steps"] == 12
    assert [path.parent for path in (root / training.RUNS).glob("*/run.json")] == [folder]


def test_an_abort_fails_the_step_and_the_next_run_goes_on(config, root, adapter, tmp_path):
    """As a panic of the driver does: the step's process is gone without a word."""
    (tmp_path / "aborting.py").write_text(ABORTING)
    there = on(config, adapter)
    run(there, assets=UPSTREAM)
    values = {"ops": {"trained_weights": there["ops"]["trained_weights"]}, "resources": there["resources"]}
    command = ["asset", "materialize", "-m", "aborting", "--select", "trained_weights"]
    places = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    done = execute(*command, "--config-json", json.dumps(values), cwd=tmp_path, PYTHONPATH=places)
    assert done.returncode != 0
    assert "trained_weights" in done.stdout
    assert "terminated by signal 6" in done.stdout or "unexpectedly exited with code -6" in done.stdout, done.stdout
    assert "trained_weights" not in pointers(root)
    (folder,) = (root / training.RUNS).iterdir()
    assert checkpoints(folder)[-1].name == "step-00000005"
    run(config)
    assert pointers(root)["trained_weights"].facts["steps"] == 12
