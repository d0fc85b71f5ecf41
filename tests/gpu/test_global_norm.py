"""The gradient-norm kernel against the NumPy side in float64."""

import numpy as np
import pytest

from mamba_ops.cpu import open_cpu
from mamba_ops.gpu import global_norm as module
from mamba_ops.parameters import EMBEDDING


def norms(ops, arrays):
    return ops.global_norm({name: ops.upload_parameter(name, array) for name, array in arrays.items()})


def reference(arrays):
    return open_cpu(np.float64, threads=1).global_norm({n: a.astype(np.float64) for n, a in arrays.items()})


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30, 2e36, 1e-36])
def test_agrees_with_the_cpu(gpu, scale):
    rng = np.random.default_rng(0)
    shapes = {
        "one": (1,),
        "odd": (13, 17),
        "prime": (257,),
        "block": (module.BLOCK,),
        "past": (3, module.BLOCK // 2 + 1),
    }
    arrays = {name: (rng.standard_normal(shape) * scale).astype(np.float32) for name, shape in shapes.items()}
    found, expected = norms(gpu, arrays), reference(arrays)
    assert list(found) == list(shapes)
    assert found == {name: pytest.approx(value, rel=1e-5) for name, value in expected.items()}


def test_elements_of_every_size(gpu):
    """Running maxima: from small to large, from large to small, and both at once."""
    values = np.ldexp(np.float32(1.5), np.arange(-140, 127)).astype(np.float32)
    arrays = {"up": values, "down": values[::-1].copy(), "both": np.concatenate([values, -values[::-1]])}
    assert norms(gpu, arrays) == {name: pytest.approx(value, rel=1e-5) for name, value in reference(arrays).items()}


def test_more_blocks_than_one_dimension_of_workgroups(gpu_once, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 4)
    arrays = {
        "a": np.random.default_rng(0).standard_normal((70_001, 4)).astype(np.float32),
        "b": np.ones(5, np.float32),
    }
    assert norms(gpu_once, arrays) == {n: pytest.approx(value, rel=1e-5) for n, value in reference(arrays).items()}


def test_zeros_have_norm_zero(gpu):
    assert norms(gpu, {"a": np.zeros(1, np.float32), "b": np.zeros((300, 7), np.float32)}) == {"a": 0.0, "b": 0.0}


def test_nothing_to_measure(gpu_once):
    assert gpu_once.global_norm({}) == {}


def test_case_13_huge_gradients_do_not_overflow(gpu):
    assert norms(gpu, {"g": np.full(100, 1e20, np.float32)}) == {"g": pytest.approx(1e21, rel=1e-6)}


@pytest.mark.parametrize("place", [0, 1, 255, 256, module.BLOCK - 1, module.BLOCK, 2 * module.BLOCK])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_case_13_a_non_finite_element_is_seen_wherever_it_is(gpu, bad, place):
    values = np.random.default_rng(0).standard_normal(2 * module.BLOCK + 1).astype(np.float32)
    whole = values.copy()
    values[place] = bad
    found = norms(gpu, {"before": whole, "bad": values, "after": whole})
    assert np.isnan(found["bad"]) if np.isnan(bad) else found["bad"] == np.inf
    assert np.isfinite(found["before"])
    assert found["before"] == found["after"]


def test_case_13_any_nan(gpu):
    """Signalling, negative, and with any payload."""
    bits = np.array([0x7F800001, 0xFF800001, 0x7FC00000, 0xFFFFFFFF, 0x7FFFFFFF], np.uint32)
    for pattern in bits:
        array = gpu.upload(np.array([0x3F800000, pattern], np.uint32))
        assert np.isnan(gpu.global_norm({"g": array})["g"])


def test_repeated_runs_give_the_same_number(gpu):
    values = np.random.default_rng(0).standard_normal(3 * module.BLOCK).astype(np.float32)
    assert len({norms(gpu, {"g": values})["g"] for _ in range(3)}) == 1


@pytest.mark.parametrize("limit", [512, 160, 32])
def test_case_48_row_parts_change_nothing(gpu, monkeypatch, limit):
    arrays = {
        EMBEDDING: np.random.default_rng(0).standard_normal((40, 8)).astype(np.float32),
        "b": np.ones(3, np.float32),
    }
    expected = norms(gpu, arrays)
    monkeypatch.setattr(gpu.device, "binding_limit", limit)
    assert norms(gpu, arrays) == {name: pytest.approx(value, rel=1e-6) for name, value in expected.items()}
