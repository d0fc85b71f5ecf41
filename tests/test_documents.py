"""Every kind of file gives the same documents; what is damaged or has another form is named."""

import gzip
import itertools
import json

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mamba_ops import documents
from mamba_ops.config import CorpusConfig, TokenizerConfig
from mamba_ops.corpus import build_corpus, read_texts
from mamba_ops.corpus_tables import training_texts
from mamba_ops.tokenized import encode_corpus
from mamba_ops.tokenizer import build_tokenizer

CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hello, who?"},
    {"role": "assistant", "content": "A model."},
]
TEXTS = [f"the document number {i}, with some words.\nAnd é a second line {i * i}.\n" for i in range(300)]
TEXTS[7] = "a long one\n" * 200_000
RECORDS = {
    "text": [{"text": text} for text in TEXTS],
    "prompt": [{"prompt": f"How much is {i} + 1?", "completion": f" {i + 1}"} for i in range(300)],
    "chat": [{"messages": [*CHAT[:1], {"role": "user", "content": f"{i}?"}, CHAT[2]]} for i in range(300)],
}
KINDS = ("jsonl", "jsonl.gz", "jsonl.zst", "parquet")


def compress(data, kind):
    if kind == "gz":
        return gzip.compress(data[:100]) + gzip.compress(data[100:])  # two members
    codec = pa.Codec("zstd")
    return codec.compress(data[:100], asbytes=True) + codec.compress(data[100:], asbytes=True)  # two frames


def write(path, records):
    """Write records as the kind of file that the path's name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(records), path, row_group_size=max(1, len(records) // 3))
        return path
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(data if path.suffix == ".jsonl" else compress(data, path.suffix[1:]))
    return path


def build(folder, *paths, name="corpus", **options):
    options.setdefault("validation_fraction", 0.2)
    return build_corpus(CorpusConfig(paths=[str(path) for path in paths], **options), folder / name)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The texts as files of their own, a tokenizer trained on them, their ids."""
    root = tmp_path_factory.mktemp("plain")
    (root / "files").mkdir()
    for number, text in enumerate(TEXTS):
        (root / "files" / f"{number:03}.txt").write_text(text)
    build(root, root / "files")
    build_tokenizer(TokenizerConfig(vocab_size=400), training_texts(root / "corpus"), root / "tokenizer")
    encode_corpus(root / "corpus", root / "tokenizer", root / "ids")
    return root


@pytest.mark.parametrize("kind", [*KINDS, "txt.gz", "txt.zst"])
def test_the_same_documents_give_the_same_ids(plain, tmp_path, kind):
    if kind.startswith("txt"):
        (tmp_path / "files").mkdir()
        for number, text in enumerate(TEXTS):
            (tmp_path / "files" / f"{number:03}.{kind}").write_bytes(compress(text.encode(), kind[4:]))
        made = build(tmp_path, tmp_path / "files")
    else:
        made = build(tmp_path, write(tmp_path / f"all.{kind}", RECORDS["text"]))
    assert made.fingerprint == build(plain, plain / "files", name=f"again-{kind}").fingerprint
    encode_corpus(tmp_path / "corpus", plain / "tokenizer", tmp_path / "ids")
    assert (tmp_path / "ids" / "ids.bin").read_bytes() == (plain / "ids" / "ids.bin").read_bytes()


@pytest.mark.parametrize("form", ["prompt", "chat"])
def test_the_same_instructions_give_the_same_documents(tmp_path, form):
    made = {kind: build(tmp_path, write(tmp_path / f"a.{kind}", RECORDS[form]), name=kind) for kind in KINDS}
    assert len({manifest.fingerprint for manifest in made.values()}) == 1
    first = made["jsonl"]
    assert first.masked == sum(first.documents.values()) == 300
    tables = [pd.read_parquet(tmp_path / kind / "texts.parquet") for kind in KINDS]
    assert all(table.equals(tables[0]) for table in tables)


def test_a_folder_may_hold_every_kind(tmp_path):
    for form, records in RECORDS.items():
        for number, kind in enumerate(KINDS):
            write(tmp_path / "all" / f"{form}.{kind}", records[number * 10 : number * 10 + 10])
    write(tmp_path / "all" / "again.jsonl", RECORDS["text"][:5])
    made = build(tmp_path, tmp_path / "all")
    assert (sum(made.documents.values()), made.masked, made.repeats) == (120, 80, 5)


def test_no_two_forms_of_a_document_are_the_same(tmp_path):
    records = [{"text": "ab"}, {"prompt": "a", "completion": "b"}, {"prompt": "ab", "completion": ""}]
    made = build(
        tmp_path, write(tmp_path / "a.jsonl", records), validation_paths=[str(write(tmp_path / "v.jsonl", CASES))]
    )
    assert (made.documents["train"], made.repeats, made.empty) == (3, 0, 0)


CASES = [{"prompt": "", "completion": "ab"}, {"text": "validation"}]


