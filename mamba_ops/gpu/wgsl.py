"""WGSL text: constants put before a kernel's file, and its unrolled loops written out.

Arrays with a dynamic index spill to memory, and a loop's index is dynamic, so a kernel that keeps numbers in
registers names each of them. Lines that begin with `//:` write those names out:

    //: for i in 0..ROWS        repeats the lines up to `//: end`, with `$i` replaced by 0, 1, ...
    //: for i in ROWS..0        the same from ROWS - 1 down to 0
    //: if NAME                 keeps the lines up to `//: else` or `//: end` where the constant is not zero
"""

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path

import wgpu
from wgpu.backends.wgpu_native import GPUShaderModule
from wgpu.backends.wgpu_native._api import libf
from wgpu.backends.wgpu_native._ffi import ffi, lib

Constant = int | float | str

_DIRECTIVE = re.compile(r"\s*//: *(?:(for) (\w) in (\w+)\.\.(\w+)|(if) (\w+)|(else)|(end))\s*")


@cache
def source(stem: str) -> str:
    """Return the text of a kernel file, from the checkout or from the installed package."""
    packaged = resources.files("mamba_ops").joinpath("_kernels", f"{stem}.wgsl")
    if packaged.is_file():
        return packaged.read_text(encoding="utf-8")
    return (Path(__file__).parents[2] / "kernels" / f"{stem}.wgsl").read_text(encoding="utf-8")


def program(stem: str, constants: Mapping[str, Constant]) -> str:
    """Return a kernel's text with its constants before it (ints as `u32`) and its unrolled loops written out."""
    prelude = "".join(f"const {name} = {_literal(value)};\n" for name, value in sorted(constants.items()))
    return prelude + source("common") + expand(source(stem), constants)


def expand(text: str, constants: Mapping[str, Constant]) -> str:
    """Return `text` with the lines that begin with `//:` carried out. Raises ValueError on one that is wrong."""
    lines, end = _block(text.splitlines(), 0, constants)
    if end is not None:
        raise ValueError(f"line {end + 1}: an `else` or `end` too many")
    return "\n".join(lines) + "\n"


def module(device: wgpu.GPUDevice, code: str, label: str, checks: bool) -> wgpu.GPUShaderModule:
    """Compile WGSL; without run-time checks where asked for and where wgpu-native offers it."""
    if checks or not hasattr(lib, "wgpuDeviceCreateShaderModuleTrusted"):
        return device.create_shader_module(code=code, label=label)
    text = ffi.new("char[]", code.encode())
    wgsl = ffi.new("WGPUShaderSourceWGSL *")
    wgsl.chain.sType = lib.WGPUSType_ShaderSourceWGSL
    wgsl.code.data, wgsl.code.length = text, len(text) - 1
    descriptor = ffi.new("WGPUShaderModuleDescriptor *")
    descriptor.nextInChain = ffi.cast("WGPUChainedStruct *", wgsl)
    created = libf.wgpuDeviceCreateShaderModuleTrusted(device._internal, descriptor, 0)
    return GPUShaderModule(label, created, device)


def _block(lines: list[str], start: int, constants: Mapping[str, Constant]) -> tuple[list[str], int | None]:
    """Carry out lines up to the `else` or `end` that closes the block; return them and that line's index."""
    out: list[str] = []
    at = start
    while at < len(lines):
        match = _DIRECTIVE.fullmatch(lines[at])
        if match is None:
            if lines[at].lstrip().startswith("//:"):
                raise ValueError(f"line {at + 1}: {lines[at].strip()!r} is neither for, if, else nor end")
            out.append(lines[at])
            at += 1
            continue
        loop, name, first, last, condition, flag, _, _ = match.groups()
        if not loop and not condition:
            return out, at
        body, end = _block(lines, at + 1, constants)
        otherwise: list[str] = []
        if condition and end is not None and "else" in lines[end]:
            otherwise, end = _block(lines, end + 1, constants)
        if end is None:
            raise ValueError(f"line {at + 1}: {lines[at].strip()!r} has no end")
        if loop:
            for value in _values(_number(first, constants), _number(last, constants)):
                out += [line.replace(f"${name}", str(value)) for line in body]
        else:
            out += body if _number(flag, constants) else otherwise
        at = end + 1
    return out, None


def _values(first: int, last: int) -> range:
    return range(first, last) if first <= last else range(first - 1, last - 1, -1)


def _number(text: str, constants: Mapping[str, Constant]) -> int:
    return int(text) if text.isdecimal() else int(constants[text])


def _literal(value: Constant) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value}u" if isinstance(value, int) else str(value)
