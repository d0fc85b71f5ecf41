"""The schedule that trains again."""

from datetime import UTC, datetime

import dagster as dg
import pytest

from pipelines import definitions
from pipelines.automation import retraining, run_config

from .running import materialized, run, versions


def tick(schedule, instance):
    """Return the run requests of a tick."""
    with dg.build_schedule_context(
        instance=instance, scheduled_execution_time=datetime(2030, 1, 6, 3, tzinfo=UTC)
    ) as context:
        return schedule.evaluate_tick(context).run_requests


def test_it_is_loaded_and_stopped():
    schedule = definitions.resolve_schedule_def("retrain")
    assert schedule.default_status == dg.DefaultScheduleStatus.STOPPED
    assert (schedule.cron_schedule, schedule.execution_timezone) == ("0 3 * * 0", "UTC")
    assert schedule.job_name == "train"


def test_cron_and_time_zone_come_from_outside():
    schedule = retraining({"MAMBA_RETRAIN_CRON": "30 4 * * *", "MAMBA_RETRAIN_TIMEZONE": "Asia/Tokyo"})
    assert (schedule.cron_schedule, schedule.execution_timezone) == ("30 4 * * *", "Asia/Tokyo")
    with pytest.raises(ValueError, match=r"MAMBA_RETRAIN_CRON=61 \* \* \* \*: expected a cron schedule"):
        retraining({"MAMBA_RETRAIN_CRON": "61 * * * *"})
    with pytest.raises(ValueError, match="MAMBA_RETRAIN_TIMEZONE=Moon/Crater: expected a time zone"):
        retraining({"MAMBA_RETRAIN_TIMEZONE": "Moon/Crater"})


def test_a_tick_without_a_file_runs_the_defaults(instance):
    (request,) = tick(retraining({}), instance)
    assert request.run_config == {"ops": {"tokenizer": {"config": {"retrain": False}}}}
    dg.validate_run_config(definitions.resolve_job_def("train"), request.run_config)


def test_ticks_train_on_what_is_there_and_keep_the_tokenizer(config, texts, tmp_path, instance):
    import yaml

    config["ops"]["tokenizer"]["config"]["retrain"] = True
    file = tmp_path / "retrain.yaml"
    file.write_text(yaml.safe_dump(config))
    schedule = retraining({"MAMBA_RETRAIN_CONFIG": str(file)})
    (first,) = tick(schedule, instance)
    before = run(first.run_config, instance=instance)
    (texts / "new.txt").write_text("a document that came in the meantime " * 10)
    (second,) = tick(schedule, instance)
    after = run(second.run_config, instance=instance)
    assert materialized(after)["tokenizer"].metadata["kept_from_before"].value
    assert versions(after)["tokenizer"] == versions(before)["tokenizer"]
    assert versions(after)["trained_weights"] != versions(before)["trained_weights"]


@pytest.mark.parametrize(
    ("content", "came"),
    [(None, "No such file"), ("- 1\n- 2\n", "list"), ("a: [", "expected"), ("ops: [1]", "as ops, got list")],
)
def test_a_tick_names_a_bad_file(tmp_path, instance, content, came):
    file = tmp_path / "retrain.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(dg.DagsterUserCodeExecutionError) as failed:
        tick(retraining({"MAMBA_RETRAIN_CONFIG": str(file)}), instance)
    assert f"MAMBA_RETRAIN_CONFIG={file}: expected a " in str(failed.value.__cause__)
    assert came in str(failed.value.__cause__)


def test_emptied_blocks_of_the_file_are_defaults(tmp_path):
    file = tmp_path / "retrain.yaml"
    file.write_text("ops:\n  tokenizer:\n")
    assert run_config(str(file)) == {"ops": {"tokenizer": {"config": {"retrain": False}}}}
