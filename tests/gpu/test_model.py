"""The whole model on the GPU, and twenty training steps, against the NumPy side in float64."""

import numpy as np
import pandas as pd
import pytest

from mamba_ops import gradcheck, model, optimizer
from mamba_ops.config import EvaluateConfig, GenerateConfig, MambaConfig, TrainConfig
from mamba_ops.cpu import open_cpu
from mamba_ops.evaluate import perplexity
from mamba_ops.generate import generate
from mamba_ops.gpu.device import DeviceError
from mamba_ops.gpu.gpu_ops import open_gpu
from mamba_ops.gradients import GradientBuffers
from mamba_ops.ops import Batch
from mamba_ops.optimizer import AdamState, adam_state
from mamba_ops.parameters import EMBEDDING, LM_HEAD, init
from mamba_ops.train import train_step

CONFIGURATIONS = {
    "tied": dict(hidden_size=8, state_size=4),
    "untied": dict(hidden_size=8, state_size=16, tie_word_embeddings=False),
    "biases": dict(hidden_size=6, state_size=3, use_bias=True, time_step_rank=2),
    "no conv bias": dict(hidden_size=5, state_size=2, use_conv_bias=False, conv_kernel=3),
    "smallest": dict(hidden_size=3, state_size=1, conv_kernel=1, expand=1),
    "past a workgroup": dict(hidden_size=67, state_size=16, vocab_size=301, use_bias=True),
}
FIELDS = "ids", "targets", "positions"


def configuration(name):
    return MambaConfig(**(dict(vocab_size=11, num_hidden_layers=2) | CONFIGURATIONS[name]))


def random_parameters(config, seed=0):
    """Of size one, where every gradient stands above rounding; float32."""
    params = gradcheck.random_parameters(config, np.random.default_rng(seed))
    return {name: value.astype(np.float32) for name, value in params.items()}


def random_batch(config, batch, seq_len, seed=0):
    return gradcheck.random_batch(np.random.default_rng(seed), config.vocab_size, batch, seq_len)


def batch_of(ids, targets, positions):
    return Batch(np.array([ids]), np.array([targets]), np.array([positions], np.uint32))


def doubled(params):
    return {name: value.astype(np.float64) for name, value in params.items()}


def uploaded(ops, params):
    return {name: ops.upload_parameter(name, value) for name, value in params.items()}


def gradients(ops, params, config, batches, need=None, checkpointing=False):
    """The summed loss and every gradient on the host; first uses overwrite buffers that hold NaN."""
    on_device = uploaded(ops, params)
    grads = GradientBuffers(on_device, params if need is None else need, ops)
    for array in grads.arrays.values():
        ops.write_parameter(array, np.full(array.shape, np.nan, np.float32))
    total = 0.0
    for batch in batches:
        with ops.scope():
            rows = ops.rows(batch)
            total += model.losses_and_gradients(ops, on_device, config, rows, grads, grads.arrays, checkpointing)
    return total, {name: ops.read(array) for name, array in grads.arrays.items()}


def reference(params, config, batches):
    cpu, wide = open_cpu(np.float64, threads=1), doubled(params)
    grads = GradientBuffers(wide, wide)
    total = sum(model.losses_and_gradients(cpu, wide, config, cpu.rows(batch), grads, wide) for batch in batches)
    return total, grads.arrays


def logits(ops, params, config, batch, state=None):
    with ops.scope():
        return model.logits(ops, uploaded(ops, params), config, ops.rows(batch), state)


def check_gradients(assert_close, found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-4)
    for name, value in expected[1].items():
        assert_close(found[1][name], value, 1e-3, name)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_losses_and_logits(gpu, assert_close, name):
    config, cpu = configuration(name), open_cpu(np.float64, threads=1)
    params, batch = random_parameters(config), random_batch(config, 3, 37)
    on_device, wide = uploaded(gpu, params), doubled(params)
    with gpu.scope():
        rows = gpu.rows(batch)
        found = gpu.read(model.losses(gpu, on_device, config, rows))
        assert_close(found, model.losses(cpu, wide, config, cpu.rows(batch)), 1e-4)
        found = model.logits(gpu, on_device, config, rows)
        assert_close(found, model.logits(cpu, wide, config, cpu.rows(batch)), 1e-4)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_gradients(gpu, assert_close, name):
    config = configuration(name)
    params, batches = random_parameters(config), [random_batch(config, 2, 37), random_batch(config, 1, 5, seed=1)]
    check_gradients(assert_close, gradients(gpu, params, config, batches), reference(params, config, batches))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_activation_checkpointing_is_bit_identical(gpu, name):
    config = configuration(name)
    params, batches = init(config, 0), [random_batch(config, 3, 37)]
    kept_loss, kept = gradients(gpu, params, config, batches)
    again_loss, again = gradients(gpu, params, config, batches, checkpointing=True)
    assert kept_loss == again_loss
    assert all(kept[key].tobytes() == again[key].tobytes() for key in kept)


