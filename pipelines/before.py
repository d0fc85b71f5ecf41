"""Before training starts: what it will take, in the log and as metadata, or a refusal."""

from pathlib import Path
from typing import Any

import dagster as dg

from mamba_ops.available import available_memory
from mamba_ops.config import BatchesConfig, TrainConfig
from mamba_ops.cpu import CpuOps
from mamba_ops.estimate import estimate_time
from mamba_ops.memory import estimate_memory, require_memory, size
from mamba_ops.ops import Ops
from mamba_ops.run_folder import checkpoints
from mamba_ops.training_data import TokenRows
from mamba_ops.training_state import TrainingState


def announced(
    context: dg.AssetExecutionContext,
    state: TrainingState,
    rows: TokenRows,
    config: TrainConfig,
    batches: BatchesConfig,
    ops: Ops,
    run: Path,
) -> dict[str, Any]:
    """Log the estimates of memory (of runs on the CPU) and time, and return them as metadata.

    Raises ValueError, naming what would make it fit, when memory does not suffice.
    """
    found = memory(context, state, rows, config, batches, ops) if isinstance(ops, CpuOps) else {}
    done = int(newest[-1].name.removeprefix("step-")) if (newest := checkpoints(run)) else 0
    left = estimate_time(state, rows, config, batches, ops, done)
    context.log.info(f"time: about {left}")
    return found | {"estimated/seconds": left.seconds, "estimated/steps": left.steps}


def memory(
    context: dg.AssetExecutionContext,
    state: TrainingState,
    rows: TokenRows,
    config: TrainConfig,
    batches: BatchesConfig,
    ops: CpuOps,
) -> dict[str, Any]:
    """Log and return what training will hold, and what it would with or without activation checkpointing."""
    cut = batches, len(rows.starts)
    options = state.selection | {"threads": ops.threads, "dtype": ops.dtype}
    held = sum(value.nbytes for value in state.params.values())
    needed = require_memory(state.config, config, *cut, held=held, **options)
    other = config.model_copy(update={"gradient_checkpointing": not config.gradient_checkpointing})
    instead = estimate_memory(state.config, other, *cut, **options).total
    word = "without" if config.gradient_checkpointing else "with"
    free = available_memory()
    room = f"; {size(free)} are available" if free is not None else ""
    context.log.info(f"memory: about {needed}; {size(instead)} {word} gradient_checkpointing{room}")
    return {"estimated/bytes": needed.total, f"estimated/bytes_{word}_checkpointing": instead}
