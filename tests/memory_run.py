"""Two training steps and a checkpoint in a process of its own: `python memory_run.py OPTIONS`, a JSON object.

Prints the bytes that the process held after its imports, its peak, and the estimate of the difference.
"""

import json
import sys
from typing import Any

import numpy as np

from mamba_ops.available import peak_memory, restart_peak
from mamba_ops.config import BatchesConfig, LoraConfig, MambaConfig, TrainConfig
from mamba_ops.cpu import open_cpu
from mamba_ops.memory import estimate_memory
from mamba_ops.parameters import init
from mamba_ops.train import start, train
from mamba_ops.wsla import wsla_names

ADAPTED = {"lora": LoraConfig(lora_dropout=0.1)}
WAYS = {"full": lambda config: {}, "wsla": lambda config: {"names": wsla_names(config)}, "lora": lambda config: ADAPTED}


def main(
    folder: str,
    model: dict[str, int],
    train_options: dict[str, Any],
    batches: dict[str, int],
    rows: int,
    way: str = "full",
) -> None:
    """Run in a folder."""
    baseline = peak_memory()
    config, options, cut = MambaConfig(**model), TrainConfig(max_steps=2, **train_options), BatchesConfig(**batches)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, rows * cut.seq_len + 1)
    ops = open_cpu()
    chosen = WAYS[way](config)
    state = start(config, init(config, 0), **chosen, copy=False)
    restart_peak()
    steps = list(train(state, ids, options, cut, ops=ops, folder=folder))
    assert len(steps) == 2
    found = peak_memory()
    estimate = estimate_memory(config, options, cut, rows, **chosen, threads=ops.threads)
    print(json.dumps({"baseline": baseline, "peak": found, "estimate": estimate.total}))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
