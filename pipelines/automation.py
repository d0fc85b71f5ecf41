"""Jobs, and the schedule that trains again."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zoneinfo import available_timezones

import dagster as dg
import yaml
from dagster._utils.schedules import is_valid_cron_schedule

from pipelines.ways import FULL, WAYS, Way

CRON, TIME_ZONE, RUN_CONFIG = "MAMBA_RETRAIN_CRON", "MAMBA_RETRAIN_TIMEZONE", "MAMBA_RETRAIN_CONFIG"

SMOKE = {
    "execution": {"config": {"in_process": {}}},
    "loggers": {"console": {"config": {"log_level": "INFO"}}},
    "ops": {
        "corpus": {"config": {"max_documents": 40}},
        "tokenizer": {"config": {"vocab_size": 300}},
        "token_batches": {"config": {"seq_len": 64, "batch_size": 4}},
        "weights_mirror": {"config": {"hidden_size": 16, "num_hidden_layers": 2}},
        "trained_weights": {"config": {"learning_rate": "1e-2", "warmup_steps": 5, "max_steps": 60, "save_steps": 25}},
        "perplexity": {"config": {"window": 256, "batch_size": 4, "max_new_tokens": 40}},
    },
}
"""Full training in seconds; the same as configs/smoke.yaml."""


def chain(way: Way) -> dg.AssetSelection:
    """Return a way's results and all that they are made from."""
    return dg.AssetSelection.assets(*way.results).upstream()


train, wsla, lora = (
    dg.define_asset_job(
        way.job, chain(way), description=f"From documents to {way.weights}, with {' and '.join(way.results)}."
    )
    for way in WAYS
)
merge = dg.define_asset_job(
    "merge", dg.AssetSelection.assets("merged_weights"), description="The adapter that exists already, in its base."
)
evaluate = dg.define_asset_job(
    "evaluate",
    dg.AssetSelection.assets("perplexity"),
    description="Perplexity of the trained weights that exist already.",
)
smoke = dg.define_asset_job(
    "smoke",
    chain(FULL),
    config=SMOKE | {"resources": {"storage": {"config": {"root": "build/smoke"}}}},
    description="The whole graph on a tiny model under build/smoke, in seconds.",
)


def retraining(environment: Mapping[str, str]) -> dg.ScheduleDefinition:
    """Return the schedule `retrain`, stopped until it is switched on; time and run configuration are set outside.

    A tick reads the run configuration anew and keeps the tokenizer, which belongs to the weights.
    """

    cron, zone = environment.get(CRON) or "0 3 * * 0", environment.get(TIME_ZONE) or "UTC"
    if not is_valid_cron_schedule(cron):
        raise ValueError(f"{CRON}={cron}: expected a cron schedule such as '0 3 * * 0'")
    if zone not in available_timezones():
        raise ValueError(f"{TIME_ZONE}={zone}: expected a time zone such as Europe/Berlin")

    @dg.schedule(
        job=train,
        name="retrain",
        cron_schedule=cron,
        execution_timezone=zone,
        default_status=dg.DefaultScheduleStatus.STOPPED,
        description=f"Train on what the corpus holds then. Set by {CRON}, {TIME_ZONE} and {RUN_CONFIG} (a YAML file).",
    )
    def retrain(context: dg.ScheduleEvaluationContext) -> dg.RunRequest:
        return dg.RunRequest(run_config=run_config(environment.get(RUN_CONFIG)))

    return retrain


def run_config(path: str | None) -> dict[str, Any]:
    """Return the run configuration in a YAML file, the defaults for None, with the tokenizer kept.

    Raises ValueError when the file is missing or holds something else.
    """
    config: Any = {}
    if path:
        try:
            config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ValueError(f"{RUN_CONFIG}={path}: expected a YAML file, got {error}") from None
    level = config = _mapping(path, "run configuration", config)
    for name in ("ops", "tokenizer", "config"):
        level[name] = level = _mapping(path, name, level.get(name))
    level["retrain"] = False
    return config


def _mapping(path: str | None, name: str, value: Any) -> dict[str, Any]:
    """Return a copy of a mapping, empty for None."""
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{RUN_CONFIG}={path}: expected a mapping as {name}, got {type(value).__name__}")
    return dict(value or {})


retrain = retraining(os.environ)
