"""Files of a corpus at addresses: found, read, and noticed when they change; S3 by a server on this machine."""

import functools
import io
import itertools
import os
import runpy
import socket
import threading
import zipfile
from datetime import UTC, datetime
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pandas as pd
import pytest

from mamba_ops import corpus, storage
from mamba_ops.config import CorpusConfig
from mamba_ops.corpus import build_corpus
from mamba_ops.storage import ChangedError, check_unchanged, find

TREE = {
    "b.txt": "bee",
    "a/z.md": "zed",
    "a/b/c.jsonl": '{"text": "sea"}\n',
    "a.txt.gz": "",
    "a.parquet.gz": "",
    "code.py": "",
    ".hidden/x.txt": "",
    ".x.txt": "",
    "a/.y.txt": "",
    "[draft].txt": "draft",
}
KEPT = ["[draft].txt", "a/b/c.jsonl", "a/z.md", "a.txt.gz", "b.txt"]


@pytest.fixture(scope="session")
def s3_server():
    """An S3 server on the loopback interface."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(s3_server, monkeypatch):
    """A new bucket's address; the environment says where the server is, and nothing else can be reached."""
    connect = socket.socket.connect

    def only_loopback(self, address):
        assert self.family != socket.AF_INET or address[0].startswith("127."), address
        assert self.family != socket.AF_INET6 or address[0] == "::1", address
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", only_loopback, raising=False)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL": s3_server,
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }.items():
        monkeypatch.setenv(name, value)
    bucket = f"bucket-{datetime.now(UTC):%H%M%S%f}"
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(bucket)
    fsspec.filesystem("s3").invalidate_cache()
    return f"s3://{bucket}"


