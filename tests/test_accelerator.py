"""Opening a side by the setting `adapter`, and one process at a time on an adapter."""

import importlib
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from mamba_ops import accelerator
from mamba_ops.accelerator import alone, lock_path, open_ops
from mamba_ops.cpu import CpuOps

HOLDER = """
import sys
from mamba_ops.accelerator import alone
with alone(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _own_locks(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(accelerator.tempfile, "tempdir", str(tmp_path))


def without_wgpu(monkeypatch, error):
    """Make loading of wgpu fail, as without the package or without a Vulkan loader."""
    for name in [name for name in sys.modules if name.split(".")[0] == "wgpu" or name.startswith("mamba_ops.gpu.")]:
        monkeypatch.delitem(sys.modules, name)

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "wgpu":
                raise error

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])


def test_the_processor_is_opened_without_wgpu(tmp_path):
    code = """
    import sys
    from mamba_ops.accelerator import open_ops
    with open_ops("cpu") as (ops, reason, _):
        print(ops.name, "/", reason)
    print("wgpu" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout == "NumPy / the processor was asked for: NumPy runs the model\nFalse\n"


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_processor_has_the_dtype_asked_for(dtype):
    with open_ops("cpu", dtype) as (ops, *_):
        assert isinstance(ops, CpuOps)
        assert ops.dtype == dtype


def test_only_float32_is_for_a_device():
    with open_ops("auto", np.float64) as (ops, reason, _):
        assert isinstance(ops, CpuOps)
    assert reason == "a device has no float64: NumPy runs the model on the processor"
    with pytest.raises(ValueError, match=r"adapter 'gpu': expected float32.*got float64"), open_ops("gpu", np.float64):
        pass


ERRORS = [ImportError("No module named 'wgpu'"), OSError("libvulkan.so.1: no such file"), RuntimeError("no library")]


@pytest.mark.parametrize("error", ERRORS)
def test_without_wgpu_auto_takes_the_processor_and_says_why(monkeypatch, error):
    without_wgpu(monkeypatch, error)
    with open_ops() as (ops, reason, _):
        assert isinstance(ops, CpuOps)
    assert str(error) in reason
    assert "NumPy runs the model" in reason
    assert "\n" not in reason


@pytest.mark.parametrize("wanted", ["gpu", "llvmpipe", "0"])
@pytest.mark.parametrize("error", ERRORS)
def test_without_wgpu_a_device_is_an_error(monkeypatch, error, wanted):
    without_wgpu(monkeypatch, error)
    with pytest.raises(RuntimeError, match=f"adapter '{wanted}': wgpu cannot be loaded .*install"), open_ops(wanted):
        pass


def adapters_found(monkeypatch, found):
    adapters = importlib.import_module("mamba_ops.gpu.adapters")
    monkeypatch.setattr(adapters, "list_adapters", lambda: found)


def test_without_hardware_auto_takes_the_processor(monkeypatch):
    adapters_found(monkeypatch, [])
    with open_ops() as (ops, reason, _):
        assert isinstance(ops, CpuOps)
    assert reason == "no hardware adapter (no adapter at all): NumPy runs the model on the processor"
    with pytest.raises(RuntimeError, match="adapter 'gpu': no hardware adapter; found: no adapter at all; install"):
        open_ops("gpu").__enter__()


class BrokenAdapter:
    """A card whose driver refuses every device."""

    info = {"device": "A card", "vendor": "", "description": "1.0", "adapter_type": "DiscreteGPU"} | {
        "backend_type": "Vulkan"
    }
    limits = dict.fromkeys(importlib.import_module("mamba_ops.gpu.device").LIMITS, 1)
    features = ()

    def request_device_sync(self, **_):
        raise RuntimeError("driver is broken")


def test_a_card_that_cannot_be_opened(monkeypatch):
    adapters_found(monkeypatch, [BrokenAdapter()])
    with open_ops() as (ops, reason, _):
        assert isinstance(ops, CpuOps)
    assert "opening A card: refused: driver is broken" in reason
    with pytest.raises(RuntimeError, match="opening A card: refused: driver is broken"), open_ops("gpu"):
        pass
    with alone("A card 0"):
        pass


def test_one_process_at_a_time_and_the_next_is_told_who_has_it(tmp_path):
    command = [sys.executable, "-c", HOLDER, "A card 0"]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    told = []

    def say(text):
        told.append(text)
        holder.kill()

    with alone("A card 0", say):
        assert holder.wait() != 0
    holder.communicate()
    (text,) = told
    assert text.startswith(f"adapter A card 0 is in use by process {holder.pid} (")
    assert str(lock_path("A card 0")) in text
    assert lock_path("A card 0").parent == tmp_path


def test_a_process_does_not_wait_for_itself():
    with alone("A card 0"):
        with pytest.raises(RuntimeError, match="A card 0: this process has it open already"), alone("A card 0"):
            pass
        with alone("A card 1"):
            pass
    with alone("A card 0", say=pytest.fail):
        pass


def test_the_lock_is_free_after_an_error():
    def failing():
        with alone("A card 0"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    with alone("A card 0", say=pytest.fail):
        pass
