"""Kernels' times on the device, by timestamp queries."""

from typing import Any, NamedTuple

import numpy as np
import wgpu
from wgpu.backends.wgpu_native._ffi import lib

QUERIES = 4096


class KernelTime(NamedTuple):
    """A kernel's dispatches while profiling, and their time on the device in ms."""

    kernel: str
    dispatches: int
    milliseconds: float


class Timestamps:
    """Timestamps before and after each dispatch, summed by kernel."""

    def __init__(self, device: wgpu.GPUDevice):
        self._queue = device.queue
        self._queries = device.create_query_set(type="timestamp", count=QUERIES)
        usage = wgpu.BufferUsage.QUERY_RESOLVE | wgpu.BufferUsage.COPY_SRC
        self._resolved = device.create_buffer(size=QUERIES * 8, usage=usage)
        self._period = lib.wgpuQueueGetTimestampPeriod(device.queue._internal)
        self._kernels: list[str] = []
        self._sums: dict[str, tuple[int, float]] = {}

    @property
    def full(self) -> bool:
        """Whether no query is left."""
        return 2 * len(self._kernels) >= QUERIES

    def add(self, kernel: str) -> None:
        """Take the next two queries for a dispatch of `kernel`."""
        self._kernels.append(kernel)

    def writes(self) -> dict[str, Any]:
        """Return the timestamps of the pass of the dispatch added last."""
        last = 2 * len(self._kernels) - 1
        return {
            "query_set": self._queries,
            "beginning_of_pass_write_index": last - 1,
            "end_of_pass_write_index": last,
        }

    def resolve(self, encoder: Any) -> None:
        """Record writing the timestamps to a buffer."""
        if self._kernels:
            encoder.resolve_query_set(self._queries, 0, 2 * len(self._kernels), self._resolved, 0)

    def collect(self) -> None:
        """Read what was submitted."""
        if not self._kernels:
            return
        data = self._queue.read_buffer(self._resolved, 0, 16 * len(self._kernels))
        stamps = np.frombuffer(data, np.int64).reshape(-1, 2)
        elapsed = (stamps[:, 1] - stamps[:, 0]).astype(np.float64) * self._period * 1e-6
        for kernel, milliseconds in zip(self._kernels, elapsed, strict=True):
            dispatches, total = self._sums.get(kernel, (0, 0.0))
            self._sums[kernel] = dispatches + 1, total + float(milliseconds)
        self._kernels.clear()

    def times(self) -> list[KernelTime]:
        """Return the sums, the longest first."""
        times = [KernelTime(kernel, *both) for kernel, both in self._sums.items()]
        return sorted(times, key=lambda time: -time.milliseconds)

    def close(self) -> None:
        """Free the queries."""
        self._resolved.destroy()
        self._queries.destroy()
