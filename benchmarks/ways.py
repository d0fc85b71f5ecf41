"""The three ways of fine-tuning: step time, optimizer bytes and memory; and what activation checkpointing saves.

`python benchmarks/ways.py` first checks the gradients of an adapted model against a central difference, then makes
steps of full training, LoRA and WSLA by turns, each in a process of its own, at vocabulary 50,280, d_model 768, 4
layers, batch 1, 256 tokens; a ratio is of one round. Then it measures the activations of a step of 24
layers with `tracemalloc`, kept and computed again. With `--adapter NAME` the steps are those of mamba-130m on a device,
24 layers, batch 8, 512 tokens, and the memory is that of its buffers. `--json FILE` keeps the rows.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from statistics import median

import numpy as np
from cpu_step import quiet_share, random_rows

from mamba_ops import gradcheck
from mamba_ops.available import peak_memory, restart_peak
from mamba_ops.config import TARGETS, LoraConfig, MambaConfig, TrainConfig, WslaTrainConfig
from mamba_ops.cpu import open_cpu
from mamba_ops.gpu.gpu_ops import open_gpu
from mamba_ops.gradients import GradientBuffers, accumulate
from mamba_ops.mirror import Mirror
from mamba_ops.optimizer import state_bytes
from mamba_ops.tensors import fingerprint
from mamba_ops.train import start, train_step
from mamba_ops.training_state import TrainingState
from mamba_ops.wsla import wsla_names

WAYS = "full", "lora", "wsla"
SEQ_LEN = 256
ROUNDS = 5


def model(layers: int) -> MambaConfig:
    """Return mamba-130m's shape with so many layers."""
    return MambaConfig(vocab_size=50280, hidden_size=768, num_hidden_layers=layers)


def begin(way: str, config: MambaConfig) -> tuple[TrainingState, TrainConfig]:
    """Return the state and the configuration of a way, with its defaults."""
    ways = {
        "full": lambda: (start(config), TrainConfig()),
        "lora": lambda: (start(config, lora=LoraConfig()), TrainConfig()),
        "wsla": lambda: (start(config, names=wsla_names(config)), WslaTrainConfig()),
    }
    return ways[way]()


def steps(way: str, repeats: int, adapter: str | None) -> dict:
    """Return the milliseconds of whole steps after the first, and what the way holds."""
    config = model(4 if adapter is None else 24)
    batch = random_rows(config, 1, SEQ_LEN) if adapter is None else random_rows(config, 8, 512)
    state, settings = begin(way, config)
    restart_peak()
    ops = open_cpu() if adapter is None else open_gpu(adapter)
    mirror = Mirror(ops, state.params, state.adam)
    buffers, spent = GradientBuffers(mirror.params, state.names, ops), []
    for _ in range(1 + repeats):
        began = time.perf_counter()
        with ops.scope():
            step = config, [batch], buffers, mirror.adam, settings, 1e-4, state.names, state.adapters, state.dropout
            train_step(ops, mirror.params, *step)
            if adapter is not None:
                ops.device.wait()
        spent.append(1e3 * (time.perf_counter() - began))
    return {
        "ms": spent[1:],
        "trainable": state.trainable,
        "optimizer_bytes": state_bytes(state.adam),
        "peak_bytes": peak_memory() if adapter is None else ops.device.held_bytes,
    }


def activations(way: str, layers: int, checkpointing: bool) -> dict:
    """Return the most bytes of a forward and backward besides parameters, gradients and moments."""
    config = model(layers)
    state, _ = begin(way, config)
    ops, batch, buffers = open_cpu(), random_rows(config, 1, SEQ_LEN), GradientBuffers(state.params, state.names)
    tracemalloc.start()
    accumulate(ops, state.params, config, [batch], buffers, state.names, checkpointing, state.adapters, state.dropout)
    return {"bytes": tracemalloc.get_traced_memory()[1], "gradients": fingerprint(buffers.arrays)}


def check() -> float:
    """Return the relative difference of a derivative along a direction of all adapters' tensors, float64."""
    config = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2)
    options = LoraConfig(r=4, target_modules=list(TARGETS))
    case = gradcheck.model_case(open_cpu(np.float64), config, seed=0, lora=options)
    *_, direction = gradcheck.check(case, elements=1)
    if not direction.holds:
        raise SystemExit(f"the gradient is wrong: {direction}")
    return direction.difference / direction.scale