def test_frozen_parameters_get_no_gradient(gpu):
    config = configuration("biases")
    params, batches = init(config, 0), [random_batch(config, 2, 9)]
    need = [name for name in params if name.endswith(("x_proj.weight", "A_log"))]
    _, found = gradients(gpu, params, config, batches, need)
    _, full = gradients(gpu, params, config, batches)
    assert sorted(found) == sorted(need)
    assert all(found[name].tobytes() == full[name].tobytes() for name in need)


def test_repeated_runs_give_the_same_bytes(gpu):
    config = configuration("past a workgroup")
    params, batches = init(config, 0), [random_batch(config, 3, 70)]
    found = set()
    for _ in range(3):
        loss, grads = gradients(gpu, params, config, batches)
        found.add((loss, *(value.tobytes() for value in grads.values())))
    assert len(found) == 1


PACKED = batch_of([0, 1, 2, 3, 0, 4, 5], [1, 2, 3, 0, 4, 5, 0], [0, 1, 2, 3, 0, 1, 2])
ALONE = [
    batch_of([0, 1, 2, 3], [1, 2, 3, 0], [0, 1, 2, 3]),
    batch_of([0, 4, 5], [4, 5, 0], [0, 1, 2]),
]


def test_case_18_packed_documents_train_as_if_alone(gpu, assert_close):
    config = configuration("tied")
    params = random_parameters(config)
    check_gradients(assert_close, gradients(gpu, params, config, [PACKED]), reference(params, config, ALONE))
    pieces = [logits(gpu, params, config, batch) for batch in ALONE]
    assert_close(logits(gpu, params, config, PACKED), np.concatenate(pieces).astype(np.float64), 1e-4)


@pytest.mark.parametrize("lengths", [(1, 1, 1), (2, 3, 1), (1, 31, 2), (16, 16, 17), (3, 61, 64)])
def test_case_18_short_documents_and_block_edges(gpu, assert_close, lengths):
    config, rng = configuration("biases"), np.random.default_rng(0)
    params = random_parameters(config)
    documents = [batch_of(rng.integers(0, 11, n), rng.integers(0, 11, n), np.arange(n)) for n in lengths]
    packed = Batch(*(np.concatenate([getattr(d, field) for d in documents], axis=1) for field in FIELDS))
    check_gradients(assert_close, gradients(gpu, params, config, [packed]), reference(params, config, documents))


@pytest.mark.parametrize("changed", [0, 3, 4, 6])
def test_case_18_a_token_reaches_only_its_own_document(gpu, changed):
    config = configuration("tied")
    params = random_parameters(config)
    before = logits(gpu, params, config, PACKED)
    ids = PACKED.ids.copy()
    ids[0, changed] = 9
    after = logits(gpu, params, config, Batch(ids, PACKED.targets, PACKED.positions))
    document = slice(0, 4) if changed < 4 else slice(4, 7)
    same = np.ones(7, bool)
    same[changed : document.stop] = False
    assert after[same].tobytes() == before[same].tobytes()
    assert np.all(np.any(after[~same] != before[~same], axis=1))


def test_case_14_tied_gradient_of_a_repeated_row_that_is_also_a_target(gpu, assert_close):
    config = configuration("tied")
    params, batch = random_parameters(config), batch_of([5, 5, 5, 1], [5, 5, 1, 5], [0, 1, 2, 3])
    expected = reference(params, config, [batch])[1][EMBEDDING]
    assert_close(gradients(gpu, params, config, [batch])[1][EMBEDDING], expected, 1e-3)


