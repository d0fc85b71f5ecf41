"""Perplexity is exact whatever the windows, lanes, order and partitions."""

import dataclasses
import math
import tracemalloc

import numpy as np
import pandas as pd
import pytest

from mamba_ops.config import EvaluateConfig, MambaConfig
from mamba_ops.cpu import open_cpu
from mamba_ops.evaluate import Evaluation, combine, perplexity
from mamba_ops.model import losses
from mamba_ops.ops import Batch
from mamba_ops.parameters import init

E = 0
TOLERANCE = {np.float32: 1e-5, np.float64: 1e-10}
CONFIG = MambaConfig(vocab_size=11, hidden_size=8, num_hidden_layers=2, state_size=3)


def lay_out(documents):
    """Return the ids E d1 E d2 E and the table of documents."""
    ids, offsets = [E], []
    for document in documents:
        offsets.append(len(ids))
        ids += [*document, E]
    lengths = [len(document) for document in documents]
    table = {"offset": offsets, "tokens": lengths, "bytes": [3 * length for length in lengths]}
    return np.array(ids, np.uint32), pd.DataFrame(table, dtype=np.int64)


def random_documents(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, CONFIG.vocab_size, length).tolist() for length in lengths]


def sharp_parameters(dtype):
    """Parameters whose losses depend on the context: the head's scale is 1, not 0.02."""
    params = init(CONFIG, 0, dtype)
    return params | {"backbone.embeddings.weight": params["backbone.embeddings.weight"] * dtype(50)}


def parallel(ops, params, document):
    """The document's loss by one forward over all of it, without a state."""
    ids = np.array([[E, *document, E]])
    batch = Batch(ids[:, :-1], ids[:, 1:], np.arange(len(document) + 1, dtype=np.uint32)[None])
    with ops.scope():
        return float(losses(ops, params, CONFIG, ops.rows(batch)).sum(dtype=np.float64))


def settings(window, batch_size):
    return EvaluateConfig(window=window, batch_size=batch_size)


DOCUMENTS = random_documents([5, 1, 17, 0, 2, 3, 29, 8])


@pytest.fixture(scope="module", params=[np.float32, np.float64])
def reference(request):
    """(ops, params, per-document losses of a forward over each whole document, tolerance)."""
    ops, params = open_cpu(request.param), sharp_parameters(request.param)
    nll = np.array([parallel(ops, params, document) for document in DOCUMENTS])
    return ops, params, nll, TOLERANCE[request.param]


@pytest.mark.parametrize("window", [1, 2, 3, 7, 16, 1024])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 8, 100])
def test_any_window_and_batch_size_equal_a_forward_over_each_document(reference, window, batch_size):
    ops, params, nll, tolerance = reference
    ids, table = lay_out(DOCUMENTS)
    got = perplexity(ops, params, CONFIG, ids, table, settings(window, batch_size))
    np.testing.assert_allclose(got.document_nll, nll, rtol=tolerance)
    assert got.document_nll.dtype == np.float64
    assert got.nll == pytest.approx(nll.sum(), rel=tolerance)
    assert got.document_tokens.tolist() == [len(document) + 1 for document in DOCUMENTS]
    assert got.tokens == len(ids) - 1
    assert got.bytes == 3 * (len(ids) - 1 - len(DOCUMENTS))


def test_case_27_any_document_order_and_number_of_partitions(reference):
    ops, params, nll, tolerance = reference
    ids, table = lay_out(DOCUMENTS)
    order = np.random.default_rng(1).permutation(len(DOCUMENTS))
    shuffled = perplexity(ops, params, CONFIG, ids, table.iloc[order], settings(4, 3))
    np.testing.assert_allclose(shuffled.document_nll, nll[order], rtol=tolerance)
    expected = math.exp(nll.sum() / (len(ids) - 1))
    assert shuffled.perplexity == pytest.approx(expected, rel=tolerance)
    for partitions in (1, 2, 3, len(DOCUMENTS)):
        whole = combine(
            [
                perplexity(ops, params, CONFIG, ids, table.iloc[rows], settings(5, 2))
                for rows in np.array_split(order, partitions)
            ]
        )
        assert whole.perplexity == pytest.approx(expected, rel=tolerance)
        assert (whole.tokens, whole.bytes) == (shuffled.tokens, shuffled.bytes)
        assert whole.bits_per_byte == pytest.approx(shuffled.bits_per_byte, rel=tolerance)


