"""What the GPU tests share: one opened adapter for each set of options, and the comparison with the NumPy side.

The adapter is the one that MAMBA_TEST_ADAPTER names; where it is missing, the tests fail. Unset it is `llvmpipe`, and
where that is missing, they are skipped.
"""

import hashlib
import os
from contextlib import ExitStack

import numpy as np
import pytest

from mamba_ops.gpu.adapters import choose, open_device
from mamba_ops.gpu.device import DeviceError
from mamba_ops.gpu.gpu_ops import GpuOps

ADAPTER = os.environ.get("MAMBA_TEST_ADAPTER", "llvmpipe")
OPTIONS = [
    pytest.param((True, True), id="checked-subgroups"),
    pytest.param((True, False), id="checked-plain"),
    pytest.param((False, True), id="unchecked-subgroups"),
    pytest.param((False, False), id="unchecked-plain"),
]


@pytest.fixture(scope="session")
def adapter():
    """The adapter under test."""
    try:
        return choose(ADAPTER).adapter
    except DeviceError as error:
        if "MAMBA_TEST_ADAPTER" in os.environ:
            pytest.fail(f"MAMBA_TEST_ADAPTER: {error}", pytrace=False)
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def devices(adapter):
    """Return the opened device of (checks, subgroups); one each for the whole session."""
    opened = {}

    def device(checks=True, subgroups=True):
        key = checks, subgroups
        if key not in opened:
            opened[key] = open_device(adapter, checks=checks, subgroups=subgroups)
        return opened[key]

    yield device
    for value in opened.values():
        value.close()


@pytest.fixture(params=OPTIONS)
def gpu(request, devices):
    """The GPU's ops with run-time checks on and off, with subgroups and without; fresh buffers hold NaN."""
    with GpuOps(devices(*request.param), poison=True) as ops:
        yield ops


@pytest.fixture
def gpu_with(devices):
    """Return the function that opens the GPU's ops with `checks` and `subgroups`; fresh buffers hold NaN."""
    with ExitStack() as stack:
        yield lambda checks=True, subgroups=True: stack.enter_context(GpuOps(devices(checks, subgroups), poison=True))


@pytest.fixture
def gpu_once(gpu_with):
    """The GPU's ops with run-time checks and subgroups, for tests that need no other; fresh buffers hold NaN."""
    return gpu_with()


@pytest.fixture(params=[True, False], ids=["checked", "unchecked"])
def ops(request, gpu_with):
    """The GPU's ops with run-time checks on and off, for kernels without subgroups; fresh buffers hold NaN."""
    return gpu_with(checks=request.param)


@pytest.fixture
def assert_close():
    """Return the comparison `assert_close(found, reference, tolerance)` of a device array with a float64 one."""
    return _assert_close


def _assert_close(found, reference, tolerance, name=""):
    """max|found - reference| <= tolerance * max|reference|; found: host or device array of float32."""
    found = np.asarray(found, np.float64)
    reference = np.asarray(reference)
    assert reference.dtype == np.float64, "the reference is computed in float64"
    assert found.shape == reference.shape, f"{name}: {found.shape} for {reference.shape}"
    assert np.isfinite(found).all(), f"{name}: {np.count_nonzero(~np.isfinite(found))} of {found.size} not finite"
    difference, largest = np.abs(found - reference).max(initial=0), np.abs(reference).max(initial=0)
    assert difference <= tolerance * largest, f"{name}: {difference:.3e} of {largest:.3e}, more than {tolerance:g}"


@pytest.fixture
def kept_of():
    """Return `kept_of(dropout, weight, rows, columns)`: which elements stay, by integers of Python, not the library."""
    return _kept_of


def _kept_of(dropout, weight, rows, columns):
    words = hashlib.sha256(f"{dropout.seed} {dropout.step} {weight}".encode()).digest()
    key0, key1 = (int.from_bytes(words[at : at + 4], "little") for at in (0, 4))
    least = min(round(dropout.rate * 2**32), 2**32 - 1)
    kept = np.empty((rows, columns), bool)
    for t in range(rows):
        row = (_mix(key0 ^ ((dropout.first + t) % 2**32)) + key1) % 2**32
        for c in range(columns):
            kept[t, c] = _mix(row ^ (c * 0x9E3779B9 % 2**32)) >= least
    return kept


def _mix(x):
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = (x ^ (x >> shift)) * factor % 2**32
    return x
