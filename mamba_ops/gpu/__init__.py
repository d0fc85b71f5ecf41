"""The ops on wgpu: the same stems as `cpu/`, launchers of the kernels in `kernels/`."""
