"""The one gate between arrays and disk: safetensors files, whole or not at all, never a pickle."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_dtypes import bfloat16
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from mamba_ops.fingerprint import atomic_file

DTYPES = {
    "BF16": np.dtype(bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "U8": np.dtype(np.uint8),
    "U32": np.dtype(np.uint32),
    "U64": np.dtype(np.uint64),
}
"""What is read, by the file format's name."""

WRITTEN = {name: dtype for name, dtype in DTYPES.items() if name != "F16"}
"""What is written."""

BLOCK = 1 << 22
"""Elements that are read at once."""


class CheckpointError(ValueError):
    """A checkpoint, or what was to become one, is not as expected."""


class Entry(NamedTuple):
    """One tensor of a file's header; dtype is the file format's name ('F32', 'BF16', ...), offset in bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


def mismatch(path: str | Path, key: str, found: Any, expected: Any) -> CheckpointError:
    """Return the error naming a file, a key in it (may be empty), what was found and what was expected."""
    where = f"{path}: {key}" if key else str(path)
    return CheckpointError(f"{where}: found {found}, expected {expected}")


def save_tensors(
    path: str | Path,
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, str] | None = None,
    read_back: bool = True,
) -> None:
    """Write a safetensors file of finite arrays in C order, atomically, and compare what was written.

    Raises CheckpointError naming the tensor on a dtype outside `WRITTEN`, a value that is not finite, or a
    written tensor that differs; then nothing at `path` has changed.
    """
    path = Path(path)
    arrays = {name: _checked(path, name, value) for name, value in tensors.items()}
    with atomic_file(path) as temporary:
        try:
            save_file(arrays, temporary, metadata=dict(metadata or {}))
        except SafetensorError as error:
            raise OSError(f"{path}: cannot be written: {error}") from error
        _sort_metadata(temporary)
        if read_back:
            _compare(path, temporary, tensors)


def _sort_metadata(path: Path) -> None:
    """Put the header's metadata, which safetensors writes in any order, in that of its keys."""
    with open(path, "r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        if len(header.get("__metadata__", {})) > 1:
            ordered = {**header, "__metadata__": dict(sorted(header["__metadata__"].items()))}
            file.seek(8)
            file.write(json.dumps(ordered, separators=(",", ":"), ensure_ascii=False).encode().ljust(size))


def load_tensors(path: str | Path) -> dict[str, np.ndarray]:
    """Return the tensors of a safetensors file, writable and in C order.

    Raises CheckpointError on a missing, truncated or corrupt file and on a dtype outside `DTYPES`.
    """
    header = load_header(path)
    for name, entry in header.items():
        if entry.dtype not in DTYPES:
            raise mismatch(path, name, f"dtype {entry.dtype}", f"one of {', '.join(DTYPES)}")
    return {name: read_tensor(path, entry) for name, entry in header.items()}


def load_header(path: str | Path) -> dict[str, Entry]:
    """Return each tensor's dtype, shape and place without reading its values; raises CheckpointError."""
    with _open(path):
        values, start = _header(Path(path))
    values.pop("__metadata__", None)
    return {
        name: Entry(value["dtype"], tuple(value["shape"]), start + value["data_offsets"][0])
        for name, value in values.items()
    }


def read_tensor(path: str | Path, entry: Entry, dtype: np.dtype[Any] | None = None) -> np.ndarray:
    """Return one tensor of a file as `dtype` (its own for None); no more than a block is held besides."""
    stored = DTYPES[entry.dtype]
    array = np.empty(entry.shape, stored if dtype is None else dtype)
    flat = array.reshape(-1)
    for start, part in read_blocks(path, entry):
        with np.errstate(invalid="ignore"):  # what is not a number stays so
            flat[start : start + part.size] = part
    return array


def read_blocks(path: str | Path, entry: Entry) -> Iterator[tuple[int, np.ndarray]]:
    """Yield a tensor's elements in C order, `BLOCK` at a time, as (index of the first, elements)."""
    stored, size = DTYPES[entry.dtype], math.prod(entry.shape)
    width = stored.itemsize
    with open(path, "rb") as file:
        file.seek(entry.offset)
        for start in range(0, size, BLOCK):
            count = min(BLOCK, size - start)
            raw = np.fromfile(file, f"<u{width}", count)
            if raw.size != count:
                raise mismatch(path, "", "a file that shrank while it was read", "a whole safetensors file")
            yield start, raw.astype(f"=u{width}", copy=False).view(stored)


def load_metadata(path: str | Path) -> dict[str, str]:
    """Return the text entries of a safetensors file; raises CheckpointError."""
    with _open(path) as file:
        return dict(file.metadata() or {})


def check_finite(path: str | Path, name: str, array: np.ndarray) -> None:
    """Raise CheckpointError naming the first value that is not finite."""
    with np.errstate(invalid="ignore"):  # bfloat16's signalling NaN
        finite = np.isfinite(array)
    if not finite.all():
        index = tuple(int(i) for i in np.unravel_index(np.argmin(finite), array.shape))
        raise mismatch(path, name, f"{array[index]} at {index}", "finite values")


def fingerprint(params: Mapping[str, np.ndarray]) -> str:
    """Return the SHA-256 over sorted names, dtypes, shapes and values, as hex."""
    total = hashlib.sha256()
    for name in sorted(params):
        array = np.asarray(params[name], order="C")
        header = [name, array.dtype.str, list(array.shape)]
        total.update(json.dumps(header).encode() + b"\n")
        total.update(array.data)
    return total.hexdigest()


@contextmanager
def _open(path: str | Path) -> Iterator[Any]:
    path = Path(path)
    if not path.is_file():
        raise mismatch(path, "", "a folder" if path.is_dir() else "no such file", "a safetensors file")
    try:
        with safe_open(path, framework="np") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise _broken(path, error) from error


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Return a file's header, and the byte where the values start."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= path.stat().st_size - 8:
            raise ValueError(f"a header of {length:,} bytes")
        return json.loads(file.read(length)), 8 + length


def _broken(path: Path, error: Exception) -> CheckpointError:
    """Say what is wrong with a file that the format's reader refuses, with the first key that shows it."""
    size = path.stat().st_size
    try:
        values, start = _header(path)
        entries = {name: value for name, value in values.items() if name != "__metadata__"}
        for name, value in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            dtype, shape, (first, last) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
            if dtype not in DTYPES:
                return mismatch(path, name, f"dtype {dtype}", f"one of {', '.join(DTYPES)}")
            if last - first != (needed := math.prod(shape) * DTYPES[dtype].itemsize):
                return mismatch(path, name, f"{last - first:,} bytes", f"{needed:,} for {dtype} {shape}")
            if start + last > size:
                whole = start + max(value["data_offsets"][1] for value in entries.values())
                found = f"{size:,} bytes that end before {name} does"
                return mismatch(path, "", found, f"a whole safetensors file of {whole:,}; it is truncated")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OSError):
        pass  # the header itself
    found = f"{size:,} bytes that cannot be read ({error})"
    return mismatch(path, "", found, "a whole safetensors file; it is truncated or corrupt")


