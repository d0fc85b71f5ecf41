"""Gradient buffers and moments on the device."""

from collections.abc import Iterable, Mapping

from mamba_ops.gpu.workspace import DeviceArray, GpuWorkspace
from mamba_ops.optimizer import AdamState


class DeviceGradients:
    """One buffer a trained parameter, in its row parts; `take` says whether this step has already written to it."""

    def __init__(self, ops: GpuWorkspace, params: Mapping[str, DeviceArray], need: Iterable[str]):
        self.arrays = {name: ops.zeros_like(params[name]) for name in need}
        self._ops = ops
        self._written: set[str] = set()

    def take(self, name: str) -> tuple[DeviceArray, bool]:
        """Return the buffer of `name` and whether to add to it (False on the first use in a step)."""
        add = name in self._written
        self._written.add(name)
        return self.arrays[name], add

    def start_step(self) -> None:
        """Make the next use of every buffer overwrite it."""
        self._written.clear()

    def finish_step(self) -> None:
        """Zero what this step has not written to, so that nothing of an earlier step is left."""
        for name in self.arrays.keys() - self._written:
            self._ops.zero(self.arrays[name])


def device_moments(ops: GpuWorkspace, params: Mapping[str, DeviceArray], names: Iterable[str]) -> AdamState:
    """Return zero moments and counts for the named parameters, on the device."""
    chosen = list(names)
    moments = {name: (ops.zeros_like(params[name]), ops.zeros_like(params[name])) for name in chosen}
    return AdamState(moments, dict.fromkeys(chosen, 0))