def in_process(*arguments: str) -> dict:
    """Run a part of this file in a process of its own."""
    command = [sys.executable, __file__, *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def compared(*options: str) -> dict[str, dict]:
    """Return each way's medians over rounds in which they take turns; a ratio is the median of those of each round."""
    rounds = [{way: in_process("--steps", way, *options) for way in WAYS} for _ in range(ROUNDS)]
    rows = {}
    for way in WAYS:
        times = [ms for made in rounds for ms in made[way]["ms"]]
        rows[way] = {key: value for key, value in rounds[0][way].items() if key != "ms"}
        rows[way] |= {"step_ms": median(times), "step_ms_min": min(times), "step_ms_max": max(times)}
        rows[way]["of_full"] = median(median(made[way]["ms"]) / median(made["full"]["ms"]) for made in rounds)
    for row in rows.values():
        row["optimizer_of_full"] = row["optimizer_bytes"] / rows["full"]["optimizer_bytes"]
    return rows


def saved(layers: int) -> dict[str, dict]:
    """Return the activations of a step with and without checkpointing."""
    rows = {}
    for way in ("full", "lora"):
        kept, again = (in_process("--activations", way, "--layers", str(layers), *more) for more in ([], ["--again"]))
        rows[way] = {
            "kept_bytes": kept["bytes"],
            "checkpointing_bytes": again["bytes"],
            "share": again["bytes"] / kept["bytes"],
            "same_gradients": kept["gradients"] == again["gradients"],
        }
    return rows


def wrong(rows: dict[str, dict], layers: dict[str, dict]) -> list[str]:
    """Return what LoRA and checkpointing promise and do not hold, on the CPU."""
    lora = rows["lora"]
    found = [f"lora's step takes {lora['of_full']:.2f} of full training's, expected 0.75"] * (lora["of_full"] > 0.75)
    share = lora["optimizer_of_full"]
    found += [f"lora's optimizer state is {share:.1%} of full training's, expected 2 %"] * (share > 0.02)
    for way, row in layers.items():
        found += [f"{way}: checkpointing leaves {row['share']:.2f} of the activations, expected a third"] * (
            row["share"] > 1 / 3
        )
        found += [f"{way}: the gradients differ with checkpointing"] * (not row["same_gradients"])
    return found


def main() -> int:
    """Check, measure, print; return 1 where something promised does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=24, help="of the model whose activations are measured")
    parser.add_argument("--adapter", help="of a device, by a part of its name")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--activations", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--again", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps:
        print(json.dumps(steps(options.steps, options.repeats, options.adapter)))
        return 0
    if options.activations:
        print(json.dumps(activations(options.activations, options.layers, options.again)))
        return 0
    busy = quiet_share()
    print(f"other processes use {busy:.0%} of the cores" + ": NOT QUIET, do not believe the times" * (busy > 0.05))
    print(f"check: derivative of the adapters within {check():.1e} of a central difference")
    rows = compared("--repeats", str(options.repeats), *(["--adapter", options.adapter] if options.adapter else []))
    print(f"\n{'way':6}{'trainable':>12}{'optimizer MB':>14}{'peak MB':>9}{'step ms':>9}{'of full':>9}")
    for way, row in rows.items():
        print(
            f"{way:6}{row['trainable']:12,}{row['optimizer_bytes'] / 1e6:14.2f}{row['peak_bytes'] / 1e6:9.0f}"
            f"{row['step_ms']:9.0f}{row['of_full']:9.2f}"
        )
    layers = {} if options.adapter else saved(options.layers)
    if layers:
        print(f"\nactivations of {options.layers} layers: kept, checkpointing, share, gradients the same")
    for way, row in layers.items():
        print(
            f"{way:6}{row['kept_bytes'] / 1e6:9.0f} MB{row['checkpointing_bytes'] / 1e6:9.0f} MB{row['share']:8.2f}"
            f"  {row['same_gradients']}"
        )
    if options.json:
        machine = {"machine": platform.platform(), "cores": os.cpu_count(), "busy": busy, "numpy": np.__version__}
        machine["adapter"] = options.adapter or "cpu"
        found = {"machine": machine, "ways": rows, "layers": options.layers, "activations": layers}
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    failed = [] if options.adapter else wrong(rows, layers)
    print("".join(f"{line}\n" for line in failed), end="")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
