"""One stem and one signature for each op, wherever it is written; and the library stands without Dagster."""

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mamba_ops.cpu.cpu_ops import CpuOps
from mamba_ops.gpu.gpu_ops import GpuOps
from mamba_ops.ops import Ops

ROOT = Path(__file__).parents[1]
FOLDERS = "mamba_ops/cpu", "mamba_ops/gpu", "tests/ops", "tests/gpu"
METHODS = {name for name, value in vars(Ops).items() if callable(value) and not name.startswith("_")}
OPS = sorted(name for name in METHODS if name.endswith(("_forward", "_backward")) or name in ("adamw", "global_norm"))


def stems(folder):
    files = (ROOT / folder).iterdir()
    return {path.stem.removeprefix("test_") for path in files if path.suffix in (".py", ".wgsl")}


def stem_of(op):
    return re.sub(r"_(forward|backward)$", "", op)


def parameters(function):
    """Name, kind and default of each parameter after the first: `self` in the interface, `ops` in a function."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()][1:]


KERNELS = stems("kernels") - {"common"}


def test_there_is_one_kernel_file_for_each_op():
    assert {stem_of(op) for op in OPS} == KERNELS


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_op_has_a_file_of_the_same_stem(folder):
    """Beside them lies what several ops share."""
    assert stems(folder) >= KERNELS


@pytest.mark.parametrize("side", ["cpu", "gpu"])
@pytest.mark.parametrize("op", OPS)
def test_signatures_agree(op, side):
    function = getattr(importlib.import_module(f"mamba_ops.{side}.{stem_of(op)}"), op)
    assert next(iter(inspect.signature(function).parameters)) == "ops"
    assert parameters(function) == parameters(getattr(Ops, op))
    assert getattr(CpuOps if side == "cpu" else GpuOps, op) is function


@pytest.mark.parametrize("side", [CpuOps, GpuOps])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_both_sides_take_what_the_interface_says(method, side):
    """A side may take more, when it can be left out."""
    wanted, found = parameters(getattr(Ops, method)), parameters(getattr(side, method))
    assert found[: len(wanted)] == wanted
    assert all(default is not inspect.Parameter.empty for _, _, default in found[len(wanted) :])


@pytest.mark.parametrize("stem", sorted(KERNELS))
def test_entry_points_are_forward_and_backward(stem):
    text = (ROOT / "kernels" / f"{stem}.wgsl").read_text(encoding="utf-8")
    entries = re.findall(r"@compute[^{]*?\bfn (\w+)", text)
    assert "forward" in entries
    assert any(entry.startswith("backward") for entry in entries) == (f"{stem}_backward" in OPS)


def test_the_library_never_imports_dagster():
    script = (
        "import importlib, pkgutil, sys, mamba_ops\n"
        "for module in pkgutil.walk_packages(mamba_ops.__path__, 'mamba_ops.'):\n"
        "    importlib.import_module(module.name)\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0].startswith('dagster')))\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr
    importing = re.compile(r"^\s*(import|from)\s+(dagster|pipelines)\b", re.MULTILINE)
    assert [p.name for p in (ROOT / "mamba_ops").rglob("*.py") if importing.search(p.read_text(encoding="utf-8"))] == []
