"""Where the model runs: the ops that the setting `adapter` names, alone on their card."""

import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mamba_ops.cpu import open_cpu
from mamba_ops.ops import Ops

try:
    import fcntl
except ImportError:  # no such lock on Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
_held: set[Path] = set()


class Opened(NamedTuple):
    """Ops, which side they are and why in one line, and the version of a device's driver."""

    ops: Ops
    reason: str
    driver: str = ""


@contextmanager
def open_ops(
    adapter: str | int = "auto", dtype: type = np.float32, say: Callable[[str], None] = log.warning
) -> Iterator[Opened]:
    """Open the ops of an adapter: `auto`, `cpu`, `gpu`, a part of a name or an index; freed on leaving.

    `auto` takes the first hardware adapter and otherwise, or where it cannot be opened, NumPy. An adapter is opened
    by one process at a time: another one waits, and `say` is told who has it. wgpu is loaded only when an adapter is
    looked for. Raises ValueError for an adapter that is named with another dtype than float32, RuntimeError where it
    is not there, cannot be opened, or is open in this process already.
    """
    with ExitStack() as stack:
        yield _open(str(adapter).strip() or "auto", np.dtype(dtype), say, stack)


def _open(wanted: str, dtype: np.dtype, say: Callable[[str], None], stack: ExitStack) -> Opened:
    if wanted == "cpu":
        return Opened(open_cpu(dtype.type), "the processor was asked for: NumPy runs the model")
    if dtype != np.float32 and wanted != "auto":
        raise ValueError(f"adapter {wanted!r}: expected float32, the only dtype of a device, got {dtype}")
    if dtype != np.float32:
        return Opened(open_cpu(dtype.type), f"a device has no {dtype}: NumPy runs the model on the processor")
    try:
        return _open_device(wanted, say, stack)
    except (ImportError, OSError, RuntimeError) as error:
        if wanted != "auto":
            raise
        return Opened(open_cpu(dtype.type), f"no adapter can be opened ({error}): NumPy runs the model")


def _open_device(wanted: str, say: Callable[[str], None], stack: ExitStack) -> Opened:
    try:
        from mamba_ops.gpu.adapters import choose, open_device
        from mamba_ops.gpu.gpu_ops import GpuOps
    except (ImportError, OSError, RuntimeError) as error:
        raise RuntimeError(
            f"adapter {wanted!r}: wgpu cannot be loaded ({error}); install the package wgpu, and on Linux libvulkan1"
        ) from error
    choice = choose(wanted)
    if choice.adapter is None:
        return Opened(open_cpu(), choice.reason)
    with ExitStack() as own:
        own.enter_context(alone(f"{choice.adapter.info['device']} {choice.number}", say))
        ops = own.enter_context(GpuOps(open_device(choice.adapter), owner=True))
        stack.enter_context(own.pop_all())
    return Opened(ops, f"{choice.reason}: it runs the model", choice.adapter.info["description"])


@contextmanager
def alone(adapter: str, say: Callable[[str], None] = log.warning) -> Iterator[None]:
    """Hold an adapter's lock, which the operating system gives back when the process ends, however it ends.

    While another process holds it this one waits, after telling `say` which. Raises RuntimeError when this process
    does. Where the system has no such locks nothing is held.
    """
    path = lock_path(adapter)
    if path in _held:
        raise RuntimeError(f"adapter {adapter}: this process has it open already; close it first")
    if not fcntl:
        yield
        return
    descriptor = _open_lock(path)
    try:
        _wait(descriptor, adapter, path, say)
        _held.add(path)
        _sign(descriptor)
        yield
    finally:
        _held.discard(path)
        os.close(descriptor)


def lock_path(adapter: str) -> Path:
    """Return the file whose lock an adapter's user holds."""
    name = re.sub(r"[^a-z0-9]+", "-", adapter.lower()).strip("-")
    return Path(tempfile.gettempdir()) / f"mamba-ops-{name}.lock"


def _open_lock(path: Path) -> int:
    """Open a lock file, made for everyone; one that another user made may be readable only, which is enough."""
    with suppress(FileExistsError):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        os.fchmod(descriptor, 0o666)
        return descriptor
    try:
        return os.open(path, os.O_RDWR)
    except PermissionError:
        return os.open(path, os.O_RDONLY)


def _wait(descriptor: int, adapter: str, path: Path, say: Callable[[str], None]) -> None:
    told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not told:
                holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
                say(f"adapter {adapter} is in use by {holder} ({path}); this process waits for it")
            told = True
            time.sleep(POLL_SECONDS)


def _sign(descriptor: int) -> None:
    """Write who holds the lock, where the file may be written."""
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} ({' '.join(sys.argv)[:120]})".encode(), 0)
