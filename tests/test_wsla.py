"""WSLA: the selective projection alone trains, in bounded steps."""

import numpy as np
import pytest

from mamba_ops.config import BatchesConfig, LoraConfig, MambaConfig, TrainConfig, WslaTrainConfig
from mamba_ops.train import start, train
from mamba_ops.wsla import wsla_names

CONFIG = MambaConfig(vocab_size=11, hidden_size=8, num_hidden_layers=2, state_size=4)
IDS = np.random.default_rng(5).integers(0, 11, 40).tolist()


def test_names():
    assert wsla_names(CONFIG) == [f"backbone.layers.{i}.mixer.x_proj.weight" for i in range(2)]


def test_x_proj_alone_changes_and_no_element_by_more_than_max_delta_a_step():
    state = start(CONFIG, seed=1, names=wsla_names(CONFIG))
    before = {name: value.copy() for name, value in state.params.items()}
    config = WslaTrainConfig(learning_rate=1.0, weight_decay=1.0, max_steps=1, warmup_steps=0)
    assert config.max_delta == 0.05
    list(train(state, IDS, config, BatchesConfig(seq_len=8, batch_size=2)))
    for name, value in state.params.items():
        if name in state.names:
            change = np.abs(value - before[name])
            # decay and Adam's step are clamped together: at this rate every element is at the bound
            assert change.max() == pytest.approx(0.05, rel=1e-5)
            assert (change <= 0.05 * (1 + 1e-5)).all()
        else:
            assert value.tobytes() == before[name].tobytes(), name
    assert set(state.adam.moments) == set(state.names)


def test_with_lora_it_is_refused():
    with pytest.raises(ValueError, match=r"names: with lora the adapters alone train, expected none, got \['backbone"):
        start(CONFIG, names=wsla_names(CONFIG), lora=LoraConfig())


def test_full_training_has_no_trust_region_unless_asked():
    assert TrainConfig().max_delta == 0