@pytest.mark.parametrize("pieces", [(23,), (1, 22), (5, 1, 1, 16), (1,) * 23])
def test_state_is_carried_over_any_split(gpu, assert_close, pieces):
    config, cpu = configuration("biases"), open_cpu(np.float64, threads=1)
    params, batch = random_parameters(config), random_batch(config, 2, 23)
    whole = model.logits(cpu, doubled(params), config, cpu.rows(batch)).reshape(2, 23, -1)
    state, at, found = model.empty_state(gpu, config, 2), 0, []
    for length in pieces:
        piece = Batch(*(getattr(batch, field)[:, at : at + length].copy() for field in FIELDS))
        found.append(logits(gpu, params, config, piece, state).reshape(2, length, -1))
        at += length
    assert_close(np.concatenate(found, axis=1), whole, 1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_case_48_forced_small_limit(gpu, assert_close, monkeypatch, tied):
    """Vocabulary 40, d_model 8: 1,280 bytes with the limit at 512, for embedding and head only."""
    config = MambaConfig(vocab_size=40, hidden_size=8, num_hidden_layers=2, state_size=4, tie_word_embeddings=tied)
    params, batches = random_parameters(config), [random_batch(config, 2, 37)]
    expected, whole = reference(params, config, batches), logits(gpu, params, config, batches[0])
    monkeypatch.setattr(gpu.device, "binding_limit", 512)
    cut = {name for name, value in uploaded(gpu, params).items() if len(value.parts) > 1}
    assert cut == ({EMBEDDING} if tied else {EMBEDDING, LM_HEAD})
    check_gradients(assert_close, gradients(gpu, params, config, batches), expected)
    assert_close(logits(gpu, params, config, batches[0]), whole.astype(np.float64), 1e-4)


def device_training(ops, params, names):
    on_device = uploaded(ops, params)
    return on_device, GradientBuffers(on_device, names, ops), AdamState({}, {})


def host_training(params, names):
    wide = doubled(params)
    return wide, GradientBuffers(wide, names), adam_state(wide, names)


def losses_of(ops, config, training, settings, names, windows):
    """The loss of each training step."""
    params, grads, state = training
    found = []
    for window in windows:
        with ops.scope():
            result = train_step(ops, params, config, window, grads, state, settings, settings.learning_rate, names)
        assert result.skipped == ""
        found.append((result.loss, result.grad_norm))
    return found


VARIANTS = {
    "full": {},
    "accumulation": {"batches": 3},
    "boundaries": {"boundaries": True},
    "checkpointing": {"settings": {"gradient_checkpointing": True}},
    "tied": {"tied": True},
    "biases": {"config": {"use_bias": True}},
    "trust region": {"settings": {"max_delta": 5e-3, "weight_decay": 0.1}},
    "some frozen": {"names": ("x_proj.weight", "dt_proj.weight", "A_log")},
    "small limit": {"limit": 512},
    "all at once": {
        "batches": 2,
        "boundaries": True,
        "tied": True,
        "limit": 512,
        "settings": {"gradient_checkpointing": True},
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_twenty_training_steps(gpu_once, assert_close, monkeypatch, variant):
    """Loss and gradient norm of each step, and the parameters after the last."""
    options = VARIANTS[variant]
    config = MambaConfig(
        vocab_size=40,
        hidden_size=8,
        num_hidden_layers=2,
        state_size=4,
        tie_word_embeddings=options.get("tied", False),
        **options.get("config", {}),
    )
    settings = TrainConfig(**{"learning_rate": 1e-2, "max_grad_norm": 0.5} | options.get("settings", {}))
    rng = np.random.default_rng(0)

    def batch():
        made = gradcheck.random_batch(rng, config.vocab_size, 2, 19)
        if options.get("boundaries"):
            return made
        return Batch(made.ids, made.targets, np.broadcast_to(np.arange(19, dtype=np.uint32), (2, 19)).copy())

    pool = [batch() for _ in range(4)]
    windows = [[pool[(step + i) % 4] for i in range(options.get("batches", 1))] for step in range(20)]
    params = init(config, 0)
    names = [name for name in params if name.endswith(options.get("names", ""))]
    if "limit" in options:
        monkeypatch.setattr(gpu_once.device, "binding_limit", options["limit"])
    one, other = host_training(params, names), device_training(gpu_once, params, names)
    expected = losses_of(open_cpu(np.float64, threads=1), config, one, settings, names, windows)
    found = losses_of(gpu_once, config, other, settings, names, windows)
    assert found == [(pytest.approx(loss, rel=1e-4), pytest.approx(norm, rel=1e-3)) for loss, norm in expected]
    for name, value in one[0].items():
        assert_close(gpu_once.read(other[0][name]), value, 1e-3, name)


def test_nothing_grows_from_step_to_step(gpu_once):
    config = configuration("tied")
    params, settings = init(config, 0), TrainConfig(learning_rate=1e-2)
    names, held, rng = list(params), set(), np.random.default_rng(0)
    training = device_training(gpu_once, params, names)
    for step in range(5):
        window = [gradcheck.random_batch(rng, (2, 11)[step % 2], 2, 19) for _ in range(2)]
        losses_of(gpu_once, config, training, settings, names, [window])
        if step > 0:
            held.add((gpu_once.held_bytes(), gpu_once.device.held_bytes))
    assert len(held) == 1


def test_case_13_a_non_finite_step_changes_nothing(gpu):
    config = configuration("tied")
    params, settings = init(config, 0), TrainConfig(learning_rate=1e-2)
    params["backbone.layers.1.mixer.D"][3] = np.nan
    on_device, grads, state = device_training(gpu, params, list(params))
    with gpu.scope():
        result = train_step(
            gpu, on_device, config, [random_batch(config, 2, 19)], grads, state, settings, 1e-2, list(params)
        )
    assert "nan" in result.skipped
    assert state == AdamState({}, {})
    for name, value in params.items():
        assert gpu.read(on_device[name]).tobytes() == value.tobytes()


def test_perplexity_agrees_window_by_window(gpu):
    config, lengths = configuration("biases"), np.array([5, 1, 17, 0, 2, 3, 29, 8])
    params = random_parameters(config)
    offsets = 1 + np.cumsum(lengths + 1) - (lengths + 1)
    ids = np.random.default_rng(0).integers(1, config.vocab_size, lengths.sum() + len(lengths) + 1)
    ids[[0, *(offsets + lengths)]] = 0
    documents = pd.DataFrame({"offset": offsets, "tokens": lengths, "bytes": lengths})
    settings = EvaluateConfig(window=7, batch_size=3)
    expected = perplexity(open_cpu(np.float64, threads=1), doubled(params), config, ids, documents, settings)
    found = perplexity(gpu, uploaded(gpu, params), config, ids, documents, settings)
    np.testing.assert_allclose(found.document_nll, expected.document_nll, rtol=1e-4)


def test_greedy_text_is_the_same(gpu_once):
    config, options = configuration("untied"), GenerateConfig(max_new_tokens=30, temperature=0)
    params = random_parameters(config)
    cpu, prompt = open_cpu(np.float64, threads=1), [3, 1, 4, 1, 5]
    with gpu_once.scope():
        found = list(generate(gpu_once, uploaded(gpu_once, params), config, prompt, options))
    assert found == list(generate(cpu, doubled(params), config, prompt, options))


def test_case_48_the_real_embedding(gpu_once, assert_close, monkeypatch):
    """50,280 x 768: 154 MB, above the 128 MiB of many adapters."""
    monkeypatch.setattr(gpu_once.device, "binding_limit", 1 << 27)
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((50_280, 768), np.float32) * np.float32(0.02)
    x = rng.standard_normal((3, 768), np.float32)
    ids, targets = np.array([[0, 50_279, 43_690]]), np.array([[50_279, 1, 43_689]])
    params = {EMBEDDING: gpu_once.upload_parameter(EMBEDDING, weight)}
    assert [part.rows * 768 * 4 <= 1 << 27 for part in params[EMBEDDING].parts] == [True, True]
    grads, state = GradientBuffers(params, params, gpu_once), AdamState({}, {})
    rows = gpu_once.rows(Batch(ids, targets, np.zeros((1, 3), np.uint32)))

    out, dx, inputs = gpu_once.empty(3, 768), gpu_once.empty(3, 768), gpu_once.upload(x)
    gpu_once.embedding_forward(rows, params, EMBEDDING, out)
    np.testing.assert_array_equal(gpu_once.read(out), weight[ids[0]])

    losses = gpu_once.linear_cross_entropy_forward(rows, inputs, params, EMBEDDING, grads, params, dx)
    gpu_once.embedding_backward(inputs, rows, params, EMBEDDING, grads, params)
    wide = weight.astype(np.float64)
    values = np.exp(x @ wide.T)
    p = values / values.sum(axis=1, keepdims=True)
    assert_close(gpu_once.read(losses), -np.log(p[range(3), targets[0]]), 1e-4)
    p[range(3), targets[0]] -= 1
    assert_close(gpu_once.read(dx), p @ wide, 1e-3)
    gradient = p.T @ x
    gradient[ids[0]] += x
    assert_close(gpu_once.read(grads.arrays[EMBEDDING]), gradient, 1e-3)
    norms = gpu_once.global_norm(grads.arrays)
    assert norms == {EMBEDDING: pytest.approx(np.linalg.norm(gradient), rel=1e-5)}

    settings = TrainConfig(learning_rate=1e-2)
    optimizer.step(gpu_once, params, grads.arrays, state, settings, 1e-2, 1.0, ())
    touched = [0, 1, 43_689, 43_690, 50_279]
    step = -1e-2 * gradient[touched] / (np.abs(gradient[touched]) + 1e-8)
    assert_close(gpu_once.read(params[EMBEDDING])[touched] - weight[touched], step, 1e-3)


def test_open_gpu_owns_its_device(adapter):
    with open_gpu(adapter.info["device"]) as ops:
        assert ops.read(ops.upload(np.ones(3, np.float32))).tolist() == [1, 1, 1]
    assert ops.device.closed
    with pytest.raises(DeviceError, match="is closed"):
        ops.device.buffer(4)
    with pytest.raises(DeviceError, match="adapter 'cpu'"):
        open_gpu("cpu")
