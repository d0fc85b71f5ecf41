"""The files of a corpus wherever they lie: here, or at any address that fsspec knows.

A file's version is what its file system says of the content: a checksum (S3's ETag) where there is one, else
times (and, here, the inode), so that a file that is written while it is read is noticed. A system that tells
neither leaves the size.
"""

import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa
from fsspec import AbstractFileSystem
from fsspec.core import has_magic, url_to_fs
from fsspec.implementations.local import LocalFileSystem

from mamba_ops.files import find_files, is_corpus_name, kind, no_files, shown

BLOCK = 1 << 20
REMOTE_BLOCK = 1 << 23
FETCHED_WHOLE = 1 << 24
FETCHED_TOGETHER = 1 << 25
MOST_TOGETHER = 64
CHECKSUMS = ("etag", "md5hash", "contentmd5", "md5", "contenthash", "checksum", "digest", "sha", "crc")
TIMES = ("lastmodified", "mtime", "modified", "updated", "created", "datetime")
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::.*://)")
_LOCAL = ("file://", "local://")

Advance = Callable[[int], None]
"""Called with the bytes that were read since the last call."""


class File(NamedTuple):
    """A file: its path in its system, its name for people, bytes, version; system is None for this machine's."""

    path: str
    name: str
    size: int
    version: str
    system: AbstractFileSystem | None = None


class ChangedError(ValueError):
    """A file was written, replaced or removed while the corpus was read."""


def find(entry: str, options: Mapping[str, Any]) -> tuple[list[File], int]:
    """Return the files of a path or address: a file, a folder or a glob; and what was passed over in folders.

    options: of fsspec's file system, for addresses. The order depends on names only.
    Raises FileNotFoundError when nothing is there, ValueError when there is no file to read, and OSError, with
    what the file system said, when it cannot be asked.
    """
    if entry.startswith(_LOCAL):
        entry = LocalFileSystem._strip_protocol(entry)
    if _ADDRESS.match(entry):
        with _reaching(f"corpus address {entry!r}"):
            return _find_remote(entry, options)
    paths, ignored = find_files(entry)
    return [_local(path) for path in paths], ignored


def check_unchanged(entries: Iterable[str], options: Mapping[str, Any], files: Iterable[File]) -> None:
    """Look at the entries again; raise ChangedError naming the first of the files that is not as it was."""
    now: dict[tuple[str, str], File] = {}
    for entry in entries:
        try:
            now.update({(file.name, file.path): file for file in find(entry, options)[0]})
        except (FileNotFoundError, ValueError):  # none is left
            continue
    for file in files:
        found = now.get((file.name, file.path))
        if found is None or (found.size, found.version) != (file.size, file.version):
            raise changed(file, _state(found))


def changed(file: File, found: str) -> ChangedError:
    """Return the error of a file that is not as it was when reading began."""
    return ChangedError(
        f"{file.name} changed while the corpus was read: expected {_state(file)}, got {found}; "
        "read again when nothing writes to it"
    )


def open_files(files: Iterable[File], advance: Advance) -> Iterator[tuple[File, BinaryIO]]:
    """Yield each file and its bytes, not decompressed; it is closed when the next one is asked for.

    Small remote files are fetched several at once, large ones block by block.
    """
    for group in _groups(files):
        if group[0].system is None or not _small(group[0]):
            (file,) = group
            with _open(file) as raw, io.BufferedReader(_Counted(raw, advance), BLOCK) as stream:
                yield file, stream
        else:
            for file, content in zip(group, _fetch(group), strict=True):
                yield file, io.BytesIO(content)
                advance(len(content))


def decompressed(file: File, stream: BinaryIO) -> BinaryIO:
    """Return a stream of what is in a file: itself, or what its .gz or .zst holds."""
    _, compression = kind(file.name)
    if compression is None:
        return stream
    inside = pa.CompressedInputStream(pa.PythonFile(stream, mode="r"), compression)
    return io.BufferedReader(inside, BLOCK)


@contextmanager
def reading(file: File) -> Iterator[None]:
    """Turn what goes wrong while a file is read into an error that names it."""
    try:
        yield
    except FileNotFoundError:
        raise changed(file, "no such file") from None
    except Exception as error:
        if isinstance(error, ValueError) and not isinstance(error, pa.ArrowException):
            raise
        if type(error).__name__ == "FileExpired":  # s3fs: the ETag is another one
            raise changed(file, "another version") from error
        suffix, compression = kind(file.name)
        expected = compression or suffix.lstrip(".") or "text"
        raise ValueError(f"{file.name}: expected {expected} data that can be read, got {error}") from error


