"""Memory of a training run on the CPU before it starts: what it will take, whether that fits, and what would."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from typing import Any, cast

import numpy as np

from mamba_ops.available import available_memory
from mamba_ops.config import BatchesConfig, LoraConfig, MambaConfig, TrainConfig, byte_size
from mamba_ops.cpu.tally import Tally
from mamba_ops.cpu.workspace import Rows
from mamba_ops.lora import adapters as adapters_of
from mamba_ops.lora import tensor_shapes
from mamba_ops.low_rank import with_dropout
from mamba_ops.model import losses_and_gradients
from mamba_ops.ops import NO_ADAPTERS, Adapters, Dropout, Ops
from mamba_ops.parameters import select, table
from mamba_ops.tensors import BLOCK

BLAS_DEPTH = 320
BLAS_BUFFER = 1 << 25
"""OpenBLAS packs so many columns of the taller factor at a time, into a buffer of so many bytes a thread."""

RUNTIME = 6 << 20
"""Bytes of what is too small to count: stacks of threads, modules that are imported late, what malloc keeps."""

READ_BACK = 2.25
"""What is saved is read again and compared: two blocks at a time and a mask, in sizes of a block."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a training run on the CPU takes at its peak, on top of the interpreter, libraries and mapped ids.

    activations: every buffer in the pools of the ops, which are never given back. scratch: small buffers of the
    ops, those of BLAS, and what else is small. passing: arrays that are made and dropped by one op, or while a
    checkpoint is saved, whichever is more.
    """

    parameters: int
    gradients: int
    moments: int
    activations: int
    scratch: int
    passing: int

    @property
    def total(self) -> int:
        """The sum."""
        return sum(asdict(self).values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size(count)}" for name, count in asdict(self).items())
        return f"{size(self.total)} ({parts})"


def estimate_memory(
    config: MambaConfig,
    train: TrainConfig,
    batches: BatchesConfig,
    rows: int,
    *,
    names: Iterable[str] | None = None,
    lora: LoraConfig | None = None,
    threads: int = 1,
    dtype: Any = np.float32,
) -> MemoryEstimate:
    """Return what training will take, from shapes: the model runs on a `Tally` for each size of batch in an epoch.

    rows: in an epoch. names: the parameters that train, all for None. lora: adapters train in their place. The pools
    are counted exactly.
    """
    shapes = {name: entry.shape for name, entry in table(config).items()}
    trained, adapters = select(config, names), NO_ADAPTERS
    if lora:
        adapted = tensor_shapes(config, lora)
        shapes, trained = shapes | adapted, list(adapted)
        adapters = with_dropout(adapters_of(config, lora), Dropout(lora.lora_dropout, 0, 0))
    tally, itemsize = Tally(dtype), np.dtype(dtype).itemsize
    _run(tally, config, shapes, trained, train, batches, rows, adapters)
    sizes = {name: prod(shape) * itemsize for name, shape in shapes.items()}
    trainable = sum(sizes[name] for name in trained)
    taller = max(shape[0] for shape in shapes.values()) * min(BLAS_DEPTH, batches.batch_size * batches.seq_len)
    blas = min(threads * BLAS_BUFFER, taller * itemsize)
    return MemoryEstimate(
        parameters=sum(sizes.values()),
        gradients=trainable,
        moments=2 * trainable,
        activations=tally.pooled,
        scratch=tally.scratch_bytes + blas + RUNTIME,
        passing=max(tally.passing, _saving(max(sizes[name] for name in trained), itemsize)),
    )


def _saving(largest: int, itemsize: int) -> int:
    """Return what a checkpoint takes besides: blocks that are read back, or a mask of what is finite in a tensor."""
    return max(int(READ_BACK * min(largest, BLOCK * itemsize)), largest // itemsize)


def _run(
    tally: Tally,
    config: MambaConfig,
    shapes: dict[str, tuple[int, ...]],
    trained: list[str],
    train: TrainConfig,
    batches: BatchesConfig,
    rows: int,
    adapters: Adapters,
) -> None:
    """Make a step of the windows that an epoch has: whole ones, and a last one that may end with a smaller batch."""
    whole = min(rows, batches.batch_size)
    accumulation = train.gradient_accumulation_steps
    count = -(-rows // whole)
    last = [whole] * min(2, (count - 1) % accumulation) + [rows - (count - 1) * whole]
    for window in ([whole] * min(2, accumulation, count), last):
        grads = Shapes(shapes)
        for batch in window:
            shape = Rows(batch, batches.seq_len, *3 * [np.empty(0)])
            kept = train.gradient_checkpointing
            losses_and_gradients(cast(Ops, tally), shapes, config, shape, grads, trained, kept, adapters)
    tally.step()


def require_memory(
    config: MambaConfig,
    train: TrainConfig,
    batches: BatchesConfig,
    rows: int,
    *,
    names: Iterable[str] | None = None,
    lora: LoraConfig | None = None,
    threads: int = 1,
    dtype: Any = np.float32,
    held: int = 0,
) -> MemoryEstimate:
    """Return the estimate of a run, as `estimate_memory`, when memory_limit and what is available allow it.

    held: bytes of it that the process has taken already. Raises ValueError, naming what would make it fit.
    """

    def estimate(train: TrainConfig, now: BatchesConfig) -> MemoryEstimate:
        cut = -(-rows * batches.seq_len // now.seq_len)
        return estimate_memory(config, train, now, cut, names=names, lora=lora, threads=threads, dtype=dtype)

    needed = estimate(train, batches)
    room, source = _room(train, held)
    if room is None or needed.total <= room:
        return needed
    ways = list(_ways(lambda *changed: estimate(*changed).total, train, batches, room))
    fixed = needed.parameters + needed.gradients + needed.moments
    advice = (
        f"it fits with {', or with '.join(ways)}"
        if ways
        else (f"no batch_size and seq_len make it fit: parameters, gradients and moments alone take {size(fixed)}")
    )
    raise ValueError(f"memory: training takes about {needed}, expected at most {size(room)}, {source}; {advice}")


def size(count: float) -> str:
    """Return bytes in the largest fitting unit, by powers of 1,000."""
    for unit in ("bytes", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} GB" if count < 1000 else f"{count:,.0f} GB"


class Shapes:
    """Gradients that are only shapes."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]):
        self._shapes = shapes
        self._written: set[str] = set()

    def take(self, name: str) -> tuple[Any, bool]:
        add = name in self._written
        self._written.add(name)
        return self._shapes[name], add


