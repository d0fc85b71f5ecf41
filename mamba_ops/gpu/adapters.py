"""Choosing an adapter: hardware unless a software one is named, Vulkan, Metal and DirectX 12 before OpenGL."""

from typing import NamedTuple

import wgpu

from mamba_ops.gpu.device import Device, DeviceError

HARDWARE = ("DiscreteGPU", "IntegratedGPU")
SOFTWARE = ("llvmpipe", "lavapipe", "softpipe", "swiftshader", "microsoft basic", "warp")
BACKENDS = ("Vulkan", "Metal", "D3D12", "OpenGL", "OpenGLES")
SAFE_WITHOUT_CHECKS = ("nvidia", "llvmpipe")
DRIVERS = (
    "install the driver of the graphics card with its Vulkan part (Linux: NVIDIA's driver, or mesa-vulkan-drivers "
    "for AMD and Intel, and libvulkan1; `vulkaninfo --summary` must list the card; in a container pass the card "
    "in); on Windows and macOS the vendor's driver or the system's is enough"
)


class Choice(NamedTuple):
    """The adapter that was chosen, None for the NumPy side, and why in one line.

    number: which it is of those with the same name and backend.
    """

    adapter: wgpu.GPUAdapter | None
    reason: str
    number: int = 0


def list_adapters() -> list[wgpu.GPUAdapter]:
    """Return every adapter: hardware first, then by backend (Vulkan, Metal, DirectX 12, OpenGL)."""
    return sorted(wgpu.gpu.enumerate_adapters_sync(), key=_rank)


def describe(adapter: wgpu.GPUAdapter) -> str:
    """Return an adapter's name, driver, kind and backend in one line."""
    info = adapter.info
    return f"{info['device']} ({info['description']}), {info['adapter_type']}, {info['backend_type']}"


def is_software(adapter: wgpu.GPUAdapter) -> bool:
    """Return whether an adapter runs on the processor: llvmpipe, SwiftShader, WARP."""
    info = adapter.info
    names = f"{info['device']} {info['vendor']} {info['description']}".lower()
    return info["adapter_type"] == "CPU" or any(name in names for name in SOFTWARE)


def choose(wanted: str | int = "auto") -> Choice:
    """Choose an adapter: `auto`, `cpu`, `gpu`, an index into `list_adapters()`, or a part of a name.

    `auto` takes the first hardware adapter, and None (the NumPy side) where there is none. Raises DeviceError,
    saying what was found, for `gpu` without a hardware adapter and for a name or an index that is not there.
    """
    wanted = str(wanted)
    if wanted == "cpu":
        return Choice(None, "the processor was asked for: NumPy runs the model")
    found = list_adapters()
    if wanted in ("auto", "gpu"):
        hardware = [adapter for adapter in found if not is_software(adapter)]
        if hardware:
            return Choice(hardware[0], f"found {describe(hardware[0])}", _number(hardware[0], found))
        if wanted == "auto":
            return Choice(None, f"no hardware adapter ({_listing(found)}): NumPy runs the model on the processor")
        raise DeviceError(f"adapter 'gpu': no hardware adapter; found: {_listing(found)}; {DRIVERS}")
    if wanted.isdecimal():
        matches = found[int(wanted) : int(wanted) + 1]
    else:
        matches = [adapter for adapter in found if wanted.lower() in describe(adapter).lower()]
    if not matches:
        raise DeviceError(f"adapter {wanted!r}: no such name or index; found: {_listing(found)}; {DRIVERS}")
    return Choice(matches[0], f"adapter {wanted!r} is {describe(matches[0])}", _number(matches[0], found))


def safe_without_checks(adapter: wgpu.GPUAdapter) -> bool:
    """Return whether WGSL's run-time checks may be off: through Vulkan, NVIDIA's own driver and llvmpipe.

    Those are the ones on which every kernel was tested so.
    """
    info = adapter.info
    names = f"{info['device']} {info['vendor']}".lower()
    return info["backend_type"] == "Vulkan" and "nvk" not in names and any(n in names for n in SAFE_WITHOUT_CHECKS)


def open_device(
    adapter: wgpu.GPUAdapter,
    *,
    checks: bool | None = None,
    subgroups: bool = True,
    binding_limit: int | None = None,
) -> Device:
    """Open an adapter. checks: None keeps WGSL's run-time checks unless the driver is known to be safe without.

    subgroups: whether kernels may use them where the adapter has them. binding_limit: bytes of one binding, to
    force it below the adapter's. Raises DeviceError.
    """
    checks = not safe_without_checks(adapter) if checks is None else checks
    return Device(adapter, checks=checks, subgroups=subgroups, binding_limit=binding_limit)


def _rank(adapter: wgpu.GPUAdapter) -> tuple[int, int, int]:
    info = adapter.info
    kind, backend = info["adapter_type"], info["backend_type"]
    kinds = HARDWARE.index(kind) if kind in HARDWARE else len(HARDWARE)
    return int(is_software(adapter)), BACKENDS.index(backend) if backend in BACKENDS else len(BACKENDS), kinds


def _number(adapter: wgpu.GPUAdapter, found: list[wgpu.GPUAdapter]) -> int:
    same = [other for other in found if describe(other) == describe(adapter)]
    return next(i for i, other in enumerate(same) if other is adapter)


def _listing(adapters: list[wgpu.GPUAdapter]) -> str:
    return "; ".join(f"[{i}] {describe(adapter)}" for i, adapter in enumerate(adapters)) or "no adapter at all"
