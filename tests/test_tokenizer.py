"""The tokenizer: trained or loaded, plain text in, ids out, and ids that fit the embedding."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from mamba_ops.config import TokenizerConfig
from mamba_ops.encoding import SLICE_CHARACTERS
from mamba_ops.tokenizer import (
    TokenizerManifest,
    build_tokenizer,
    check_ids,
    embedding_rows,
    encode_texts,
    end_of_text_id,
    end_of_text_token,
    load_tokenizer,
    special_tokens,
    tokenizer_fingerprint,
    train_tokenizer,
)

END = "<|endoftext|>"
WORDS = ["walk", "talk", "bark", "park", "lurk", "work", "jump", "lump", "bump", "dump"]
TEXTS = [f"the {word} went to the {word}s and {word}ed, 'tis said.\n\tx = {i}" for i, word in enumerate(3 * WORDS)]


@pytest.fixture(scope="module")
def bpe():
    return train_tokenizer(TEXTS, TokenizerConfig(vocab_size=300))


def encode(tokenizer, text):
    return next(encode_texts(tokenizer, [text]))


def words(*tokens):
    """A tokenizer of whole words, id by position."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def test_trained_bpe(bpe):
    assert embedding_rows(bpe) == bpe.get_vocab_size() == 300
    assert end_of_text_id(bpe, END) == 0
    assert special_tokens(bpe) == [END]
    assert sorted(bpe.get_vocab().values()) == list(range(300))
    alphabet = {bpe.id_to_token(i) for i in range(1, 257)}
    assert alphabet == set(pre_tokenizers.ByteLevel.alphabet())


def test_training_is_deterministic(monkeypatch, bpe):
    assert train_tokenizer(iter(TEXTS), TokenizerConfig(vocab_size=300)).to_str() == bpe.to_str()
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    assert train_tokenizer(TEXTS, TokenizerConfig(vocab_size=300)).to_str() == bpe.to_str()


def test_training_in_pieces_changes_nothing(bpe, monkeypatch):
    monkeypatch.setattr("mamba_ops.encoding.SLICE_CHARACTERS", 5)
    assert train_tokenizer(TEXTS, TokenizerConfig(vocab_size=300)).to_str() == bpe.to_str()


def test_few_texts_give_fewer_tokens():
    assert embedding_rows(train_tokenizer(["abc"], TokenizerConfig(vocab_size=300))) == 257
    with pytest.raises(ValueError, match="got 0 texts"):
        train_tokenizer([], TokenizerConfig())


@given(st.text())
@example("<|endoftext|>")
@example("\0\r\n\ufeff\u180e 🎉e\u0301")
@example(f"a {END}{END} b")
def test_any_text_comes_back(bpe, text):
    ids = encode(bpe, text)
    assert ids.dtype == np.uint32
    assert bpe.decode(ids.tolist(), skip_special_tokens=False) == text
    assert 0 not in ids


FRAGMENTS = ["the", " the", "walk", "s", "'tis", " ", "  ", "\n", "\n\t", "\u3000", "\u180e", "\x1c", ".", "é", "0"]


