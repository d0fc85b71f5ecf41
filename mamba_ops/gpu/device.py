"""One opened adapter: pipelines compiled once, bind groups cached, dispatches recorded into one submission.

WGSL entry points take a uniform block at binding 0 and storage buffers at 1, 2, ...; in a kernel's file, names
such as D_STATE that a launcher knows are constants put before the source (`wgsl.py`).
"""

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import wgpu

from mamba_ops.gpu import wgsl
from mamba_ops.gpu.timestamps import KernelTime, Timestamps

STORAGE = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST
UNIFORM = wgpu.BufferUsage.UNIFORM | wgpu.BufferUsage.COPY_DST
LIMITS = (
    "max-buffer-size",
    "max-storage-buffer-binding-size",
    "max-storage-buffers-per-shader-stage",
    "max-compute-workgroup-storage-size",
    "max-compute-invocations-per-workgroup",
    "max-compute-workgroup-size-x",
    "max-compute-workgroups-per-dimension",
)
DISPATCHES_PER_SUBMISSION = 64
CACHED_GROUPS = 16384
GROUPS_PER_DIMENSION = 65535


class DeviceError(RuntimeError):
    """The device refused, was lost or is closed; the message says what was asked for and what the limit is."""


class Device:
    """An open device. checks: whether WGSL's run-time checks stay on. binding_limit: bytes of one binding.

    `binding_limit` decides where parameters are split by rows; it can be forced below the adapter's. Not for
    several threads, and not usable after a fork. Every method raises DeviceError when wgpu refuses.
    """

    def __init__(self, adapter: wgpu.GPUAdapter, *, checks: bool, subgroups: bool, binding_limit: int | None = None):
        wanted = {"timestamp-query"} | ({"subgroup"} if subgroups else set())
        self.adapter = adapter
        self.info = adapter.info
        self.name = self.info["device"]
        self.limits = {name: adapter.limits[name] for name in LIMITS}
        with _refusals(f"opening {self.name}"):
            self.wgpu = adapter.request_device_sync(
                required_features=sorted(wanted & set(adapter.features)), required_limits=self.limits
            )
        self.checks = checks
        self.subgroups = "subgroup" in self.wgpu.features
        self.binding_limit = min(binding_limit or 1 << 62, self.limits["max-storage-buffer-binding-size"])
        self.closed = False
        self._process = os.getpid()
        self._buffers: dict[int, wgpu.GPUBuffer] = {}
        self._pipelines: dict[tuple, wgpu.GPUComputePipeline] = {}
        self._labels: dict[int, str] = {}
        self._uniforms: dict[bytes, wgpu.GPUBuffer] = {}
        # the key is ids; the value holds the objects, so that no id in a key is given to another object
        self._groups: dict[tuple[int, ...], tuple[wgpu.GPUBindGroup, tuple]] = {}
        self._encoder: Any = None
        self._pass: Any = None
        self._dispatches = 0
        self._profile: Timestamps | None = None
        self._fence: wgpu.GPUBuffer | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of all own buffers, the uniform ones too."""
        return sum(b.size for b in self._buffers.values()) + sum(b.size for b in self._uniforms.values())

    def buffer(self, nbytes: int, name: str = "a buffer") -> wgpu.GPUBuffer:
        """Return a new storage buffer of zeros, of at least `nbytes` bytes: a multiple of 16, for `array<vec4f>`.

        Raises DeviceError, with `name` in the message, above the limits and when memory is refused.
        """
        self._check_open()
        size = max(16, -(-nbytes // 16) * 16)
        for limit in ("max-buffer-size", "max-storage-buffer-binding-size"):
            if size > self.limits[limit]:
                raise DeviceError(
                    f"{name}: {size:,} bytes, above {limit} {self.limits[limit]:,} of {self.name}; "
                    "a smaller batch or shorter rows need less"
                )
        with _refusals(f"{name}: {size:,} bytes on {self.name}, where this process holds {self.held_bytes:,}"):
            buffer = self.wgpu.create_buffer(size=size, usage=STORAGE)
        self._buffers[id(buffer)] = buffer
        return buffer

    def free(self, buffers: Iterable[wgpu.GPUBuffer]) -> None:
        """Destroy buffers of this device and forget the bind groups that use them."""
        gone = {id(buffer): buffer for buffer in buffers if id(buffer) in self._buffers}
        if not gone:
            return
        if not self.closed:
            self.flush()
        self._groups = {key: group for key, group in self._groups.items() if gone.keys().isdisjoint(key)}
        for key, buffer in gone.items():
            del self._buffers[key]
            buffer.destroy()

    def uniform(self, layout: str, *values: int | float) -> wgpu.GPUBuffer:
        """Return the uniform buffer with these values (`struct` codes I, i, f), made once for each content."""
        data = struct.pack("<" + layout, *values)
        data += bytes(-len(data) % 16)
        found = self._uniforms.get(data)
        if found is None:
            self._check_open()
            with _refusals("a uniform buffer"):
                found = self.wgpu.create_buffer_with_data(data=data, usage=UNIFORM)
            self._uniforms[data] = found
        return found

    def pipeline(self, stem: str, entry: str, **constants: wgsl.Constant) -> wgpu.GPUComputePipeline:
        """Return the compute pipeline of `kernels/<stem>.wgsl`'s entry point, compiled once."""
        key = stem, entry, tuple(constants.items())
        found = self._pipelines.get(key)
        if found is None:
            self._check_open()
            label = f"{stem}.{entry}"
            with _refusals(f"compiling {stem}.wgsl, {entry}, {constants}"):
                module = wgsl.module(self.wgpu, wgsl.program(stem, constants), label, self.checks)
                found = self.wgpu.create_compute_pipeline(
                    label=label, layout="auto", compute={"module": module, "entry_point": entry}
                )
            self._pipelines[key] = found
            self._labels[id(found)] = label
        return found

    def dispatch(
        self,
        pipeline: wgpu.GPUComputePipeline,
        uniform: wgpu.GPUBuffer,
        buffers: Sequence[wgpu.GPUBuffer],
        groups: tuple[int, int, int],
        label: str | None = None,
    ) -> None:
        """Record one dispatch; it runs after everything recorded before it.

        label: its name in `profile`, `<stem>.<entry>` unless given.
        """
        key = id(pipeline), id(uniform), *map(id, buffers)
        cached = self._groups.get(key)
        group = self._bind(key, pipeline, uniform, buffers) if cached is None else cached[0]
        if self._profile is not None:
            self._profile.add(label or self._labels[id(pipeline)])
            self._pass = self._open_encoder().begin_compute_pass(timestamp_writes=self._profile.writes())
        elif self._pass is None:
            self._pass = self._open_encoder().begin_compute_pass()
        self._pass.set_pipeline(pipeline)
        self._pass.set_bind_group(0, group)
        self._pass.dispatch_workgroups(*groups)
        self._dispatches += 1
        if self._profile is not None:
            self._end_pass()
            if self._profile.full:
                self.flush()
        elif self._dispatches >= DISPATCHES_PER_SUBMISSION:
            self.flush()

    def clear(self, buffer: wgpu.GPUBuffer) -> None:
        """Record setting a buffer to zeros."""
        self._check_buffer(buffer)
        encoder = self._open_encoder()
        self._end_pass()
        encoder.clear_buffer(buffer)

    def copy(self, source: wgpu.GPUBuffer, destination: wgpu.GPUBuffer) -> None:
        """Record copying one buffer to another of the same size."""
        self._check_buffer(source)
        self._check_buffer(destination)
        encoder = self._open_encoder()
        self._end_pass()
        encoder.copy_buffer_to_buffer(source, 0, destination, 0, source.size)

    def flush(self) -> None:
        """Submit what is recorded; it runs while the host goes on."""
        if self._encoder is None:
            return
        self._check_open()
        encoder, profile = self._encoder, self._profile
        try:
            with _refusals(f"running {self._dispatches} dispatches on {self.name}"):
                self._end_pass()
                if profile is not None:
                    profile.resolve(encoder)
                self.wgpu.queue.submit([encoder.finish()])
        finally:
            self._encoder = self._pass = None
            self._dispatches = 0
        if profile is not None:
            profile.collect()

    def wait(self) -> None:
        """Submit what is recorded and wait until the device has run it."""
        if self._fence is None:
            self._fence = self.buffer(16)
        self.read(self._fence, np.uint32, 1)

    def write(self, buffer: wgpu.GPUBuffer, array: np.ndarray, offset: int = 0) -> None:
        """Upload an array of 32-bit elements, after everything recorded before. offset: bytes."""
        array = np.ascontiguousarray(array)
        if not array.nbytes:
            return
        self._check_buffer(buffer, offset + array.nbytes)
        self.flush()
        with _refusals(f"uploading {array.nbytes:,} bytes to {self.name}"):
            self.wgpu.queue.write_buffer(buffer, offset, array)

    def read(self, buffer: wgpu.GPUBuffer, dtype: type, count: int, offset: int = 0) -> np.ndarray:
        """Return `count` elements on the host; waits for everything recorded before. offset: bytes."""
        nbytes = count * np.dtype(dtype).itemsize
        self._check_buffer(buffer, offset + nbytes)
        self.flush()
        if not nbytes:
            return np.empty(0, dtype)
        with _refusals(f"reading {nbytes:,} bytes from {self.name}"):
            return np.frombuffer(self.wgpu.queue.read_buffer(buffer, offset, nbytes), dtype).copy()

    @contextmanager
    def profile(self) -> Iterator[list[KernelTime]]:
        """Within, time every dispatch on the device; on leaving, the list is filled, the longest kernel first.

        Raises DeviceError where the adapter has no timestamp queries.
        """
        if "timestamp-query" not in self.wgpu.features:
            raise DeviceError(f"{self.name} has no timestamp queries, so its kernels cannot be timed one by one")
        self.flush()
        times: list[KernelTime] = []
        self._profile = profile = Timestamps(self.wgpu)
        try:
            yield times
            self.flush()
        finally:
            self._profile = None
            profile.close()
        times += profile.times()

    def close(self) -> None:
        """Destroy every buffer and the device; what is recorded is dropped."""
        if self.closed:
            return
        self.closed = True
        self._encoder = self._pass = None
        self.free(list(self._buffers.values()))
        for buffer in self._uniforms.values():
            buffer.destroy()
        for cache in (self._groups, self._uniforms, self._pipelines, self._labels):
            cache.clear()
        self.wgpu.destroy()

    def _bind(
        self,
        key: tuple[int, ...],
        pipeline: wgpu.GPUComputePipeline,
        uniform: wgpu.GPUBuffer,
        buffers: Sequence[wgpu.GPUBuffer],
    ) -> wgpu.GPUBindGroup:
        """Make the bind group of these buffers, and keep it."""
        for buffer in buffers:
            self._check_buffer(buffer)
        if len(self._groups) >= CACHED_GROUPS:
            self._forget_uniforms(uniform)
        entries = [
            {"binding": i, "resource": {"buffer": b, "offset": 0, "size": b.size}}
            for i, b in enumerate((uniform, *buffers))
        ]
        with _refusals(f"binding buffers of {[b.size for b in buffers]} bytes to {self._labels[id(pipeline)]}"):
            group = self.wgpu.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=entries)
        self._groups[key] = group, (pipeline, uniform, *buffers)
        return group

    def _forget_uniforms(self, but: wgpu.GPUBuffer) -> None:
        """Empty the caches of bind groups and uniform buffers, which grow with every new shape."""
        self.flush()
        self._groups.clear()
        self._uniforms = {data: buffer for data, buffer in self._uniforms.items() if buffer is but}

    def _open_encoder(self) -> Any:
        if self._encoder is None:
            self._check_open()
            with _refusals(f"recording for {self.name}"):
                self._encoder = self.wgpu.create_command_encoder()
        return self._encoder

    def _end_pass(self) -> None:
        if self._pass is not None:
            self._pass.end()
            self._pass = None

    def _check_open(self) -> None:
        if self.closed:
            raise DeviceError(f"{self.name} is closed")
        if os.getpid() != self._process:
            raise DeviceError(f"{self.name} was opened before a fork; open it in the process that uses it")

    def _check_buffer(self, buffer: wgpu.GPUBuffer, end: int = 0) -> None:
        """Raise on a buffer that is not alive here (reading a destroyed one aborts the process) or too small."""
        self._check_open()
        if id(buffer) not in self._buffers:
            raise DeviceError(f"a buffer of {buffer.size:,} bytes is not on {self.name}, or was freed")
        if end > buffer.size:
            raise DeviceError(f"{end:,} bytes asked of a buffer of {buffer.size:,}")


def grid(count: int) -> tuple[int, int, int]:
    """Return workgroups (x, y, 1) of at least `count`, at most 65,535 each way; number x + y * num_workgroups.x."""
    x = min(count, GROUPS_PER_DIMENSION)
    return x, -(-count // x), 1


@contextmanager
def _refusals(what: str) -> Iterator[None]:
    """Turn what wgpu raises into a DeviceError that says what was asked for."""
    try:
        yield
    except (wgpu.GPUError, RuntimeError) as error:
        if isinstance(error, DeviceError):
            raise
        kind = "the device was lost" if "device is lost" in str(error) else "refused"
        if isinstance(error, wgpu.GPUOutOfMemoryError):
            kind = "out of memory"
        raise DeviceError(f"{what}: {kind}: {' '.join(str(error).split())}") from error
