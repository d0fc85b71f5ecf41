"""What the CPU ops share: the dtype, the threads, and buffers that are made once and reused."""

import math
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import NamedTuple

import numpy as np
from threadpoolctl import ThreadpoolController

from mamba_ops.ops import Batch, Columns, LayerState

CACHE_LINE = 64
INTERPRETER_IS_LOCKED: bool = getattr(sys, "_is_gil_enabled", lambda: True)()


class Rows(NamedTuple):
    """A batch, flattened to (batch * seq_len,)."""

    batch: int
    seq_len: int
    ids: np.ndarray
    targets: np.ndarray
    positions: np.ndarray


class Workspace:
    """The dtype, the worker threads and the buffer pools of one set of CPU ops.

    dtype: of activations and parameters. threads: workers, all cores for None. Tasks are cut by shape and
    never by the number of threads, so results do not depend on it.
    """

    def __init__(self, dtype: type = np.float32, threads: int | None = None):
        self.dtype = np.dtype(dtype)
        self.threads = threads or _cores()
        self._executor = ThreadPoolExecutor(self.threads) if self.threads > 1 else None
        self._blas = ThreadpoolController().select(user_api="blas")
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)
        self._scopes: list[list[np.ndarray]] = [[]]
        self._local = threading.local()

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Give back, on leaving, every array that `empty` returned inside."""
        self._scopes.append([])
        try:
            yield
        finally:
            for buffer in reversed(self._scopes.pop()):
                self._free[buffer.size].append(buffer)

    def empty(self, rows: int, columns: int) -> np.ndarray:
        """Return an uninitialised (rows, columns) array that lives as long as the innermost open scope."""
        size = rows * columns
        pool = self._free[size]
        buffer = pool.pop() if pool else aligned(size, self.dtype)
        self._scopes[-1].append(buffer)
        return buffer.reshape(rows, columns)

    def empty_like(self, parameter: np.ndarray) -> np.ndarray:
        """Return an uninitialised activation of a parameter's shape."""
        return self.empty(len(parameter), parameter.size // len(parameter)).reshape(parameter.shape)

    def held_bytes(self) -> int:
        """Return the bytes of all activation buffers, in use or free."""
        return sum(buffer.nbytes for pool in (*self._free.values(), *self._scopes) for buffer in pool)

    def scratch(self, name: str, capacity: int, shape: tuple[int, ...], dtype: type | None = None) -> np.ndarray:
        """Return this thread's uninitialised array of that name; the next call of that name reuses it.

        capacity: elements of the largest shape asked for under this name.
        """
        arrays = self._local.__dict__.setdefault("arrays", {})
        key = name, capacity
        if key not in arrays:
            arrays[key] = aligned(capacity, np.dtype(dtype or self.dtype))
        return arrays[key][: math.prod(shape)].reshape(shape)

    def run(self, task: Callable[[int], None], count: int) -> None:
        """Run task(0) ... task(count - 1), made of NumPy calls on arrays that stay in cache; BLAS has one thread.

        A call gives up the interpreter's lock and takes it back; handing it to another thread takes longer than
        such a call, so two threads are slower than one. Only an interpreter without the lock uses the threads.
        """
        with self._blas.limit(limits=1):
            if INTERPRETER_IS_LOCKED or self._executor is None:
                for index in range(count):
                    task(index)
                return
            # NumPy's error state is a context variable: each task runs in a copy of the caller's context
            calls = [(copy_context(), index) for index in range(count)]
            for _ in self._executor.map(lambda call: call[0].run(task, call[1]), calls):
                pass

    def rows(self, batch: Batch) -> Rows:
        """Flatten a batch to (batch * seq_len,)."""
        size, seq_len = batch.ids.shape
        return Rows(size, seq_len, batch.ids.ravel(), batch.targets.ravel(), batch.positions.ravel())

    def layer_state(self, batch: int, d_inner: int, d_state: int, d_conv: int) -> LayerState:
        """Return a zero state."""
        return LayerState(
            np.zeros((batch, d_conv - 1, d_inner), self.dtype),
            np.zeros((batch, d_state, d_inner), self.dtype),
        )

    def read(self, array: np.ndarray) -> np.ndarray:
        """Return a copy."""
        return array.copy()

    def upload_parameter(self, name: str, array: np.ndarray) -> np.ndarray:
        """Return the array itself."""
        return array

    def write_parameter(self, parameter: np.ndarray, array: np.ndarray) -> None:
        """Overwrite a parameter, unless it is the array itself."""
        if parameter is not array:
            np.copyto(parameter, array)

    def zeros_like(self, array: np.ndarray) -> np.ndarray:
        """Return zeros of the same shape."""
        return np.zeros_like(array)

    def zero(self, array: np.ndarray) -> None:
        """Set every element to zero."""
        array.fill(0)

    def release(self, arrays: Iterable[np.ndarray]) -> None:
        """Arrays are freed with their last reference."""

    def total(self, losses: np.ndarray) -> float:
        """Return the sum of per-token losses, accumulated in float64."""
        return float(losses.sum(dtype=np.float64))


def aligned(size: int, dtype: np.dtype) -> np.ndarray:
    """Return an uninitialised flat array that opens a cache line.

    Wide loads that cross a line cost double, and NumPy's own arrays start 16 bytes into one.
    """
    raw = np.empty(size * dtype.itemsize + CACHE_LINE, np.uint8)
    first = -raw.ctypes.data % CACHE_LINE
    return raw[first : first + size * dtype.itemsize].view(dtype)


def view(columns: np.ndarray | Columns) -> np.ndarray:
    """Return a column range as a strided view."""
    if isinstance(columns, Columns):
        return columns.array[:, columns.first : columns.first + columns.width]
    return columns


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
