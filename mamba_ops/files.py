"""The files behind a path, a folder or a glob, in an order that depends on names only."""

import glob
import os
from collections.abc import Iterator
from pathlib import Path

SUFFIXES = (".txt", ".text", ".md", ".rst", ".jsonl", ".parquet")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


def kind(name: str) -> tuple[str, str | None]:
    """Return a file name's suffix in lower case and its compression: (".jsonl", "gzip") for a.jsonl.gz."""
    stem, suffix = os.path.splitext(os.path.basename(name).lower())
    compression = COMPRESSIONS.get(suffix)
    return (os.path.splitext(stem)[1] if compression else suffix), compression


def is_corpus_name(name: str) -> bool:
    """Whether a file is read when its folder is given."""
    suffix, compression = kind(name)
    return suffix in SUFFIXES and not (suffix == ".parquet" and compression)


def no_files(entry: str, ignored: int) -> ValueError:
    """Return the error of a folder without a file to read."""
    return ValueError(
        f"corpus folder {entry!r}: 0 files ending in {', '.join(SUFFIXES)}, expected at least 1 "
        f"({ignored} others); name other kinds by a glob"
    )


def shown(path: Path) -> str:
    """Return a path as text that any file can hold: bytes of a name that are not UTF-8 become U+FFFD."""
    return os.fsencode(path).decode(errors="replace")


def find_files(entry: str) -> tuple[list[Path], int]:
    """Return the files of a file, folder or glob, sorted, and the count of what was passed over in folders.

    Raises FileNotFoundError when nothing is there, ValueError when what is there holds no file to read.
    """
    if not entry.strip():
        raise ValueError(f"a corpus path is {entry!r}, expected a file, a folder or a glob")
    path = Path(entry).expanduser()
    if path.is_file():
        return [path], 0
    if path.is_dir():
        files, ignored = _folder(path)
        if not files:
            raise no_files(entry, ignored)
        return files, ignored
    if path.exists():
        raise ValueError(f"corpus path {entry!r} is a device, pipe or socket, expected a file or a folder")
    if not glob.has_magic(entry):
        raise FileNotFoundError(f"corpus path {entry!r} does not exist (looked from {os.getcwd()})")
    files, ignored = _glob(path, entry)
    if not files:
        raise FileNotFoundError(f"corpus glob {entry!r} matches no file (looked from {os.getcwd()})")
    return files, ignored


def _folder(folder: Path) -> tuple[list[Path], int]:
    """Walk without following links to folders, so that a loop of links ends."""
    files: list[Path] = []
    ignored = 0
    for root, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        ignored += sum(Path(root, name).is_symlink() for name in folders)
        for path in (Path(root, name) for name in names if not name.startswith(".")):
            if is_corpus_name(path.name) and path.is_file():
                files.append(path)
            else:
                ignored += 1
    return sorted(files, key=lambda path: path.parts), ignored


def _refuse(error: OSError) -> None:
    raise error


def _glob(path: Path, entry: str) -> tuple[list[Path], int]:
    fixed = next(i for i, part in enumerate(path.parts) if glob.has_magic(part))
    base, pattern = Path(*path.parts[:fixed]), list(path.parts[fixed:])
    if pattern[-1] == "**":
        pattern.append("*")
    files: set[Path] = set()
    ignored = 0
    for match in _visible(base, pattern, entry):
        if match.is_dir():
            inside, passed = _folder(match)
            files.update(inside)
            ignored += passed
        elif match.is_file():
            files.add(match)
    return sorted(files, key=lambda path: path.parts), ignored


def _visible(base: Path, pattern: list[str], entry: str) -> Iterator[Path]:
    """Yield matches without hidden names, unless the pattern names a hidden part itself."""
    if any("**" in part and part != "**" for part in pattern):
        raise ValueError(f"corpus glob {entry!r}: ** can only be a whole part of a path")
    hidden = any(part.startswith(".") for part in pattern)
    for match in base.glob("/".join(pattern)):
        if hidden or not any(part.startswith(".") for part in match.relative_to(base).parts):
            yield match