@contextmanager
def _reaching(what: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except ImportError as error:
        raise ValueError(f"{what} needs another package: {error}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: {error}" if what not in str(error) else str(error)) from None
    except Exception as error:
        text = f"{what}: expected an address that can be read, got {type(error).__name__}: {error}"
        raise (PermissionError if isinstance(error, PermissionError) else OSError)(text) from error


def _local(path: Path) -> File:
    status = path.stat()
    version = json.dumps({"mtime_ns": status.st_mtime_ns, "inode": status.st_ino})
    return File(str(path), shown(path), status.st_size, version)


def _find_remote(entry: str, options: Mapping[str, Any]) -> tuple[list[File], int]:
    system, path = url_to_fs(entry, **options)
    system.invalidate_cache()
    found = _info(system, path)
    if found is not None and found["type"] == "file":
        return [_remote(system, found)], 0
    if found is not None:
        files, ignored = _remote_folder(system, path)
        if not files:
            raise no_files(entry, ignored)
        return files, ignored
    if not has_magic(path):
        raise FileNotFoundError(f"corpus address {entry!r} does not exist")
    files, ignored = _remote_glob(system, path)
    if not files:
        raise FileNotFoundError(f"corpus glob {entry!r} matches no file")
    return files, ignored


def _info(system: AbstractFileSystem, path: str) -> dict[str, Any] | None:
    try:
        return system.info(path)
    except FileNotFoundError:
        return None


def _remote_folder(system: AbstractFileSystem, folder: str) -> tuple[list[File], int]:
    files, ignored = [], 0
    for path, info in system.find(folder, detail=True).items():
        if any(part.startswith(".") for part in _below(path, folder).split("/")):
            continue
        if is_corpus_name(path):
            files.append(_remote(system, info))
        else:
            ignored += 1
    return _ordered(files), ignored


def _remote_glob(system: AbstractFileSystem, pattern: str) -> tuple[list[File], int]:
    fixed = re.split(r"[*?\[]", pattern)[0].rpartition("/")[0]
    hidden = any(part.startswith(".") for part in _below(pattern, fixed).split("/"))
    files: dict[str, File] = {}
    ignored = 0
    for path, info in system.glob(pattern, detail=True).items():
        if not hidden and any(part.startswith(".") for part in _below(path, fixed).split("/")):
            continue
        if info["type"] == "file":
            files[path] = _remote(system, info)
        else:
            inside, passed = _remote_folder(system, path)
            files.update((file.path, file) for file in inside)
            ignored += passed
    return _ordered(files.values()), ignored


def _below(path: str, folder: str) -> str:
    return path[len(folder) :].lstrip("/") if path.startswith(folder) else path


def _ordered(files: Iterable[File]) -> list[File]:
    return sorted(files, key=lambda file: file.path.split("/"))


def _remote(system: AbstractFileSystem, info: Mapping[str, Any]) -> File:
    said = {re.sub("[-_]", "", key.lower()): value for key, value in info.items() if value}
    found = [{key: str(said[key]) for key in keys if key in said} for keys in (CHECKSUMS, TIMES)]
    version = json.dumps(next(filter(None, found), {}), sort_keys=True)
    return File(info["name"], system.unstrip_protocol(info["name"]), info.get("size") or 0, version, system)


def _state(file: File | None) -> str:
    if file is None:
        return "no such file"
    facts = ", ".join(f"{key} {value}" for key, value in json.loads(file.version).items())
    return f"{file.size} bytes" + f" ({facts})" * bool(facts)


def _small(file: File) -> bool:
    return 0 < file.size <= FETCHED_WHOLE


def _groups(files: Iterable[File]) -> Iterator[list[File]]:
    """Gather small files of one remote system that follow each other; any other file is a group of its own."""
    group: list[File] = []
    size = 0
    for file in files:
        alone = file.system is None or not _small(file)
        full = size + file.size > FETCHED_TOGETHER or len(group) == MOST_TOGETHER
        if group and (alone or full or file.system is not group[0].system):
            yield group
            group, size = [], 0
        if alone:
            yield [file]
        else:
            group.append(file)
            size += file.size
    if group:
        yield group


def _fetch(group: list[File]) -> Iterator[bytes]:
    system = group[0].system
    assert system is not None
    contents = system.cat_ranges([file.path for file in group], None, None, on_error="return")
    for file, content in zip(group, contents, strict=True):
        with reading(file):
            if isinstance(content, BaseException):
                raise content
            if len(content) != file.size:
                raise changed(file, f"{len(content)} bytes")
        yield content


def _open(file: File) -> Any:
    with reading(file):
        if file.system is None:
            return open(file.path, "rb", buffering=0)
        return file.system.open(file.path, "rb", block_size=REMOTE_BLOCK, cache_type="readahead")


class _Counted(io.RawIOBase):
    """A file that says how much of it was read."""

    def __init__(self, file: Any, advance: Advance):
        self._file, self._advance = file, advance

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._advance(len(data))
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())
