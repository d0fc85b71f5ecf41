"""Bad input: the run fails, with one error that names the thing, what came and what was expected."""

import json
import shutil

import numpy as np
import pytest
import yaml

from mamba_ops.checkpoint import load_model, save_model
from pipelines import ways
from pipelines.demo import error_message

from .running import execute, failure, materialized, merged, pointers, run, verdicts


@pytest.fixture
def checkpoint(finished, tmp_path):
    """A checkpoint folder with its tokenizer, and what makes the run use both."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(pointers(finished.root)["trained_weights"].path, folder)
    return folder


def from_checkpoint(config, folder):
    changed = merged(config, {"tokenizer": {"path": str(folder)}})
    changed["ops"]["weights_mirror"]["config"] = {"checkpoint": str(folder)}
    return changed


def said(result):
    """Return what the one failed step said; nothing else failed."""
    assert sum(event.is_step_failure for event in result.all_events) == 1
    message = failure(result).strip().removeprefix("dagster._core.definitions.events.Failure: ")
    assert "\n" not in message
    return message


def command_line(config, tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    done = execute("job", "execute", "-m", "pipelines", "-j", "train", "-c", "run.yaml", cwd=tmp_path)
    return done.returncode, done.stdout


def test_a_wrong_field_is_dagster_s_config_error(config, root, tmp_path):
    status, output = command_line(merged(config, {"trained_weights": {"lr": 1}}), tmp_path)
    assert status == 1
    assert error_message(output).startswith(
        'Received unexpected config entry "lr" at path root:ops:trained_weights:config. Expected: '
    )
    assert not root.exists()


def test_an_empty_corpus(config, texts, tmp_path):
    for file in texts.iterdir():
        file.write_text(" \n")
    status, output = command_line(config, tmp_path)
    assert status == 1
    message = error_message(output)
    assert str(texts) in message
    assert "0 documents with text" in message
    assert "expected at least" in message


def test_case_22_a_corpus_too_small_to_split_fails_with_the_counts(config, texts, root):
    for file in sorted(texts.iterdir())[1:]:
        file.unlink()
    result = run(config, fails=True)
    assert f"{texts}']: 0 documents with text for train" in said(result)
    assert verdicts(result) == {("corpus", "documents_exist"): False, ("corpus", "splits_disjoint"): False}
    assert not pointers(root)


def test_case_22_rows_longer_than_the_corpus_and_batches_larger_than_it_train(config, root):
    run(merged(config, {"token_batches": {"seq_len": 100_000, "batch_size": 64}, "trained_weights": {"max_steps": 1}}))
    facts = pointers(root)["trained_weights"].facts
    assert facts["steps"] == 1
    assert facts["tokens_seen"] == pointers(root)["token_batches"].facts["target_tokens"]


@pytest.mark.parametrize("path", ["nowhere", "nowhere/*.txt"])
def test_a_missing_corpus_names_its_path(config, tmp_path, path):
    result = run(merged(config, {"corpus": {"paths": [str(tmp_path / path)]}}), fails=True)
    assert str(tmp_path / path) in said(result)


def test_a_corrupt_checkpoint_exits_with_1(config, checkpoint, tmp_path):
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    status, output = command_line(from_checkpoint(config, checkpoint), tmp_path)
    assert status == 1
    message = error_message(output)
    assert message.startswith(f"{weights}: found ")
    assert "expected " in message
    assert f"Failure: {message}" in output


def test_an_unsupported_model_type(config, checkpoint, root):
    values = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(values | {"model_type": "falcon_mamba"}))
    result = run(from_checkpoint(config, checkpoint), fails=True)
    assert said(result).endswith(
        "model_type: found 'falcon_mamba', expected 'mamba': only model_type 'mamba' (Mamba-1) is supported; "
        "norms on dt, B and C would be silently lost"
    )
    assert verdicts(result)["weights_mirror", "weights_finite"] is False
    assert "trained_weights" not in materialized(result)
    assert "weights_mirror" not in pointers(root)


def test_a_checkpoint_that_is_not_there(config, tmp_path, checkpoint):
    changed = from_checkpoint(config, checkpoint)
    changed["ops"]["weights_mirror"]["config"]["checkpoint"] = str(tmp_path / "nowhere")
    assert f"{tmp_path / 'nowhere'}: found nothing there, expected a local Hugging Face folder" in said(
        run(changed, fails=True)
    )


def test_a_checkpoint_with_another_tokenizer_says_what_to_set(config, checkpoint):
    changed = from_checkpoint(config, checkpoint)
    changed["ops"]["tokenizer"]["config"] = {"vocab_size": 270}
    message = said(run(changed, fails=True))
    assert message.startswith(f"{checkpoint / 'tokenizer.json'}: found the tokenizer ")
    assert message.endswith(f"set the path of the stage tokenizer to {checkpoint}")


def test_a_checkpoint_is_trained_further(config, checkpoint, finished, root):
    run(from_checkpoint(config, checkpoint))
    base = pointers(root)["weights_mirror"].facts
    assert base["weights"] == pointers(finished.root)["trained_weights"].facts["weights"]
    assert pointers(root)["perplexity"].facts["before"] == pytest.approx(
        pointers(finished.root)["perplexity"].facts["after"]
    )


def test_what_comes_before_is_asked_for_by_name(config, root):
    result = run(config, assets=["tokenizer"], fails=True)
    assert (
        said(result)
        == f"corpus: nothing at {root}/manifests/corpus.json, expected a manifest; materialize corpus first"
    )


def test_a_broken_pointer_is_named(trained, root):
    (root / "manifests/corpus.json").write_text("{")
    assert "corpus.json: found no readable manifest" in said(run(trained, assets=["tokenizer"], fails=True))


def test_a_missing_file_is_named(trained, root):
    file = pointers(root)["corpus"].path / "documents.parquet"
    file.unlink()
    assert said(run(trained, assets=["tokenizer"], fails=True)).startswith(f"{file}: found no such file, expected ")
    assert "materialize corpus again" in said(run(trained, assets=["corpus"], fails=True))
    shutil.rmtree(file.parent)
    run(trained, assets=["corpus", "tokenizer"])


def test_tokenizers_that_differ_are_refused(trained):
    retrained = merged(trained, {"tokenizer": {"vocab_size": 270}})
    run(retrained, assets=["tokenizer"])
    message = said(run(trained, assets=["perplexity"], fails=True))
    assert message.startswith("tokenizers differ: found {'trained_weights': ")
    run(retrained, assets=["tokenized_corpus", "token_batches"])
    assert said(run(trained, assets=["trained_weights"], fails=True)).startswith("tokenizers differ")


def test_a_run_that_another_process_holds_is_refused(trained, root):
    import fcntl

    (folder,) = (root / "runs").iterdir()
    with open(folder / ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another process trains in this folder" in said(run(trained, assets=["trained_weights"], fails=True))


def test_training_that_is_never_finite_fails_its_checks(config, checkpoint, root):
    model, weights = load_model(checkpoint)
    tokenizer = shutil.copy(checkpoint / "tokenizer.json", checkpoint.parent)
    weights["backbone.layers.0.norm.weight"][:] = 3e38
    shutil.rmtree(checkpoint)
    save_model(checkpoint, model, weights, tokenizer)
    changed = merged(from_checkpoint(config, checkpoint), {"trained_weights": {"max_skipped_steps": 2}})
    result = run(changed, fails=True)
    assert "3 steps in a row were not finite, max_skipped_steps allows 2" in said(result)
    assert verdicts(result)["trained_weights", "weights_finite"] is False
    assert "trained_weights" not in pointers(root)


def test_weights_that_predict_nothing_finite_fail_the_check(trained, root, monkeypatch):
    real = ways.load_model

    def wild(folder):
        model, weights = real(folder)
        return model, weights | {"backbone.norm_f.weight": np.full(model.hidden_size, 3e38, np.float32)}

    monkeypatch.setattr(ways, "load_model", wild)
    result = run(trained, job="evaluate", assets=["perplexity"], fails=True)
    assert said(result).startswith("check perplexity_finite of perplexity failed: found ")


def test_messages_are_found_in_dagster_s_output():
    assert (
        error_message("x\ndagster._core.definitions.events.Failure: check a failed\n\nStack Trace:\n")
        == "check a failed"
    )
    unexpected = (
        'dagster._core.errors.DagsterExecutionStepExecutionError: Error occurred while executing op "a"::\n\n'
        "KeyError: 'b'\n\nStack Trace:\n"
    )
    assert error_message(unexpected) == "KeyError: 'b'"
    wrong = "dagster._core.errors.DagsterInvalidConfigError: Error in config for job train\n    Error 1: Received x\n"
    assert error_message(wrong) == "Received x"
    assert error_message("Traceback\nModuleNotFoundError: no pipelines\n") == "ModuleNotFoundError: no pipelines"
    assert error_message("") == "the job failed without a word"
