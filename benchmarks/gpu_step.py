"""A whole training step of mamba-130m's shape on a device: checked, timed, profiled by kernel.

`python benchmarks/gpu_step.py --adapter NVIDIA` compares a tiny model's losses and gradients with float64 NumPy, then
times the step (forward, backward, norm, clip, AdamW) beside transformers on the same card where torch with CUDA is
importable, and prints the time by kernel from timestamp queries and the bytes of the device's buffers.
"""

import argparse
import json
import re
import subprocess
import time
from pathlib import Path

import numpy as np
from cpu_step import random_rows

from mamba_ops import model
from mamba_ops.config import MambaConfig, TrainConfig
from mamba_ops.cpu import open_cpu
from mamba_ops.gpu.adapters import describe
from mamba_ops.gpu.gpu_ops import GpuOps, open_gpu
from mamba_ops.gradcheck import random_batch, random_parameters
from mamba_ops.gradients import GradientBuffers
from mamba_ops.mirror import Mirror
from mamba_ops.optimizer import adam_state
from mamba_ops.parameters import init
from mamba_ops.train import train_step

SHAPES = {
    "130m": (MambaConfig(vocab_size=50280, hidden_size=768, num_hidden_layers=24), 8, 512),
    "small": (MambaConfig(vocab_size=512, hidden_size=64, num_hidden_layers=2), 2, 64),
}


def check(ops: GpuOps) -> float:
    """Return the largest relative difference of a tiny model's gradients from float64 NumPy."""
    config = MambaConfig(vocab_size=97, hidden_size=40, num_hidden_layers=2, use_bias=True)
    params = random_parameters(config, np.random.default_rng(0))
    host = {name: value.astype(np.float32) for name, value in params.items()}
    batch = random_batch(np.random.default_rng(1), config.vocab_size, 3, 70)
    exact, cpu = GradientBuffers(params, params), open_cpu(np.float64)
    wide = {name: value.astype(np.float64) for name, value in host.items()}
    reference = model.losses_and_gradients(cpu, wide, config, cpu.rows(batch), exact, params)
    mirror = Mirror(ops, host)
    found = GradientBuffers(mirror.params, params, ops)
    with ops.scope():
        nll = model.losses_and_gradients(ops, mirror.params, config, ops.rows(batch), found, params)
    worst = abs(nll / reference - 1)
    for name, value in exact.arrays.items():
        worst = max(worst, float(np.abs(ops.read(found.arrays[name]) - value).max() / np.abs(value).max()))
    if not worst <= 1e-3:
        raise SystemExit(f"the device disagrees with NumPy: {worst:.1e}")
    return worst


def timed(ops: GpuOps, config: MambaConfig, batch_size: int, seq_len: int, repeats: int, checkpointing: bool) -> dict:
    """Return the milliseconds of whole steps and a profile of one."""
    params = init(config, 0)
    batch = random_rows(config, batch_size, seq_len)
    names, settings = list(params), TrainConfig(gradient_checkpointing=checkpointing)
    mirror = Mirror(ops, params, adam_state(params, names))
    buffers = GradientBuffers(mirror.params, names, ops)

    def step() -> float:
        began = time.perf_counter()
        result = train_step(ops, mirror.params, config, [batch], buffers, mirror.adam, settings, 1e-4, names)
        ops.device.wait()
        if result.skipped:
            raise SystemExit(result.skipped)
        return 1e3 * (time.perf_counter() - began)

    warm = [step() for _ in range(3)]
    times = [step() for _ in range(repeats)]
    with ops.device.profile() as kernels:
        step()
    memory = {"own_buffer_bytes": ops.device.held_bytes, "driver_mib": driver_mib()}
    mirror.close()
    ops.release(buffers.arrays.values())
    return {
        "batch": batch_size,
        "seq_len": seq_len,
        "gradient_checkpointing": checkpointing,
        "step_ms": float(np.median(times)),
        "step_ms_all": times,
        "first_ms": warm,
        **memory,
        "kernels": [kernel._asdict() for kernel in kernels],
    }


def driver_mib() -> int | None:
    """Return the driver's figure of used memory, where nvidia-smi is there."""
    try:
        out = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True
        )
        return int(out.stdout.split()[0])
    except (OSError, ValueError, IndexError):
        return None


def transformers_step(config: MambaConfig, batch_size: int, seq_len: int, mambapy: bool, repeats: int) -> dict:
    """Return the milliseconds of the same step by transformers on CUDA, strict float32."""
    import torch
    from transformers import MambaConfig as HFConfig
    from transformers import MambaForCausalLM

    torch.backends.cuda.matmul.allow_tf32 = False
    hf = HFConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        use_mambapy=mambapy,
    )
    network = MambaForCausalLM(hf).cuda().train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, config.vocab_size, (batch_size, seq_len), device="cuda")

    def step() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = network(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began)

    step()
    times = [step() for _ in range(repeats)]
    peak = torch.cuda.max_memory_allocated() / 2**30
    return {"use_mambapy": mambapy, "step_ms": float(np.median(times)), "peak_gib": peak}


def main() -> None:
    """Check, time, profile; print a table and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapter", default="gpu")
    parser.add_argument("--small", action="store_true", help="a tiny shape, to try the script on a software adapter")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--torch", action="store_true", help="time transformers on CUDA in the same run")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    config, batch_size, seq_len = SHAPES["small" if options.small else "130m"]
    results: dict = {}
    with open_gpu(options.adapter) as ops:
        name, results["adapter"] = ops.device.name, describe(ops.device.adapter)
        results["checks"] = ops.device.checks
        print(results["adapter"], "run-time checks", "on" if ops.device.checks else "off")
        results["check"] = check(ops)
        print(f"check: gradients within {results['check']:.1e} of float64 NumPy")
    for checkpointing in (False, True):
        with open_gpu(options.adapter) as ops:  # a device of its own: pools that are empty show what it needs
            row = timed(ops, config, batch_size, seq_len, options.repeats, checkpointing)
            results["checkpointing" if checkpointing else "plain"] = row
            own = row["own_buffer_bytes"] / 2**30
            print(f"step, checkpointing {checkpointing}: {row['step_ms']:.1f} ms, own buffers {own:.2f} GiB, ", end="")
            print(f"driver {row['driver_mib']} MiB; all steps {[round(t, 1) for t in row['step_ms_all']]}")
            for kernel in row["kernels"][:25]:
                print(f"    {kernel['kernel']:36}{kernel['dispatches']:6}{kernel['milliseconds']:10.2f} ms")
    if options.torch:
        for mambapy in (True, False):
            try:
                found = transformers_step(config, batch_size, seq_len, mambapy, 5 if mambapy else 1)
            except Exception as error:
                found = {"use_mambapy": mambapy, "error": repr(error)[:300]}
            results[f"transformers mambapy={mambapy}"] = found
            print("transformers", found)
    slug = re.sub(r"\W+", "-", name).strip("-").lower()
    path = options.json or Path(__file__).parent / "results" / f"gpu_step-{slug}{'-small' * options.small}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
