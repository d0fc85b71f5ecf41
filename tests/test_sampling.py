"""What the next token is drawn from, and the draws."""

import numpy as np
import pytest

from mamba_ops.config import GenerateConfig
from mamba_ops.sampling import draw, probabilities

LOGITS = np.array([1.0, -0.5, 0.25, 0.0], np.float32)


def distribution(values=LOGITS, seen=(), **options):
    mask = np.zeros(len(values), bool)
    mask[list(seen)] = True
    return probabilities(np.asarray(values), mask, GenerateConfig(**{"temperature": 1.0} | options))


def softmax(values):
    weights = np.exp(np.asarray(values, np.float64))
    return weights / weights.sum()


@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
def test_softmax_at_the_temperature(temperature):
    expected = softmax(LOGITS.astype(float) / temperature)
    np.testing.assert_allclose(distribution(temperature=temperature), expected, rtol=1e-14)


def test_temperature_0_takes_the_first_largest():
    np.testing.assert_array_equal(distribution([0, 2, 2, 1], temperature=0), [0, 1, 0, 0])
    np.testing.assert_array_equal(distribution([2, 2, 1], temperature=0, seen=[0], repetition_penalty=1.1), [0, 1, 0])


@pytest.mark.parametrize(
    ("top_k", "kept"), [(0, [0, 1, 2, 3]), (1, [0]), (2, [0, 2]), (3, [0, 2, 3]), (4, [0, 1, 2, 3]), (9, [0, 1, 2, 3])]
)
def test_top_k(top_k, kept):
    expected = np.zeros(4)
    expected[kept] = softmax(LOGITS[kept])
    np.testing.assert_allclose(distribution(top_k=top_k), expected, rtol=1e-14)


def test_top_k_keeps_what_ties_with_the_last():
    np.testing.assert_allclose(distribution([3, 1, 1, 0], top_k=2), [*softmax([3, 1, 1]), 0], rtol=1e-14)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1, [0, 1, 2, 3]), (0.95, [0, 1, 2, 3]), (0.89, [0, 2, 3]), (0.7, [0, 2]), (0.3, [0]), (0, [0])]
)
def test_top_p(top_p, kept):
    """Probabilities 0.5, 0.1, 0.25, 0.15."""
    values = np.log([0.5, 0.1, 0.25, 0.15])
    expected = np.zeros(4)
    expected[kept] = np.exp(values[kept])
    np.testing.assert_allclose(distribution(values, top_p=top_p), expected / expected.sum(), rtol=1e-14)


def test_top_p_counts_within_top_k():
    values = np.log([0.4, 0.3, 0.2, 0.1])
    np.testing.assert_allclose(distribution(values, top_k=3, top_p=0.5), [4 / 7, 3 / 7, 0, 0], rtol=1e-14)
    np.testing.assert_allclose(distribution(values, top_k=2, top_p=0.5), [1, 0, 0, 0], rtol=1e-14)


def test_repetition_penalty_lowers_what_the_text_has():
    found = distribution([1.0, -0.5, 0.25, 0.0], seen=[0, 1, 3], repetition_penalty=2.0)
    np.testing.assert_allclose(found, softmax([0.5, -1.0, 0.25, 0.0]), rtol=1e-14)
    np.testing.assert_array_equal(distribution(seen=[], repetition_penalty=2.0), distribution())


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 6, "top_p": 0.7, "temperature": 1.5}])
def test_20_000_draws_follow_the_distribution(options):
    values = np.random.default_rng(2).normal(0, 1, 12)
    shares = distribution(values, **options)
    rng = np.random.default_rng(3)
    counts = np.bincount([draw(shares, rng) for _ in range(20_000)], minlength=12)
    kept = shares > 0
    assert not counts[~kept].any()
    statistic = ((counts - 20_000 * shares)[kept] ** 2 / (20_000 * shares[kept])).sum()
    above_once_in_10_000 = {12: 37.4, 5: 23.5, 7: 27.9, 6: 25.7, 4: 21.1, 3: 18.4, 8: 29.9}
    assert statistic < above_once_in_10_000[kept.sum()]


def test_a_draw_never_takes_what_is_ruled_out():
    class Rng:
        def __init__(self, value):
            self.value = value

        def random(self):
            return self.value

    shares = np.array([0, 0.5, 0, 0.5, 0])
    assert [draw(shares, Rng(u)) for u in (0.0, 0.49, 0.5, np.nextafter(1, 0), 1.0)] == [1, 1, 3, 3, 3]


def test_extreme_temperatures_and_logits():
    values = np.array([0.0, 3e38, -3e38], np.float32)
    for temperature in (0, 5e-324, 1e-310, 1e-8, 1.0):
        for options in ({}, {"top_k": 2}, {"top_p": 0.5}, {"seen": [0, 1, 2], "repetition_penalty": 100}):
            assert distribution(values, temperature=temperature, **options).argmax() == 1
    np.testing.assert_allclose(distribution([0.0, 1.0], temperature=1e308), [0.5, 0.5])
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match="1 of 2"):
            distribution([0.0, bad])