def _checked(path: Path, name: str, value: Any) -> np.ndarray:
    """Return the array in C order and native byte order, 0-d kept as 0-d."""
    if not isinstance(value, np.ndarray | np.generic) or isinstance(value, np.ma.MaskedArray):
        raise mismatch(path, name, type(value).__name__, "a NumPy array")
    dtype = value.dtype.newbyteorder("=")
    if dtype not in WRITTEN.values():
        allowed = ", ".join(str(known) for known in WRITTEN.values())
        raise mismatch(path, name, f"dtype {value.dtype}", f"one of {allowed}")
    array = np.asarray(value, dtype=dtype, order="C")
    check_finite(path, name, array)
    return array


def _compare(path: Path, written: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Compare the file with the arrays as they were given, strides and all."""
    header = load_header(written)
    if set(header) != set(tensors):
        raise mismatch(path, "", sorted(header), f"what was to be written: {sorted(tensors)}")
    for name, value in tensors.items():
        flat, entry = value.reshape(-1), header[name]
        same = DTYPES[entry.dtype] == value.dtype.newbyteorder("=") and entry.shape == value.shape
        blocks = read_blocks(written, entry) if same else ()
        if not same or not all(np.array_equal(part, flat[start : start + part.size]) for start, part in blocks):
            raise mismatch(path, name, "other values on disk", "those that were written")
