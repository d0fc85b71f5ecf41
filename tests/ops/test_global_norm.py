"""The gradient-norm op."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mamba_ops.cpu import global_norm as module
from mamba_ops.cpu import open_cpu


@given(hnp.arrays(np.float64, st.integers(1, 40), elements=st.floats(-1e100, 1e100)))
def test_is_the_euclidean_norm(values):
    found = open_cpu(np.float64, threads=1).global_norm({"g": values})["g"]
    top = np.abs(values).max()
    expected = top * np.sqrt(np.sum((values / top) ** 2)) if top else 0.0
    assert found == pytest.approx(expected, rel=1e-12)


def test_slices_change_nothing(monkeypatch):
    values = np.random.default_rng(0).standard_normal((13, 17))
    monkeypatch.setattr(module, "SLICE", 10)
    norms = open_cpu(np.float64).global_norm({"a": values, "b": values[:1]})
    assert norms == {
        "a": pytest.approx(np.linalg.norm(values), rel=1e-13),
        "b": pytest.approx(np.linalg.norm(values[0]), rel=1e-13),
    }


def test_case_13_huge_gradients_do_not_overflow():
    values = np.full(100, 1e20, np.float32)
    assert open_cpu(np.float32).global_norm({"g": values})["g"] == pytest.approx(1e21, rel=1e-6)
    assert open_cpu(np.float64).global_norm({"g": np.full(100, 1e200)})["g"] == pytest.approx(1e201, rel=1e-12)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_case_13_a_non_finite_element_makes_the_norm_non_finite(bad):
    values = np.ones(5, np.float32)
    values[3] = bad
    assert not np.isfinite(open_cpu(np.float32).global_norm({"g": values})["g"])
