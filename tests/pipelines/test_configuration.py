"""The stages' configuration, as Dagster takes it."""

from tempfile import TemporaryDirectory

import dagster as dg
import pytest
import yaml

from mamba_ops import config as library
from pipelines import configuration, definitions
from pipelines.configuration import STAGES, ConfigurationError, EvaluateRun, TrainRun, WeightsRun, allowed

from .running import materialized, merged, run

LIBRARY = {
    "corpus": library.CorpusConfig,
    "tokenizer": library.TokenizerConfig,
    "token_batches": library.BatchesConfig,
    "weights_mirror": library.WeightsConfig,
    "trained_weights": library.TrainConfig,
    "wsla_weights": library.WslaTrainConfig,
    "lora_adapter": library.LoraTrainConfig,
    "merged_weights": library.SaveConfig,
    "perplexity": library.EvaluateConfig,
    "wsla_perplexity": library.EvaluateConfig,
    "lora_perplexity": library.EvaluateConfig,
    "samples": library.SamplesConfig,
}


def received(stage, text):
    """Return what an asset receives when the YAML text is its configuration."""
    seen = []

    @dg.asset
    def probe(config: stage) -> None:
        seen.append(config)

    with TemporaryDirectory() as folder:
        dg.materialize(
            [probe],
            run_config={"ops": {"probe": {"config": yaml.safe_load(text)}}},
            instance=dg.DagsterInstance.ephemeral(folder),
        )
    return seen[0]


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", '"1e-4"', "0.0001", "1E-4", "1e-04"])
@pytest.mark.parametrize("field", ["learning_rate", "adam_epsilon", "weight_decay"])
def test_case_57_numbers_are_accepted_however_yaml_reads_them(field, text):
    value = getattr(received(TrainRun, f"{field}: {text}"), field)
    assert (type(value), value) == (float, 1e-4)


@pytest.mark.parametrize("value", ["abc", "nan", "inf", "-1", -1, float("nan"), float("inf"), True, "", None, [1]])
@pytest.mark.parametrize(
    ("field", "limits"),
    [("learning_rate", "> 0 and <= 10"), ("adam_epsilon", ">= 1e-30 and <= 1"), ("weight_decay", ">= 0 and <= 1")],
)
def test_case_57_what_is_no_number_in_range_is_refused_naming_field_and_range(field, limits, value):
    with pytest.raises(ConfigurationError, match=field) as refused:
        TrainRun(**{field: value})
    assert limits in str(refused.value)
    assert "\n" not in str(refused.value)


def test_case_57_a_run_file_that_holds_only_a_learning_rate(tmp_path):
    values = yaml.safe_load("ops: {trained_weights: {config: {learning_rate: 1e-4}}}")
    dg.validate_run_config(definitions.resolve_job_def("train"), values)
    assert TrainRun(**values["ops"]["trained_weights"]["config"]) == TrainRun(learning_rate=0.0001)


def test_case_57_unknown_keys_stay_errors():
    values = {"ops": {"trained_weights": {"config": {"lr": "1e-4"}}}}
    with pytest.raises(dg.DagsterInvalidConfigError, match='unexpected config entry "lr"'):
        dg.validate_run_config(definitions.resolve_job_def("train"), values)
    with pytest.raises(ConfigurationError, match="lr: extra inputs are not permitted, got '1e-4'"):
        TrainRun(lr="1e-4")


def test_a_number_needs_no_quotes_as_a_baseline():
    assert received(EvaluateRun, "baseline: 12").baseline == "12"
    assert received(EvaluateRun, "baseline: 12.5").baseline == "12.5"
    with pytest.raises(ConfigurationError, match="baseline: expected none, unigram, bigram or a number above 1"):
        EvaluateRun(baseline="trigram")


def test_an_optional_number_may_be_left_out_or_be_text():
    assert received(TrainRun, "max_seconds: 1e1").max_seconds == 10
    assert received(TrainRun, "max_seconds: null").max_seconds is None
    assert received(TrainRun, "{}").max_seconds is None


def test_each_stage_is_the_library_s_own_class_with_its_defaults():
    assert STAGES.keys() == LIBRARY.keys()
    for name, stage in STAGES.items():
        assert issubclass(stage, LIBRARY[name])
        assert stage().model_dump() == LIBRARY[name]().model_dump()
        assert issubclass(stage, dg.Config)


def test_every_field_is_described_with_its_range():
    for name, stage in STAGES.items():
        fields = stage.to_config_schema().as_field().config_type.fields
        assert fields.keys() == LIBRARY[name].model_fields.keys()
        for key, field in fields.items():
            limits = allowed(LIBRARY[name].model_fields[key])
            assert field.description
            assert field.description.endswith(f"Allowed: {limits}.") or not limits
            assert not field.is_required


def test_ranges_in_words():
    fields = library.TrainConfig.model_fields
    assert allowed(fields["learning_rate"]) == "> 0 and <= 10"
    assert allowed(fields["max_steps"]) == ">= 1"
    assert allowed(fields["max_seconds"]) == "> 0"
    assert allowed(fields["lr_scheduler_type"]) == "one of cosine, linear, constant"
    assert allowed(fields["gradient_checkpointing"]) == ""


def test_a_shape_beside_a_checkpoint_is_refused():
    with pytest.raises(ConfigurationError, match="the shape comes from it; remove \\['hidden_size'\\]"):
        WeightsRun(checkpoint="folder", hidden_size=3)
    assert received(WeightsRun, "checkpoint: folder").checkpoint == "folder"


def test_a_late_stage_s_wrong_value_stops_the_run_before_its_first_stage(config):
    result = run(merged(config, {"trained_weights": {"learning_rate": "abc"}}), fails=True)
    assert not materialized(result)


def test_values_from_environment_variables_are_left_to_their_stage():
    configuration.check_stages({"ops": {"trained_weights": {"config": {"learning_rate": {"env": "RATE"}}}}})
    configuration.check_stages({"ops": {"another": {"config": {"learning_rate": "abc"}}, "corpus": {}}})
    with pytest.raises(ConfigurationError, match=r"trained_weights: max_steps: .* got 0"):
        configuration.check_stages({"ops": {"trained_weights": {"config": {"max_steps": 0}}}})
