"""Weights: the assets weights_mirror and trained_weights."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pandas as pd

from mamba_ops.checkpoint import fingerprint as weights_fingerprint
from mamba_ops.checkpoint import load_model, save_model
from mamba_ops.config import BatchesConfig, MambaConfig, new_model_config
from mamba_ops.fingerprint import digest, write_json
from mamba_ops.metrics import StepMetrics, mean_loss, read_history
from mamba_ops.ops import Ops
from mamba_ops.parameters import count, init, resize_embeddings
from mamba_ops.tokenizer import TOKENIZER, load_tokenizer, tokenizer_fingerprint
from mamba_ops.train import TokenRows, start, train
from mamba_ops.training_data import data_fingerprint, open_rows
from mamba_ops.training_state import TrainingState, ops_before, run_identity
from pipelines.before import announced
from pipelines.checks import Events, Verdict, blocking, passed, reported
from pipelines.configuration import TrainRun, WeightsRun, identity
from pipelines.io import Manifest, draft, output, publish
from pipelines.pictures import plot, sketch, table, thinned
from pipelines.progress import watched
from pipelines.resources import Accelerator, Storage
from pipelines.sides import both_sides, mirror_agrees, sides_metadata

CODE = "1"
"""Raised when a change of the code changes trained weights: runs of older code are then not continued."""

RUNS = "runs"
METRICS = "metrics.json"
SHOWN = 40
WALL_CLOCK = ("seconds", "elapsed_seconds")


@dg.asset(
    code_version="1",
    group_name="model",
    kinds={"numpy", "safetensors"},
    pool="accelerator",
    check_specs=blocking(
        "weights_mirror",
        weights_finite="Every weight is a finite number.",
        mirror_agrees="The device holds the same weights as the host, and computes the same logits.",
        ids_have_rows="Every id of the tokenizer has a row in the embedding.",
    ),
)
@reported
def weights_mirror(
    context: dg.AssetExecutionContext,
    config: WeightsRun,
    storage: Storage,
    accelerator: Accelerator,
    tokenizer: Manifest,
) -> Events:
    """Base weights, from a checkpoint or from a seed, as a Hugging Face folder; on a device the same as on the host."""
    model, weights = base_weights(config, tokenizer)
    with accelerator.opened(context) as opened:
        sides = both_sides(opened, model, weights)
    with draft(storage.path, "weights_mirror") as folder:
        yield from passed(
            "weights_mirror",
            weights_finite=lambda: weights_finite(weights),
            mirror_agrees=lambda: mirror_agrees(sides),
            ids_have_rows=lambda: ids_have_rows(model, tokenizer),
        )
        save_model(folder, model, weights, tokenizer.path / TOKENIZER)
        content = {
            "weights": weights_fingerprint(weights),
            "model": model.model_dump(mode="json"),
            "tokenizer": tokenizer.facts["fingerprint"],
        }
        manifest = publish(storage.path, "weights_mirror", folder, content, identity(config), [tokenizer], content)
    yield output(manifest, weights_metadata(model, weights) | sides_metadata(opened, sides))


@dg.asset(
    code_version=CODE,
    group_name="model",
    kinds={"numpy", "safetensors"},
    pool="accelerator",
    check_specs=blocking(
        "trained_weights",
        optimizer_steps="At least one optimizer step changed the weights.",
        weights_finite="Every weight is a finite number.",
    ),
)
@reported
def trained_weights(
    context: dg.AssetExecutionContext,
    config: TrainRun,
    storage: Storage,
    accelerator: Accelerator,
    token_batches: Manifest,
    weights_mirror: Manifest,
) -> Events:
    """Weights after training, as a Hugging Face folder with metrics.json; an interrupted run continues."""
    same_tokenizer(token_batches, weights_mirror)
    facts = token_batches.facts
    rows = open_rows(token_batches.root / facts["tokenized_folder"], token_batches.path)
    batches = BatchesConfig(**{name: facts[name] for name in BatchesConfig.model_fields})
    state = start(*load_model(weights_mirror.path))
    run = storage.path / RUNS / run_name(state, config, batches, rows)
    with accelerator.opened(context) as (ops, *_):
        continued(context, run, ops)
        expected = announced(context, state, rows, config, batches, ops, run)
        with closing(train(state, rows, config, batches, ops=ops, folder=run)) as steps:
            watched(context, steps, state, run, config.logging_seconds)
    history = read_history(run)
    with draft(storage.path, "trained_weights") as folder:
        yield from passed(
            "trained_weights",
            optimizer_steps=lambda: optimizer_steps(history),
            weights_finite=lambda: weights_finite(state.params),
        )
        dtype, size = config.save_dtype, config.max_shard_size
        words = weights_mirror.path / TOKENIZER
        save_model(folder, state.config, state.params, words, max_shard_size=size, dtype=dtype)
        write_json(folder / METRICS, reproducible(history))
        model = state.config.model_dump(mode="json")
        content = {"weights": weights_fingerprint(state.params), "model": model, "saved_as": [dtype, size]}
        content |= weights_facts(state, weights_mirror)
        inputs = [token_batches, weights_mirror]
        manifest = publish(storage.path, "trained_weights", folder, content, identity(config), inputs, content)
    yield output(manifest, expected | training_metadata(state, history, run))


def base_weights(config: WeightsRun, tokenizer: Manifest) -> tuple[MambaConfig, dict[str, np.ndarray]]:
    """Return the checkpoint's model, or a fresh one for the tokenizer.

    Raises ValueError when the checkpoint holds another tokenizer; with resize_embeddings it may have more tokens.
    """
    if not config.checkpoint:
        model = new_model_config(config, tokenizer.facts["vocab_size"], tokenizer.facts["end_of_text_id"])
        return model, init(model, config.seed)
    folder = Path(config.checkpoint).expanduser()
    model, weights = load_model(folder)
    own = folder / TOKENIZER
    if own.is_file():
        check_tokenizer(own, tokenizer, config.resize_embeddings)
    if config.resize_embeddings:
        return resize_embeddings(model, weights, tokenizer.facts["vocab_size"], config.seed)
    return model, weights


def check_tokenizer(own: Path, tokenizer: Manifest, may_extend: bool) -> None:
    """Raise ValueError unless a checkpoint's own tokenizer is the asset's, or, when it may, a part of it."""
    found, chosen = tokenizer_fingerprint(own), tokenizer.facts["fingerprint"]
    if found == chosen:
        return
    if not may_extend:
        raise ValueError(
            f"{own}: found the tokenizer {found[:16]}, expected {chosen[:16]}, the one of the asset tokenizer; "
            f"set the path of the stage tokenizer to {own.parent}"
        )
    ids = load_tokenizer(tokenizer.path).get_vocab()
    moved = {token: i for token, i in load_tokenizer(own).get_vocab().items() if ids.get(token) != i}
    if moved:
        token = min(moved, key=moved.__getitem__)
        raise ValueError(
            f"{own}: found {token!r} with the id {moved[token]} ({len(moved)} tokens differ), expected "
            f"{ids.get(token)} as in the asset tokenizer, which with resize_embeddings may only have more tokens"
        )


def continued(context: dg.AssetExecutionContext, run: Path, ops: Ops) -> None:
    """Warn where a run goes on with other ops than those its newest checkpoint was made with."""
    before = ops_before(run)
    if before not in ("", ops.name):
        context.log.warning(f"{ops.name} continues what {before} began: from here on not bit for bit the same run")


def run_name(state: TrainingState, config: TrainRun, batches: BatchesConfig, rows: TokenRows) -> str:
    """Return the fingerprint of what a run belongs to; the same run finds its checkpoints under it."""
    belongs_to = run_identity(state, config, batches, data_fingerprint(rows), rows.tokenizer)
    return digest([CODE, belongs_to])[:16]


def same_tokenizer(*manifests: Manifest) -> None:
    """Raise ValueError unless all were made with one tokenizer."""
    found = {
        made.asset: made.facts["fingerprint" if made.asset == "tokenizer" else "tokenizer"][:16] for made in manifests
    }
    if len(set(found.values())) > 1:
        raise ValueError(
            f"tokenizers differ: found {found}, expected one; materialize what comes after tokenizer again"
        )


def weights_finite(weights: Mapping[str, np.ndarray]) -> Verdict:
    """Whether every weight is a finite number."""
    bad = {name: int(np.count_nonzero(~np.isfinite(value))) for name, value in weights.items()}
    bad = {name: number for name, number in bad.items() if number}
    return Verdict(
        not bad, f"found {bad or 'only finite values'} in {len(weights)} tensors, expected only finite values"
    )


def ids_have_rows(model: MambaConfig, tokenizer: Manifest) -> Verdict:
    """Whether the embedding has a row for each id of the tokenizer."""
    largest = tokenizer.facts["vocab_size"] - 1
    token = load_tokenizer(tokenizer.path).id_to_token(largest)
    found = f"found the id {largest} ({token!r}), expected 0 to {model.vocab_size - 1}, the rows of the embedding"
    if largest < model.vocab_size:
        return Verdict(True, found)
    return Verdict(False, f"{found}; resize_embeddings of the stage weights_mirror adds rows")


def optimizer_steps(history: list[StepMetrics]) -> Verdict:
    """Whether a step was made."""
    made = sum(not step.skipped for step in history)
    return Verdict(made > 0, f"found {made} optimizer steps and {len(history) - made} skipped, expected at least 1")


def weights_facts(state: TrainingState, base: Manifest) -> dict[str, Any]:
    """Return what evaluation asks about trained weights."""
    return {
        "tokenizer": base.facts["tokenizer"],
        "base_folder": base.folder,
        "steps": state.step,
        "tokens_seen": state.tokens_seen,
    }


def reproducible(history: list[StepMetrics]) -> dict[str, list[Any]]:
    """Return the columns of the history that the same run gives again: without wall-clock times."""
    frame = pd.DataFrame(history).drop(columns=list(WALL_CLOCK))
    columns = frame.astype(object).where(frame.notna(), None)
    return {str(name): columns[name].tolist() for name in columns}


def weights_metadata(model: MambaConfig, weights: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return the parameter count, the model's configuration and a table of the tensors."""
    rows = [
        {"tensor": name, "shape": "x".join(map(str, value.shape)), "parameters": value.size, "rms": rms(value)}
        for name, value in weights.items()
    ]
    shown = thinned(len(rows), SHOWN)
    return {
        "parameters": count(model),
        "config": dg.MetadataValue.json(model.model_dump(mode="json")),
        "tensors": table([rows[i] for i in shown]),
    }


