"""Before training starts: estimates in the log and the metadata, and a refusal that says what would fit."""

from .running import failure, materialized, merged, pointers, run


def test_estimates_are_metadata(finished):
    metadata = materialized(finished.result)["trained_weights"].metadata
    assert metadata["estimated/steps"].value == 12
    assert metadata["estimated/seconds"].value > 0
    assert metadata["estimated/bytes"].value > metadata["estimated/bytes_with_checkpointing"].value > 0


def test_estimates_are_in_the_log(trained, root, capfd):
    loud = trained | {"loggers": {"console": {"config": {"log_level": "INFO"}}}}
    other = merged(loud, {"trained_weights": {"max_steps": 3, "gradient_checkpointing": True}})
    run(other, assets=["trained_weights"])
    said = capfd.readouterr().err
    assert "memory: about " in said
    assert " without gradient_checkpointing; " in said
    assert " are available" in said
    assert "time: about " in said
    assert " for 3 steps of " in said


def test_a_finished_run_has_nothing_left(trained, root, capfd):
    loud = trained | {"loggers": {"console": {"config": {"log_level": "INFO"}}}}
    again = run(loud, assets=["trained_weights"])
    assert "time: about 0 steps are left" in capfd.readouterr().err
    assert materialized(again)["trained_weights"].metadata["estimated/steps"].value == 0


def test_a_run_that_cannot_fit_is_refused_and_told_what_would(trained, root):
    before = pointers(root)["trained_weights"]
    limited = {"memory_limit": "1MB", "learning_rate": 1e-3}
    result = run(merged(trained, {"trained_weights": limited}), assets=["trained_weights"], fails=True)
    message = failure(result)
    assert "memory: training takes about " in message
    assert "expected at most 1 MB, the memory_limit; no batch_size and seq_len make it fit: parameters, " in message
    assert pointers(root)["trained_weights"] == before