@given(st.lists(st.lists(st.sampled_from(FRAGMENTS)).map("".join), min_size=1, max_size=6), st.integers(1, 9))
def test_long_texts_are_cut_without_changing_an_id(bpe, texts, limit):
    whole = [bpe.encode(text, add_special_tokens=False).ids for text in texts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mamba_ops.encoding.SLICE_CHARACTERS", limit)
        patch.setattr("mamba_ops.encoding.BATCH_CHARACTERS", 3 * limit)
        assert [ids.tolist() for ids in encode_texts(bpe, texts)] == whole


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.add_tokens([AddedToken("foo bar")]),
        lambda t: t.add_tokens([AddedToken("foo", rstrip=True)]),
        lambda t: setattr(t, "normalizer", normalizers.Replace("foo bar", "qux")),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda t: setattr(t, "pre_tokenizer", pre_tokenizers.Metaspace(prepend_scheme="always")),
        lambda t: setattr(t, "normalizer", normalizers.NFC()),
        lambda t: t.add_tokens([AddedToken("  ", normalized=False)]),
    ],
)
def test_other_tokenizers_give_their_own_ids_for_long_texts(change):
    tokenizer = train_tokenizer(TEXTS, TokenizerConfig(vocab_size=300))
    change(tokenizer)
    long = "foo bar  the e\u0301\n" * (SLICE_CHARACTERS // 8)
    for text in (long, long.replace(" ", "\n")):
        assert encode(tokenizer, text).tolist() == tokenizer.encode(text, add_special_tokens=False).ids


def test_words_that_reach_across_spaces_are_not_cut():
    text = "the walk\n" * (SLICE_CHARACTERS // 4)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.train_from_iterator(["the walk\n" * 9], trainers.BpeTrainer(vocab_size=300, show_progress=False))
    assert encode(tokenizer, text).tolist() == tokenizer.encode(text).ids


def test_settings_of_a_stored_tokenizer_do_not_cut_pad_or_add(tmp_path):
    tokenizer = words("[UNK]", "a", "b", "[CLS]")
    tokenizer.add_special_tokens(["[CLS]"])
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 3)])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=7)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert [ids.tolist() for ids in encode_texts(loaded, ["a b a b a", "b"])] == [[1, 2, 1, 2, 1], [2]]
    for change in (tokenizer.no_truncation, tokenizer.no_padding):
        change()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    (tmp_path / "plain.json").write_text(json.dumps(json.loads(tokenizer.to_str())))
    assert tokenizer_fingerprint(tmp_path / "plain.json") == tokenizer_fingerprint(tmp_path)
    tokenizer.add_tokens(["c"])
    tokenizer.save(str(tmp_path / "other.json"))
    assert tokenizer_fingerprint(tmp_path / "other.json") != tokenizer_fingerprint(tmp_path)


def test_dropout_is_off(tmp_path, bpe):
    content = json.loads(bpe.to_str())
    content["model"]["dropout"] = 0.9
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    loaded = load_tokenizer(tmp_path)
    assert [ids.tolist() for ids in encode_texts(loaded, TEXTS)] == [ids.tolist() for ids in encode_texts(bpe, TEXTS)]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff\xfe", b'{"version": "1.0", "model": null}'])
def test_corrupt_files_are_named(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer\.json that tokenizers can read"):
        load_tokenizer(path)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json does not exist"):
        load_tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        load_tokenizer(tmp_path / "nowhere")


@pytest.mark.parametrize("declared", ["</s>", {"content": "</s>", "special": True}])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_end_of_text_declared_beside(tmp_path, name, declared):
    tokenizer = words("[UNK]", "a", "</s>")
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"no token '<\|endoftext\|>'.* is None; .*special tokens \['</s>'\]"):
        end_of_text_id(tokenizer, END, tmp_path)
    (tmp_path / name).write_text(json.dumps({"eos_token": declared}))
    assert end_of_text_id(tokenizer, END, tmp_path) == 2
    assert end_of_text_token(tokenizer, "a", tmp_path / "tokenizer.json") == "a"
    (tmp_path / name).write_text(json.dumps({"eos_token": "<eos>"}))
    with pytest.raises(ValueError, match="is '<eos>'"):
        end_of_text_id(tokenizer, END, tmp_path)
    (tmp_path / name).write_text("{")
    with pytest.raises(ValueError, match=rf"{name}: expected a JSON object"):
        end_of_text_id(tokenizer, END, tmp_path)


def test_build_trains(tmp_path):
    manifest = build_tokenizer(TokenizerConfig(vocab_size=300), TEXTS, tmp_path / "one")
    again = build_tokenizer(TokenizerConfig(vocab_size=300), TEXTS, tmp_path / "two")
    assert manifest == again
    assert manifest == TokenizerManifest(
        fingerprint=tokenizer_fingerprint(tmp_path / "one"),
        vocab_size=300,
        end_of_text=END,
        end_of_text_id=0,
        trained=True,
    )
    loaded = load_tokenizer(tmp_path / "one")
    assert loaded.decode(encode(loaded, "a  b ,").tolist()) == "a  b ,"
    with pytest.raises(FileExistsError, match="one exists"):
        build_tokenizer(TokenizerConfig(vocab_size=300), TEXTS, tmp_path / "one")


