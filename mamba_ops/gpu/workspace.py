"""What the GPU ops share: the device, arrays on it, and activation buffers that are reused."""

import math
import weakref
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import wgpu

from mamba_ops.gpu.device import Device, DeviceError
from mamba_ops.ops import Batch, Columns, LayerState
from mamba_ops.parameters import EMBEDDING, LM_HEAD

SPLIT = (EMBEDDING, LM_HEAD)
"""Parameters that may lie in row parts."""


NO_ROW = 0xFFFFFFFF
"""What fills `DeviceRows.distinct` up: no weight has such a row."""


class Part(NamedTuple):
    """The rows `first .. first + rows - 1` of an array, in a buffer of their own."""

    first: int
    rows: int
    buffer: wgpu.GPUBuffer


@dataclass(frozen=True, eq=False)
class DeviceArray:
    """A float32 or 32-bit integer array on the device: one part, or row parts above the binding limit."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def buffer(self) -> wgpu.GPUBuffer:
        """The buffer of an array with one part; raises DeviceError for more."""
        if len(self.parts) != 1:
            raise DeviceError(f"an array of shape {self.shape} lies in {len(self.parts)} row parts; this op takes one")
        return self.parts[0].buffer

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        """Elements of a row."""
        return math.prod(self.shape[1:])


class Range(NamedTuple):
    """A column range as kernels take it: element (t, c) lies at `t * stride + first + c`."""

    buffer: wgpu.GPUBuffer
    stride: int
    first: int
    width: int


class DeviceRows(NamedTuple):
    """A batch on the device, flattened to (batch * seq_len,), as 32-bit integers.

    runs, order, distinct, starts: the embedding's backward, made on the host: how many distinct ids there are,
    token indices sorted by id (stable), the distinct ids (then NO_ROW), and where each one's run starts in `order`
    (then its end). largest: the largest id or target.
    """

    batch: int
    seq_len: int
    runs: int
    largest: int
    ids: DeviceArray
    targets: DeviceArray
    positions: DeviceArray
    order: DeviceArray
    distinct: DeviceArray
    starts: DeviceArray


class GpuWorkspace:
    """A device, the arrays on it, and its activation buffers, pooled whole by size, last in, first out.

    poison: fill every array that `empty` returns with NaN, to prove that the ops write what they return.
    """

    def __init__(self, device: Device, poison: bool = False):
        self.device = device
        self.dtype = np.dtype(np.float32)
        self.poison = poison
        self._free: dict[int, list[wgpu.GPUBuffer]] = defaultdict(list)
        self._scopes: list[list[wgpu.GPUBuffer]] = [[]]
        self._kept: dict[int, wgpu.GPUBuffer] = {}
        self._values: dict[Hashable, tuple[wgpu.GPUBuffer, bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except DeviceError:
            # an error of the body says more
            if kind is None:
                raise

    def close(self) -> None:
        """Free every array of this workspace; the device stays open."""
        pooled = [buffer for pool in (*self._free.values(), *self._scopes) for buffer in pool]
        self.device.free([*pooled, *self._kept.values()])
        self._free.clear()
        self._scopes = [[]]
        self._kept.clear()
        self._values.clear()

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Give back, on leaving, every array that `empty` returned inside."""
        self._scopes.append([])
        try:
            yield
        finally:
            for buffer in reversed(self._scopes.pop()):
                self._free[buffer.size].append(buffer)

    def empty(self, rows: int, columns: int) -> DeviceArray:
        """Return an uninitialised (rows, columns) float32 array that lives as long as the innermost open scope."""
        size = max(16, -(-rows * columns // 4) * 16)
        pool = self._free[size]
        buffer = pool.pop() if pool else self.device.buffer(size, f"an activation of ({rows}, {columns})")
        self._scopes[-1].append(buffer)
        if self.poison:
            self.device.write(buffer, np.full(size // 4, np.nan, np.float32))
        return DeviceArray((rows, columns), (Part(0, rows, buffer),))

    def empty_like(self, parameter: DeviceArray) -> DeviceArray:
        """Return an uninitialised activation of a parameter's shape, in one part."""
        return DeviceArray(parameter.shape, self.empty(parameter.shape[0], parameter.width).parts)

    def held_bytes(self) -> int:
        """Return the bytes of every array of this workspace, activations in use or free included."""
        pooled = [buffer.size for pool in (*self._free.values(), *self._scopes) for buffer in pool]
        return sum(pooled) + sum(buffer.size for buffer in self._kept.values())

    def upload(self, array: np.ndarray) -> DeviceArray:
        """Return a new array with the contents of a host array of 32-bit elements, kept until it is released."""
        found = self._keep(array.shape, array.shape[0], f"an array of {array.shape}")
        self.write_parameter(found, array)
        return found

    def upload_parameter(self, name: str, array: np.ndarray) -> DeviceArray:
        """Return a parameter on the device, cut by rows if it is above the binding limit and may be: `SPLIT`.

        Raises DeviceError, naming the parameter, its size and the limit, if it fits neither way.
        """
        found = self._keep(array.shape, self._rows_per_part(name, array.shape), f"parameter {name}")
        self.write_parameter(found, array)
        return found

    def write_parameter(self, parameter: DeviceArray, array: np.ndarray) -> None:
        """Overwrite an array with a host array of the same shape, float32 or 32-bit integers."""
        if array.shape != parameter.shape:
            raise ValueError(f"an array of {array.shape} for one of {parameter.shape} on the device")
        if array.dtype.itemsize != 4:
            raise ValueError(f"an array of {array.dtype}; the device takes float32 and 32-bit integers")
        for part in parameter.parts:
            self.device.write(part.buffer, array[part.first : part.first + part.rows])

    def zeros_like(self, array: DeviceArray) -> DeviceArray:
        """Return a new array of zeros, in the same row parts, kept until it is released."""
        rows = array.parts[0].rows
        return self._keep(array.shape, rows, f"an array of {array.shape}")

    def zero(self, array: DeviceArray) -> None:
        """Set every element to zero."""
        for part in array.parts:
            self.device.clear(part.buffer)

    def release(self, arrays: Iterable[DeviceArray]) -> None:
        """Free arrays that `upload`, `upload_parameter` and `zeros_like` returned."""
        buffers = [part.buffer for array in arrays for part in array.parts]
        for buffer in buffers:
            self._kept.pop(id(buffer), None)
        self.device.free(buffers)

    def values(self, key: Hashable, *numbers: float, dtype: type = np.float32) -> wgpu.GPUBuffer:
        """Return a storage buffer with these 32-bit numbers; the next call with the same key overwrites it."""
        data: np.ndarray = np.array(numbers, dtype)
        buffer, old = self._values.get(key, (None, b""))
        if buffer is None:
            buffer = self._kept_buffer(data.nbytes, f"the values of {key}")
        if data.tobytes() != old:
            self.device.write(buffer, data)
            self._values[key] = buffer, data.tobytes()
        return buffer

    def rows(self, batch: Batch) -> DeviceRows:
        """Bring a batch to the device."""
        size, seq_len = batch.ids.shape
        ids = batch.ids.reshape(-1)
        smallest, largest = int(ids.min()), int(max(ids.max(), batch.targets.max()))
        if smallest < 0 or largest >= 1 << 31:
            raise ValueError(f"token ids from {smallest} to {largest}; expected 0 <= id < 2^31")
        order = np.argsort(ids, kind="stable")
        starts = np.flatnonzero(np.diff(ids[order], prepend=-1))
        # as long as there are tokens, whatever the number of distinct ids, so that the same buffers come back
        distinct, edges = np.full(ids.size, NO_ROW, np.uint32), np.full(ids.size + 1, ids.size, np.uint32)
        distinct[: starts.size], edges[: starts.size] = ids[order][starts], starts
        hosts = (
            ids.astype(np.uint32),
            batch.targets.reshape(-1).astype(np.int32),
            batch.positions.reshape(-1).astype(np.uint32),
            order.astype(np.uint32),
            distinct,
            edges,
        )
        return DeviceRows(size, seq_len, starts.size, largest, *map(self._activation, hosts))

    def layer_state(self, batch: int, d_inner: int, d_state: int, d_conv: int) -> LayerState:
        """Return a zero state; its buffers go back to the pools with the last reference to it."""
        return LayerState(self._state(batch, d_conv - 1, d_inner), self._state(batch, d_state, d_inner))

    def read(self, array: DeviceArray, dtype: type = np.float32) -> np.ndarray:
        """Return a copy on the host."""
        parts = [self.device.read(p.buffer, dtype, p.rows * array.width) for p in array.parts]
        return np.concatenate(parts).reshape(array.shape)

    def _activation(self, host: np.ndarray) -> DeviceArray:
        """Upload a host array of 32-bit elements into a pooled buffer of the current scope."""
        array = self.empty(host.size, 1)
        self.device.write(array.buffer, host)
        return DeviceArray(host.shape, array.parts)

    def _state(self, *shape: int) -> DeviceArray:
        """Return an array of zeros whose buffer goes back to the pools with the last reference to the array."""
        size = max(16, -(-math.prod(shape) // 4) * 16)
        pool = self._free[size]
        buffer = pool.pop() if pool else self.device.buffer(size, f"a state of {shape}")
        self.device.clear(buffer)
        self._kept[id(buffer)] = buffer
        array = DeviceArray(shape, (Part(0, shape[0], buffer),))
        weakref.finalize(array, self._give_back, id(buffer)).atexit = False
        return array

    def _give_back(self, key: int) -> None:
        buffer = self._kept.pop(key, None)
        if buffer is not None:
            self._free[buffer.size].append(buffer)

    def _keep(self, shape: tuple[int, ...], rows_per_part: int, name: str) -> DeviceArray:
        """Return a new array of zeros in parts of so many rows."""
        rows, width = shape[0], math.prod(shape[1:])
        parts = []
        for first in range(0, max(1, rows), max(1, rows_per_part)):
            count = min(rows_per_part, rows - first)
            buffer = self._kept_buffer(count * width * 4, name)
            parts.append(Part(first, count, buffer))
        return DeviceArray(shape, tuple(parts))

    def _kept_buffer(self, nbytes: int, name: str) -> wgpu.GPUBuffer:
        buffer = self.device.buffer(nbytes, name)
        self._kept[id(buffer)] = buffer
        return buffer

    def _rows_per_part(self, name: str, shape: tuple[int, ...]) -> int:
        """Return the rows of a part: all, or as many as the binding limit takes, in steps of 64 or 4 if it can."""
        rows, nbytes = shape[0], math.prod(shape) * 4
        limit = self.device.binding_limit
        if name not in SPLIT or nbytes <= limit:
            return rows
        fit = limit // (nbytes // rows)
        if fit == 0:
            raise DeviceError(
                f"parameter {name}: {nbytes:,} bytes in {rows:,} rows, and one row is above the binding limit of "
                f"{limit:,} bytes of {self.device.name}"
            )
        return fit - fit % (64 if fit >= 64 else 4 if fit >= 4 else 1)


def range_of(x: DeviceArray | Columns) -> Range:
    """Return where the columns of an array with one part lie."""
    if isinstance(x, Columns):
        return Range(x.array.buffer, x.array.shape[-1], x.first, x.width)
    return Range(x.buffer, x.shape[-1], 0, x.shape[-1])
