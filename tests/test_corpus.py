"""Documents: found, read, repaired, deduplicated, split, fingerprinted."""

import hashlib
import json
import os

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_ops.config import CorpusConfig
from mamba_ops.corpus import (
    CorpusManifest,
    build_corpus,
    default_documents,
    in_validation,
    read_manifest,
    read_texts,
)
from mamba_ops.files import find_files


def side(text, fraction=0.5):
    return "validation" if in_validation(hashlib.sha256(text.encode()).digest(), fraction) else "train"


TRAIN = [text for text in map("text number {}".format, range(60)) if side(text) == "train"]
HELD_OUT = [text for text in map("text number {}".format, range(60)) if side(text) == "validation"]


def build(tmp_path, paths, name="corpus", **options):
    options.setdefault("validation_fraction", 0.5)
    config = CorpusConfig(paths=[str(path) for path in paths], **options)
    manifest = build_corpus(config, tmp_path / name)
    return manifest, read_tables(tmp_path / name)


def read_tables(folder):
    """Return the table of documents, with the text of each."""
    documents, texts = (pd.read_parquet(folder / f"{name}.parquet") for name in ("documents", "texts"))
    return documents.assign(text=documents["document"].map(texts.groupby("document")["text"].agg("".join)))


@pytest.fixture
def folder(tmp_path):
    """A folder with two documents for training and one for validation."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in (("b.txt", TRAIN[0]), ("a.md", HELD_OUT[0]), ("c.txt", TRAIN[1])):
        (folder / name).write_text(text)
    return folder


def lines(path, *values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def test_default_corpus(tmp_path):
    manifest = build_corpus(CorpusConfig(), tmp_path / "one")
    again = build_corpus(CorpusConfig(), tmp_path / "two")
    table = pd.read_parquet(tmp_path / "one" / "documents.parquet")
    assert manifest == again == read_manifest(CorpusManifest, tmp_path / "one")
    for name in ("documents.parquet", "texts.parquet"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert table["source"].str.match(r"pydoc_data\.topics:|stdlib:[a-z]\w*\.py$").all()
    assert 3e6 < manifest.bytes["train"] + manifest.bytes["validation"] < 6e6
    assert 0.05 < manifest.bytes["validation"] / manifest.bytes["train"] < 0.25
    assert manifest.ignored == manifest.empty == manifest.undecodable == 0


def test_default_corpus_in_its_two_parts(tmp_path):
    def ids(chosen):
        manifest = build_corpus(CorpusConfig(default=chosen), tmp_path / chosen)
        table = pd.read_parquet(tmp_path / chosen / "documents.parquet")
        return manifest, dict(zip(table["id"], zip(table["source"], table["split"], strict=True), strict=True))

    found = {chosen: ids(chosen) for chosen in ("all", "documentation", "sources")}
    assert len({manifest.fingerprint for manifest, _ in found.values()}) == 3
    parts = {chosen: documents for chosen, (_, documents) in found.items()}
    assert parts["documentation"] | parts["sources"] == parts["all"]
    assert not parts["documentation"].keys() & parts["sources"].keys()
    for chosen, pattern in ("documentation", "pydoc_data.topics:"), ("sources", "stdlib:"):
        assert all(source.startswith(pattern) for source, _ in parts[chosen].values())
        assert {split for _, split in parts[chosen].values()} == {"train", "validation"}
        assert sum(found[chosen][0].bytes.values()) > 3e5


def test_a_part_of_the_default_corpus_together_with_paths():
    with pytest.raises(ValueError, match=r"default: expected all, as paths are given, got 'sources' with \['texts'\]"):
        CorpusConfig(paths=["texts"], default="sources")


def test_default_corpus_without_topics(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pydoc_data.topics", None)
    with pytest.raises(FileNotFoundError, match=r"pydoc_data\.topics.*give corpus paths"):
        next(default_documents())
    assert next(default_documents("sources")).source == "stdlib:abc.py"


def test_table_and_manifest(tmp_path, folder):
    manifest, table = build(tmp_path, [folder])
    assert list(table.columns) == ["document", "id", "source", "split", "bytes", "text"]
    assert list(table["text"]) == [HELD_OUT[0], TRAIN[0], TRAIN[1]]
    assert list(table["split"]) == ["validation", "train", "train"]
    assert list(table["id"]) == [hashlib.sha256(text.encode()).hexdigest() for text in table["text"]]
    assert [source.rsplit("/", 1)[1] for source in table["source"]] == ["a.md", "b.txt", "c.txt"]
    assert manifest.documents == {"train": 2, "validation": 1}
    assert sum(manifest.bytes.values()) == table["bytes"].sum()
    assert list(read_texts(tmp_path / "corpus", "train")) == TRAIN[:2]


def test_fingerprint_is_of_content_and_split(tmp_path, folder):
    first, _ = build(tmp_path, [folder], "one")
    moved = folder.rename(tmp_path / "elsewhere")
    os.utime(moved / "b.txt", (0, 0))
    same, _ = build(tmp_path, [moved / "*"], "two")
    assert same.fingerprint == first.fingerprint
    (moved / "b.txt").write_text(TRAIN[5])
    changed, _ = build(tmp_path, [moved], "three")
    assert changed.fingerprint != first.fingerprint
    train, held_out = lines(tmp_path / "t.jsonl", {"text": "a"}), lines(tmp_path / "v.jsonl", {"text": "b"})
    one, _ = build(tmp_path, [train], "four", validation_paths=[str(held_out)])
    other, _ = build(tmp_path, [held_out], "five", validation_paths=[str(train)])
    assert one.fingerprint != other.fingerprint


def test_split_is_stable_when_documents_are_added(tmp_path, folder):
    _, before = build(tmp_path, [folder], "one")
    for number, text in enumerate(TRAIN[2:] + HELD_OUT[1:]):
        (folder / f"added-{number}.txt").write_text(text)
    _, after = build(tmp_path, [folder], "two")
    kept = after.set_index("id")["split"].reindex(before["id"])
    assert list(kept) == list(before["split"])
    assert set(after["split"]) == {"train", "validation"}


@given(st.binary(min_size=32, max_size=32), st.floats(0, 1), st.floats(0, 1))
def test_validation_only_grows_with_its_fraction(digest, one, other):
    low, high = sorted((one, other))
    assert in_validation(digest, low) <= in_validation(digest, high)
    assert not in_validation(digest, 0)
    assert in_validation(digest, 1)


def test_repeats_are_counted_and_used_once(tmp_path):
    path = lines(tmp_path / "a.jsonl", *({"text": text} for text in TRAIN[:2] + HELD_OUT[:1] + TRAIN[:2]))
    manifest, table = build(tmp_path, [path, path])
    assert (manifest.repeats, manifest.overlaps) == (2, 0)
    assert table["id"].is_unique
    assert len(table) == 3


def test_repeats_are_found_after_repair(tmp_path):
    path = lines(tmp_path / "a.jsonl", *({"text": text} for text in ("a\r\nb", "\ufeffa\nb", "a\nb", "c")))
    manifest, _ = build(tmp_path, [path], validation_paths=[str(lines(tmp_path / "v.jsonl", {"text": "d"}))])
    assert manifest.repeats == 2
    assert manifest.documents["train"] == 2


def test_what_is_in_both_files_is_kept_for_validation(tmp_path):
    train = lines(tmp_path / "train.jsonl", {"text": "shared"}, {"text": "own"})
    held_out = lines(tmp_path / "validation.jsonl", {"text": "held out"}, {"text": "shared"})
    manifest, table = build(tmp_path, [train], validation_paths=[str(held_out)])
    assert (manifest.repeats, manifest.overlaps) == (1, 1)
    assert dict(zip(table["text"], table["split"], strict=True)) == {
        "held out": "validation",
        "shared": "validation",
        "own": "train",
    }


def test_repairs(tmp_path):
    texts = {
        "crlf.txt": b"one\r\ntwo\r\n",
        "mark.txt": b"\xef\xbb\xbfthree",
        "bytes.txt": b"f\xfcr\x80",
        "plain.txt": b"caf\xc3\xa9\r",
    }
    for name, data in texts.items():
        (tmp_path / name).write_bytes(data)
    surrogate = tmp_path / "s.jsonl"
    surrogate.write_bytes(b'\xef\xbb\xbf{"text": "lone \\ud800 pair \\ud83d\\ude00"}\r\n')
    paths = [*(tmp_path / name for name in texts), surrogate]
    manifest, table = build(tmp_path, paths, validation_paths=[str(lines(tmp_path / "v.jsonl", {"text": "v"}))])
    assert list(table["text"][1:]) == ["one\ntwo\n", "three", "f\ufffdr\ufffd", "café\r", "lone \ufffd pair 😀"]
    assert (manifest.undecodable, manifest.byte_order_marks, manifest.crlf) == (2, 2, 1)


@settings(deadline=None)  # each example writes files through to the disk
@given(st.binary(max_size=200))
def test_any_bytes_become_a_document_or_an_empty_one(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("bytes")
    (folder / "a.txt").write_bytes(data)
    (folder / "b.txt").write_text("a text that is surely not drawn")
    validation = [str(lines(folder / "v.jsonl", {"text": "validation"}))]
    manifest, table = build(folder, [folder / "a.txt", folder / "b.txt"], validation_paths=validation)
    assert len(table) + manifest.empty == 3
    assert not table["text"].str.contains("\r\n").any()


def test_max_documents_keeps_the_first(tmp_path):
    texts = [TRAIN[0], TRAIN[0], HELD_OUT[0], TRAIN[1]]
    _, table = build(tmp_path, [lines(tmp_path / "a.jsonl", *({"text": t} for t in texts))], max_documents=2)
    assert list(table["text"]) == [TRAIN[0], HELD_OUT[0]]


def test_text_column(tmp_path):
    path = lines(tmp_path / "a.JSONL", *({"body": text, "text": 3} for text in TRAIN[:2] + HELD_OUT[:1]))
    _, table = build(tmp_path, [path], text_column="body")
    assert len(table) == 3


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('["a"]', "got a list"),
        ("null", "got a NoneType"),
        ('{"body": "a"}', r"got the keys \['body'\]"),
        ('{"text": null}', "got a NoneType there"),
        ('{"text": 3}', "got a int there"),
        ('{"text": "a"', "got Expecting ',' delimiter"),
        ("[" * 100_000, "got "),
        ("1" * 5000, "got Exceeds the limit"),
    ],
)
def test_malformed_lines_are_named(tmp_path, line, found):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "fine"}}\n\n{line}\n')
    with pytest.raises(ValueError, match=rf"a\.jsonl, line 3: expected .* string under 'text', {found}"):
        build(tmp_path, [path])
    assert not (tmp_path / "corpus").exists()


def test_missing_paths_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"corpus path .*nowhere\.txt' does not exist"):
        build(tmp_path, [tmp_path / "nowhere.txt"])
    with pytest.raises(FileNotFoundError, match=r"corpus glob .*\*\.txt' matches no file"):
        build(tmp_path, [tmp_path / "*.txt"])
    with pytest.raises(FileNotFoundError, match="does not exist"):
        build(tmp_path, [lines(tmp_path / "a.jsonl", {"text": "a"})], validation_paths=[str(tmp_path / "v")])
    with pytest.raises(ValueError, match=r"corpus glob .*: .*\*\*"):
        build(tmp_path, [tmp_path / "**x"])
    with pytest.raises(ValueError, match="corpus path is ''"):
        build(tmp_path, [""])
    with pytest.raises(ValueError, match="device, pipe or socket"):
        build(tmp_path, ["/dev/null"])


@pytest.mark.parametrize("content", ["", " \n\t\u3000\n"])
def test_case_22_empty_files_are_an_error_that_names_them(tmp_path, content):
    path = tmp_path / "empty.txt"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"empty\.txt.*0 documents with text for train and 0 .*1 without text"):
        build(tmp_path, [path])
    (tmp_path / "texts").mkdir()
    with pytest.raises(ValueError, match=r"texts.*0 files ending in \.txt"):
        build(tmp_path, [tmp_path / "texts"])


def test_a_split_without_documents_is_an_error_that_says_what_to_do(tmp_path):
    path = lines(tmp_path / "a.jsonl", {"text": TRAIN[0]})
    with pytest.raises(ValueError, match=r"1 documents with text for train and 0 .*0\.5; give validation_paths"):
        build(tmp_path, [path])
    with pytest.raises(ValueError, match=r"0 documents with text for train and 1 .*give validation_paths"):
        build(tmp_path, [path], validation_fraction=0.999999)
    with pytest.raises(ValueError, match=r"with validation .*a\.jsonl.*0 documents .* train and 1 .*1 repeats"):
        build(tmp_path, [path], validation_paths=[str(path)])
    assert not (tmp_path / "corpus").exists()


def test_nothing_is_overwritten(tmp_path, folder):
    build(tmp_path, [folder])
    with pytest.raises(FileExistsError, match="corpus exists"):
        build(tmp_path, [folder])


def test_damaged_manifests_are_named(tmp_path, folder):
    build(tmp_path, [folder])
    path = tmp_path / "corpus" / "manifest.json"
    path.write_text(path.read_text()[:40])
    with pytest.raises(ValueError, match=r"manifest\.json: expected a CorpusManifest"):
        read_manifest(CorpusManifest, tmp_path / "corpus")


def names(entry, root):
    files, ignored = find_files(str(entry))
    return [path.relative_to(root).as_posix() for path in files], ignored


@pytest.fixture
def tree(tmp_path):
    """Files of several kinds, hidden ones, and links that loop."""
    root = tmp_path / "tree"
    for name in ("b.txt", "a/z.md", "a/b/c.jsonl", "a.txt", "code.py", ".hidden/x.txt", ".x.txt", "a/.y.txt"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    (root / "a" / "loop").symlink_to(root)
    (root / "a" / "b" / "loop").symlink_to(root)
    (root / "broken.txt").symlink_to(root / "nowhere")
    os.mkfifo(root / "pipe.txt")
    return root


def test_folders(tree):
    assert names(tree, tree) == (["a/b/c.jsonl", "a/z.md", "a.txt", "b.txt"], 5)


def test_globs(tree):
    assert names(tree / "*.txt", tree) == (["a.txt", "b.txt"], 0)
    assert names(tree / "**" / "*.py", tree) == (["code.py"], 0)
    assert names(tree / "*.py", tree) == (["code.py"], 0)
    assert names(tree / ".h*" / "*.txt", tree) == ([".hidden/x.txt"], 0)
    assert names(tree / "?", tree)[0] == ["a/b/c.jsonl", "a/z.md"]
    found = names(tree / "**", tree)[0]
    assert {"a/b/c.jsonl", "a/z.md", "a.txt", "b.txt", "code.py"} <= set(found)


def test_a_name_with_glob_characters_is_taken_literally_first(tmp_path):
    (tmp_path / "[draft].txt").write_text("a")
    assert find_files(str(tmp_path / "[draft].txt"))[0] == [tmp_path / "[draft].txt"]


def test_names_that_are_not_utf8(tmp_path):
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text(TRAIN[0])
    (tmp_path / "b.txt").write_text(HELD_OUT[0])
    _, table = build(tmp_path, [tmp_path])
    assert any(source.endswith("caf\ufffd.txt") for source in table["source"])