@pytest.fixture
def memory():
    """An empty folder in memory."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    return "memory://texts"


@pytest.fixture(params=["memory", "s3", "file"])
def root(request, tmp_path):
    return f"file://{tmp_path}/files" if request.param == "file" else request.getfixturevalue(request.param)


@pytest.fixture
def held_out(tmp_path):
    """A file of this machine for validation."""
    (tmp_path / "held-out.txt").write_text("held out")
    return str(tmp_path / "held-out.txt")


def put(root, files):
    """Write files: text, or bytes, by name below the root."""
    system, path = fsspec.core.url_to_fs(root)
    for name, content in files.items():
        if root.startswith("file"):
            os.makedirs(os.path.dirname(f"{path}/{name}"), exist_ok=True)
        system.pipe_file(f"{path}/{name}", content.encode() if isinstance(content, str) else content)


def names(entry, root):
    files, ignored = find(entry, {})
    place = fsspec.core.url_to_fs(root)[1]
    return [os.path.relpath(file.path, place) for file in files], ignored


def test_folders_and_globs_are_found_as_on_this_machine(root):
    put(root, TREE)
    assert names(root, root) == (KEPT, 2)
    assert names(f"{root}/a/", root) == (["a/b/c.jsonl", "a/z.md"], 0)
    assert names(f"{root}/*.txt", root) == (["[draft].txt", "b.txt"], 0)
    assert names(f"{root}/**/*.jsonl", root) == (["a/b/c.jsonl"], 0)
    assert names(f"{root}/*.py", root) == (["code.py"], 0)
    assert names(f"{root}/?", root) == (["a/b/c.jsonl", "a/z.md"], 0)
    assert names(f"{root}/.h*/*.txt", root) == ([".hidden/x.txt"], 0)
    assert names(f"{root}/[draft].txt", root) == (["[draft].txt"], 0)


def test_what_is_not_there_is_named(root):
    put(root, {"only.py": "", "folder/b.py": ""})
    with pytest.raises(FileNotFoundError, match=r"corpus (address|path) .*nothing\.txt' does not exist"):
        find(f"{root}/nothing.txt", {})
    with pytest.raises(FileNotFoundError, match=r"corpus glob .*\*\.txt' matches no file"):
        find(f"{root}/*.txt", {})
    with pytest.raises(ValueError, match=r"corpus folder .*folder': 0 files ending in \.txt.* \(1 others\)"):
        find(f"{root}/folder", {})


def test_a_corpus_is_the_same_wherever_it_lies(root, tmp_path):
    texts = {f"{number:02}.txt": f"text {number}\r\n" for number in range(40)}
    put(root, texts | {"big.txt": "line\n" * 50_000})
    made = build_corpus(CorpusConfig(paths=[root], validation_fraction=0.5), tmp_path / "corpus")
    sources = pd.read_parquet(tmp_path / "corpus" / "documents.parquet")["source"]
    assert set(sources) == {file.name for file in find(root, {})[0]}
    local = tmp_path / "here"
    put(f"file://{local}", texts | {"big.txt": "line\n" * 50_000})
    assert build_corpus(CorpusConfig(paths=[str(local)], validation_fraction=0.5), tmp_path / "local") == made


def test_large_remote_files_are_read_in_blocks(s3, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "FETCHED_WHOLE", 1000)
    text = "".join(f"line {number}\n" for number in range(20_000))
    put(s3, {"big.txt": text, "small.txt": "small", "lines.jsonl": '{"text": "one"}\n{"text": "two"}\n' + " \n" * 2000})
    parts = [{"text": [f"row {i} of {name}" for i in range(5000)]} for name in "ab"]
    for name, part in zip("ab", parts, strict=True):
        pd.DataFrame(part).to_parquet(tmp_path / name)
        put(s3, {f"{name}.parquet": (tmp_path / name).read_bytes()})
    made = build_corpus(CorpusConfig(paths=[s3], validation_fraction=0.5), tmp_path / "corpus")
    assert sum(made.documents.values()) == 10_004
    assert text in list(corpus.read_texts(tmp_path / "corpus", "train")) + list(
        corpus.read_texts(tmp_path / "corpus", "validation")
    )


@pytest.mark.large
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the peak is read from /proc")
def test_many_remote_files_take_the_memory_of_few(s3, tmp_path):
    run = runpy.run_path(str(Path(__file__).with_name("encoding_run.py")))
    texts, peaks = run["documents"](90), []
    for files, folder in ((30, "few"), (90, "many")):
        for number in range(files):
            table = pd.DataFrame({"text": list(itertools.islice(texts, 100))})
            table.to_parquet(buffer := io.BytesIO())
            put(s3, {f"{folder}/{number:03}.parquet": buffer.getvalue()})
        peaks.append(run["peak"](tmp_path / folder, f"{s3}/{folder}", True))
    assert peaks[1] - peaks[0] < 25 * run["MB"]


def test_storage_options_are_passed_on(s3, s3_server, tmp_path, monkeypatch):
    put(s3, {"a.txt": "a", "b.txt": "b"})
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    config = {"paths": [f"{s3}/a.txt"], "validation_paths": [f"{s3}/b.txt"]}
    options = {"endpoint_url": s3_server, "key": "somebody", "secret": "something"}
    build_corpus(CorpusConfig(**config, storage_options=options), tmp_path / "corpus")
    with pytest.raises(ValueError, match=r"corpus address 's3://.*': .*endpoint_ur"):
        build_corpus(CorpusConfig(**config, storage_options={"endpoint_ur": s3_server}), tmp_path / "other")


def test_a_path_with_colons_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes::draft.txt").write_text("notes")
    assert [file.path for file in find("notes::draft.txt", {})[0]] == ["notes::draft.txt"]


def test_addresses_that_nothing_knows_are_named(tmp_path):
    with pytest.raises(ValueError, match="corpus address 'nowhere://x': Protocol not known: nowhere"):
        find("nowhere://x", {})


def test_a_server_that_does_not_answer_is_named(s3, monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    options = {"endpoint_url": f"http://127.0.0.1:{port}", "config_kwargs": {"retries": {"max_attempts": 0}}}
    with pytest.raises(OSError, match=rf"corpus address '{s3}': expected an address that can be read, got .*{port}"):
        find(s3, options)


@pytest.mark.parametrize("change", ["longer", "same length", "removed"])
def test_a_file_that_changes_while_it_is_read_is_named(root, tmp_path, monkeypatch, change):
    put(root, {"a.txt": "first", "b.txt": "second"})
    system, path = fsspec.core.url_to_fs(root)
    write = corpus._write

    def writing(document, texts):
        if document.source.endswith("a.txt"):
            if change == "removed":
                system.rm(f"{path}/a.txt")
            else:
                put(root, {"a.txt": "fi" if change == "longer" else "other"})
        return write(document, texts)

    monkeypatch.setattr(corpus, "_write", writing)
    found = "no such file" if change == "removed" else r"\d bytes"
    with pytest.raises(ChangedError, match=rf"a\.txt changed while .*: expected 5 bytes.*, got {found}"):
        build_corpus(CorpusConfig(paths=[root], validation_fraction=0.5), tmp_path / "corpus")
    assert not (tmp_path / "corpus").exists()


def test_a_file_that_is_written_again_with_the_same_content_on_s3_has_not_changed(s3):
    put(s3, {"a.txt": "first"})
    files, _ = find(s3, {})
    put(s3, {"a.txt": "first", "b.txt": "new"})
    check_unchanged([s3], {}, files)


@pytest.mark.parametrize("size", ["small", "large"])
def test_a_file_that_changes_between_listing_and_reading_is_named(s3, tmp_path, monkeypatch, size):
    if size == "large":
        monkeypatch.setattr(storage, "FETCHED_WHOLE", 2)
    put(s3, {"a.txt": "first", "b.txt": "second"})
    found = corpus._files

    def changing(*arguments):
        files = found(*arguments)
        if files:
            put(s3, {"a.txt": "another"})
        return files

    monkeypatch.setattr(corpus, "_files", changing)
    with pytest.raises(ChangedError, match=r"a\.txt changed while the corpus was read: expected 5 bytes"):
        build_corpus(CorpusConfig(paths=[s3], validation_fraction=0.5), tmp_path / "corpus")


def test_a_large_remote_file_that_changes_between_two_blocks_is_named(s3, tmp_path, monkeypatch):
    for name in ("FETCHED_WHOLE", "REMOTE_BLOCK", "BLOCK"):
        monkeypatch.setattr(storage, name, 1000)
    monkeypatch.setattr("mamba_ops.documents.BLOCK", 1000)
    put(s3, {"a.txt": "line\n" * 2000})
    resized = corpus.read_documents.__globals__["resized"]

    def changing(texts, size):
        for number, piece in enumerate(resized(texts, 500)):
            if number == 1:
                put(s3, {"a.txt": "next\n" * 2000})
            yield piece

    monkeypatch.setattr("mamba_ops.documents.resized", changing)
    with pytest.raises(ChangedError, match=r"a\.txt changed while .*: expected 10000 bytes .*, got another version"):
        build_corpus(CorpusConfig(paths=[s3], validation_fraction=0.5), tmp_path / "corpus")


def test_a_web_server_s_files_are_read(tmp_path, held_out):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    handler = functools.partial(SimpleHTTPRequestHandler, directory=tmp_path / "site")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/a.jsonl"
        (file,), _ = find(address, {})
        assert (file.name, file.size) == (address, 32)
        made = build_corpus(CorpusConfig(paths=[address], validation_paths=[held_out]), tmp_path / "corpus")
        server.shutdown()
    assert made.documents == {"train": 2, "validation": 1}
    sources = pd.read_parquet(tmp_path / "corpus" / "documents.parquet")["source"]
    assert list(sources) == [held_out, f"{address}:1", f"{address}:2"]


def test_files_in_an_archive_are_read(tmp_path, held_out):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("one.txt", "one")
        archive.writestr("b/two.md", "two")
        archive.writestr("b/code.py", "three")
    files, ignored = find(f"zip://::file://{tmp_path}/a.zip", {})
    assert ([file.path for file in files], ignored) == (["b/two.md", "one.txt"], 1)
    config = CorpusConfig(paths=[f"zip://::file://{tmp_path}/a.zip"], validation_paths=[held_out])
    assert build_corpus(config, tmp_path / "corpus").documents == {"train": 2, "validation": 1}
