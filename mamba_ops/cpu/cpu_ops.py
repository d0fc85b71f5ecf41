"""The CPU side of `ops.Ops`, in float32 or float64."""

import numpy as np

from mamba_ops.cpu.adamw import adamw
from mamba_ops.cpu.causal_conv1d import causal_conv1d_backward, causal_conv1d_forward
from mamba_ops.cpu.embedding import embedding_backward, embedding_forward
from mamba_ops.cpu.global_norm import global_norm
from mamba_ops.cpu.linear import linear_backward, linear_forward
from mamba_ops.cpu.linear_cross_entropy import linear_cross_entropy_forward
from mamba_ops.cpu.low_rank import low_rank_backward, low_rank_forward
from mamba_ops.cpu.rms_norm import rms_norm_backward, rms_norm_forward
from mamba_ops.cpu.selective_scan import selective_scan_backward, selective_scan_forward
from mamba_ops.cpu.workspace import Workspace


class CpuOps(Workspace):
    """`ops.Ops` on the CPU: the functions of this folder over one workspace."""

    name = "NumPy"

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


def open_cpu(dtype: type = np.float32, threads: int | None = None) -> CpuOps:
    """Return the CPU ops for float32 or float64 arrays, on all cores unless told a number of threads."""
    return CpuOps(dtype, threads)
