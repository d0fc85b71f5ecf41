"""What the weights write: the asset samples."""

from contextlib import closing
from typing import Any

import dagster as dg

from mamba_ops.checkpoint import load_model
from mamba_ops.fingerprint import atomic_directory, write_json
from mamba_ops.generate import continuation
from mamba_ops.mirror import Mirror
from mamba_ops.ops import Ops
from mamba_ops.tokenizer import load_tokenizer
from pipelines.checks import Events, reported
from pipelines.configuration import SamplesRun, identity
from pipelines.io import Manifest, draft, output, publish
from pipelines.pictures import quoted
from pipelines.resources import Accelerator, Storage
from pipelines.weights import same_tokenizer

SAMPLES = "samples.json"
SHOWN = 20


@dg.asset(code_version="1", group_name="model", kinds={"numpy", "json"}, pool="accelerator")
@reported
def samples(
    context: dg.AssetExecutionContext,
    config: SamplesRun,
    storage: Storage,
    accelerator: Accelerator,
    trained_weights: Manifest,
    tokenizer: Manifest,
) -> Events:
    """Texts that continue the prompts of the configuration, written by the trained weights."""
    same_tokenizer(trained_weights, tokenizer)
    with accelerator.opened(context) as (ops, *_):
        texts = continued(ops, config, trained_weights, tokenizer)
    with draft(storage.path, "samples") as folder:
        with atomic_directory(folder) as made:
            write_json(made / SAMPLES, texts)
        inputs, facts = [trained_weights, tokenizer], {"prompts": len(texts)}
        manifest = publish(storage.path, "samples", folder, texts, identity(config), inputs, facts)
    shown = "\n\n".join(quoted(text["prompt"] + text["continuation"]) for text in texts[:SHOWN])
    yield output(manifest, {"prompts": len(texts), "samples": dg.MetadataValue.md(shown)})


def continued(ops: Ops, config: SamplesRun, trained_weights: Manifest, tokenizer: Manifest) -> list[dict[str, Any]]:
    """Return each prompt with its continuation; each starts from the same seed."""
    model, weights = load_model(trained_weights.path)
    words, end = load_tokenizer(tokenizer.path), tokenizer.facts["end_of_text_id"]
    with closing(Mirror(ops, weights)) as mirror:
        return [
            {
                "prompt": prompt,
                "continuation": "".join(continuation(ops, mirror.params, model, words, end, prompt, config)),
            }
            for prompt in config.prompts
        ]
