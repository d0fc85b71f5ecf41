"""How good the weights are, beside their base: the assets perplexity, wsla_perplexity and lora_perplexity."""

import math
from collections.abc import Mapping
from contextlib import closing
from typing import Any, TypeAlias

import dagster as dg
import numpy as np
import pandas as pd

from mamba_ops.baselines import baselines
from mamba_ops.checkpoint import load_model
from mamba_ops.comparison import Difference, difference
from mamba_ops.config import MambaConfig
from mamba_ops.corpus import DOCUMENTS, SPLITS
from mamba_ops.evaluate import Evaluation
from mamba_ops.evaluate import perplexity as evaluate
from mamba_ops.fingerprint import atomic_directory, write_json
from mamba_ops.generate import continuation
from mamba_ops.mirror import Mirror
from mamba_ops.ops import Ops
from mamba_ops.tokenized import open_ids
from mamba_ops.tokenizer import load_tokenizer
from pipelines.checks import Events, Verdict, blocking, passed, reported
from pipelines.configuration import EvaluateRun, identity
from pipelines.io import Manifest, draft, output, publish
from pipelines.pictures import quoted, table
from pipelines.resources import Accelerator, Storage
from pipelines.ways import WAYS, Way
from pipelines.weights import same_tokenizer

Model: TypeAlias = tuple[MambaConfig, dict[str, np.ndarray]]

RESULT, SAMPLE = "perplexity.json", "sample.txt"
MODELS = ("uniform", "unigram", "bigram", "before", "after")
SHOWN = 20


def perplexity_asset(way: Way) -> dg.AssetsDefinition:
    """Return the asset of how good a way's weights are."""

    @dg.asset(
        name=way.perplexity,
        description=f"Perplexity of {way.weights} on the validation documents, beside its base on the same tokens and "
        "models that only count.",
        ins={"weights": dg.AssetIn(way.weights)},
        code_version="2",
        group_name="model",
        kinds={"numpy", "json"},
        pool="accelerator",
        check_specs=blocking(
            way.perplexity,
            perplexity_finite="The perplexity is a finite number.",
            better_than_baseline="The perplexity is below that of the baseline in the configuration.",
        ),
    )
    @reported
    def perplexity(
        context: dg.AssetExecutionContext,
        config: EvaluateRun,
        storage: Storage,
        accelerator: Accelerator,
        weights: Manifest,
        tokenized_corpus: Manifest,
        tokenizer: Manifest,
    ) -> Events:
        same_tokenizer(weights, tokenized_corpus, tokenizer)
        ids, training, validation = open_documents(tokenized_corpus)
        base = weights.root / weights.facts["base_folder"]
        with accelerator.opened(context) as (ops, *_):
            before = measured(ops, load_model(base), ids, validation, config)
            model = way.load(weights)
            after = measured(ops, model, ids, validation, config)
            counted = baselines(ids, training, validation, tokenizer.facts["vocab_size"])
            yield from passed(
                way.perplexity,
                perplexity_finite=lambda: perplexity_finite(after),
                better_than_baseline=lambda: better_than_baseline(after, config.baseline, counted),
            )
            sample = sampled_text(ops, config, model, tokenizer)
        changed = difference(before, after)
        context.log.info(f"{way.weights} beside its base: {changed}")
        result = summary(counted, before, after, changed)
        with draft(storage.path, way.perplexity) as folder:
            with atomic_directory(folder) as made:
                write_json(made / RESULT, result)
                (made / SAMPLE).write_text(sample, encoding="utf-8")
            inputs, content = [weights, tokenized_corpus, tokenizer], {**result, "sample": sample}
            manifest = publish(storage.path, way.perplexity, folder, content, identity(config), inputs, result)
        yield output(manifest, {"change": str(changed)} | perplexity_metadata(result, sample, after, validation))

    return perplexity


def open_documents(tokenized_corpus: Manifest) -> tuple[np.ndarray, pd.DataFrame, pd.DataFrame]:
    """Return the mapped ids, and the tables of the training and of the validation documents."""
    documents = pd.read_parquet(tokenized_corpus.path / DOCUMENTS)
    training, validation = (documents[documents["split"] == split].reset_index() for split in SPLITS)
    return open_ids(tokenized_corpus.path), training, validation