def _room(train: TrainConfig, held: int) -> tuple[int | None, str]:
    """Return the bytes that the run may take, None where nobody knows, and who says so."""
    if train.memory_limit is not None:
        return byte_size(train.memory_limit), "the memory_limit"
    free = available_memory()
    return (None if free is None else free + held), "what is available"


def _ways(
    total: Callable[[TrainConfig, BatchesConfig], int], train: TrainConfig, batches: BatchesConfig, room: int
) -> Iterator[str]:
    """Yield changes with which the run fits, the one that leaves the result alone first."""
    kept = train.model_copy(update={"gradient_checkpointing": True})
    settings = {"": train} if train.gradient_checkpointing else {"": train, " and gradient_checkpointing": kept}
    if not train.gradient_checkpointing and (needed := total(kept, batches)) <= room:
        yield f"gradient_checkpointing ({size(needed)})"
    for name, value, changed in (
        ("batch_size", batches.batch_size, _smaller_batches),
        ("seq_len", batches.seq_len, _shorter_rows),
    ):
        for also, chosen in settings.items():
            most = _most(partial(changed, chosen, batches), total, value, room)
            if most:
                made = changed(chosen, batches, most)
                steps = made[0].gradient_accumulation_steps
                same = f" with gradient_accumulation_steps {steps}" * (steps != train.gradient_accumulation_steps)
                yield f"{name} {most} instead of {value}{same}{also} ({size(total(*made))})"
                break


def _smaller_batches(train: TrainConfig, batches: BatchesConfig, n: int) -> tuple[TrainConfig, BatchesConfig]:
    """Return batches of n rows, and at least as many rows in a step as before."""
    steps = -(-batches.batch_size * train.gradient_accumulation_steps // n)
    return (
        train.model_copy(update={"gradient_accumulation_steps": steps}),
        batches.model_copy(update={"batch_size": n}),
    )


def _shorter_rows(train: TrainConfig, batches: BatchesConfig, n: int) -> tuple[TrainConfig, BatchesConfig]:
    return train, batches.model_copy(update={"seq_len": n})


def _most(
    changed: Callable[[int], tuple[TrainConfig, BatchesConfig]],
    total: Callable[[TrainConfig, BatchesConfig], int],
    value: int,
    room: int,
) -> int:
    """Return a number below value with which the run fits, and with one more not; 0 where even 1 does not."""
    low, high = 0, value
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if total(*changed(middle)) <= room else (low, middle)
    return low
