"""A tiny training run in a process of its own: `python tiny_run.py OPTIONS`, a JSON object of `tiny_run`'s arguments.

Prints the batches it read and the number of its file system operations. It can kill itself at the n-th batch or the
n-th such operation, as `kill -9` would, and do that for each n in a process of its own.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

import mamba_ops.train
from mamba_ops.config import BatchesConfig, MambaConfig, TrainConfig
from mamba_ops.cpu import open_cpu
from mamba_ops.metrics import StepMetrics
from mamba_ops.train import TokenRows, start, train
from mamba_ops.training_state import TrainingState

OPERATIONS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "tempfile.mkdtemp"}


def tiny_run(
    folder: str | None,
    *,
    max_steps: int = 6,
    save_steps: int = 3,
    accumulation: int = 1,
    hidden_size: int = 8,
    weights_seed: int = 0,
    data_seed: int = 0,
    tokenizer: str = "a tokenizer",
    state: TrainingState | None = None,
    **settings: Any,
) -> tuple[TrainingState, Iterator[StepMetrics]]:
    """2 layers, d_model 8, 7 rows (the last one short), batch 2."""
    config = MambaConfig(vocab_size=11, hidden_size=hidden_size, num_hidden_layers=2, state_size=4)
    ids = np.random.default_rng(data_seed).integers(0, 11, 40)
    starts = np.arange(0, 39, 6)
    rows = TokenRows(ids, np.array([0, 9]), starts, np.minimum(6, 39 - starts), 6, f"data {data_seed}", tokenizer)
    options: dict[str, Any] = {
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "max_steps": max_steps,
        "save_steps": save_steps,
        "gradient_accumulation_steps": accumulation,
    }
    state = state or start(config, seed=weights_seed)
    ops = open_cpu(threads=1)
    batches = BatchesConfig(seq_len=6, batch_size=2, seed=1)
    return state, train(state, rows, TrainConfig(**(options | settings)), batches, ops=ops, folder=folder)


def main(stop_after: int = 0, kill_at_batch: int = 0, kill_at_operation: int = 0, **options: Any) -> None:
    """Run, and print what was done; stop_after: leave without a word to the generator after that many steps."""
    read: list[list[int]] = []
    operations = 0

    def count() -> None:
        nonlocal operations
        operations += 1
        if operations == kill_at_operation:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        removed = event in ("os.remove", "os.rmdir")  # by a name relative to an open folder
        if event in OPERATIONS and (removed or str(arguments[0]).startswith(options["folder"])):
            count()

    real_load, real_fsync = mamba_ops.train.load, os.fsync

    def load(rows: TokenRows, indices: np.ndarray) -> Any:
        read.append(indices.tolist())
        if len(read) == kill_at_batch:
            os.kill(os.getpid(), signal.SIGKILL)
        return real_load(rows, indices)

    def fsync(descriptor: int) -> None:
        count()
        real_fsync(descriptor)

    mamba_ops.train.load, os.fsync = load, fsync
    sys.addaudithook(hook)
    _, steps = tiny_run(**options)
    for number, _ in enumerate(steps, 1):
        if number == stop_after:
            break
    print(json.dumps({"batches": read, "operations": operations}), flush=True)
    os._exit(0)


def kill_at_each(folders: list[str], **options: Any) -> None:
    """Run in each folder, in a forked process that kills itself at its 1st, 2nd, ... operation; print the signals."""
    signals = []
    for number, folder in enumerate(folders, 1):
        child = os.fork()
        if not child:
            main(folder=folder, kill_at_operation=number, **options)
        signals.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(json.dumps(signals), flush=True)


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    kill_at_each(**arguments) if "folders" in arguments else main(**arguments)
