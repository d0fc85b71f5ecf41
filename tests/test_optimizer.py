"""AdamW state: moments and counts by name, decay mask, trust region, own gradient for each parameter."""

import math

import numpy as np
import pytest

from mamba_ops import lora, optimizer
from mamba_ops.config import TARGETS, LoraConfig, MambaConfig, TrainConfig, WslaTrainConfig
from mamba_ops.cpu import open_cpu
from mamba_ops.gradients import clip_factor, total_norm
from mamba_ops.optimizer import adam_state, decayed, gather, state_bytes
from mamba_ops.ownership import shards
from mamba_ops.parameters import init
from mamba_ops.wsla import wsla_names

CONFIG = MambaConfig(vocab_size=7, hidden_size=4, num_hidden_layers=2, state_size=3, use_bias=True)


@pytest.fixture
def ops():
    return open_cpu(np.float64, threads=1)


def reference(theta, gradients, config, rates, decay):
    """torch.optim.AdamW's recurrence on a scalar list of gradients, in float64."""
    m = v = 0.0
    for count, (g, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        theta = theta * (1 - rate * decay)
        m = config.adam_beta1 * m + (1 - config.adam_beta1) * g
        v = config.adam_beta2 * v + (1 - config.adam_beta2) * g * g
        hat_m, hat_v = m / (1 - config.adam_beta1**count), v / (1 - config.adam_beta2**count)
        theta -= rate * hat_m / (math.sqrt(hat_v) + config.adam_epsilon)
    return theta


def test_each_parameter_steps_with_its_own_gradient_and_moments(ops):
    config = TrainConfig(weight_decay=0.1)
    rng = np.random.default_rng(0)
    params = {"a": np.array([0.5]), "b": np.array([-2.0])}
    start = {name: float(value[0]) for name, value in params.items()}
    state = adam_state(params, params)
    grads = {name: rng.normal(size=10) for name in params}
    rates = [1e-2 / (k + 1) for k in range(10)]
    for k, rate in enumerate(rates):
        optimizer.step(ops, params, {n: grads[n][k : k + 1] for n in params}, state, config, rate, 1.0, {"a"})
    for name, decay in [("a", 0.1), ("b", 0.0)]:
        expected = reference(start[name], grads[name].tolist(), config, rates, decay)
        assert params[name][0] == pytest.approx(expected, rel=1e-12)
    assert state.counts == {"a": 10, "b": 10}


def test_seed_fault_4_a_parameter_that_trains_later_has_a_count_of_its_own(ops):
    config = TrainConfig(weight_decay=0.0)
    params = {"old": np.zeros(3), "new": np.zeros(3)}
    state = adam_state(params, ["old"])
    for _ in range(1000):
        optimizer.step(ops, params, {"old": np.ones(3)}, state, config, 1e-3, 1.0, ())
    optimizer.step(ops, params, {"old": np.ones(3), "new": np.ones(3)}, state, config, 1e-3, 1.0, ())
    assert state.counts == {"old": 1001, "new": 1}
    # a first step of AdamW is rate * sign(g); with the run's count it would be 2.5 times that
    np.testing.assert_allclose(params["new"], -1e-3, rtol=1e-7)


def test_seed_fault_8_decay_skips_A_log_D_norms_and_biases(ops):
    names = decayed(CONFIG)
    assert {name.rsplit("mixer.")[-1] for name in names if "layers.0" in name} == {
        "in_proj.weight",
        "conv1d.weight",
        "x_proj.weight",
        "dt_proj.weight",
        "out_proj.weight",
    }
    params = init(CONFIG, 0, np.float64)
    before = {name: value.copy() for name, value in params.items()}
    zeros = {name: np.zeros_like(value) for name, value in params.items()}
    config = TrainConfig(weight_decay=0.5)
    optimizer.step(ops, params, zeros, adam_state(params, params), config, 0.1, 1.0, names)
    for name, value in params.items():
        np.testing.assert_allclose(value, before[name] * (0.95 if name in names else 1.0), rtol=1e-14)
        if name.endswith((".A_log", ".D", ".bias")) or "norm" in name:
            assert value.tobytes() == before[name].tobytes(), name


def test_an_adapter_decays_where_its_weight_does():
    config = LoraConfig(target_modules=list(TARGETS))
    tensors = set(lora.tensor_shapes(CONFIG, config))
    found = decayed(CONFIG, lora.adapters(CONFIG, config))
    assert found >= decayed(CONFIG)
    assert tensors - found == {name for name in tensors if ".A_log." in name}
    assert found & tensors == found - decayed(CONFIG)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_trust_region_bounds_decay_and_adam_together(ops, sign):
    # Adam alone moves by 0.04 and decay alone by 0.04: each is inside 0.05, both together are not
    config = TrainConfig(weight_decay=0.5, max_delta=0.05)
    params = {"w": np.array([2.0, 0.0, -2.0]) * sign}
    before = params["w"].copy()
    state = adam_state(params, params)
    optimizer.step(ops, params, {"w": np.ones(3) * sign}, state, config, 0.04, 1.0, {"w"})
    np.testing.assert_allclose((params["w"] - before) * sign, [-0.05, -0.04, 0.0], atol=1e-9)


def test_trust_region_of_zero_is_none(ops):
    params = {"w": np.zeros(2)}
    optimizer.step(ops, params, {"w": np.ones(2)}, adam_state(params, params), TrainConfig(), 5.0, 1.0, ())
    np.testing.assert_allclose(params["w"], -5.0, rtol=1e-7)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_huge_finite_gradients_step_as_their_clipped_selves(dtype):
    ops = open_cpu(dtype, threads=1)
    config = TrainConfig(weight_decay=0.0)
    huge = {"a": np.full(100, 1e20, dtype), "b": np.full(3, -1e19, dtype)}
    norm = total_norm(ops.global_norm(huge))
    factor = clip_factor(norm, 1.0)
    small = {name: (value.astype(np.float64) * factor).astype(dtype) for name, value in huge.items()}
    results = []
    for grads, scale in [(huge, factor), (small, 1.0)]:
        params = {name: np.zeros_like(value) for name, value in grads.items()}
        state = adam_state(params, params)
        optimizer.step(ops, params, grads, state, config, 1e-2, scale, ())
        assert all(np.isfinite(array).all() for pair in state.moments.values() for array in pair)
        results.append((params, state))
    for name in huge:
        np.testing.assert_allclose(results[0][0][name], results[1][0][name], rtol=1e-5)
        for one, other in zip(results[0][1].moments[name], results[1][1].moments[name], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5)


def test_state_bytes_are_two_moments_of_what_trains():
    params = {"a": np.zeros(5, np.float32), "b": np.zeros((2, 3), np.float32)}
    assert state_bytes(adam_state(params, ["b"])) == 2 * 6 * 4


def trained(way, dtype):
    """Return the parameters of a way of training, the names that train, its configuration, and what decays."""
    params = init(CONFIG, 0, dtype)
    if way == "full":
        return params, list(params), TrainConfig(weight_decay=0.1), decayed(CONFIG)
    if way == "WSLA":
        return params, wsla_names(CONFIG), WslaTrainConfig(weight_decay=0.1, max_grad_norm=0), decayed(CONFIG)
    config = LoraConfig(r=3, target_modules=list(TARGETS))
    tensors = lora.initial(CONFIG, config, 0, dtype)
    decay = decayed(CONFIG, lora.adapters(CONFIG, config))
    return params | tensors, list(tensors), TrainConfig(weight_decay=0.1), decay


def copied(params):
    return {name: value.copy() for name, value in params.items()}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("way", ["full", "WSLA", "LoRA"])
@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_twenty_steps_of_shards_are_the_whole_steps_bit_for_bit(number, way, dtype):
    """The rate is so high that WSLA's trust region clamps; gradients are of one size and clipped in some steps."""
    ops = open_cpu(dtype, threads=1)
    params, names, config, decay = trained(way, dtype)
    whole, cut = copied(params), copied(params)
    owned = shards({name: params[name].shape for name in names}, number)
    state, states = adam_state(whole, names), [adam_state(cut, names, rows) for rows in owned]
    rng = np.random.default_rng(1)
    clamped = 0
    for k in range(20):
        grads = {name: (rng.normal(size=params[name].shape) * 0.3**k).astype(dtype) for name in names}
        factor = clip_factor(total_norm(ops.global_norm(grads)), config.max_grad_norm)
        before = copied(whole)
        optimizer.step(ops, whole, grads, state, config, 0.06, factor, decay)
        for rows, own in zip(owned, states, strict=True):
            optimizer.step(ops, cut, grads, own, config, 0.06, factor, decay, rows)
        clamped += sum(int((np.abs(whole[n] - before[n]) >= 0.0499).sum()) for n in names if config.max_delta)
        for name in params:
            assert cut[name].tobytes() == whole[name].tobytes(), name
    assert (clamped > 0) == (way == "WSLA")
    found = gather(owned, states)
    assert found.counts == state.counts == dict.fromkeys(names, 20)
    for name in names:
        assert whole[name].tobytes() != params[name].tobytes(), name
        for one, other in zip(found.moments[name], state.moments[name], strict=True):
            assert one.tobytes() == other.tobytes(), name


@pytest.mark.parametrize("way", ["full", "WSLA", "LoRA"])
def test_shards_hold_the_moments_of_their_rows_alone(way):
    params, names, _, _ = trained(way, np.float32)
    whole = state_bytes(adam_state(params, names))
    assert whole == 2 * sum(params[name].nbytes for name in names)
    owned = shards({name: params[name].shape for name in names}, 4)
    states = [adam_state(params, names, rows) for rows in owned]
    assert sum(map(state_bytes, states)) == whole
    for rows, state in zip(owned, states, strict=True):
        assert state.moments.keys() == state.counts.keys() == rows.keys()
        assert not any(np.shares_memory(pair[0], params[name]) for name, pair in state.moments.items())


@pytest.mark.parametrize("number", [2, 5])
def test_a_shard_counts_the_steps_of_each_of_its_names(ops, number):
    """A parameter that trains later starts at 1 in every shard, whose moments are made then."""
    params = {"old": np.zeros(7), "new": np.zeros((7, 2))}
    whole, owned = copied(params), shards({name: value.shape for name, value in params.items()}, number)
    state, states = adam_state(whole, ["old"]), [adam_state(params, ["old"], rows) for rows in owned]
    for k in range(6):
        grads = {name: np.ones_like(value) for name, value in params.items() if name == "old" or k > 2}
        optimizer.step(ops, whole, grads, state, TrainConfig(), 1e-2, 1.0, ())
        for rows, own in zip(owned, states, strict=True):
            optimizer.step(ops, params, grads, own, TrainConfig(), 1e-2, 1.0, (), rows)
    assert gather(owned, states).counts == state.counts == {"old": 6, "new": 3}
    for name, value in params.items():
        assert value.tobytes() == whole[name].tobytes()


def test_moments_of_another_shards_rows_are_refused_before_anything_is_stepped(ops):
    params, grads = {"a": np.zeros(4), "b": np.zeros((6, 2))}, {"a": np.ones(4), "b": np.ones((6, 2))}
    state = adam_state(params, params, {"a": (0, 4), "b": (0, 2)})
    for rows, message in [
        ({"a": (0, 4), "b": (2, 6)}, r"moments of b: expected \(4, 2\) for rows \(2, 6\), got \(2, 2\)"),
        ({"a": (0, 4), "b": (5, 7)}, r"b: expected rows inside 0 \.\. 6, got \(5, 7\)"),
        (None, r"moments of b: expected \(6, 2\) for rows all, got \(2, 2\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            optimizer.step(ops, params, grads, state, TrainConfig(), 1e-2, 1.0, (), rows)
    assert not params["a"].any()
    assert state.counts == {"a": 0, "b": 0}


def test_shards_that_do_not_make_a_whole_are_refused():
    params = {"a": np.zeros(6)}
    for ranges in ([(0, 2), (3, 6)], [(0, 4), (3, 6)], [(1, 6)]):
        owned = [{"a": rows} for rows in ranges]
        with pytest.raises(ValueError, match="moments of a: expected rows that follow each other from 0"):
            gather(owned, [adam_state(params, params, rows) for rows in owned])
    owned = [{"a": (3, 6)}, {"a": (0, 3)}]
    states = [adam_state(params, params, rows) for rows in owned]
    states[1].counts["a"] = 2
    with pytest.raises(ValueError, match=r"moments of a: expected one count of steps, got \[2, 0\]"):
        gather(owned, states)


@pytest.mark.parity
def test_ten_steps_with_clip_are_torchs(ops):
    torch = pytest.importorskip("torch")
    config = TrainConfig(weight_decay=0.1, max_grad_norm=1.0)
    rng = np.random.default_rng(1)
    params = {"a": rng.normal(size=(3, 4)), "b": rng.normal(size=5)}
    twins = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in params.items()}
    groups = [{"params": [twins["a"]], "weight_decay": 0.1}, {"params": [twins["b"]], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-8)
    state = adam_state(params, params)
    for k in range(10):
        grads = {name: rng.normal(size=value.shape) * 3.0**-k for name, value in params.items()}
        for name, twin in twins.items():
            twin.grad = torch.tensor(grads[name])
        norm = total_norm(ops.global_norm(grads))
        assert norm == pytest.approx(float(torch.nn.utils.get_total_norm([t.grad for t in twins.values()])), rel=1e-14)
        # torch's own clip divides by norm + 1e-6: the exact factor is applied to both
        for twin in twins.values():
            twin.grad *= clip_factor(norm, 1.0)
        reference.step()
        optimizer.step(ops, params, grads, state, config, 1e-2, clip_factor(norm, 1.0), {"a"})
    for name, twin in twins.items():
        np.testing.assert_allclose(params[name], twin.detach().numpy(), rtol=1e-10)
