"""Training: the assets trained_weights, wsla_weights and lora_adapter."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np

from mamba_ops.available import restart_peak
from mamba_ops.checkpoint import SAVED, fingerprint
from mamba_ops.config import BatchesConfig, TrainConfig
from mamba_ops.fingerprint import digest, write_json
from mamba_ops.lora import zero_at_start
from mamba_ops.metrics import StepMetrics, read_history
from mamba_ops.ops import Ops
from mamba_ops.run_folder import ops_before
from mamba_ops.train import TokenRows, train
from mamba_ops.training_data import data_fingerprint, open_rows
from mamba_ops.training_state import TrainingState, run_identity
from pipelines.accounts import accounts, reproducible, training_metadata
from pipelines.before import announced
from pipelines.checks import Events, Verdict, blocking, passed, reported
from pipelines.configuration import identity
from pipelines.io import Manifest, draft, output, publish
from pipelines.progress import watched
from pipelines.resources import Accelerator, Storage
from pipelines.ways import WAYS, Way
from pipelines.weights import same_tokenizer, weights_finite

CODE = "1"
"""Raised when a change of the code changes trained weights: runs of older code are then not continued."""

RUNS = "runs"
METRICS = "metrics.json"


def weights_asset(way: Way) -> dg.AssetsDefinition:
    """Return the asset of what a way of fine-tuning trains."""

    @dg.asset(
        name=way.weights,
        description=way.description,
        code_version=CODE,
        group_name="model",
        kinds={"numpy", "safetensors"},
        pool="accelerator",
        check_specs=blocking(way.weights, **way.checks),
    )
    @reported
    def weights(
        context: dg.AssetExecutionContext,
        config: way.stage,  # type: ignore[name-defined]
        storage: Storage,
        accelerator: Accelerator,
        token_batches: Manifest,
        weights_mirror: Manifest,
    ) -> Events:
        same_tokenizer(token_batches, weights_mirror)
        rows, batches = open_batches(token_batches)
        state = way.begin(context, config, weights_mirror)
        restart_peak()
        partly = "frozen_unchanged" in way.checks
        before = {name: tensor_digest(value) for name, value in state.params.items() if partly}
        run = storage.path / RUNS / run_name(state, config, batches, rows)
        with accelerator.opened(context) as (ops, *_):
            continued(context, run, ops)
            expected = announced(context, state, rows, config, batches, ops, run)
            with closing(train(state, rows, config, batches, ops=ops, folder=run)) as steps:
                watched(context, steps, state, run, config.logging_seconds)
        history = read_history(run)
        taken = accounts(state, history)
        with draft(storage.path, way.weights) as folder:
            yield from checked(way, state, history, before, config)
            content = way.save(folder, state, config, weights_mirror) | facts_of(state, weights_mirror)
            write_json(folder / METRICS, reproducible(history))
            inputs = [token_batches, weights_mirror]
            manifest = publish(storage.path, way.weights, folder, content, identity(config), inputs, content)
        yield output(manifest, expected | taken | way.shown(state) | training_metadata(state, history, run))

    return weights


def open_batches(token_batches: Manifest) -> tuple[TokenRows, BatchesConfig]:
    """Return the rows of the training split, and how they are cut."""
    facts = token_batches.facts
    rows = open_rows(token_batches.root / facts["tokenized_folder"], token_batches.path)
    return rows, BatchesConfig(**{name: facts[name] for name in BatchesConfig.model_fields})


def continued(context: dg.AssetExecutionContext, run: Path, ops: Ops) -> None:
    """Warn where a run goes on with other ops than those its newest checkpoint was made with."""
    before = ops_before(run)
    if before not in ("", ops.name):
        context.log.warning(f"{ops.name} continues what {before} began: from here on not bit for bit the same run")


def run_name(state: TrainingState, config: TrainConfig, batches: BatchesConfig, rows: TokenRows) -> str:
    """Return the fingerprint of what a run belongs to; the same run finds its checkpoints under it."""
    belongs_to = run_identity(state, config, batches, data_fingerprint(rows), rows.tokenizer)
    return digest([CODE, belongs_to])[:16]


def checked(
    way: Way, state: TrainingState, history: Sequence[StepMetrics], before: Mapping[str, str], config: TrainConfig
) -> Events:
    """Report a way's checks. before: digests of the parameters before the first step."""
    known = {
        "optimizer_steps": lambda: optimizer_steps(history),
        "weights_finite": lambda: weights_finite(state.params),
        "frozen_unchanged": lambda: frozen_unchanged(state, before, config.save_dtype),
        "trained_changed": lambda: trained_changed(state, before),
    }
    yield from passed(way.weights, **{name: known[name] for name in way.checks})


def optimizer_steps(history: Sequence[StepMetrics]) -> Verdict:
    """Whether a step was made."""
    made = sum(not step.skipped for step in history)
    return Verdict(made > 0, f"found {made} optimizer steps and {len(history) - made} skipped, expected at least 1")


def frozen_unchanged(state: TrainingState, before: Mapping[str, str], save_dtype: str) -> Verdict:
    """Whether everything that does not train is, as it is saved, bit for bit as before."""
    frozen = sorted(before.keys() - set(state.names))
    dtype = SAVED[save_dtype]
    now = {name: tensor_digest(state.params[name].astype(dtype).astype(np.float32)) for name in frozen}
    changed = [name for name in frozen if now[name] != before[name]]
    found = f"{len(changed)} changed in {save_dtype}, such as {changed[0]}," if changed else "0 changed"
    return Verdict(not changed, f"found {found} of {len(frozen)} frozen tensors, expected 0")


def trained_changed(state: TrainingState, before: Mapping[str, str]) -> Verdict:
    """Whether every weight that trains differs from its start; of an adapter, the tensor that begins at 0."""
    parts = {weight: zero_at_start(weight, adapter) for weight, adapter in state.adapters.items()}
    parts = parts or {name: name for name in state.names}
    same = [weight for weight, name in parts.items() if tensor_digest(state.params[name]) == before[name]]
    found = f"{len(same)} without a change, such as {same[0]}," if same else "0 without a change"
    return Verdict(not same, f"found {found} of {len(parts)} weights that train, expected 0")


def tensor_digest(value: np.ndarray) -> str:
    """Return a tensor's SHA-256."""
    return fingerprint({"": value})


def facts_of(state: TrainingState, base: Manifest) -> dict[str, Any]:
    """Return what evaluation asks about what was trained."""
    return {
        "tokenizer": base.facts["tokenizer"],
        "base_folder": base.folder,
        "steps": state.step,
        "tokens_seen": state.tokens_seen,
    }


trained_weights, wsla_weights, lora_adapter = map(weights_asset, WAYS)
