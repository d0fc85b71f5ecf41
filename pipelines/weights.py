"""Base weights: the asset weights_mirror, and what is asked about any weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np

from mamba_ops.checkpoint import fingerprint, load_model, save_model
from mamba_ops.config import MambaConfig, new_model_config
from mamba_ops.parameters import count, init, resize_embeddings
from mamba_ops.tokenizer import TOKENIZER, load_tokenizer, tokenizer_fingerprint
from pipelines.checks import Events, Verdict, blocking, passed, reported
from pipelines.configuration import WeightsRun, identity
from pipelines.io import Manifest, draft, output, publish
from pipelines.pictures import table, thinned
from pipelines.resources import Accelerator, Storage
from pipelines.sides import both_sides, mirror_agrees, sides_metadata

SHOWN = 40


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
            "weights": fingerprint(weights),
            "model": model.model_dump(mode="json"),
            "tokenizer": tokenizer.facts["fingerprint"],
        }
        manifest = publish(storage.path, "weights_mirror", folder, content, identity(config), [tokenizer], content)
    yield output(manifest, weights_metadata(model, weights) | sides_metadata(opened, sides))


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
