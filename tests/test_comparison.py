"""The paired difference of two evaluations, and its interval."""

import math

import numpy as np
import pytest

from mamba_ops.comparison import Difference, difference, student_t
from mamba_ops.evaluate import Evaluation

TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 10: 2.228, 19: 2.093, 30: 2.042, 120: 1.980}
"""97.5 % points of Student's distribution, as printed in textbooks."""


def excludes_zero(found):
    """Whether the interval is known and holds only changes of one sign."""
    return found.low > 0 or found.high < 0


def evaluation(nll, tokens):
    return Evaluation(np.array(nll, np.float64), np.array(tokens, np.int64), bytes=1)


@pytest.mark.parametrize("degrees", TABLE)
def test_students_quantile_is_the_tables(degrees):
    assert student_t(degrees) == pytest.approx(TABLE[degrees], abs=5.1e-4)


def test_students_quantile_tends_to_the_normal_one():
    assert student_t(1) == pytest.approx(math.tan(math.pi * 0.475), rel=1e-9)
    assert student_t(2) == pytest.approx(math.sqrt(2 * 0.95**2 / (1 - 0.95**2)), rel=1e-9)
    found = [student_t(degrees) for degrees in (*range(1, 40), 1000, 100_001)]
    assert found == sorted(found, reverse=True)
    assert found[-1] == pytest.approx(1.959964, abs=3e-5)


def test_two_documents_by_hand():
    """d = -3, -1 over n = 2, 2: R = -1, residuals -1, 1, variance 2 / 1 * 2 / 16 = 1/4."""
    found = difference(evaluation([5, 4], [2, 2]), evaluation([2, 3], [2, 2]))
    assert found.nats_per_token == -1
    assert (found.low, found.high) == pytest.approx((-1 - 12.7062 / 2, -1 + 12.7062 / 2), rel=1e-5)
    assert found.documents == 2
    assert not excludes_zero(found)


def test_documents_weigh_by_their_tokens():
    """d = -1, -2, -6 over n = 1, 3, 5: R = -1, residuals 0, 1, -1, variance 3 / 2 * 2 / 81 = 1/27."""
    found = difference(evaluation([10, 10, 10], [1, 3, 5]), evaluation([9, 8, 4], [1, 3, 5]))
    assert found.nats_per_token == -1
    half = 4.30265 / math.sqrt(27)
    assert (found.low, found.high) == pytest.approx((-1 - half, -1 + half), rel=1e-5)
    assert excludes_zero(found)


def test_it_is_the_difference_of_the_means():
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 900, 50)
    one, other = (evaluation(tokens * rng.normal(3, 0.1, 50), tokens) for _ in range(2))
    found = difference(one, other)
    assert found.nats_per_token == pytest.approx(other.nll / other.tokens - one.nll / one.tokens, abs=1e-14)
    turned = difference(other, one)
    assert turned.nats_per_token == -found.nats_per_token
    assert (turned.low, turned.high) == (-found.high, -found.low)


def test_a_common_change_is_certain_however_the_documents_differ():
    tokens = np.array([1, 50, 7, 3000])
    before = np.array([9.0, 100.0, 3.0, 20_000.0])
    found = difference(evaluation(before, tokens), evaluation(before - 0.25 * tokens, tokens))
    assert found == (-0.25, -0.25, -0.25, 4)
    assert excludes_zero(found)
    same = difference(evaluation(before, tokens), evaluation(before, tokens))
    assert same == (0, 0, 0, 4)
    assert not excludes_zero(same)


def test_the_order_of_the_documents_does_not_count():
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 900, 200)
    before, after = (tokens * rng.normal(3, 1, 200) for _ in range(2))
    found = difference(evaluation(before, tokens), evaluation(after, tokens))
    for _ in range(5):
        order = rng.permutation(200)
        again = difference(evaluation(before[order], tokens[order]), evaluation(after[order], tokens[order]))
        assert again == found


def test_documents_without_targets_do_not_count():
    found = difference(evaluation([5, 0, 4, 0], [2, 0, 2, 0]), evaluation([2, 0, 3, 0], [2, 0, 2, 0]))
    assert found == difference(evaluation([5, 4], [2, 2]), evaluation([2, 3], [2, 2]))
    assert found.documents == 2


def test_the_interval_covers_the_truth_in_95_of_100_samples():
    """20 documents of 20 to 400 tokens, whose own change scatters about the common one, as their tokens' do."""
    rng, truth, covered, trials = np.random.default_rng(2), -0.05, 0, 1500
    for _ in range(trials):
        tokens = rng.integers(20, 401, 20)
        changes = tokens * (truth + rng.normal(0, 0.1, 20)) + rng.normal(0, 1, 20) * np.sqrt(tokens)
        before = tokens * rng.normal(4, 1, 20)
        found = difference(evaluation(before, tokens), evaluation(before + changes, tokens))
        covered += found.low <= truth <= found.high
    assert covered / trials == pytest.approx(0.95, abs=0.02)


def test_one_document_has_no_interval():
    found = difference(evaluation([5, 0], [2, 0]), evaluation([2, 0], [2, 0]))
    assert found.nats_per_token == -1.5
    assert math.isnan(found.low)
    assert math.isnan(found.high)
    assert not excludes_zero(found)
    assert str(found) == "-1.5000 nats per token (95 % interval unknown: it takes 2 documents; 1 document)"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_has_no_difference(bad):
    for before, after in ([bad, 2], [1, 2]), ([1, 2], [bad, 2]), ([bad, 2], [bad, 2]):
        found = difference(evaluation(before, [1, 1]), evaluation(after, [1, 1]))
        assert all(map(math.isnan, found[:3]))
        assert not excludes_zero(found)
        assert str(found) == "+nan nats per token (95 % interval unknown: a loss is not finite; 2 documents)"


def test_it_says_what_it_found():
    assert str(Difference(-0.125, -0.25, 0.0, 37)) == (
        "-0.1250 nats per token (95 % interval -0.2500 to +0.0000; 37 documents)"
    )


def test_other_documents_are_refused():
    with pytest.raises(ValueError, match="different documents: 2 before, 1 after"):
        difference(evaluation([1, 1], [1, 1]), evaluation([1], [1]))
    with pytest.raises(ValueError, match="document 1 has 3 targets before and 4 after, and 1 more differ"):
        difference(evaluation([1, 1, 1], [2, 3, 4]), evaluation([1, 1, 1], [2, 4, 3]))
