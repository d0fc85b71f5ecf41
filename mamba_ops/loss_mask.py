"""Tokens that are read but not learned, as runs of indices, beside the ids as document starts are.

Runs are (runs, 2) int64, begin and end of each, ascending and apart: ids[begin:end] carry no loss as targets.
"""

import numpy as np
import pandas as pd

NONE = np.empty((0, 2), np.int64)


def masked_runs(documents: pd.DataFrame) -> np.ndarray:
    """Return the runs of a table of documents with the columns offset and masked, which may be missing.

    masked: begin and end of each run of the document's own tokens, one after the other; None for none.
    Raises ValueError where runs are not pairs, or overlap.
    """
    edges, counts = _edges(documents)
    edges = edges + np.repeat(documents["offset"].to_numpy(np.int64), counts)[:, None]
    return check_runs(edges[np.argsort(edges[:, 0], kind="stable")])


def masked_tokens(documents: pd.DataFrame) -> np.ndarray:
    """Return how many tokens of each document carry no loss: (documents,) int64; raises as `masked_runs`."""
    edges, counts = _edges(documents)
    document = np.repeat(np.arange(len(documents)), counts)
    return np.bincount(document, edges[:, 1] - edges[:, 0], len(documents)).astype(np.int64)


def _edges(documents: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Return the runs of all documents, (runs, 2), and how many each has."""
    own = documents["masked"].to_numpy() if "masked" in documents else np.full(len(documents), None)
    counts = np.fromiter((0 if runs is None else len(runs) for runs in own), np.int64, len(own))
    if (counts % 2).any():
        raise ValueError(f"masked: expected pairs of begin and end, got {own[counts % 2 > 0][0]}")
    if not counts.any():
        return NONE, counts
    return np.concatenate([np.asarray(runs, np.int64) for runs in own[counts > 0]]).reshape(-1, 2), counts // 2


def check_runs(runs: np.ndarray) -> np.ndarray:
    """Return runs as they are; raises ValueError unless they are (n, 2), ascending and apart."""
    edges = np.asarray(runs)
    if edges.ndim != 2 or edges.shape[1] != 2 or (np.diff(edges.reshape(-1)) < 0).any():
        raise ValueError(f"masked: expected ascending runs of begin and end, got an array of shape {edges.shape}")
    return edges


def is_learned(runs: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return whether the token at each index carries loss as a target; index: any shape."""
    if not len(runs):
        return np.ones(index.shape, bool)
    run = np.searchsorted(runs[:, 0], index, side="right") - 1
    return (run < 0) | (index >= runs[run, 1])


def masked_before(runs: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return how many tokens in front of each index carry no loss; index: any shape."""
    if not len(runs):
        return np.zeros(index.shape, np.int64)
    before = np.concatenate([[0], np.cumsum(runs[:, 1] - runs[:, 0])])
    run = np.searchsorted(runs[:, 0], index, side="right") - 1
    inside = np.where(run >= 0, np.minimum(index, runs[run, 1]) - runs[run, 0], 0)
    return before[np.maximum(run, 0)] + inside
