"""Documents to batches: the assets corpus, tokenizer, tokenized_corpus and token_batches."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pandas as pd

from mamba_ops.corpus import SPLITS, CorpusManifest, build_corpus
from mamba_ops.corpus_tables import DOCUMENTS, training_texts
from mamba_ops.loss_mask import NONE
from mamba_ops.progress import Progress, Report, describe
from mamba_ops.tokenized import TokenizedManifest, encode_corpus, largest_id, open_masked
from mamba_ops.tokenizer import TokenizerManifest, build_tokenizer, load_tokenizer
from mamba_ops.tokens import ROWS, BatchesManifest, build_batches, learned_targets
from pipelines.checks import Events, Verdict, blocking, passed, reported
from pipelines.configuration import BatchesRun, CorpusRun, TokenizerRun, identity
from pipelines.io import Manifest, candidates, draft, output, publish
from pipelines.pictures import histogram, table, thinned
from pipelines.resources import Storage

SHOWN = 20
"""Rows of a table in the UI, which shows all that it is given."""

LOG_SECONDS = 5.0


@dg.asset(
    code_version="2",
    group_name="data",
    kinds={"python", "parquet"},
    check_specs=blocking(
        "corpus",
        documents_exist="Training and validation each hold at least one document.",
        splits_disjoint="No text is both in training and in validation.",
    ),
)
@reported
def corpus(context: dg.AssetExecutionContext, config: CorpusRun, storage: Storage) -> Events:
    """Documents, repaired, each distinct text once, split into training and validation."""
    with draft(storage.path, "corpus") as folder:
        made = build_corpus(config, folder, logged(context))
        documents = pd.read_parquet(folder / DOCUMENTS, columns=["id", "source", "split", "bytes"])
        yield from passed(
            "corpus",
            documents_exist=lambda: documents_exist(documents),
            splits_disjoint=lambda: splits_disjoint(documents),
        )
        facts = made.model_dump(mode="json")
        manifest = publish(storage.path, "corpus", folder, made.fingerprint, identity(config), [], facts)
    yield output(manifest, corpus_metadata(made, documents))


@dg.asset(code_version="1", group_name="data", kinds={"python", "json"})
@reported
def tokenizer(context: dg.AssetExecutionContext, config: TokenizerRun, storage: Storage, corpus: Manifest) -> Events:
    """A byte-level BPE trained on the training split, or a tokenizer.json; kept until it is asked to be retrained."""
    kept = None if config.retrain or config.path else trained_before(storage.path, config)
    if kept:
        context.log.info(f"tokenizer {kept.fingerprint} with this configuration is kept; retrain: true makes a new one")
        manifest = kept
    else:
        with draft(storage.path, "tokenizer") as folder:
            made = build_tokenizer(config, training_texts(corpus.path), folder)
            facts = made.model_dump(mode="json")
            content, inputs = made.fingerprint, [] if config.path else [corpus]
            manifest = publish(storage.path, "tokenizer", folder, content, identity(config), inputs, facts)
    yield output(manifest, tokenizer_metadata(manifest, kept is not None))


@dg.asset(
    code_version="2",
    group_name="data",
    kinds={"numpy", "parquet"},
    check_specs=blocking("tokenized_corpus", ids_in_range="Every id is one of the tokenizer's."),
)
@reported
def tokenized_corpus(
    context: dg.AssetExecutionContext, storage: Storage, corpus: Manifest, tokenizer: Manifest
) -> Events:
    """Token ids in one memory-mapped file, with a table of the documents in it."""
    with draft(storage.path, "tokenized_corpus") as folder:
        made = encode_corpus(corpus.path, tokenizer.path, folder, report=logged(context))
        yield from passed(
            "tokenized_corpus", ids_in_range=lambda: ids_in_range(largest_id(folder), tokenizer.facts["vocab_size"])
        )
        inputs, facts = [corpus, tokenizer], made.model_dump(mode="json")
        manifest = publish(storage.path, "tokenized_corpus", folder, made.fingerprint, {}, inputs, facts)
    documents = pd.read_parquet(manifest.path / DOCUMENTS, columns=["source", "split", "tokens", "bytes"])
    yield output(manifest, tokenized_metadata(made, documents))


@dg.asset(
    code_version="1",
    group_name="data",
    kinds={"pandas", "parquet"},
    check_specs=blocking("token_batches", every_target_once="An epoch holds each target of the training split once."),
)
@reported
def token_batches(
    context: dg.AssetExecutionContext, config: BatchesRun, storage: Storage, tokenized_corpus: Manifest
) -> Events:
    """An index table of rows into the mapped ids of the training split."""
    with draft(storage.path, "token_batches") as folder:
        made = build_batches(config, tokenized_corpus.path, folder)
        rows = pd.read_parquet(folder / ROWS)
        yield from passed(
            "token_batches",
            every_target_once=lambda: every_target_once(
                rows, tokenized_corpus.facts["streams"]["train"], open_masked(tokenized_corpus.path)
            ),
        )
        facts = made.model_dump(mode="json") | {
            "tokenizer": tokenized_corpus.facts["tokenizer"],
            "tokenized_folder": tokenized_corpus.folder,
        }
        manifest = publish(
            storage.path, "token_batches", folder, made.fingerprint, identity(config), [tokenized_corpus], facts
        )
    yield output(manifest, batches_metadata(made, rows))


def trained_before(root: Path, config: TokenizerRun) -> Manifest | None:
    """Return the tokenizer that was trained with this configuration, the newest one of several."""
    for manifest in candidates(root, "tokenizer"):
        if manifest.facts["trained"] and manifest.config == identity(config):
            return manifest
    return None


def documents_exist(documents: pd.DataFrame) -> Verdict:
    """Whether each split has a document."""
    counts = {split: int((documents["split"] == split).sum()) for split in SPLITS}
    return Verdict(all(counts.values()), f"found {counts} documents, expected at least 1 of each")


def splits_disjoint(documents: pd.DataFrame) -> Verdict:
    """Whether no text (by its SHA-256) is in two splits, or twice in one."""
    repeated = documents["id"][documents["id"].duplicated()]
    example = f", such as {repeated.iloc[0]}" if len(repeated) else ""
    return Verdict(repeated.empty, f"found {len(repeated)} texts more than once{example}, expected 0")


def ids_in_range(largest: int, rows: int) -> Verdict:
    """Whether the largest id is below the number of rows."""
    return Verdict(largest < rows, f"found ids up to {largest}, expected 0 to {rows - 1}")


def every_target_once(rows: pd.DataFrame, stream: Mapping[str, int], masked: np.ndarray = NONE) -> Verdict:
    """Whether the rows lie apart from each other and hold all targets of the stream that carry loss."""
    expected = stream["end"] - stream["begin"] - 1 - stream.get("masked", 0)
    found = int(learned_targets(rows, masked).sum())
    starts, ends = rows["start"].to_numpy(), (rows["start"] + rows["length"]).to_numpy()
    apart = bool((starts[1:] >= ends[:-1]).all()) and starts[0] >= stream["begin"] and ends[-1] < stream["end"]
    how = "apart" if apart else "that overlap or reach outside"
    return Verdict(apart and found == expected, f"found {found} targets in {len(rows)} rows {how}, expected {expected}")


def logged(context: dg.AssetExecutionContext) -> Report:
    """Return a function that logs progress every so many seconds."""
    last = time.monotonic()

    def report(progress: Progress) -> None:
        nonlocal last
        if time.monotonic() - last >= LOG_SECONDS:
            last = time.monotonic()
            context.log.info(describe(progress))

    return report


def corpus_metadata(made: CorpusManifest, documents: pd.DataFrame) -> dict[str, Any]:
    """Return counts, a table of the splits, the largest documents and a picture of their sizes."""
    counts = made.model_dump(mode="json", exclude={"fingerprint", "documents", "bytes"})
    largest = documents.nlargest(SHOWN, "bytes")[["source", "split", "bytes"]]
    return counts | {
        "dagster/row_count": len(documents),
        "splits": table([{"split": s, "documents": made.documents[s], "bytes": made.bytes[s]} for s in SPLITS]),
        "largest_documents": table(largest.to_dict("records")),
        "sizes": histogram("document sizes", documents["bytes"], "log10 of bytes"),
    }


def tokenizer_metadata(manifest: Manifest, kept: bool) -> dict[str, Any]:
    """Return counts and a sample of the tokens."""
    words = load_tokenizer(manifest.path)
    facts = TokenizerManifest.model_validate(manifest.facts)
    shown = thinned(facts.vocab_size, SHOWN)
    return {
        "vocab_size": facts.vocab_size,
        "end_of_text": facts.end_of_text,
        "end_of_text_id": facts.end_of_text_id,
        "trained": facts.trained,
        "kept_from_before": kept,
        "tokens": table([{"id": int(i), "token": repr(words.id_to_token(int(i)))} for i in shown]),
    }


def tokenized_metadata(made: TokenizedManifest, documents: pd.DataFrame) -> dict[str, Any]:
    """Return counts, a table of the splits and the longest documents."""
    longest = documents.nlargest(SHOWN, "tokens")[["source", "split", "tokens", "bytes"]]
    splits = [
        {
            "split": name,
            "documents": stream.documents,
            "tokens": stream.tokens,
            "targets": stream.targets,
            "bytes_per_token": round(stream.bytes / stream.tokens, 3),
        }
        for name, stream in made.streams.items()
    ]
    return {
        "dagster/row_count": len(documents),
        "max_id": made.max_id,
        "vocab_size": made.vocab_size,
        "without_tokens": made.without_tokens,
        "splits": table(splits),
        "longest_documents": table(longest.to_dict("records")),
    }


def batches_metadata(made: BatchesManifest, rows: pd.DataFrame) -> dict[str, Any]:
    """Return counts and some of the rows."""
    shown = rows.iloc[thinned(len(rows), SHOWN)]
    return made.model_dump(mode="json", exclude={"fingerprint", "tokenized"}) | {
        "dagster/row_count": len(rows),
        "some_rows": table(shown.to_dict("records")),
    }
