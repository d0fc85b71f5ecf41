"""Settings that hold for every test."""

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _numpy_raises():
    """NumPy raises on divide, over and invalid; underflow is normal (exp of large negatives)."""
    with np.errstate(divide="raise", over="raise", invalid="raise", under="ignore"):
        yield
