"""The GPU side of `ops.Ops`, in float32."""

from mamba_ops.gpu.adamw import adamw
from mamba_ops.gpu.adapters import choose, describe, open_device
from mamba_ops.gpu.causal_conv1d import causal_conv1d_backward, causal_conv1d_forward
from mamba_ops.gpu.device import Device, DeviceError
from mamba_ops.gpu.embedding import embedding_backward, embedding_forward
from mamba_ops.gpu.global_norm import global_norm
from mamba_ops.gpu.linear import linear_backward, linear_forward
from mamba_ops.gpu.linear_cross_entropy import linear_cross_entropy_forward, total
from mamba_ops.gpu.low_rank import low_rank_backward, low_rank_forward
from mamba_ops.gpu.rms_norm import rms_norm_backward, rms_norm_forward
from mamba_ops.gpu.selective_scan import selective_scan_backward, selective_scan_forward
from mamba_ops.gpu.workspace import GpuWorkspace


class GpuOps(GpuWorkspace):
    """`ops.Ops` on the GPU: the functions of this folder over one workspace; a context manager that frees it.

    owner: whether closing it closes the device too.
    """

    def __init__(self, device: Device, poison: bool = False, owner: bool = False):
        super().__init__(device, poison)
        self._owner = owner

    @property
    def name(self) -> str:
        """The adapter's name, driver, kind and backend."""
        return describe(self.device.adapter)

    def close(self) -> None:
        """Free every array, and close the device where these ops own it."""
        try:
            super().close()
        finally:
            if self._owner:
                self.device.close()

    adamw = adamw
    causal_conv1d_backward = causal_conv1d_backward
    causal_conv1d_forward = causal_conv1d_forward
    embedding_backward = embedding_backward
    embedding_forward = embedding_forward
    global_norm = global_norm
    linear_backward = linear_backward
    linear_cross_entropy_forward = linear_cross_entropy_forward
    linear_forward = linear_forward
    low_rank_backward = low_rank_backward
    low_rank_forward = low_rank_forward
    rms_norm_backward = rms_norm_backward
    rms_norm_forward = rms_norm_forward
    selective_scan_backward = selective_scan_backward
    selective_scan_forward = selective_scan_forward
    total = total


def open_gpu(
    adapter: str | int = "gpu",
    *,
    checks: bool | None = None,
    subgroups: bool = True,
    binding_limit: int | None = None,
) -> GpuOps:
    """Open a device and return its ops; leaving them as a context manager closes both.

    adapter and the options are those of `adapters.choose` and `adapters.open_device`. Raises DeviceError where the
    adapter asked for is not there, or is none (`cpu`, and `auto` without hardware).
    """
    found, reason, _ = choose(adapter)
    if found is None:
        raise DeviceError(f"adapter {adapter!r}: {reason}; open_cpu opens that side")
    device = open_device(found, checks=checks, subgroups=subgroups, binding_limit=binding_limit)
    return GpuOps(device, owner=True)
