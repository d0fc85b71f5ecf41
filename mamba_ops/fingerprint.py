"""Content fingerprints, and files and folders that appear whole or not at all."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def digest(value: Any) -> str:
    """Return the SHA-256 of a JSON value in canonical form, as hex."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: str | Path) -> str:
    """Return the SHA-256 of a file's bytes, as hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """Yield a temporary name beside `path` that replaces it when the block ends without an error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        os.chmod(temporary, 0o644)
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | Path, value: Any) -> None:
    """Write a JSON file that is whole or absent; NaN and infinity are refused."""
    text = json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n"
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def atomic_directory(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` when the block ends without an error.

    Raises FileExistsError when `path` exists: nothing is overwritten.
    """
    path = Path(path)
    if path.exists():
        raise FileExistsError(f"{path} exists and is not overwritten")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield temporary
        os.chmod(temporary, 0o755)
        for file in temporary.rglob("*"):
            sync(file)
        sync(temporary)
        os.rename(temporary, path)
        sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
