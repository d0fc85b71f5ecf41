"""Masks as runs of indices: the same as a flag for each token."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mamba_ops.loss_mask import NONE, check_runs, is_learned, masked_before, masked_runs, masked_tokens


@given(st.lists(st.booleans(), max_size=40))
def test_runs_are_flags(flags):
    masked = np.array(flags, bool)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], masked, [False]]).astype(int)))
    runs = edges.reshape(-1, 2)
    index = np.arange(len(flags)).reshape(1, -1)
    assert check_runs(runs) is runs
    assert np.array_equal(is_learned(runs, index), ~masked[None])
    assert masked_before(runs, np.arange(len(flags) + 1)).tolist() == [0, *np.cumsum(masked)]


def test_runs_of_documents():
    table = pd.DataFrame({"offset": [20, 1, 10], "masked": [[0, 3, 4, 5], None, []]})
    assert masked_runs(table).tolist() == [[20, 23], [24, 25]]
    assert masked_tokens(table).tolist() == [4, 0, 0]
    assert (
        masked_runs(table[1:]).shape == masked_runs(table[["offset"]]).shape == masked_runs(table[:0]).shape == (0, 2)
    )
    assert masked_tokens(table[["offset"]]).tolist() == [0, 0, 0]
    assert is_learned(NONE, np.arange(3)).all()


def test_runs_that_are_none_are_refused():
    with pytest.raises(ValueError, match=r"masked: expected pairs of begin and end, got \[0, 3, 4\]"):
        masked_runs(pd.DataFrame({"offset": [1, 5], "masked": [None, [0, 3, 4]]}))
    with pytest.raises(ValueError, match="masked: expected ascending runs"):
        masked_runs(pd.DataFrame({"offset": [1, 2], "masked": [[0, 3], [0, 1]]}))
    with pytest.raises(ValueError, match=r"masked: expected ascending runs .* shape \(3,\)"):
        check_runs(np.array([1, 2, 3]))
