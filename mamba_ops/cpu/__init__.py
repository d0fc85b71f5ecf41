"""The ops on NumPy arrays: one file an op, gathered in `cpu_ops`."""

from mamba_ops.cpu.cpu_ops import CpuOps, open_cpu

__all__ = ["CpuOps", "open_cpu"]
