"""The learning rate of each step."""

import math

import pytest

from mamba_ops.config import TrainConfig
from mamba_ops.schedule import learning_rate

KINDS = ("cosine", "linear", "constant")


def rates(kind: str, warmup: int, total: int, peak: float = 1.0) -> list[float]:
    config = TrainConfig(learning_rate=peak, warmup_steps=warmup, lr_scheduler_type=kind)
    return [learning_rate(config, step, total) for step in range(1, total + 1)]


def test_values_by_hand():
    expected = [
        1 / 3,
        2 / 3,
        1.0,
        0.5 * (1 + math.cos(math.pi / 4)),
        0.5,
        0.5 * (1 + math.cos(3 * math.pi / 4)),
    ]
    assert rates("cosine", 2, 6) == pytest.approx(expected, rel=1e-15)
    assert rates("linear", 2, 6) == pytest.approx([1 / 3, 2 / 3, 1.0, 0.75, 0.5, 0.25], rel=1e-15)
    assert rates("constant", 2, 6) == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1], rel=1e-15)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (0, 7), (1, 7), (3, 7), (6, 7), (7, 7), (20, 7)])
def test_every_step_has_a_rate_above_zero_and_at_most_the_peak(kind, warmup, total):
    found = rates(kind, warmup, total, peak=3e-4)
    assert all(0 < rate <= 3e-4 for rate in found)
    rising, falling = found[: warmup + 1], found[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    if warmup < total:
        assert found[warmup] == 3e-4


@pytest.mark.parametrize("step", [0, -1, 8])
def test_a_step_outside_the_run_is_an_error(step):
    with pytest.raises(ValueError, match=f"step: expected 1 to 7, got {step}"):
        learning_rate(TrainConfig(), step, 7)


@pytest.mark.parity
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("warmup", [0, 3])
def test_after_the_warm_up_the_rates_are_transformers(kind, warmup):
    torch = pytest.importorskip("torch")
    optimization = pytest.importorskip("transformers.optimization")
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=2e-3)
    args = (optimizer, warmup) if kind == "constant" else (optimizer, warmup, 11)
    scheduler = getattr(optimization, f"get_{kind}_schedule_with_warmup")(*args)
    expected = []
    for _ in range(11):
        expected.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates(kind, warmup, 11, peak=2e-3)[warmup:] == pytest.approx(expected[warmup:], rel=1e-12)
