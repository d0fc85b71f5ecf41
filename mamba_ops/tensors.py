"""The one gate between arrays and disk: safetensors files, whole or not at all, never a pickle."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from mamba_ops.fingerprint import atomic_file

DTYPES = {
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "U8": np.dtype(np.uint8),
    "U32": np.dtype(np.uint32),
    "U64": np.dtype(np.uint64),
}
"""What is written and read, by the file format's name."""


class CheckpointError(ValueError):
    """A checkpoint, or what was to become one, is not as expected."""


class Entry(NamedTuple):
    """One tensor of a file's header; dtype is the file format's name ('F32', 'BF16', ...)."""

    dtype: str
    shape: tuple[int, ...]


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

    Raises CheckpointError naming the tensor on a dtype outside `DTYPES`, a value that is not finite, or a
    written tensor that differs; then nothing at `path` has changed.
    """
    path = Path(path)
    arrays = {name: _checked(path, name, value) for name, value in tensors.items()}
    with atomic_file(path) as temporary:
        try:
            save_file(arrays, temporary, metadata=dict(metadata or {}))
        except SafetensorError as error:
            raise OSError(f"{path}: cannot be written: {error}") from error
        if read_back:
            _compare(path, temporary, tensors)


def load_tensors(path: str | Path) -> dict[str, np.ndarray]:
    """Return the tensors of a safetensors file, writable and in C order.

    Raises CheckpointError on a missing, truncated or corrupt file and on a dtype outside `DTYPES`.
    """
    with _open(path) as file:
        for name in file.keys():  # noqa: SIM118
            dtype = file.get_slice(name).get_dtype()
            if dtype not in DTYPES:
                raise mismatch(path, name, f"dtype {dtype}", f"one of {', '.join(DTYPES)}")
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def load_header(path: str | Path) -> dict[str, Entry]:
    """Return each tensor's dtype and shape without reading its values; raises CheckpointError."""
    with _open(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: Entry(view.get_dtype(), tuple(view.get_shape())) for name, view in slices.items()}


def load_metadata(path: str | Path) -> dict[str, str]:
    """Return the text entries of a safetensors file; raises CheckpointError."""
    with _open(path) as file:
        return dict(file.metadata() or {})


def check_finite(path: str | Path, name: str, array: np.ndarray) -> None:
    """Raise CheckpointError naming the first value that is not finite."""
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
        size = f"{path.stat().st_size:,} bytes that cannot be read ({error})"
        raise mismatch(path, "", size, "a whole safetensors file; it is truncated or corrupt") from error


def _checked(path: Path, name: str, value: Any) -> np.ndarray:
    """Return the array in C order and native byte order, 0-d kept as 0-d."""
    if not isinstance(value, np.ndarray | np.generic) or isinstance(value, np.ma.MaskedArray):
        raise mismatch(path, name, type(value).__name__, "a NumPy array")
    dtype = value.dtype.newbyteorder("=")
    if dtype not in DTYPES.values():
        allowed = ", ".join(str(known) for known in DTYPES.values())
        raise mismatch(path, name, f"dtype {value.dtype}", f"one of {allowed}")
    array = np.asarray(value, dtype=dtype, order="C")
    check_finite(path, name, array)
    return array


def _compare(path: Path, written: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Compare the file with the arrays as they were given, strides and all."""
    with _open(written) as file:
        if set(file.keys()) != set(tensors):
            raise mismatch(path, "", sorted(file.keys()), f"what was to be written: {sorted(tensors)}")
        for name, value in tensors.items():
            stored = file.get_tensor(name)
            if stored.dtype != value.dtype.newbyteorder("=") or not np.array_equal(stored, value):
                raise mismatch(path, name, "other values on disk", "those that were written")
