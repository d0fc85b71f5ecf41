"""Logits, loss and every gradient against transformers' Mamba."""

from dataclasses import replace

import numpy as np
import pytest

from mamba_ops import parameters
from mamba_ops.config import MambaConfig
from mamba_ops.gradients import GradientBuffers
from mamba_ops.model import logits, losses_and_gradients
from mamba_ops.ops import IGNORED, Batch

torch = pytest.importorskip("torch", reason="torch is missing: pip install -e .[parity]")
pytest.importorskip("transformers", reason="transformers is missing: pip install -e .[parity]")

pytestmark = pytest.mark.parity

CASES = {
    "tied, past 64": (dict(vocab_size=37, hidden_size=16, num_hidden_layers=2), 2, 65),
    "untied, dt_rank 3": (
        dict(
            vocab_size=29,
            hidden_size=12,
            num_hidden_layers=3,
            state_size=5,
            time_step_rank=3,
            tie_word_embeddings=False,
        ),
        3,
        17,
    ),
    "use_bias, length 1": (dict(vocab_size=8, hidden_size=6, num_hidden_layers=2, use_bias=True), 4, 1),
    "no conv bias, kernel 3, expand 3": (
        dict(vocab_size=11, hidden_size=10, num_hidden_layers=2, conv_kernel=3, expand=3, use_conv_bias=False),
        1,
        64,
    ),
    "odd, one state, kernel 1, epsilon 1e-2": (
        dict(
            vocab_size=101,
            hidden_size=7,
            num_hidden_layers=1,
            state_size=1,
            conv_kernel=1,
            expand=1,
            layer_norm_epsilon=1e-2,
        ),
        2,
        129,
    ),
    "untied, both biases, kernel 5, dt_rank above d_model": (
        dict(
            vocab_size=13,
            hidden_size=5,
            num_hidden_layers=2,
            state_size=3,
            conv_kernel=5,
            time_step_rank=9,
            use_bias=True,
            tie_word_embeddings=False,
        ),
        5,
        3,
    ),
    "use_bias, no conv bias, prime": (
        dict(
            vocab_size=67,
            hidden_size=13,
            num_hidden_layers=1,
            state_size=17,
            use_bias=True,
            use_conv_bias=False,
        ),
        3,
        31,
    ),
}


@pytest.fixture(params=list(CASES))
def case(request):
    settings, batch, seq_len = CASES[request.param]
    return MambaConfig(**settings), batch, seq_len


def assert_close(found, expected, share, name):
    bound = share * np.abs(expected).max()
    worst = np.abs(np.asarray(found, dtype=np.float64) - expected).max()
    assert worst <= bound, f"{name}: {worst:.3e} above {bound:.3e}"


def run_reference(model, batch: Batch):
    """Return logits (T, vocab_size) and the summed negative log-likelihood; its gradients are added to the model's."""
    ids = torch.from_numpy(batch.ids)
    targets = torch.from_numpy(np.where(batch.targets == IGNORED, -100, batch.targets))
    out = model(input_ids=ids, labels=ids, shift_labels=targets, num_items_in_batch=1, use_cache=False)
    out.loss.backward()
    return out.logits.detach().numpy().reshape(-1, out.logits.shape[-1]), out.loss.item()


def run_ours(ops, params, config, batch, gradient_checkpointing=False):
    buffers = GradientBuffers(params, params)
    rows = ops.rows(batch)
    total = losses_and_gradients(ops, params, config, rows, buffers, set(params), gradient_checkpointing)
    return logits(ops, params, config, rows), total, buffers.arrays


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_float64(case, gradient_checkpointing, ops64, random_parameters, random_batch, reference, float64_transformers):
    config, batch_size, seq_len = case
    params = random_parameters(config, seed=1)
    batch = random_batch(config, 2, batch_size, seq_len, ignored=0.2 if seq_len > 1 else 0.0)
    model = reference(config, params)
    expected_logits, expected_loss = run_reference(model, batch)
    found_logits, found_loss, grads = run_ours(ops64, params, config, batch, gradient_checkpointing)
    assert expected_logits.dtype == found_logits.dtype == np.float64
    assert_close(found_logits, expected_logits, 1e-10, "logits")
    assert abs(found_loss - expected_loss) <= 1e-10 * abs(expected_loss)
    expected = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    assert grads.keys() == expected.keys() == parameters.table(config).keys()
    for name, gradient in expected.items():
        assert gradient.dtype == np.float64
        assert_close(grads[name], gradient, 1e-10, name)
    zero = [name for name, gradient in expected.items() if not gradient.any()]
    assert all(name.endswith("A_log") for name in zero)
    assert bool(zero) == (seq_len == 1)  # one token never sees the decay of a state