def test_instructions_without_any_text_are_empty(tmp_path):
    records = [{"prompt": " ", "completion": "\n"}, {"prompt": "a", "completion": "b"}]
    made = build(
        tmp_path, write(tmp_path / "a.jsonl", records), validation_paths=[str(write(tmp_path / "v.jsonl", CASES))]
    )
    assert made.empty == 1


def test_repairs_reach_every_string(tmp_path):
    message = {"role": "assistant", "content": "c\r\nd \ud800", "name": None}
    records = [{"prompt": "\ufeffa\r\nb", "completion": "c"}, {"messages": [message]}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    made = build(tmp_path, path, validation_paths=[str(write(tmp_path / "v.jsonl", CASES))])
    assert (made.crlf, made.byte_order_marks, made.undecodable) == (2, 1, 1)
    assert list(read_texts(tmp_path / "corpus", "train")) == [
        "a\nbc",
        '[{"content": "c\\nd \ufffd", "role": "assistant"}]',
    ]


@pytest.mark.parametrize(
    ("record", "options", "found"),
    [
        (
            {"body": "a"},
            {},
            r"an object with one of strings under 'prompt' and 'completion', .* got the keys \['body'\]",
        ),
        ({"prompt": "a"}, {}, r"got the keys \['prompt'\]"),
        ({"prompt": "a", "completion": 3}, {}, "got a int there"),
        ({"prompt": None, "completion": "b"}, {}, "got a NoneType there"),
        ({"text": "a", "messages": CHAT}, {}, "got the keys of text and chat; set form to one of them"),
        ({"text": "a"}, {"form": "chat"}, r"an object with a list under 'messages', got the keys \['text'\]"),
        ({"text": "a"}, {"form": "prompt"}, r"an object with strings under 'prompt' and 'completion', got the"),
        ({"prompt": "a", "completion": "b"}, {"form": "text"}, r"an object with a string under 'text', got the keys"),
        ({"messages": []}, {}, "got an empty list there"),
        ({"messages": "Hello"}, {}, "got a str there"),
        ({"messages": ["Hello"]}, {}, "got a message without a role: Hello"),
        ({"messages": [{"content": "Hello"}]}, {}, r"got a message without a role: \{"),
        ({"messages": CHAT[:2]}, {}, r"got messages of \['system', 'user'\] and none of the assistant"),
    ],
)
def test_records_of_another_form_are_named(tmp_path, record, options, found):
    path = write(tmp_path / "a.jsonl", [record])
    with pytest.raises(ValueError, match=rf"a\.jsonl, line 1: expected (.*, )?{found}"):
        build(tmp_path, path, **options)


@pytest.mark.parametrize(
    ("record", "found"),
    [
        ({"prompt": "a"}, r"the keys \['prompt'\]"),
        ({"prompt": "a", "completion": None}, "a NoneType there"),
        ({"text": "a", "messages": CHAT}, "the keys of text and chat; set form to one of them"),
        ({"messages": CHAT[:2]}, r"messages of \['system', 'user'\] and none of the assistant"),
    ],
)
def test_rows_of_another_form_are_named(tmp_path, record, found):
    fine = {"prompt": "a", "completion": "b"} if "prompt" in record and len(record) > 1 else None
    path = write(tmp_path / "a.parquet", [*filter(None, [fine]), record])
    with pytest.raises(ValueError, match=rf"a\.parquet, row {2 if fine else 1}: expected .*, got {found}"):
        build(tmp_path, path)


def test_a_configured_form_settles_what_is_meant(tmp_path):
    records = [{"text": f"text {i}", **RECORDS["prompt"][i], **RECORDS["chat"][i]} for i in range(20)]
    path = write(tmp_path / "a.jsonl", records)
    for form in RECORDS:
        made = build(tmp_path, path, name=form, form=form)
        assert made.masked == (0 if form == "text" else 20)


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        *itertools.product(["jsonl.gz", "jsonl.zst", "txt.gz", "txt.zst"], ["truncated", "other bytes"]),
        ("jsonl.gz", "changed bytes"),  # pyarrow writes zstd without checksums
        ("txt.gz", "changed bytes"),
    ],
)
def test_damaged_compression_is_named(tmp_path, kind, damage):
    whole = compress(("".join(json.dumps(record) + "\n" for record in RECORDS["prompt"])).encode(), kind.split(".")[1])
    middle = len(whole) // 2
    data = {
        "truncated": whole[:-9],
        "other bytes": b"plain text",
        "changed bytes": whole[:middle] + bytes([whole[middle] ^ 255]) * 40 + whole[middle + 40 :],
    }[damage]
    path = tmp_path / f"a.{kind}"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"a\.{kind}.*: expected (gzip|zstd) data that can be read, got "):
        build(tmp_path, path)


