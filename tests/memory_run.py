"""Two training steps and a checkpoint in a process of its own: `python memory_run.py OPTIONS`, a JSON object.

Prints the bytes that the process held after its imports, its peak, and the estimate of the difference.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from mamba_ops.config import BatchesConfig, MambaConfig, TrainConfig
from mamba_ops.cpu import open_cpu
from mamba_ops.memory import estimate_memory
from mamba_ops.train import start, train


def peak() -> int:
    """Return VmHWM: unlike ru_maxrss it does not count what the parent held when it forked."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def main(folder: str, model: dict[str, int], train_options: dict[str, Any], batches: dict[str, int], rows: int) -> None:
    """Run in a folder."""
    baseline = peak()
    config, options, cut = MambaConfig(**model), TrainConfig(max_steps=2, **train_options), BatchesConfig(**batches)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, rows * cut.seq_len + 1)
    ops = open_cpu()
    steps = list(train(start(config), ids, options, cut, ops=ops, folder=folder))
    assert len(steps) == 2
    found = peak()
    estimate = estimate_memory(config, options, cut, rows, threads=ops.threads)
    print(json.dumps({"baseline": baseline, "peak": found, "estimate": estimate.total}))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
