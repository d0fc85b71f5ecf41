"""The main job on prompts and completions: loss on completions only, counts of those."""

import json

import fsspec
import pytest

from pipelines import data
from pipelines.io import newest

from .running import materialized, merged, pointers, run


@pytest.fixture
def instructions(tmp_path):
    """Prompts longer than a row, so that some rows hold no target."""
    path = tmp_path / "instructions.jsonl"
    records = [{"prompt": f"What follows {i}? " * 6, "completion": f"It is {i + 1}."} for i in range(40)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_the_graph_on_instructions(config, root, instructions):
    result = run(merged(config, {"corpus": {"paths": [str(instructions)]}, "token_batches": {"seq_len": 16}}))
    found = pointers(root)
    streams = found["tokenized_corpus"].facts["streams"]
    assert found["corpus"].facts["masked"] == sum(found["corpus"].facts["documents"].values()) == 40
    targets = {split: s["end"] - s["begin"] - 1 - s["masked"] for split, s in streams.items()}
    assert all(s["masked"] > s["tokens"] / 2 for s in streams.values())
    batches = found["token_batches"].facts
    assert batches["target_tokens"] == targets["train"]
    assert batches["without_targets"] > 0
    assert found["perplexity"].facts["tokens"] == targets["validation"]
    completions = [len(f"It is {i + 1}.") for i in range(40)]
    assert found["perplexity"].facts["bytes"] < sum(completions)
    metadata = materialized(result)["corpus"].metadata
    assert metadata["masked"].value == 40


def test_options_of_a_file_system_are_not_part_of_what_a_corpus_is(config, root):
    run(config, assets=["corpus"])
    first = newest(root, "corpus")
    run(merged(config, {"corpus": {"storage_options": {"key": "secret"}}}), assets=["corpus"])
    assert newest(root, "corpus") == first
    assert not any(b"secret" in path.read_bytes() for path in root.rglob("*") if path.is_file())


def test_a_corpus_at_an_address_is_skipped_until_it_changes(config, capfd):
    system = fsspec.filesystem("memory")
    for number in range(20):
        system.pipe_file(f"/instructions/{number}.txt", f"a text, number {number}".encode())
    asked = merged(config, {"corpus": {"paths": ["memory://instructions"]}})
    asked["resources"]["storage"]["config"]["skip_unchanged"] = True
    asked["loggers"] = {"console": {"config": {"log_level": "INFO"}}}
    skipped = []
    for text in (None, None, b"another text"):
        if text:
            system.pipe_file("/instructions/0.txt", text)
        run(asked, assets=["corpus"])
        skipped.append("not computed again" in capfd.readouterr().err)
    system.rm("/instructions", recursive=True)
    assert skipped == [False, True, False]


def test_progress_is_logged(config, monkeypatch, capfd):
    monkeypatch.setattr(data, "LOG_SECONDS", 0)
    monkeypatch.setattr("mamba_ops.progress.EVERY_SECONDS", 0)
    logged = merged(config, {})
    logged["loggers"] = {"console": {"config": {"log_level": "INFO"}}}
    run(logged, assets=["corpus", "tokenizer", "tokenized_corpus"])
    said = capfd.readouterr().err
    for stage in ("corpus", "tokens"):
        assert f"{stage}: 0.0 of 0.0 MB, " in said
