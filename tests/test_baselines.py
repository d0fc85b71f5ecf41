"""The counting models against dictionaries."""

import math
from collections import Counter, defaultdict

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_ops.baselines import baselines, bigram_probability, count, unigram_probability

E = 0
VOCABULARY = 6
document_lists = st.lists(st.lists(st.integers(1, VOCABULARY - 1), max_size=12), min_size=1, max_size=6)


def lay_out(*splits):
    """Return the ids of the splits, each E d1 E d2 E, and a table of documents for each split."""
    ids, tables = [], []
    for documents in splits:
        offsets = []
        ids.append(E)
        for document in documents:
            offsets.append(len(ids))
            ids += [*document, E]
        tables.append(pd.DataFrame({"offset": offsets, "tokens": [len(d) for d in documents]}, dtype=np.int64))
    return np.array(ids, np.uint32), *tables


def pairs_of(documents):
    return [pair for document in documents for pair in zip([E, *document], [*document, E], strict=True)]


class Dictionaries:
    """The same models, one token at a time."""

    def __init__(self, documents, vocab_size):
        self.vocab_size = vocab_size
        self.total = len(pairs_of(documents))
        self.words = Counter(w for _, w in pairs_of(documents))
        self.after = defaultdict(Counter)
        for h, w in pairs_of(documents):
            self.after[h][w] += 1

    def unigram(self, w):
        return (self.words[w] + 1) / (self.total + self.vocab_size)

    def bigram(self, h, w):
        if h not in self.after:
            return self.unigram(w)
        seen = self.after[h]
        return (seen[w] + len(seen) * self.unigram(w)) / (sum(seen.values()) + len(seen))


@settings(max_examples=60, deadline=None)
@given(document_lists, document_lists, st.integers(VOCABULARY, 9), st.integers(1, 5))
def test_perplexities_equal_those_of_dictionaries(training, validation, vocab_size, chunk):
    ids, train_table, validation_table = lay_out(training, validation)
    got = baselines(ids, train_table, validation_table, vocab_size, chunk)
    model, pairs = Dictionaries(training, vocab_size), pairs_of(validation)
    unigram = -sum(math.log(model.unigram(w)) for _, w in pairs) / len(pairs)
    bigram = -sum(math.log(model.bigram(h, w)) for h, w in pairs) / len(pairs)
    assert got["uniform"] == vocab_size
    assert got["unigram"] == pytest.approx(math.exp(unigram), rel=1e-12)
    assert got["bigram"] == pytest.approx(math.exp(bigram), rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(document_lists, st.integers(VOCABULARY, 9))
def test_probabilities_sum_to_one_over_the_vocabulary(training, vocab_size):
    ids, table = lay_out(training)
    counts = count(ids, table, vocab_size)
    w = np.arange(vocab_size)
    assert unigram_probability(counts, w).sum() == pytest.approx(1, rel=1e-12)
    for h in range(vocab_size):
        assert bigram_probability(counts, np.full(vocab_size, h), w).sum() == pytest.approx(1, rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(document_lists, st.integers(1, 7))
def test_counts_do_not_depend_on_the_chunk(training, chunk):
    ids, table = lay_out(training)
    for whole, cut in zip(count(ids, table, 9), count(ids, table, 9, chunk), strict=True):
        np.testing.assert_array_equal(whole, cut)
    counts = count(ids, table, 9, chunk)
    assert counts.unigram.sum() == counts.pair_counts.sum() == len(pairs_of(training))
    assert (np.diff(counts.pairs) > 0).all()


def test_numbers_by_hand():
    ids, training, validation = lay_out([[1, 1, 2]], [[2, 1], [3]])
    counts = count(ids, training, 5)
    # c: E 1, 1 2, 2 1 of N = 4; pairs: (E,1), (1,1), (1,2), (2,E)
    assert counts.unigram.tolist() == [1, 2, 1, 0, 0]
    assert counts.pairs.tolist() == [1, 6, 7, 10]
    assert counts.histories.tolist() == [1, 2, 1, 0, 0]
    assert counts.successors.tolist() == [1, 2, 1, 0, 0]
    got = bigram_probability(counts, np.array([1, 2, 3]), np.array([2, 1, 1]))
    np.testing.assert_allclose(got, [(1 + 2 * 2 / 9) / 4, (0 + 1 * 3 / 9) / 2, 3 / 9], rtol=1e-15)
    # targets 2 1 E 3 E
    product = (2 * 3 * 2 * 1 * 2) / 9**5
    got = baselines(ids, training, validation, 5)
    assert got["unigram"] == pytest.approx(product ** (-1 / 5), rel=1e-12)


def test_documents_in_any_order_and_memory_mapped(tmp_path):
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 50, rng.integers(0, 30)).tolist() for _ in range(40)]
    ids, training, validation = lay_out(documents[:30], documents[30:])
    ids.tofile(tmp_path / "ids.bin")
    mapped = np.memmap(tmp_path / "ids.bin", np.uint32, "r")
    whole = baselines(ids, training, validation, 64)
    shuffled = baselines(mapped, training.sample(frac=1, random_state=1), validation[::-1], 64, chunk=17)
    assert shuffled == pytest.approx(whole, rel=1e-12)


def test_large_vocabulary_does_not_wrap():
    big = 3_000_000
    ids, training, validation = lay_out([[big - 1, big - 2, big - 1, big - 2]], [[big - 1, big - 2]])
    counts = count(ids, training, big)
    assert counts.pairs[-1] == (big - 1) * big + big - 2
    assert counts.pair_counts[-1] == 2
    assert baselines(ids, training, validation, big)["bigram"] < 3


def test_no_training_documents_give_the_uniform_model():
    ids, nothing, validation = lay_out([], [[1, 2]])
    got = baselines(ids, nothing, validation, 7)
    assert got == pytest.approx({"uniform": 7, "unigram": 7, "bigram": 7}, rel=1e-12)


def test_nothing_to_evaluate_is_an_error():
    ids, training, nothing = lay_out([[1, 2]], [])
    with pytest.raises(ValueError, match="no target tokens"):
        baselines(ids, training, nothing, 7)


def test_ids_outside_the_vocabulary_and_documents_outside_the_ids_are_errors():
    ids, training = lay_out([[1, 7, 2]])
    with pytest.raises(ValueError, match=r"id 7 .*expected 0 to 6, the embedding has 7 rows"):
        count(ids, training, 7)
    with pytest.raises(ValueError, match=r"offset 1, tokens 4; expected .* < 5"):
        count(ids, training.assign(tokens=4), 8)
