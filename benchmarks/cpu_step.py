"""Tokens per second, peak memory and the share of BLAS of a training step and of evaluation on the CPU.

`python benchmarks/cpu_step.py` first says whether the machine is quiet, checks the gradient of the benchmarked
model against a central difference, then times each shape in a process of its own. `--json FILE` keeps the rows.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mamba_ops import gradcheck, model
from mamba_ops.available import peak_memory
from mamba_ops.config import MambaConfig, TrainConfig
from mamba_ops.cpu import CpuOps, open_cpu
from mamba_ops.gradients import GradientBuffers
from mamba_ops.ops import Batch
from mamba_ops.optimizer import adam_state
from mamba_ops.parameters import init
from mamba_ops.train import train_step

SHAPES = {
    "d_model 64": (1024, 64, 2, 8, 128),
    "d_model 256": (1024, 256, 4, 4, 256),
    "d_model 768": (1024, 768, 4, 1, 256),
    "tiny": (512, 64, 2, 8, 128),
    "small": (4096, 256, 4, 4, 256),
    "130m, 4 layers": (50280, 768, 4, 1, 256),
}


def quiet_share(seconds: float = 1.0) -> float:
    """Return the share of all cores' time that other processes used in the next seconds (Linux)."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return float("nan")

    def read() -> tuple[int, int]:
        values = [int(x) for x in stat.read_text().splitlines()[0].split()[1:]]
        return sum(values), values[3] + values[4]

    total, idle = read()
    time.sleep(seconds)
    total_after, idle_after = read()
    return 1 - (idle_after - idle) / max(1, total_after - total)


class BlasClock:
    """Adds up the time inside np.matmul: the calling thread's whole, the workers' divided by their number."""

    def __init__(self, workers: int):
        self.seconds = 0.0
        self._workers = workers
        self._matmul = np.matmul
        self._lock = threading.Lock()
        self._main = threading.get_ident()

    def __enter__(self) -> "BlasClock":
        np.matmul = self
        return self

    def __exit__(self, *error: object) -> None:
        np.matmul = self._matmul

    def __call__(self, *args, **kwargs):
        start = time.perf_counter()
        result = self._matmul(*args, **kwargs)
        spent = time.perf_counter() - start
        with self._lock:
            self.seconds += spent if threading.get_ident() == self._main else spent / self._workers
        return result


def random_rows(config: MambaConfig, batch: int, seq_len: int) -> Batch:
    """Return rows of seeded tokens, a document each."""
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (batch, seq_len + 1))
    positions = np.broadcast_to(np.arange(seq_len, dtype=np.uint32), (batch, seq_len)).copy()
    return Batch(ids[:, :-1].copy(), ids[:, 1:].copy(), positions)


def measure(name: str, repeats: int, threads: int | None) -> dict:
    """Time one shape: medians over `repeats` after one warm-up; memory is the process's peak."""
    vocab_size, d_model, layers, batch, seq_len = SHAPES[name]
    config = MambaConfig(vocab_size=vocab_size, hidden_size=d_model, num_hidden_layers=layers)
    ops = open_cpu(np.float32, threads)
    params = init(config, 0)
    tokens_in = random_rows(config, batch, seq_len)
    rows = ops.rows(tokens_in)
    tokens = batch * seq_len
    evaluation = [_time(lambda: _evaluate(ops, params, config, rows)) for _ in range(repeats + 1)][1:]
    evaluation_peak = (peak_memory() or 0) / 1e6
    train_step = _train_step(ops, params, config, tokens_in)
    steps = [_time(train_step) for _ in range(repeats + 1)][1:]
    training_peak = (peak_memory() or 0) / 1e6
    with BlasClock(ops.threads) as clock:
        blas_step = _time(train_step)
    step = float(np.median(steps))
    return {
        "shape": name,
        "vocab_size": vocab_size,
        "d_model": d_model,
        "layers": layers,
        "batch": batch,
        "seq_len": seq_len,
        "step_ms": 1e3 * step,
        "step_ms_min": 1e3 * min(steps),
        "step_ms_max": 1e3 * max(steps),
        "train_tokens_per_s": tokens / step,
        "train_peak_mb": training_peak,
        "blas_share": clock.seconds / blas_step,
        "eval_tokens_per_s": tokens / float(np.median(evaluation)),
        "eval_peak_mb": evaluation_peak,
    }


def check() -> float:
    """Return the relative difference of a directional derivative of the model, float64."""
    config = MambaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2)
    case = gradcheck.model_case(open_cpu(np.float64), config, seed=0)
    *_, direction = gradcheck.check(case, elements=1)
    if not direction.holds:
        raise SystemExit(f"the gradient is wrong: {direction}")
    return direction.difference / direction.scale


def _evaluate(ops: CpuOps, params: dict, config: MambaConfig, rows) -> float:
    with ops.scope():
        return ops.total(model.losses(ops, params, config, rows))


def _train_step(ops: CpuOps, params: dict[str, np.ndarray], config: MambaConfig, batch: Batch) -> Callable[[], object]:
    """Return a call that makes one whole step: forward, backward, norm, clip, AdamW."""
    train = TrainConfig()
    buffers, state = GradientBuffers(params, params), adam_state(params, params)
    return lambda: train_step(ops, params, config, [batch], buffers, state, train, 1e-4, list(params))


def _time(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    """Print one row a shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shape", choices=SHAPES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.shape:
        print(json.dumps(measure(options.shape, options.repeats, options.threads)))
        return
    busy = quiet_share()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, NumPy {np.__version__}")
    print(
        f"other processes use {busy:.0%} of the cores"
        + (": NOT QUIET, do not believe the times" if busy > 0.05 else "")
    )
    print(f"check: directional derivative within {check():.1e} of a central difference")
    print(f"{'shape':16}{'step ms':>9}{'tokens/s':>10}{'peak MB':>9}{'BLAS':>7}{'eval tok/s':>12}{'eval MB':>9}")
    results = []
    for name in SHAPES:
        arguments = [sys.executable, __file__, "--shape", name, "--repeats", str(options.repeats)]
        arguments += ["--threads", str(options.threads)] if options.threads else []
        row = json.loads(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)
        results.append(row)
        print(
            f"{name:16}{row['step_ms']:9.1f}{row['train_tokens_per_s']:10.0f}{row['train_peak_mb']:9.0f}"
            f"{row['blas_share']:7.0%}{row['eval_tokens_per_s']:12.0f}{row['eval_peak_mb']:9.0f}"
        )
    if options.json:
        machine = {
            "machine": platform.platform(),
            "cores": os.cpu_count(),
            "busy": busy,
            "numpy": np.__version__,
        }
        options.json.write_text(json.dumps({"machine": machine, "rows": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
