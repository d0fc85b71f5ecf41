"""Ids on disk, rows and batches: every target once an epoch, positions from the document's start."""

import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from mamba_ops.config import BatchesConfig, CorpusConfig, TokenizerConfig
from mamba_ops.corpus import build_corpus, read_manifest, read_texts
from mamba_ops.ops import IGNORED
from mamba_ops.tokenized import TokenizedManifest, document_starts, encode_corpus, open_ids
from mamba_ops.tokenizer import build_tokenizer, encode_texts, load_tokenizer
from mamba_ops.tokens import (
    BatchesManifest,
    batch_count,
    batch_from_ids,
    build_batches,
    epoch_batches,
    ids_array,
    load_batch,
    make_rows,
    row_order,
)

SPLITS = ("train", "validation")
DOCUMENTS = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=12), min_size=1, max_size=8)


def stream(documents, before=()):
    """Return E d1 E ... dn E behind the ids `before`, and where the documents open."""
    ids, starts = [*before, 0], []
    for document in documents:
        starts.append(len(ids) - 1)
        ids += [*document, 0]
    return np.array(ids, np.uint32), np.array(starts)


def epoch(ids, starts, begin, seq_len, batch_size, seed=0, number=0):
    """Return an epoch's rows and batches of ids[begin:]."""
    rows = make_rows(begin, len(ids), seq_len)
    batches = [
        (chosen, load_batch(ids, starts, rows["start"].to_numpy()[chosen], rows["length"].to_numpy()[chosen], seq_len))
        for chosen in epoch_batches(len(rows), batch_size, seed, number)
    ]
    return rows, batches


def words_folder(folder, *tokens, normalizer=None):
    """Write a tokenizer of whole words, id by position; the first is the end of text."""
    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.normalizer = normalizer
    tokenizer.save(str(folder / "tokenizer.json"))
    return build_tokenizer(
        TokenizerConfig(path=str(folder), end_of_text=tokens[0]), [], folder.with_name(folder.name + "-built")
    )


def small(root, train, validation, *tokens, rows=None, normalizer=None):
    """Encode lines of words into root/ids and return the manifest."""
    for name, texts in (("t", train), ("v", validation)):
        (root / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = CorpusConfig(paths=[str(root / "t.jsonl")], validation_paths=[str(root / "v.jsonl")])
    build_corpus(config, root / "corpus")
    words_folder(root / "words", *tokens, normalizer=normalizer)
    return encode_corpus(root / "corpus", root / "words-built", root / "ids", rows)


@pytest.fixture(scope="session")
def default(tmp_path_factory):
    """The default corpus, encoded."""
    root = tmp_path_factory.mktemp("default")
    build_corpus(CorpusConfig(), root / "corpus")
    build_tokenizer(TokenizerConfig(vocab_size=512), read_texts(root / "corpus", "train"), root / "tokenizer")
    encode_corpus(root / "corpus", root / "tokenizer", root / "ids")
    return root


def test_default_corpus(default):
    ids, table = open_ids(default / "ids"), pd.read_parquet(default / "ids" / "documents.parquet")
    manifest = read_manifest(TokenizedManifest, default / "ids")
    assert list(table.columns) == [
        "id",
        "source",
        "split",
        "offset",
        "tokens",
        "bytes",
        "learned_bytes",
        "masked",
    ]
    assert (manifest.vocab_size, manifest.end_of_text_id, manifest.without_tokens) == (512, 0, 0)
    assert manifest.max_id == ids.max() < 512
    assert np.array_equal(
        np.sort(np.r_[document_starts(default / "ids"), [s.end - 1 for s in manifest.streams.values()]]),
        np.flatnonzero(ids == 0),
    )
    assert manifest.streams["train"].begin == 0
    assert manifest.streams["train"].end == manifest.streams["validation"].begin
    assert manifest.streams["validation"].end == len(ids)
    tokenizer = load_tokenizer(default / "tokenizer")
    for split in SPLITS:
        of_split, found = table[table["split"] == split], manifest.streams[split]
        assert found.targets == of_split["tokens"].sum() + len(of_split) == found.tokens + found.documents
        texts = list(read_texts(default / "corpus", split))
        assert [len(text.encode()) for text in texts] == list(of_split["bytes"])
        for text, offset, tokens in zip(texts, of_split["offset"], of_split["tokens"], strict=True):
            assert tokenizer.decode(ids[offset : offset + tokens].tolist()) == text


def test_encoding_again_gives_the_same_fingerprint(default, tmp_path):
    manifest = read_manifest(TokenizedManifest, default / "ids")
    assert encode_corpus(default / "corpus", default / "tokenizer", tmp_path / "again") == manifest
    assert (tmp_path / "again" / "ids.bin").read_bytes() == (default / "ids" / "ids.bin").read_bytes()


def test_layout(tmp_path):
    manifest = small(tmp_path, ["a b", "c"], ["b", "a a a"], "E", "a", "b", "c", "padding")
    assert open_ids(tmp_path / "ids").tolist() == [0, 1, 2, 0, 3, 0, 0, 2, 0, 1, 1, 1, 0]
    assert open_ids(tmp_path / "ids").dtype == "<u4"
    assert document_starts(tmp_path / "ids").tolist() == [0, 3, 6, 8]
    table = pd.read_parquet(tmp_path / "ids" / "documents.parquet")
    assert list(table["split"]) == ["train", "train", "validation", "validation"]
    assert list(table["offset"]) == [1, 4, 7, 9]
    assert list(table["tokens"]) == [2, 1, 1, 3]
    assert {split: (s.begin, s.end, s.documents, s.tokens, s.bytes) for split, s in manifest.streams.items()} == {
        "train": (0, 6, 2, 3, 4),
        "validation": (6, 13, 2, 4, 6),
    }
    with pytest.raises(FileExistsError, match="ids exists"):
        encode_corpus(tmp_path / "corpus", tmp_path / "words-built", tmp_path / "ids")


def test_documents_that_the_tokenizer_makes_nothing_of_are_left_out_and_counted(tmp_path):
    manifest = small(tmp_path, ["x", "a x", "x x"], ["a"], "E", "a", normalizer=normalizers.Replace("x", ""))
    assert manifest.without_tokens == 2
    assert open_ids(tmp_path / "ids").tolist() == [0, 1, 0, 0, 1, 0]
    assert document_starts(tmp_path / "ids").tolist() == [0, 3]


def test_a_split_without_tokens_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="the documents of validation have 0 tokens"):
        small(tmp_path, ["a"], ["x"], "E", "a", normalizer=normalizers.Replace("x", ""))
    assert not (tmp_path / "ids").exists()


