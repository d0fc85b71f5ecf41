"""Parameters and moments of a run on the host and where the ops run, kept in step."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from mamba_ops.ops import Ops
from mamba_ops.optimizer import AdamState
from mamba_ops.tensors import fingerprint


class Mirror:
    """The two sides of named parameters, and of the moments of those that train.

    The side that computed a change leads: `pull` brings the device's state to the host (before a checkpoint),
    `push` the host's to the device. On the CPU both sides are the same arrays and neither does anything.
    """

    def __init__(self, ops: Ops, params: dict[str, np.ndarray], adam: AdamState | None = None):
        self.ops = ops
        self.host = params
        self.params = {name: ops.upload_parameter(name, array) for name, array in params.items()}
        self._host_adam = adam or AdamState({}, {})
        moments = {
            name: (ops.upload_parameter(name, first), ops.upload_parameter(name, second))
            for name, (first, second) in self._host_adam.moments.items()
        }
        self.adam = AdamState(moments, self._host_adam.counts)

    def pull(self) -> None:
        """Overwrite the host's parameters and moments with the device's."""
        for array, device in self._pairs():
            if array is not device:
                array[...] = self.ops.read(device)

    def push(self, names: Iterable[str]) -> None:
        """Overwrite the device's parameters of these names with the host's."""
        for name in names:
            self.ops.write_parameter(self.params[name], self.host[name])

    def verify(self) -> tuple[str, str]:
        """Return the fingerprints of the host's and of the device's parameters, equal when they are bit for bit."""
        return fingerprint(self.host), fingerprint({name: self.ops.read(value) for name, value in self.params.items()})

    def close(self) -> None:
        """Free the device's side."""
        self.ops.release(device for _, device in self._pairs())

    def _pairs(self) -> Iterable[tuple[np.ndarray, Any]]:
        for name, device in self.params.items():
            yield self.host[name], device
        for name, pair in self.adam.moments.items():
            yield from zip(self._host_adam.moments[name], pair, strict=True)