def measured(ops: Ops, model: Model, ids: np.ndarray, documents: pd.DataFrame, config: EvaluateRun) -> Evaluation:
    """Evaluate a model on the documents."""
    with (
        closing(Mirror(ops, model[1])) as mirror,
        np.errstate(over="ignore", invalid="ignore", divide="ignore"),  # what is not finite fails the check
    ):
        return evaluate(ops, mirror.params, model[0], ids, documents, config)


def sampled_text(ops: Ops, config: EvaluateRun, model: Model, tokenizer: Manifest) -> str:
    """Return the prompt as one document's beginning, and what the model makes of it."""
    words, end = load_tokenizer(tokenizer.path), tokenizer.facts["end_of_text_id"]
    with closing(Mirror(ops, model[1])) as mirror:
        return config.prompt + "".join(continuation(ops, mirror.params, model[0], words, end, config.prompt, config))


def perplexity_finite(after: Evaluation) -> Verdict:
    """Whether the perplexity is a finite number."""
    return Verdict(math.isfinite(after.perplexity), f"found {after.perplexity:.6g}, expected a finite number")


def better_than_baseline(after: Evaluation, baseline: str, counted: Mapping[str, float]) -> Verdict:
    """Whether the perplexity is below that of the baseline: none, a counting model, or a number."""
    if baseline == "none":
        return Verdict(True, f"found {after.perplexity:.6g}, without a baseline")
    limit = counted[baseline] if baseline in counted else float(baseline)
    name = f"{baseline}'s {limit:.6g}" if baseline in counted else baseline
    return Verdict(after.perplexity < limit, f"found perplexity {after.perplexity:.6g}, expected below {name}")


def summary(counted: Mapping[str, float], before: Evaluation, after: Evaluation, changed: Difference) -> dict[str, Any]:
    """Return what is reported, as JSON: perplexities, the change, and the sums that evaluations of parts combine from.

    What is not finite is null.
    """
    return {
        **counted,
        "before": finite(before.perplexity),
        "after": after.perplexity,
        "nats_per_token_before": finite(before.nll / before.tokens),
        "nats_per_token_after": after.nll / after.tokens,
        "difference": finite(changed.nats_per_token),
        "difference_low": finite(changed.low),
        "difference_high": finite(changed.high),
        "bits_per_byte": after.bits_per_byte,
        "nll": after.nll,
        "tokens": after.tokens,
        "documents": len(after.document_tokens),
        "bytes": after.bytes,
    }


def finite(value: float) -> float | None:
    """Return a number, None for one that is not finite."""
    return value if math.isfinite(value) else None


def shown(value: float | None) -> str:
    """Return a perplexity in digits for people; None is one beyond all numbers."""
    return "not finite" if value is None else f"{value:.2f}"


def perplexity_metadata(
    result: Mapping[str, Any], sample: str, after: Evaluation, documents: pd.DataFrame
) -> dict[str, Any]:
    """Return the perplexities as numbers and as a table, the sample, and the documents that are hardest."""
    each = pd.DataFrame({"source": documents["source"], "tokens": after.document_tokens})
    each["nats_per_token"] = (after.document_nll / after.document_tokens).round(4)
    change = ("nats_per_token_before", "nats_per_token_after", "difference", "difference_low", "difference_high")
    return {name: result[name] for name in change if result[name] is not None} | {
        "perplexity": result["after"],
        "bits_per_byte": result["bits_per_byte"],
        "nll_sum": result["nll"],
        "target_tokens": result["tokens"],
        "perplexities": table([{"model": name, "perplexity": shown(result[name])} for name in MODELS]),
        "hardest_documents": table(each.nlargest(SHOWN, "nats_per_token").to_dict("records")),
        "sample": dg.MetadataValue.md(quoted(sample)),
    }


perplexity, wsla_perplexity, lora_perplexity = map(perplexity_asset, WAYS)