def test_damaged_ids_are_refused(tmp_path):
    small(tmp_path, ["a b"], ["b"], "E", "a", "b")
    path = tmp_path / "ids" / "ids.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    with pytest.raises(ValueError, match=r"ids\.bin: expected 28 bytes as its manifest says, got 24"):
        open_ids(tmp_path / "ids")
    for damaged in (whole[:-4] + b"\1\1\0\0", whole[4:8] + whole[:4] + whole[8:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"ids\.bin: expected the SHA-256 [0-9a-f]{64} as its manifest says, got"):
            open_ids(tmp_path / "ids")


def test_case_43_ids_past_the_embedding_stop_the_encoding(tmp_path):
    words = ("E", "a", "b", "c", "d", "e", "f", "g", "h")
    with pytest.raises(ValueError, match=r"id 8 \('h'\) at index 2: expected 0 to 7, .*8 rows, the tokenizer 9 tok"):
        small(tmp_path, ["a", "b g h"], ["c"], *words, rows=8)
    assert not (tmp_path / "ids").exists()
    assert encode_corpus(tmp_path / "corpus", tmp_path / "words-built", tmp_path / "ids", 50_304).max_id == 8


def test_case_43_the_end_of_text_counts_too(tmp_path):
    small(tmp_path, ["a"], ["a a"], "a", "E")
    build_tokenizer(TokenizerConfig(path=str(tmp_path / "words"), end_of_text="E"), [], tmp_path / "late")
    with pytest.raises(ValueError, match=r"id 1 \('E'\)"):
        encode_corpus(tmp_path / "corpus", tmp_path / "late", tmp_path / "other", rows=1)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 7, 8], "id 8 at index 2: expected 0 to 7"),
        ([3, -1], "got -1 to 3"),
        ([0, 2**32], "got 0 to 4294967296"),
        ([0, 2**63], "whole numbers, got float64"),
        ([0, 2**64], "whole numbers, got object"),
        ([0.0, 1.0], "whole numbers, got float64"),
        ([True, False], "whole numbers, got bool"),
        (["0", "1"], "whole numbers"),
        ([[0, 1]], r"shape \(1, 2\)"),
        ([[0, 1], [2]], "flat list of whole numbers"),
        ([5], r"at least 2 tokens, got shape \(1,\)"),
        ([], "at least 2 tokens"),
    ],
)
def test_case_43_plain_ids_are_checked(ids, message):
    with pytest.raises(ValueError, match=message):
        batch_from_ids(ids, rows=8)