def test_build_copies(tmp_path):
    (tmp_path / "given").mkdir()
    tokenizer = words("[UNK]", "a", "</s>")
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "given" / "tokenizer.json"))
    config = TokenizerConfig(path=str(tmp_path / "given"), end_of_text="</s>")
    manifest = build_tokenizer(config, [], tmp_path / "bare")
    assert (manifest.vocab_size, manifest.end_of_text_id, manifest.trained) == (3, 2, False)
    assert json.loads((tmp_path / "bare" / "tokenizer_config.json").read_text())["eos_token"] == "</s>"
    (tmp_path / "given" / "tokenizer_config.json").write_text('{"eos_token": "</s>", "own": 1}')
    default = build_tokenizer(TokenizerConfig(path=str(tmp_path / "given")), [], tmp_path / "declared")
    assert default == manifest
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "declared" / name).read_bytes() == (tmp_path / "given" / name).read_bytes()


def test_case_43_ids_past_the_embedding():
    tokenizer = words("[UNK]", "a", "b", "c", "d", "e", "f", "g")
    tokenizer.add_tokens(["added"])
    assert (tokenizer.get_vocab_size(with_added_tokens=False), embedding_rows(tokenizer)) == (8, 9)
    check_ids(np.array([0, 7]), 8, tokenizer)
    check_ids(np.array([], np.uint32), 8)
    with pytest.raises(ValueError, match=r"id 8 \('added'\) at index 2: expected 0 to 7, .* 8 rows, .* 9 tokens"):
        check_ids(np.array([0, 7, 8], np.uint32), 8, tokenizer)
    with pytest.raises(ValueError, match=r"id 50277 \(no token\) at index 0"):
        check_ids(np.array([50277]), 8, tokenizer)
    with pytest.raises(ValueError, match="id -1 at index 1: expected 0 to 7"):
        check_ids(np.array([0, -1]), 8)


def test_case_43_gaps_between_ids_count():
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 40}, unk_token="[UNK]"))
    assert tokenizer.get_vocab_size(with_added_tokens=True) == 2
    assert embedding_rows(tokenizer) == 41


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_children_encode_without_a_warning():
    code = """
import os
from mamba_ops.config import TokenizerConfig
from mamba_ops.tokenizer import encode_texts, train_tokenizer
texts = [f"the {i} word" for i in range(200)]
tokenizer = train_tokenizer(texts, TokenizerConfig(vocab_size=260))
expected = [ids.tolist() for ids in encode_texts(tokenizer, texts)]
for depth in range(2):
    child = os.fork()
    if child:
        assert "TOKENIZERS_PARALLELISM" not in os.environ or depth
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
os._exit([ids.tolist() for ids in encode_texts(tokenizer, texts)] != expected)
"""
    environment = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parity
def test_transformers_gives_the_same_ids(tmp_path):
    transformers = pytest.importorskip("transformers")
    build_tokenizer(TokenizerConfig(vocab_size=300), TEXTS, tmp_path / "built")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "built")
    ours = load_tokenizer(tmp_path / "built")
    assert theirs.eos_token_id == 0
    for text in (*TEXTS, " leading  spaces, don 't .", "🎉é\r\n"):
        assert theirs(text)["input_ids"] == encode(ours, text).tolist()
        assert theirs.decode(theirs(text)["input_ids"]) == text


@pytest.mark.parametrize("end", ["a", "the"])
def test_an_end_of_text_that_a_text_can_become_is_refused(tmp_path, end):
    config = TokenizerConfig(vocab_size=300, end_of_text=end)
    with pytest.raises(ValueError, match=f"end_of_text: '{end}' is also what a text becomes"):
        build_tokenizer(config, ["the cat and the banana " * 20], tmp_path / "words")


def test_a_word_without_end_is_no_reason_to_train_for_hours():
    tokenizer = train_tokenizer(["x" * 2_000_000, "a b"], TokenizerConfig(vocab_size=300))
    assert tokenizer.decode(tokenizer.encode("xxx a").ids) == "xxx a"


def test_a_tokenizer_whose_unknown_word_ends_the_text_is_refused(tmp_path):
    words = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "a": 1}, unk_token="<|endoftext|>"))
    words.add_special_tokens(["<|endoftext|>"])
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="stands for unknown words"):
        build_tokenizer(TokenizerConfig(path=str(tmp_path)), [], tmp_path / "built")
