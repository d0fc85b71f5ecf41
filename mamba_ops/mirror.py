"""Parameters and moments of a run on the host and where the ops run, kept in step."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from mamba_ops.config import MambaConfig
from mamba_ops.cpu import open_cpu
from mamba_ops.model import logits
from mamba_ops.ops import IGNORED, Batch, Ops
from mamba_ops.optimizer import AdamState
from mamba_ops.parameters import EMBEDDING
from mamba_ops.tensors import fingerprint

TOLERANCE = 1e-3
PROBE = 2, 33


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
        """Overwrite the host's moments, and the parameters that they belong to, with the device's."""
        for name, array, device in self._pairs():
            if array is not device and name in self.adam.moments:
                array[...] = self.ops.read(device)

    def push(self, names: Iterable[str]) -> None:
        """Overwrite the device's parameters of these names with the host's."""
        for name in names:
            self.ops.write_parameter(self.params[name], self.host[name])

    def verify(self) -> tuple[str, str]:
        """Return the fingerprints of the host's and of the device's parameters, equal when they are bit for bit."""
        return fingerprint(self.host), fingerprint({name: self.ops.read(value) for name, value in self.params.items()})

    @property
    def one_side(self) -> bool:
        """Whether the ops run on the host's own arrays."""
        return all(array is device for _, array, device in self._pairs())

    def close(self) -> None:
        """Free the device's side."""
        self.ops.release(device for _, _, device in self._pairs())

    def _pairs(self) -> Iterable[tuple[str, np.ndarray, Any]]:
        for name, device in self.params.items():
            yield name, self.host[name], device
        for name, pair in self.adam.moments.items():
            for array, device in zip(self._host_adam.moments[name], pair, strict=True):
                yield name, array, device


class Agreement(NamedTuple):
    """The two sides of parameters beside each other.

    host, device: fingerprints. nbytes: of the parameters on the device. difference, largest: max|difference| of the
    two sides' logits of a probe batch, and max|logit|.
    """

    host: str
    device: str
    nbytes: int
    difference: float
    largest: float

    @property
    def agrees(self) -> bool:
        """Whether the parameters are the same bytes, and the logits differ by at most TOLERANCE of the largest."""
        return self.host == self.device and self.difference <= TOLERANCE * self.largest


def compare(mirror: Mirror, config: MambaConfig) -> Agreement:
    """Read the device's parameters back, and run a batch of seeded random tokens on both sides."""
    host, device = mirror.verify()
    ids = np.random.default_rng(0).integers(0, config.vocab_size, PROBE)
    positions = np.broadcast_to(np.arange(PROBE[1], dtype=np.uint32), PROBE)
    batch = Batch(ids, np.full(PROBE, IGNORED), positions)
    cpu = open_cpu(mirror.host[EMBEDDING].dtype.type)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # what is not finite does not agree
        expected = logits(cpu, mirror.host, config, cpu.rows(batch)).astype(np.float64)
        with mirror.ops.scope():
            found = logits(mirror.ops, mirror.params, config, mirror.ops.rows(batch)).astype(np.float64)
        difference = float(np.abs(found - expected).max())
    nbytes = sum(value.nbytes for value in mirror.host.values())
    return Agreement(host, device, nbytes, difference, float(np.abs(expected).max()))