def test_plain_ids_are_one_document():
    batch = batch_from_ids([3, 1, 2, 0])
    assert batch.ids.tolist() == [[3, 1, 2]]
    assert batch.targets.tolist() == [[1, 2, 0]]
    assert batch.positions.tolist() == [[0, 1, 2]]
    assert (batch.ids.dtype, batch.targets.dtype, batch.positions.dtype) == (np.int64, np.int64, np.uint32)
    assert ids_array(np.array([70_000, 1], np.uint32)).tolist() == [70_000, 1]


def test_case_18_packing_example():
    ids, starts = stream([[1, 2, 3], [4, 5]])
    rows, [(_, batch)] = epoch(ids, starts, 0, seq_len=7, batch_size=1)
    assert rows.to_dict("list") == {"row": [0], "start": [0], "length": [7]}
    assert batch.ids.tolist() == [[0, 1, 2, 3, 0, 4, 5]]
    assert batch.targets.tolist() == [[1, 2, 3, 0, 4, 5, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert batch.target_count == 7


def test_short_rows_are_padded_and_positions_restart_at_a_row():
    ids, starts = stream([[1, 2, 3], [4, 5]])
    rows, batches = epoch(ids, starts, 0, seq_len=3, batch_size=9)
    [(order, batch)] = batches
    back = np.argsort(order)
    assert list(rows["length"]) == [3, 3, 1]
    assert batch.ids[back].tolist() == [[0, 1, 2], [3, 0, 4], [5, 0, 0]]
    assert batch.targets[back].tolist() == [[1, 2, 3], [0, 4, 5], [0, IGNORED, IGNORED]]
    assert batch.positions[back].tolist() == [[0, 1, 2], [0, 0, 1], [0, 0, 0]]


@pytest.mark.parametrize(("seq_len", "lengths"), [(16, [9]), (4, [4, 4, 1]), (9, [9]), (3, [3, 3, 3])])
def test_case_22_small_corpora_do_not_vanish(seq_len, lengths):
    rows = make_rows(0, 10, seq_len)
    assert list(rows["length"]) == lengths
    assert rows["length"].sum() == 10 - 1
    assert [len(chosen) for chosen in epoch_batches(len(rows), 64, seed=0, epoch=0)] == [len(rows)]


def test_case_22_no_target_is_an_error_with_the_counts():
    for end in (0, 1):
        with pytest.raises(ValueError, match=f"{end} ids give 0 target tokens and 0 rows of 16"):
            make_rows(0, end, 16)
    with pytest.raises(ValueError, match="0 rows in batches of 2 give 0 batches"):
        next(epoch_batches(0, 2, 0, 0))


def test_seed_fault_1_a_length_that_divides_evenly_loses_nothing():
    assert list(make_rows(0, 512, 512)["length"]) == [511]
    assert list(make_rows(0, 513, 512)["length"]) == [512]
    assert list(make_rows(0, 1025, 512)["length"]) == [512, 512]


@given(DOCUMENTS, st.integers(1, 20), st.integers(1, 5), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))
def test_every_pair_trains_once_an_epoch(documents, seq_len, batch_size, seed, number, before):
    ids, starts = stream(documents, [0, *range(1, before), 0][:before])
    rows, batches = epoch(ids, starts, before, seq_len, batch_size, seed, number)
    pairs = np.zeros(len(ids), int)
    for chosen, batch in batches:
        for row, line, targets, positions in zip(chosen, batch.ids, batch.targets, batch.positions, strict=True):
            start, length = rows["start"][row], rows["length"][row]
            assert np.array_equal(line[:length], ids[start : start + length])
            assert np.array_equal(targets[:length], ids[start + 1 : start + length + 1])
            assert (targets[length:] == IGNORED).all()
            assert not line[length:].any()
            assert not positions[length:].any()
            opening = 0
            for at in range(start, start + length):
                opening = 0 if at == start or at in starts else opening + 1
                assert positions[at - start] == opening
            pairs[start : start + length] += 1
    assert (pairs[before:-1] == 1).all()
    assert not pairs[:before].any()
    assert sum(batch.target_count for _, batch in batches) == sum(len(document) + 1 for document in documents)
    assert [len(chosen) for chosen, _ in batches[:-1]] == [batch_size] * (batch_count(len(rows), batch_size) - 1)


@given(DOCUMENTS, st.integers(1, 20), st.integers(0, 3))
def test_rows_in_order_are_the_stream(documents, seq_len, before):
    ids, starts = stream(documents, [0, *range(1, before), 0][:before])
    rows = make_rows(before, len(ids), seq_len)
    batch = load_batch(ids, starts, rows["start"].to_numpy(), rows["length"].to_numpy(), seq_len)
    kept = batch.targets != IGNORED
    assert batch.ids[kept].tolist() == ids[before:-1].tolist()
    assert batch.targets[kept].tolist() == ids[before + 1 :].tolist()
    assert (rows["length"][:-1] == seq_len).all()
    assert rows["row"].tolist() == list(range(len(rows)))


def test_row_order_depends_on_rows_seed_and_epoch_alone():
    assert row_order(100, 3, 7).tolist() == row_order(100, 3, 7).tolist()
    assert sorted(row_order(100, 3, 7)) == list(range(100))
    orders = {tuple(row_order(100, seed, number)) for seed in range(3) for number in range(3)}
    assert len(orders) == 9


def test_batches_are_an_index_table(default, tmp_path):
    config = BatchesConfig(seq_len=128, batch_size=8)
    manifest = build_batches(config, default / "ids", tmp_path / "batches")
    rows = pd.read_parquet(tmp_path / "batches" / "rows.parquet")
    tokenized = read_manifest(TokenizedManifest, default / "ids")
    assert manifest == read_manifest(BatchesManifest, tmp_path / "batches")
    assert rows.equals(make_rows(0, tokenized.streams["train"].end, 128))
    assert manifest.target_tokens == rows["length"].sum() == tokenized.streams["train"].targets
    assert (manifest.rows, manifest.batches) == (len(rows), batch_count(len(rows), 8))
    other = build_batches(BatchesConfig(seq_len=128, batch_size=8, seed=1), default / "ids", tmp_path / "other")
    assert other.fingerprint != manifest.fingerprint
    with pytest.raises(FileExistsError, match="batches exists"):
        build_batches(config, default / "ids", tmp_path / "batches")


def test_a_batch_is_read_from_the_map_without_the_rest(default):
    ids = open_ids(default / "ids")
    starts = document_starts(default / "ids")
    rows = make_rows(0, len(ids) // 2, 64)
    batch = load_batch(ids, starts, rows["start"].to_numpy()[5:7], rows["length"].to_numpy()[5:7], 64)
    assert batch.ids.nbytes + batch.targets.nbytes + batch.positions.nbytes == 2 * 64 * (8 + 8 + 4)
    assert not np.shares_memory(batch.ids, ids)
    assert not ids.flags.writeable


def test_a_thousand_documents(tmp_path):
    train = [f"a b {'c ' * (number % 50)} {'b ' * (number // 50)}" for number in range(1000)]
    manifest = small(tmp_path, train, ["a c"], "E", "a", "b", "c")
    assert manifest.streams["train"].documents == 1000
    assert manifest.streams["train"].tokens == sum(len(text.split()) for text in train)
    ids, starts = open_ids(tmp_path / "ids"), document_starts(tmp_path / "ids")
    end = manifest.streams["train"].end
    _, batches = epoch(ids[:end], starts[:1000], 0, 128, 8)
    assert sum(batch.target_count for _, batch in batches) == end - 1
    assert sum(int((batch.ids == 0).sum() - (batch.targets == IGNORED).sum()) for _, batch in batches) == 1000


def test_encoding_in_small_batches_gives_the_same_ids(default, monkeypatch):
    texts = list(read_texts(default / "corpus", "validation"))[:8]
    tokenizer = load_tokenizer(default / "tokenizer")
    whole = [ids.tolist() for ids in encode_texts(tokenizer, texts)]
    monkeypatch.setattr("mamba_ops.encoding.SLICE_CHARACTERS", 100)
    monkeypatch.setattr("mamba_ops.encoding.BATCH_CHARACTERS", 1000)
    assert [ids.tolist() for ids in encode_texts(tokenizer, texts)] == whole
