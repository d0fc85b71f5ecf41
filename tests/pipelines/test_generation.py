"""The asset samples: the texts that `mamba_ops.generate` prints."""

import json

import dagster as dg

from mamba_ops.checkpoint import load_model
from mamba_ops.config import GenerateConfig
from mamba_ops.cpu import open_cpu
from mamba_ops.generate import continuation
from mamba_ops.tokenizer import load_tokenizer

from .running import materialized, merged, pointers, run


def test_each_prompt_is_continued_as_the_command_does(finished):
    result, root, _, _ = finished
    found = pointers(root)
    texts = json.loads((found["samples"].path / "samples.json").read_text(encoding="utf-8"))
    model, weights = load_model(found["trained_weights"].path)
    words, end = load_tokenizer(found["tokenizer"].path), found["tokenizer"].facts["end_of_text_id"]
    options = GenerateConfig(max_new_tokens=8)
    for text, prompt in zip(texts, ["the state", ""], strict=True):
        rest = "".join(continuation(open_cpu(), weights, model, words, end, prompt, options))
        assert text == {"prompt": prompt, "continuation": rest}
    metadata = materialized(result)["samples"].metadata
    assert metadata["prompts"].value == 2
    assert metadata["samples"].value.startswith("```text\nthe state")
    assert isinstance(metadata["samples"], dg.MarkdownMetadataValue)


def test_other_options_give_other_texts(trained, root):
    first = pointers(root)["samples"]
    changed = merged(trained, {"samples": {"temperature": 0, "repetition_penalty": 1.5, "top_k": 5, "top_p": "9e-1"}})
    run(changed, assets=["samples"])
    second = pointers(root)["samples"]
    assert second.fingerprint != first.fingerprint
    assert second.config["top_p"] == 0.9
