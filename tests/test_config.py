"""Validation of configurations."""

import pytest
from pydantic import ValidationError

from mamba_ops.config import (
    EvaluateConfig,
    MambaConfig,
    TrainConfig,
    WeightsConfig,
    byte_size,
    new_model_config,
)


@pytest.mark.parametrize("value", ["1e-4", "1E-4", "1e-04", "1.0e-4", 0.0001])
def test_case_57_numeric_text_is_a_number(value):
    config = TrainConfig(learning_rate=value, adam_epsilon=value, weight_decay=value)
    assert config.learning_rate == config.adam_epsilon == config.weight_decay == 1e-4


@pytest.mark.parametrize("value", ["abc", "nan", "inf", "-1", -1, True, float("nan"), float("inf"), None])
@pytest.mark.parametrize("field", ["learning_rate", "adam_epsilon", "weight_decay"])
def test_case_57_anything_else_is_refused_by_name(field, value):
    with pytest.raises(ValidationError, match=field):
        TrainConfig(**{field: value})


def test_unknown_keys_are_errors():
    with pytest.raises(ValidationError, match="lerning_rate"):
        TrainConfig(lerning_rate=1e-4)


@pytest.mark.parametrize("baseline", ["none", "unigram", "bigram", "30", "12.5"])
def test_known_baselines(baseline):
    assert EvaluateConfig(baseline=baseline).baseline == baseline


@pytest.mark.parametrize("baseline", ["trigram", "nan", "inf", "1", "-3", ""])
def test_unknown_baselines_are_refused(baseline):
    with pytest.raises(ValidationError, match="baseline"):
        EvaluateConfig(baseline=baseline)


def test_a_checkpoint_brings_its_own_shape():
    assert WeightsConfig(checkpoint="folder").checkpoint == "folder"
    with pytest.raises(ValidationError, match="hidden_size"):
        WeightsConfig(checkpoint="folder", hidden_size=12)


def test_a_checkpoint_takes_a_seed_for_new_rows_only():
    assert WeightsConfig(checkpoint="folder", resize_embeddings=True, seed=3).seed == 3
    with pytest.raises(ValidationError, match=r"remove \['seed'\]"):
        WeightsConfig(checkpoint="folder", seed=3)
    with pytest.raises(ValidationError, match=r"remove \['hidden_size'\]"):
        WeightsConfig(checkpoint="folder", resize_embeddings=True, hidden_size=12)


@pytest.mark.parametrize(
    ("value", "size"),
    [(7, 7), ("7", 7), ("7B", 7), ("20KB", 20_000), ("500MB", 5 * 10**8), (" 2 gb ", 2 * 10**9), ("1T", 10**12)],
)
def test_sizes_in_bytes(value, size):
    assert byte_size(value) == size
    assert byte_size(TrainConfig(max_shard_size=value).max_shard_size) == size


@pytest.mark.parametrize("value", ["", "GB", "1.5GB", "-1", "2GiB", "0", "0MB", 0, -5, True, "1 PB", "٣MB"])
def test_other_sizes_are_refused(value):
    with pytest.raises(ValueError, match="expected bytes as a number or text such as 500MB or 2GB, got"):
        byte_size(value)
    with pytest.raises(ValidationError, match="max_shard_size"):
        TrainConfig(max_shard_size=value)


@pytest.mark.parametrize("field", [{"max_shard_size": 1.5}, {"max_shard_size": ["2GB"]}, {"save_dtype": "float16"}])
def test_other_saving_options_are_refused(field):
    with pytest.raises(ValidationError, match=next(iter(field))):
        TrainConfig(**field)


def test_new_model_has_the_given_shape():
    config = new_model_config(WeightsConfig(hidden_size=100, time_step_rank=None), vocab_size=300, end_of_text_id=7)
    assert (config.d_inner, config.dt_rank, config.vocab_size, config.eos_token_id) == (200, 7, 300, 7)
    assert new_model_config(WeightsConfig(time_step_rank=3), 300, 0).dt_rank == 3


def test_intermediate_size_must_be_expand_times_hidden_size():
    MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, intermediate_size=16)
    with pytest.raises(ValidationError, match="intermediate_size"):
        MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, intermediate_size=32)


@pytest.mark.parametrize(
    ("field", "value"),
    [("layer_norm_epsilon", float("inf")), ("time_step_rank", 0), ("hidden_size", True), ("use_bias", "yes")],
)
def test_config_json_values_of_another_kind_are_refused(field, value):
    with pytest.raises(ValidationError, match=field):
        MambaConfig(**{"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, field: value})
