"""How far a long pass over bytes is."""

import time
from collections.abc import Callable
from typing import NamedTuple

EVERY_SECONDS = 1.0


class Progress(NamedTuple):
    """Bytes done of a stage, of total (0: unknown), in seconds."""

    stage: str
    done: int
    total: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        """done / seconds."""
        return self.done / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """What the rest takes at the same speed; None when that is unknown."""
        return (self.total - self.done) / self.bytes_per_second if self.done and self.total >= self.done else None


Report = Callable[[Progress], None]


def meter(stage: str, total: int, report: Report | None) -> Callable[[int], None]:
    """Return a function to call with bytes just done; it calls `report` once a second, and with the last byte."""
    began = last = time.monotonic()
    done = 0

    def advance(size: int) -> None:
        nonlocal done, last
        done += size
        now = time.monotonic()
        if report is not None and size and (now - last >= EVERY_SECONDS or done == total):
            last = now
            report(Progress(stage, done, total, now - began))

    return advance


def describe(progress: Progress) -> str:
    """Return progress in one line."""
    of_total = f" of {progress.total / 1e6:,.1f}" if progress.total else ""
    line = f"{progress.stage}: {progress.done / 1e6:,.1f}{of_total} MB, {progress.bytes_per_second / 1e6:,.1f} MB/s"
    left = progress.seconds_left
    return line if left is None else f"{line}, {left:,.0f} s left"
