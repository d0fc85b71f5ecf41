"""Instructions as ids: prompts and completions apart, loss on what is learned alone, all the way to the batches."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from mamba_ops import tokenized
from mamba_ops.baselines import baselines, count
from mamba_ops.config import BatchesConfig, CorpusConfig, EvaluateConfig, MambaConfig, TokenizerConfig, TrainConfig
from mamba_ops.corpus import build_corpus, read_manifest
from mamba_ops.cpu import open_cpu
from mamba_ops.evaluate import perplexity
from mamba_ops.model import logits
from mamba_ops.ops import IGNORED
from mamba_ops.parameters import init
from mamba_ops.progress import Progress, describe
from mamba_ops.tokenized import TokenizedManifest, encode_corpus, open_ids, open_masked
from mamba_ops.tokenizer import build_tokenizer
from mamba_ops.tokens import build_batches
from mamba_ops.train import start, train
from mamba_ops.training_data import TokenRows, data_fingerprint, load, open_rows

WORDS = ("</s>", "a", "b", "c", "d", "e")
TRAIN = [
    {"text": "a b"},
    {"prompt": "a b c", "completion": "d e"},
    {"prompt": "", "completion": "e"},
    {"prompt": "c c", "completion": ""},
]
HELD_OUT = [{"prompt": "a b", "completion": "c d"}, {"text": "d e"}]
CHAT = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]


def tokenizer_folder(folder, **declared):
    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", **declared}))
    return folder


def encode(root, train, validation, **declared):
    """Encode records into root/ids and return the manifest."""
    for name, records in (("t", train), ("v", validation)):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = CorpusConfig(paths=[str(root / "t.jsonl")], validation_paths=[str(root / "v.jsonl")])
    build_corpus(config, root / "corpus")
    folder = tokenizer_folder(root / "words", **declared)
    build_tokenizer(TokenizerConfig(path=str(folder), end_of_text="</s>"), [], root / "tokenizer")
    return encode_corpus(root / "corpus", root / "tokenizer", root / "ids")


@pytest.fixture
def encoded(tmp_path):
    encode(tmp_path, TRAIN, HELD_OUT)
    return tmp_path


def documents(root, split):
    table = pd.read_parquet(root / "ids" / "documents.parquet")
    return table[table["split"] == split].reset_index(drop=True)


def test_layout(encoded):
    ids = open_ids(encoded / "ids").tolist()
    assert ids == [0, 1, 2, 0, 1, 2, 3, 4, 5, 0, 5, 0, 3, 3, 0, 0, 1, 2, 3, 4, 0, 4, 5, 0]
    assert open_masked(encoded / "ids").tolist() == [[4, 7], [12, 14], [16, 18]]
    table = documents(encoded, "train")
    assert [runs.tolist() for runs in table["masked"]] == [[], [0, 3], [], [0, 2]]
    assert table["bytes"].tolist() == [3, 8, 1, 3]
    assert table["learned_bytes"].tolist() == [3, 3, 1, 0]
    manifest = read_manifest(TokenizedManifest, encoded / "ids")
    assert [(s.tokens, s.masked, s.targets) for s in manifest.streams.values()] == [(10, 5, 9), (6, 2, 6)]


def test_the_mask_is_part_of_the_fingerprint(encoded, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    split_elsewhere = [TRAIN[0], {"prompt": "a b", "completion": "c d e"}, *TRAIN[2:]]
    manifest = encode(other, split_elsewhere, HELD_OUT)
    assert (other / "ids" / "ids.bin").read_bytes() == (encoded / "ids" / "ids.bin").read_bytes()
    assert manifest.fingerprint != read_manifest(TokenizedManifest, encoded / "ids").fingerprint


def test_rows_and_batches(encoded):
    made = build_batches(BatchesConfig(seq_len=3, batch_size=2), encoded / "ids", encoded / "batches")
    assert (made.rows, made.without_targets, made.target_tokens) == (4, 1, 9)
    rows = open_rows(encoded / "ids", encoded / "batches")
    assert rows.starts.tolist() == [0, 6, 9, 12]  # the row at 3 is all prompt
    batch = load(rows, np.arange(4))
    assert batch.ids.tolist() == [[0, 1, 2], [3, 4, 5], [0, 5, 0], [3, 3, 0]]
    assert batch.targets.tolist() == [[1, 2, 0], [4, 5, 0], [5, 0, IGNORED], [IGNORED, 0, IGNORED]]
    assert batch.positions.tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, 0], [0, 1, 0]]
    assert batch.target_count == made.target_tokens


def test_the_mask_is_part_of_the_data_of_a_run(encoded):
    build_batches(BatchesConfig(seq_len=8), encoded / "ids", encoded / "batches")
    rows = open_rows(encoded / "ids", encoded / "batches")
    other = TokenRows(**{**vars(rows), "masked": rows.masked[1:]})
    assert data_fingerprint(rows) != data_fingerprint(other)
    wrong = TokenRows(**{**vars(rows), "masked": rows.masked[::-1]})
    with pytest.raises(ValueError, match="masked: expected ascending runs"):
        list(train(start(MODEL), wrong, TrainConfig(max_steps=1), BatchesConfig(seq_len=8)))


MODEL = MambaConfig(vocab_size=6, hidden_size=8, num_hidden_layers=2, state_size=4)


def test_a_run_counts_targets_with_loss(encoded):
    made = build_batches(BatchesConfig(seq_len=4, batch_size=2), encoded / "ids", encoded / "batches")
    rows = open_rows(encoded / "ids", encoded / "batches")
    config = TrainConfig(num_train_epochs=1, learning_rate=1e-2)
    steps = list(train(start(MODEL), rows, config, BatchesConfig(seq_len=4, batch_size=2)))
    assert steps[-1].tokens_seen == made.target_tokens == 9


def test_perplexity_and_baselines_are_of_what_is_learned(encoded):
    ids, table = open_ids(encoded / "ids"), documents(encoded, "validation")
    ops = open_cpu(np.float64, threads=1)
    params = init(MODEL, 0, np.float64)
    nll = []
    for row in table.itertuples():
        own = ids[row.offset - 1 : row.offset + row.tokens + 1].astype(np.int64)
        positions = np.arange(len(own) - 1, dtype=np.uint32)
        rows = ops.rows(type_batch(own, positions))
        scores = logits(ops, params, MODEL, rows)
        losses = np.log(np.exp(scores).sum(1)) - scores[np.arange(len(own) - 1), own[1:]]
        first = int(row.masked[1]) if len(row.masked) else 0
        nll.append(losses[first:].sum())
    for batch_size, window in ((1, 100), (2, 2), (3, 1)):
        found = perplexity(ops, params, MODEL, ids, table, EvaluateConfig(batch_size=batch_size, window=window))
        assert found.document_tokens.tolist() == [3, 3]
        assert found.bytes == 6
        np.testing.assert_allclose(found.document_nll, nll, rtol=1e-12)
    counts = count(ids, documents(encoded, "train"), 6)
    assert counts.unigram.tolist() == [4, 1, 1, 0, 1, 2]
    targets = [3, 4, 0, 4, 5, 0]
    expected = math.exp(-np.log((counts.unigram[targets] + 1) / (9 + 6)).mean())
    found = baselines(ids, documents(encoded, "train"), table, 6)
    assert found["unigram"] == pytest.approx(expected, rel=1e-12)


def type_batch(own, positions):
    from mamba_ops.ops import Batch

    return Batch(own[None, :-1], own[None, 1:], positions[None])


def test_a_prompt_and_its_completion_are_encoded_apart(tmp_path):
    records = [{"prompt": "wal", "completion": "king walk"}, {"text": "walking walk walk walk"}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "v.jsonl").write_text('{"text": "walk"}\n')
    config = CorpusConfig(paths=[str(path)], validation_paths=[str(tmp_path / "v.jsonl")])
    build_corpus(config, tmp_path / "corpus")
    build_tokenizer(TokenizerConfig(vocab_size=300), ["walking walk"] * 9, tmp_path / "tokenizer")
    encode_corpus(tmp_path / "corpus", tmp_path / "tokenizer", tmp_path / "ids")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))
    first, second = (tokenizer.encode(text).ids for text in ("wal", "king walk"))
    table, ids = documents(tmp_path, "train"), open_ids(tmp_path / "ids").tolist()
    assert ids[table["offset"][0] :][: table["tokens"][0]] == first + second != tokenizer.encode("walking walk").ids
    assert table["masked"][0].tolist() == [0, len(first)]


def test_chats_by_the_template(tmp_path):
    template = "{% for m in messages %}{{ m.content }} {{ eos_token }} {% endfor %}"
    talk = [*CHAT, {"role": "user", "content": "d</s>"}, {"role": "assistant", "content": "e"}]
    manifest = encode(tmp_path, [{"messages": talk}, {"text": "d</s>"}], [{"messages": CHAT}], chat_template=template)
    # a special token is itself in a chat, and text in a text
    assert open_ids(tmp_path / "ids").tolist() == [0, 2, 0, 3, 0, 4, 0, 0, 5, 0, 1, 0, 0, 2, 0, 3, 0]
    assert manifest.streams["train"].masked == 5
    assert open_masked(tmp_path / "ids").tolist() == [[1, 3], [5, 8], [13, 15]]


def test_the_end_of_text_that_closes_a_chat_stands_once(tmp_path):
    template = "{% for m in messages %}{{ m.content }} {{ eos_token }}\n{% endfor %}"
    encode(tmp_path, [{"messages": CHAT}], [{"text": "a"}], chat_template=template)
    assert open_ids(tmp_path / "ids").tolist() == [0, 2, 0, 3, 0, 0, 1, 0]


def test_messages_without_a_template_are_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"the corpus has messages, expected a chat_template"):
        encode(tmp_path, [{"messages": CHAT}], [{"text": "a"}])
    assert not (tmp_path / "ids").exists()


def test_ids_past_the_embedding_name_the_document(tmp_path):
    encode(tmp_path, TRAIN, HELD_OUT)
    with pytest.raises(ValueError, match=r"t\.jsonl:2: id 4 \('d'\) at index 3: expected 0 to 3"):
        encode_corpus(tmp_path / "corpus", tmp_path / "tokenizer", tmp_path / "other", rows=4)


def test_progress_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("mamba_ops.progress.EVERY_SECONDS", 0)
    heard: list[Progress] = []
    (tmp_path / "t.jsonl").write_text("".join(f'{{"text": "a {i}"}}\n' for i in range(100)))
    made = build_corpus(CorpusConfig(paths=[str(tmp_path / "t.jsonl")]), tmp_path / "corpus", heard.append)
    build_tokenizer(TokenizerConfig(vocab_size=300), ["a"], tmp_path / "tokenizer")
    assert heard[-1].done == heard[-1].total == (tmp_path / "t.jsonl").stat().st_size
    heard.clear()
    encode_corpus(tmp_path / "corpus", tmp_path / "tokenizer", tmp_path / "ids", report=heard.append)
    assert [progress.done for progress in heard] == sorted(progress.done for progress in heard)
    assert heard[-1].done == heard[-1].total == sum(made.bytes.values())
    assert heard[-1].seconds_left == 0
    half = Progress("tokens", 10_000_000, 20_000_000, 2.0)
    assert (half.bytes_per_second, half.seconds_left) == (5e6, 2.0)
    assert describe(half) == "tokens: 10.0 of 20.0 MB, 5.0 MB/s, 2 s left"
    assert describe(Progress("corpus", 0, 0, 0.0)) == "corpus: 0.0 MB, 0.0 MB/s"
    assert describe(Progress("corpus", 5, 0, 1.0)) == "corpus: 0.0 MB, 0.0 MB/s"


def test_the_largest_id_is_found_block_by_block(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenized, "READ_AT_ONCE", 3)
    for ids in ([1, 9, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 0, 70_000], []):
        np.array(ids, np.uint32).tofile(tmp_path / "ids.bin")
        assert tokenized.largest_id(tmp_path) == max(ids, default=0)