@pytest.mark.parametrize("damage", ["truncated", "other bytes", "changed bytes", "empty"])
def test_damaged_parquet_is_named(tmp_path, damage):
    path = write(tmp_path / "a.parquet", RECORDS["prompt"])
    whole = path.read_bytes()
    path.write_bytes(
        {
            "truncated": whole[:-9],
            "other bytes": b"plain text, no parquet",
            "changed bytes": whole[:4] + b"\xff" * 200 + whole[204:],
            "empty": b"",
        }[damage]
    )
    with pytest.raises(ValueError, match=r"a\.parquet: expected parquet data that can be read, got "):
        build(tmp_path, path)


def test_a_missing_parquet_column_is_named(tmp_path):
    path = write(tmp_path / "a.parquet", [{"body": "a", "n": 1}])
    with pytest.raises(
        ValueError, match=r"a\.parquet: expected .* string under 'text', got the columns \['body', 'n'\]"
    ):
        build(tmp_path, path)
    other = write(tmp_path / "b.parquet", [{"body": text["text"], "text": 3} for text in RECORDS["text"][:20]])
    with pytest.raises(ValueError, match=r"b\.parquet, row 1: expected .*, got a int there"):
        build(tmp_path, other)
    assert sum(build(tmp_path, other, text_column="body").documents.values()) == 20


def test_compressed_parquet_is_refused(tmp_path):
    path = tmp_path / "a.parquet.gz"
    path.write_bytes(gzip.compress(b"x"))
    with pytest.raises(ValueError, match=r"a\.parquet\.gz: expected a parquet file, which has its own compression"):
        build(tmp_path, path)


PIECES = st.sampled_from(
    [b"\xef\xbb\xbf", b"\r", b"\n", b"\r\n", b"\xff", b"\xc3\xa9", b"\xf0\x9f", b"\x8e\x89", b"ab"]
)


@given(st.lists(PIECES, max_size=12).map(b"".join), st.integers(1, 5), st.integers(1, 5))
def test_a_text_read_block_by_block_is_as_read_whole(tmp_path_factory, data, block, part):
    path = tmp_path_factory.mktemp("blocks") / "a.txt"
    path.write_bytes(data)
    whole: set = set()
    expected = documents._decoded(data, whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "BLOCK", block)
        patch.setattr(documents, "PART_CHARACTERS", part)
        with open(path, "rb") as stream:
            repairs: set = set()
            pieces = list(documents.resized(documents._decode(stream, repairs), part))
    assert "".join(pieces) == expected
    assert repairs == whole
    assert all(len(piece) == part for piece in pieces[:-1])


def test_long_documents_lie_in_parts_and_repeats_of_them_leave_nothing(tmp_path, monkeypatch):
    for name in ("documents.BLOCK", "documents.PART_CHARACTERS", "corpus_tables.ROW_GROUP_CHARACTERS"):
        monkeypatch.setattr(f"mamba_ops.{name}", 1000)
    long = "".join(f"line {i}\n" for i in range(3000))
    texts = {"a": long, "b": "short", "c": long, "d": " \n" * 3000, "e": "another", "f": long + "x"}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
    held_out = write(tmp_path / "v.jsonl", [{"text": long}, {"text": "held out"}])
    made = build(tmp_path, tmp_path / "*.txt", validation_paths=[str(held_out)])
    assert (made.repeats, made.overlaps, made.empty) == (2, 2, 1)
    assert list(read_texts(tmp_path / "corpus", "validation")) == [long, "held out"]
    assert list(read_texts(tmp_path / "corpus", "train")) == ["short", "another", long + "x"]
    rows = pd.read_parquet(tmp_path / "corpus" / "texts.parquet")
    assert rows["text"].str.len().max() == 1000
    table = pd.read_parquet(tmp_path / "corpus" / "documents.parquet")
    assert table["document"].is_monotonic_increasing
    assert table["bytes"].sum() == sum(made.bytes.values())


def test_a_tokenizer_trains_on_the_lowest_hashes_when_there_is_too_much(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS if len(text) < 1000])
    build(tmp_path, path)
    every = list(training_texts(tmp_path / "corpus"))
    assert every == list(read_texts(tmp_path / "corpus", "train"))
    size = sum(len(text.encode()) for text in every)
    assert list(training_texts(tmp_path / "corpus", size)) == every
    some = list(training_texts(tmp_path / "corpus", size // 3))
    assert size // 3 - 100 < sum(len(text.encode()) for text in some) <= size // 3
    other = write(tmp_path / "b.jsonl", [{"text": text} for text in reversed(TEXTS) if len(text) < 1000])
    build(tmp_path, other, name="other")
    assert sorted(training_texts(tmp_path / "other", size // 3)) == sorted(some)


def test_a_tokenizer_trains_on_what_a_chat_says(tmp_path):
    build(tmp_path, write(tmp_path / "a.jsonl", RECORDS["chat"]))
    assert set(training_texts(tmp_path / "corpus")) < {"Be short.", "A model.", *(f"{i}?" for i in range(300))}