def test_case_27_tokens_weigh_equally_not_chunks():
    chunks = [
        Evaluation(np.array([20.0]), np.array([10]), 10),
        Evaluation(np.array([12.0]), np.array([2]), 2),
    ]
    assert combine(chunks).perplexity == pytest.approx(14.391916, rel=1e-7)
    assert combine(chunks[::-1]).perplexity == combine(chunks).perplexity
    assert combine(chunks).bits_per_byte == pytest.approx(32 / (math.log(2) * 12), rel=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_case_27_smallest_input(dtype):
    ops = open_cpu(dtype)
    logits = np.array([[2, 0, -1], [0, 1, 0], [5, 5, 5]], dtype)
    batch = Batch(np.zeros((1, 3), np.int64), np.array([[0, 2, 1]]), np.arange(3, dtype=np.uint32)[None])
    with ops.scope():
        nll = ops.read(
            ops.linear_cross_entropy_forward(ops.rows(batch), logits, {"head": np.eye(3, dtype=dtype)}, "head")
        )
    rtol = 1e-6 if dtype is np.float32 else 1e-9
    np.testing.assert_allclose(nll, [0.1698460196, 1.5514447139, 1.0986122887], rtol=rtol)
    got = Evaluation(nll.astype(np.float64), np.ones(3, np.int64), 3)
    assert got.perplexity == pytest.approx(2.5598986658, rel=rtol)


def test_case_27_zero_target_tokens_is_an_error():
    ids, table = lay_out(DOCUMENTS)
    ops, params = open_cpu(np.float64), sharp_parameters(np.float64)
    with pytest.raises(ValueError, match="no target tokens to evaluate in 0 documents"):
        perplexity(ops, params, CONFIG, ids, table[:0], EvaluateConfig())
    with pytest.raises(ValueError, match="no target tokens"):
        combine([])
    with pytest.raises(ValueError, match="no target tokens"):
        Evaluation(np.zeros(1), np.zeros(1, np.int64), 0)


def test_context_before_the_window_counts():
    """The same window after another beginning has other losses, so a cut context would show."""
    ops, params = open_cpu(np.float64), sharp_parameters(np.float64)
    tail = random_documents([20])[0]
    first, second = (parallel(ops, params, [head] * 30 + tail) for head in (1, 2))
    alone = [parallel(ops, params, [head] * 30) for head in (1, 2)]
    assert abs((first - alone[0]) - (second - alone[1])) > 1e-3


def test_a_long_document_needs_no_more_memory_than_a_short_one():
    params = sharp_parameters(np.float64)

    def peak(length):
        ids, table = lay_out(random_documents([length]))
        ops = open_cpu(np.float64, threads=1)
        tracemalloc.start()
        try:
            result = perplexity(ops, params, CONFIG, ids, table, settings(32, 1))
            return tracemalloc.get_traced_memory()[1], result
        finally:
            tracemalloc.stop()

    peak(100)
    short, _ = peak(31 + 32)
    long, result = peak(63 * 32 - 1)
    assert result.tokens == 63 * 32
    assert long < 1.1 * short + 4096


def test_a_model_that_is_not_finite_has_no_finite_perplexity():
    ids, table = lay_out(DOCUMENTS)
    params = sharp_parameters(np.float64)
    params["backbone.norm_f.weight"] = np.full(CONFIG.hidden_size, np.nan)
    with np.errstate(all="ignore"):
        got = perplexity(open_cpu(np.float64, threads=1), params, CONFIG, ids, table, settings(8, 2))
    assert not math.isfinite(got.perplexity)
    assert not math.isfinite(got.bits_per_byte)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_document_that_is_not_finite_shows(bad):
    got = Evaluation(np.array([1.0, bad, -bad]), np.array([1, 1, 1]), 3)
    assert math.isnan(got.nll)
    assert math.isnan(got.perplexity)


def test_a_mean_above_the_range_of_exp_is_infinite():
    assert Evaluation(np.array([7100.0]), np.array([10]), 10).perplexity == math.inf
    assert Evaluation(np.array([7000.0]), np.array([10]), 10).perplexity == math.exp(700)


def test_without_bytes_there_are_no_bits_per_byte():
    ids, table = lay_out([[]])
    got = perplexity(open_cpu(np.float64), sharp_parameters(np.float64), CONFIG, ids, table, EvaluateConfig())
    assert got.tokens == 1
    assert math.isnan(got.bits_per_byte)


def test_a_record_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Evaluation(np.ones(1), np.ones(1, np.int64), 1).bytes = 2


def test_case_43_ids_outside_the_embedding():
    ids, table = lay_out([[1, 2, 11, 3]])
    with pytest.raises(ValueError, match=r"id 11 .*expected 0 to 10, the embedding has 11 rows"):
        perplexity(open_cpu(np.float64), sharp_parameters(np.float64), CONFIG, ids, table, EvaluateConfig())