def test_the_patched_reference_holds_no_float32(random_parameters, random_batch, reference, float64_transformers):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.calls, self.narrow = 0, set()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            self.calls += 1
            if isinstance(out, torch.Tensor) and out.is_floating_point() and out.dtype != torch.float64:
                self.narrow.add(str(func))
            return out

    config = MambaConfig(vocab_size=9, hidden_size=4, num_hidden_layers=1, use_bias=True)
    model = reference(config, random_parameters(config, seed=0))
    with Watch() as watch:
        run_reference(model, random_batch(config, 0, 2, 5))
    assert watch.calls > 100
    assert watch.narrow == set()


def test_unpatched_float32_logits(case, ops32, random_parameters, random_batch, reference):
    config, batch_size, seq_len = case
    params = random_parameters(config, 3, np.float32)
    batch = random_batch(config, 4, batch_size, seq_len)
    expected, _ = run_reference(reference(config, params), batch)
    found = logits(ops32, params, config, ops32.rows(batch))
    assert expected.dtype == found.dtype == np.float32
    assert_close(found, expected, 1e-5, "logits")


def test_unpatched_float32_logits_at_the_initial_weights(ops32, random_batch, reference):
    config = MambaConfig(vocab_size=512, hidden_size=64, num_hidden_layers=4)
    params = parameters.init(config, seed=5)
    batch = random_batch(config, 6, 2, 200)
    expected, _ = run_reference(reference(config, params), batch)
    assert_close(logits(ops32, params, config, ops32.rows(batch)), expected, 1e-5, "logits")


def test_the_mean_loss_is_that_of_labels(ops64, random_parameters, random_batch, reference, float64_transformers):
    config = MambaConfig(vocab_size=23, hidden_size=8, num_hidden_layers=2)
    params = random_parameters(config, seed=7)
    batch = random_batch(config, 8, 3, 20)
    labels = torch.from_numpy(np.concatenate([batch.ids, batch.targets[:, -1:]], axis=1))
    expected = reference(config, params)(input_ids=labels, labels=labels, use_cache=False).loss.item()
    found = run_ours(ops64, params, config, batch)[1] / batch.target_count
    assert abs(found - expected) <= 1e-10 * expected


@pytest.mark.parametrize(
    "name", ["tied, past 64", "untied, dt_rank 3", "untied, both biases, kernel 5, dt_rank above d_model"]
)
def test_documents_in_one_row_are_documents_alone(
    name, ops64, random_parameters, random_batch, reference, float64_transformers
):
    """Packed with boundaries here, one by one there: the same logits, loss and gradients."""
    config = MambaConfig(**CASES[name][0])
    params = random_parameters(config, seed=9)
    documents = [random_batch(config, 10 + length, 1, length) for length in (1, 2, 3, 66, 4, 1, 33)]
    model = reference(config, params)
    parts = [run_reference(model, document) for document in documents]
    row = Batch(
        *(np.concatenate([getattr(d, field) for d in documents], axis=1) for field in ("ids", "targets", "positions"))
    )
    found_logits, found_loss, grads = run_ours(ops64, params, config, row)
    assert_close(found_logits, np.concatenate([part[0] for part in parts]), 1e-10, "logits")
    expected_loss = sum(part[1] for part in parts)
    assert abs(found_loss - expected_loss) <= 1e-10 * expected_loss
    for key, parameter in model.named_parameters():
        assert_close(grads[key], parameter.grad.numpy(), 1e-10, key)


def test_a_wrong_gradient_would_be_seen(ops64, random_parameters, random_batch, reference, float64_transformers):
    """The comparison fails when one token of the batch differs."""
    config = MambaConfig(vocab_size=23, hidden_size=8, num_hidden_layers=1)
    params = random_parameters(config, seed=11)
    batch = random_batch(config, 12, 1, 9)
    other = replace(batch, ids=np.where(np.arange(9) == 8, (batch.ids + 1) % 23, batch.ids))
    model = reference(config, params)
    run_reference(model, batch)
    grads = run_ours(ops64, params, config, other)[2]
    for name, parameter in model.named_parameters():
        with pytest.raises(AssertionError, match="above"):
            assert_close(grads[name], parameter.grad.numpy(), 1e-10, name)