def rms(value: np.ndarray) -> float:
    """Return the root of the mean square, to four digits."""
    return float(f"{np.sqrt(np.mean(np.square(value, dtype=np.float64))):.4g}")


def training_metadata(state: TrainingState, history: list[StepMetrics], run: Path) -> dict[str, Any]:
    """Return counts, speed, the loss curve as a picture in place and a large one, and a thinned table."""
    history = [step for step in history if not step.skipped]
    steps = np.array([step.step for step in history])
    losses = np.array([step.loss for step in history])
    shown = [history[i] for i in thinned(len(history), SHOWN)]
    smooth = pd.Series(losses).rolling(max(1, len(losses) // 100), min_periods=1).mean().to_numpy()
    at = thinned(len(history), 200)
    labels = ("step", "nats per token")
    tail = history[-max(1, len(history) // 20) :]
    return {
        "steps": state.step,
        "skipped_steps": state.skipped,
        "tokens_seen": state.tokens_seen,
        "trainable_parameters": state.trainable,
        "train/final_loss": mean_loss(tail),
        "seconds": state.seconds,
        "tokens_per_second": state.tokens_seen / max(state.seconds, 1e-9),
        "run_folder": dg.MetadataValue.path(str(run)),
        "loss": sketch("loss", steps[at], smooth[at], ("step", "nats")),
        "loss_curve": plot("loss", steps, {"each step": losses, "mean": smooth}, labels),
        "history": table(
            [
                {"step": s.step, "loss": s.loss, "learning_rate": s.learning_rate, "grad_norm": s.grad_norm}
                for s in shown
            ]
        ),
    }
