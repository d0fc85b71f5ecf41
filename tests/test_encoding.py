"""Texts cut in slices give the ids of whole texts, on any number of threads."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mamba_ops import encoding
from mamba_ops.config import TokenizerConfig
from mamba_ops.documents import default_documents
from mamba_ops.encoding import cut, cuts_are_exact, encode_slices
from mamba_ops.tokenizer import encode_texts, train_tokenizer

FOUR_KB = 4096
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def texts():
    return ["".join(part.text for part in document.parts) for document in default_documents()]


@pytest.fixture(scope="module")
def bpe(texts):
    return train_tokenizer(texts[:100], TokenizerConfig(vocab_size=400))


def trained(pre_tokenizer, normalizer=None, texts=()):
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer, tokenizer.normalizer = pre_tokenizer, normalizer
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, initial_alphabet=list(map(chr, range(32, 127))))
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def unigram(pre_tokenizer, texts):
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"])
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def whole(tokenizer, texts):
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


@pytest.fixture
def small_slices(monkeypatch):
    """Slices of 4 KB, of texts of any length, wherever the tokenizer allows."""
    monkeypatch.setattr(encoding, "SLICE_CHARACTERS", FOUR_KB)
    monkeypatch.setattr(encoding, "WHOLE_CHARACTERS", FOUR_KB)
    monkeypatch.setattr(encoding, "CONTEXT_CHARACTERS", 200)


def test_the_default_corpus_in_slices_of_4_kb_gives_the_ids_of_whole_texts(small_slices, texts, bpe):
    long = [text for text in texts if len(text) > FOUR_KB]
    slices = list(cut(bpe, enumerate([text] for text in texts)))
    assert cuts_are_exact(bpe)
    assert len(slices) > 2 * len(long) > 200
    line_ends = 0
    for before, after in itertools.pairwise(slices):
        if before.key == after.key:
            at_line_end = before.text[-1] == "\n" and not before.text[-2].isspace() and not after.text[0].isspace()
            assert at_line_end or (not before.text[-1].isspace() and after.text[0] in " \n")
            line_ends += at_line_end
    assert line_ends > len(long)
    found = [ids.tolist() for ids in encode_texts(bpe, texts)]
    assert found == whole(bpe, texts)


def test_other_tokenizers_give_the_ids_of_whole_texts(small_slices, texts):
    some = [text for text in texts if 2 * FOUR_KB < len(text) < 20_000 and text.isascii()][:12]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
    tokenizers = {
        "Llama 3's pattern": trained(pre_tokenizers.Sequence([split, byte_level]), None, some),
        "a space in front": trained(pre_tokenizers.ByteLevel(add_prefix_space=True), None, some),
        "Metaspace": trained(pre_tokenizers.Metaspace(prepend_scheme="always"), None, some),
        "Metaspace at the front": trained(pre_tokenizers.Metaspace(prepend_scheme="first"), None, some),
        "Llama 2's normalizer": trained(
            pre_tokenizers.Split("\n", "isolated"),
            normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
            some,
        ),
        "words": trained(pre_tokenizers.Whitespace(), normalizers.Lowercase(), some),
        "stripped": trained(byte_level, normalizers.Strip(), some[:2]),
        "Unigram": unigram(pre_tokenizers.Metaspace(), some),
    }
    for name, tokenizer in tokenizers.items():
        assert not cuts_are_exact(tokenizer), name
        slices = list(cut(tokenizer, enumerate([text] for text in some)))
        assert len(slices) > 1.5 * len(some), name
        assert [ids.tolist() for ids in encode_texts(tokenizer, some)] == whole(tokenizer, some), name


def test_a_cut_is_not_made_where_it_changes_an_id(small_slices, bpe):
    tokenizer = Tokenizer.from_str(bpe.to_str())
    tokenizer.add_tokens([AddedToken("walk\nthe")])
    text = "the walk\n" * 4000
    assert not cuts_are_exact(tokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "LONGEST_CHARACTERS", 10_000)
        with pytest.raises(ValueError, match=r"a text: expected a line end between two words, .* got none in 36000"):
            list(encode_texts(tokenizer, [text]))
    assert next(encode_texts(tokenizer, [text])).tolist() == whole(tokenizer, [text])[0]
    mixed = "the walk\nends.\n" * 2000
    assert len(list(cut(tokenizer, [(0, [mixed])]))) > 2
    assert next(encode_texts(tokenizer, [mixed])).tolist() == whole(tokenizer, [mixed])[0]


def test_texts_without_line_ends_are_cut_before_spaces(small_slices, bpe):
    text = "the walk  went,\n\n" * 3000
    assert len(list(cut(bpe, [(0, [text])]))) > 9
    assert next(encode_texts(bpe, [text])).tolist() == whole(bpe, [text])[0]


def test_a_text_with_no_place_to_cut_is_named(small_slices, bpe, monkeypatch):
    monkeypatch.setattr(encoding, "LONGEST_CHARACTERS", 50_000)
    assert len(next(encode_texts(bpe, ["x" * 50_000]))) > 0
    with pytest.raises(ValueError, match=r"expected a line end between two words, .* in each 50000 characters"):
        list(encode_texts(bpe, ["x" * 50_001]))


@given(st.integers(0, 2**32), st.integers(1, 50))
def test_the_pieces_a_text_comes_in_change_nothing(bpe, seed, most):
    random_numbers = random.Random(seed)
    text = "".join(random_numbers.choice(["the", " ", "\n", "walk", "\n\n", ".", "'s", "é", "\t"]) for _ in range(300))
    places = sorted(random_numbers.choices(range(len(text)), k=most))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "SLICE_CHARACTERS", 20)
        slices = list(cut(bpe, [("key", pieces), ("empty", [])]))
        assert "".join(s.text for s in slices) == text
        assert slices[-1] == ("empty", "", "")
        ids = [ids.tolist() for _, ids in encode_slices(bpe, slices)]
    assert list(itertools.chain(*ids)) == whole(bpe, [text])[0]


def test_ids_do_not_depend_on_the_number_of_threads(texts, bpe, monkeypatch):
    monkeypatch.setattr(encoding, "BATCH_CHARACTERS", 5000)
    slices = list(cut(bpe, enumerate([text] for text in texts[:50])))
    expected = None
    for threads in (1, 2, 5, None):
        found = list(encode_slices(bpe, iter(slices), threads))
        assert [s for s, _ in found] == slices
        assert all(ids.dtype == np.uint32 for _, ids in found)
        ids = [ids.tolist() for _, ids in found]
        expected = expected or ids
        assert ids == expected


def test_an_error_among_the_texts_ends_the_encoding(bpe):
    def failing():
        yield "fine"
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        list(encode_texts(bpe, failing()))


def test_no_more_is_read_ahead_than_the_threads_work_on(bpe, monkeypatch):
    monkeypatch.setattr(encoding, "BATCH_CHARACTERS", 1)
    read = []
    texts = (read.append(number) or f"text {number}" for number in range(100))
    found = encode_texts(bpe, texts)
    next(found)
    assert len(read) < 10


def test_a_text_that_the_tokenizer_cannot_encode_is_named():
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="missing"))
    with pytest.raises(ValueError, match=r"the tokenizer cannot encode a text among \['a text'\]: .*"):
        list(encode_slices(words, cut(words, [(None, ["b"])])))
