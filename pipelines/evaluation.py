"""How good the weights are: the asset perplexity."""

import math
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pandas as pd

from mamba_ops.baselines import baselines
from mamba_ops.checkpoint import load_model
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
from pipelines.training import same_tokenizer

RESULT, SAMPLE = "perplexity.json", "sample.txt"
MODELS = ("uniform", "unigram", "bigram", "before", "after")
SHOWN = 20


@dg.asset(
    code_version="1",
    group_name="model",
    kinds={"numpy", "json"},
    pool="accelerator",
    check_specs=blocking(
        "perplexity",
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
    trained_weights: Manifest,
    tokenized_corpus: Manifest,
    tokenizer: Manifest,
) -> Events:
    """Perplexity on the validation documents, beside models that only count and the weights before training."""
    same_tokenizer(trained_weights, tokenized_corpus, tokenizer)
    ids, training, validation = open_documents(tokenized_corpus)
    with accelerator.opened(context) as (ops, *_):
        before = measured(ops, trained_weights.root / trained_weights.facts["base_folder"], ids, validation, config)
        after = measured(ops, trained_weights.path, ids, validation, config)
        counted = baselines(ids, training, validation, tokenizer.facts["vocab_size"])
        yield from passed(
            "perplexity",
            perplexity_finite=lambda: perplexity_finite(after),
            better_than_baseline=lambda: better_than_baseline(after, config.baseline, counted),
        )
        sample = sampled_text(ops, config, trained_weights, tokenizer)
    result = summary(counted, before, after)
    with draft(storage.path, "perplexity") as folder:
        with atomic_directory(folder) as made:
            write_json(made / RESULT, result)
            (made / SAMPLE).write_text(sample, encoding="utf-8")
        inputs, content = [trained_weights, tokenized_corpus, tokenizer], {**result, "sample": sample}
        manifest = publish(storage.path, "perplexity", folder, content, identity(config), inputs, result)
    yield output(manifest, perplexity_metadata(result, sample, after, validation))


def open_documents(tokenized_corpus: Manifest) -> tuple[np.ndarray, pd.DataFrame, pd.DataFrame]:
    """Return the mapped ids, and the tables of the training and of the validation documents."""
    documents = pd.read_parquet(tokenized_corpus.path / DOCUMENTS)
    training, validation = (documents[documents["split"] == split].reset_index() for split in SPLITS)
    return open_ids(tokenized_corpus.path), training, validation


def measured(ops: Ops, folder: Path, ids: np.ndarray, documents: pd.DataFrame, config: EvaluateRun) -> Evaluation:
    """Evaluate a folder's weights on the documents."""
    model, weights = load_model(folder)
    with (
        closing(Mirror(ops, weights)) as mirror,
        np.errstate(over="ignore", invalid="ignore", divide="ignore"),  # what is not finite fails the check
    ):
        return evaluate(ops, mirror.params, model, ids, documents, config)


def sampled_text(ops: Ops, config: EvaluateRun, trained_weights: Manifest, tokenizer: Manifest) -> str:
    """Return the prompt as one document's beginning, and what the model makes of it."""
    model, weights = load_model(trained_weights.path)
    words, end = load_tokenizer(tokenizer.path), tokenizer.facts["end_of_text_id"]
    with closing(Mirror(ops, weights)) as mirror:
        return config.prompt + "".join(continuation(ops, mirror.params, model, words, end, config.prompt, config))


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


def summary(counted: Mapping[str, float], before: Evaluation, after: Evaluation) -> dict[str, Any]:
    """Return what is reported, as JSON: perplexities, and the sums that evaluations of parts combine from."""
    return {
        **counted,
        "before": before.perplexity if math.isfinite(before.perplexity) else None,
        "after": after.perplexity,
        "bits_per_byte": after.bits_per_byte,
        "nll": after.nll,
        "tokens": after.tokens,
        "documents": len(after.document_tokens),
        "bytes": after.bytes,
    }


def shown(value: float | None) -> str:
    """Return a perplexity in digits for people; None is one beyond all numbers."""
    return "not finite" if value is None else f"{value:.2f}"


def perplexity_metadata(
    result: Mapping[str, Any], sample: str, after: Evaluation, documents: pd.DataFrame
) -> dict[str, Any]:
    """Return the perplexities as numbers and as a table, the sample, and the documents that are hardest."""
    each = pd.DataFrame({"source": documents["source"], "tokens": after.document_tokens})
    each["nats_per_token"] = (after.document_nll / after.document_tokens).round(4)
    return {
        "perplexity": result["after"],
        "bits_per_byte": result["bits_per_byte"],
        "nll_sum": result["nll"],
        "target_tokens": result["tokens"],
        "perplexities": table([{"model": name, "perplexity": shown(result[name])} for name in MODELS]),
        "hardest_documents": table(each.nlargest(SHOWN, "nats_per_token").to_dict("records")),
        "sample": dg.MetadataValue.md(quoted(sample)),
    }
