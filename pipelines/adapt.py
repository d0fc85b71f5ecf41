"""Adapt a model of documentation to source code in each way, and compare: `python -m pipelines.adapt`.

The base is trained on the documentation topics of the running CPython (configs/adapt.yaml). Each way then takes its
shipped configuration, with targets, rank and alpha as they stand there, on the sources of the standard library.
"""

import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mamba_ops.fingerprint import write_json
from pipelines.demo import BUILD, error_message, execute
from pipelines.io import newest
from pipelines.ways import FULL, LORA, WAYS, WSLA, Way

CONFIGS = Path("configs")
BASE = CONFIGS / "adapt.yaml"
RESULT = BUILD / "adapt.json"
SHIPPED = {FULL.weights: "checkpoint.yaml", WSLA.weights: "wsla.yaml", LORA.weights: "lora.yaml"}
RATES = {FULL.weights: 4e-3, WSLA.weights: 3e-2, LORA.weights: 2e-2}
STEPS: dict[str, Any] = {
    "max_steps": 300,
    "warmup_steps": 20,
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing": False,
}
SHARE = 0.5
"""Of full training's drop that LoRA's has to reach."""


def main() -> int:
    """Train the base, adapt it in each way, print the table and write it to build/adapt.json; return the exit status.

    It is 1 where a way's interval holds 0, or LoRA's drop is below half of full training's.
    """
    BUILD.mkdir(exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix=time.strftime("adapt-%Y%m%d-%H%M%S-"), dir=BUILD)).absolute()
    if not _executed("train", BASE, root / "base"):
        return 1
    base = newest(root / "base", FULL.weights).path
    for way in WAYS:
        path = root / f"{way.job}.yaml"
        path.write_text(yaml.safe_dump(adapting(way, base)), encoding="utf-8")
        if not _executed(way.job, path, root):
            return 1
    found = {way.weights: dict(newest(root, way.perplexity).facts) for way in WAYS}
    write_json(RESULT, found)
    return _report(found)


def adapting(way: Way, base: Path) -> dict[str, Any]:
    """Return a way's shipped configuration, with the sources as corpus, a checkpoint as base and a small run's pace."""
    config = yaml.safe_load((CONFIGS / SHIPPED[way.weights]).read_text(encoding="utf-8"))
    stages = config["ops"]
    stages["corpus"] = {"config": {"default": "sources"}}
    stages["tokenizer"] = {"config": {"path": str(base)}}
    stages["token_batches"] = {"config": {"seq_len": 128, "batch_size": 8}}
    stages["weights_mirror"] = {"config": {"checkpoint": str(base)}}
    stages[way.weights]["config"] |= STEPS | {"learning_rate": RATES[way.weights]}
    stages[way.perplexity]["config"] |= {"batch_size": 8}
    config["resources"] = {"storage": {"config": {"skip_unchanged": True}}}
    return config


def _executed(job: str, config: Path, root: Path) -> bool:
    """Run a job; print what went wrong."""
    status, output = execute(job, config, root)
    if status:
        print(error_message(output), flush=True)
    return not status


def _report(found: Mapping[str, Mapping[str, Any]]) -> int:
    """Print the table, and what does not hold of it."""
    first = found[FULL.weights]
    print(
        f"\nNats per token on {first['tokens']:,} validation tokens of source code ({first['documents']} documents):\n"
    )
    print(f"  {'':16}{'before':>9}{'after':>9}{'change':>9}  95 % interval")
    for name, made in found.items():
        figures = (made["nats_per_token_before"], made["nats_per_token_after"], made["difference"])
        interval = f"[{made['difference_low']:.4f}, {made['difference_high']:.4f}]"
        print(f"  {name:16}" + "".join(f"{value:9.4f}" for value in figures) + f"  {interval}")
    share = found[LORA.weights]["difference"] / first["difference"]
    print(f"\nLoRA reaches {share:.0%} of full training's drop. The same as JSON: {RESULT}")
    wrong = [
        f"{name}: the interval of the change holds 0" for name, made in found.items() if not made["difference_high"] < 0
    ]
    wrong += [f"LoRA: found {share:.0%} of full training's drop, expected {SHARE:.0%}"] * (share < SHARE)
    print("".join(f"{line}\n" for line in wrong), end="", flush=True)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
