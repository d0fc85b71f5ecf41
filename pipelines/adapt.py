"""Adapt a model of documentation to source code in each way, and compare: `python -m pipelines.adapt`.

The base is trained on the documentation topics of the running CPython (configs/adapt.yaml). Each way then takes its
shipped configuration, with targets, rank and alpha as they stand there, on the sources of the standard library.
"""

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
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
# the best of three to four rates each, after 300 steps on the sources
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
    full = found[FULL.weights]
    print(f"\nNats per token on {full['tokens']:,} validation tokens of source code ({full['documents']} documents):\n")
    print(f"  {'':16}{'before':>9}{'after':>9}{'change':>9}  95 % interval")
    for name, made in found.items():
        figures = [made[key] for key in ("nats_per_token_before", "nats_per_token_after", "difference")]
        low, high = (_digits(made[key]) for key in ("difference_low", "difference_high"))
        print(f"  {name:16}" + "".join(f"{_digits(value):>9}" for value in figures) + f"  [{low}, {high}]")
    wrong = list(_wrong(found))
    for line in wrong:
        print(line, flush=True)
    if not wrong:
        share = found[LORA.weights]["difference"] / full["difference"]
        print(f"\nLoRA reaches {share:.0%} of full training's drop. The same as JSON: {RESULT}")
    return int(bool(wrong))


def _wrong(found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield what does not hold: a loss that certainly falls in each way, and LoRA's share of full training's drop."""
    for name, made in found.items():
        high = made["difference_high"]
        if high is None or high >= 0:
            yield f"{name}: found a change of up to {_digits(high)} nats per token, expected below 0"
    full, lora = (found[name]["difference"] for name in (FULL.weights, LORA.weights))
    if full is not None and lora is not None and lora > SHARE * full:
        expected = f"{SHARE:.0%} of full training's {full:.4f} or more"
        yield f"{LORA.weights}: found a change of {lora:.4f}, expected {expected}"


def _digits(value: float | None) -> str:
    """Return a number for people; None is one that is not known."""
    return "unknown" if value is None else f"{value:.4f}"


if __name__ == "__main__":
    sys.exit(main())
