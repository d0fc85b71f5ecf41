"""Memory: what this process can still take, of the machine and its control groups, and the most that it has held."""

import os
import sys
from contextlib import suppress
from pathlib import Path

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

ROOT = Path("/")
PROCESS = Path("/proc/self")


def available_memory(root: Path = ROOT) -> int | None:
    """Return the bytes that can be taken without swapping or being killed; None where the system does not say.

    The least of MemAvailable and, for each control group (v1 or v2) around the process, its limit less what it uses
    and cannot drop. Without /proc, as on macOS: all memory of the machine. root: of the file system.
    """
    free = [_mem_available(root), *_control_groups(root)]
    known = [value for value in free if value is not None]
    return max(0, min(known)) if known else _all_memory()


def restart_peak() -> None:
    """Let `peak_memory` count from here, where the system can (Linux)."""
    with suppress(OSError):
        (PROCESS / "clear_refs").write_text("5", encoding="ascii")


def peak_memory() -> int | None:
    """Return the most bytes that this process has held at once; None where the system does not say."""
    with suppress(OSError):
        for line in (PROCESS / "status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    if resource is None:
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def _mem_available(root: Path) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _control_groups(root: Path) -> list[int | None]:
    """Return what each memory control group around the process leaves, innermost first."""
    found: list[int | None] = []
    for line in _lines(root / "proc/self/cgroup"):
        _number, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top, names = (
                root / "sys/fs/cgroup/memory",
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            )
        else:
            continue
        # inside a container the path may be the host's: the mount then shows the container's own group
        inner = top / path.lstrip("/")
        groups = [inner, *inner.parents] if inner.is_dir() else [top]
        found += [_left(group, *names) for group in groups if group == top or top in group.parents]
    return found


def _left(group: Path, limit: str, usage: str, droppable: str) -> int | None:
    most, used = _number_in(group / limit), _number_in(group / usage)
    if most is None or used is None:
        return None
    statistics = dict(line.split(None, 1) for line in _lines(group / "memory.stat"))
    return most - used + int(statistics.get(droppable, 0))


def _number_in(path: Path) -> int | None:
    text = "".join(_lines(path))
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _all_memory() -> int | None:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
