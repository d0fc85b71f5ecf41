"""Full training, WSLA and LoRA on the GPU: the losses of 20 steps beside NumPy's."""

import numpy as np
import pytest

from mamba_ops import model
from mamba_ops.config import TARGETS, BatchesConfig, LoraConfig, MambaConfig, TrainConfig, WslaTrainConfig
from mamba_ops.cpu import open_cpu
from mamba_ops.gradcheck import random_batch, random_parameters
from mamba_ops.gradients import GradientBuffers, accumulate
from mamba_ops.lora import adapters, merged, tensor_shapes
from mamba_ops.mirror import Mirror
from mamba_ops.ops import Dropout
from mamba_ops.train import start, train
from mamba_ops.wsla import wsla_names

CONFIG = MambaConfig(vocab_size=40, hidden_size=8, num_hidden_layers=2, state_size=4)
IDS = np.random.default_rng(5).integers(0, 40, 300).tolist()
BATCHES = BatchesConfig(seq_len=19, batch_size=2)
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=list(TARGETS))

WAYS = {
    "full": ({}, TrainConfig),
    "wsla": ({"names": wsla_names(CONFIG)}, WslaTrainConfig),
    "lora": ({"lora": LORA}, TrainConfig),
    "lora, dropout": ({"lora": LORA.model_copy(update={"lora_dropout": 0.2})}, TrainConfig),
}


def run(ops, way, dtype=np.float32, **options):
    chosen, settings = WAYS[way]
    state = start(CONFIG, seed=1, dtype=dtype, **chosen)
    config = settings(**{"learning_rate": 1e-2, "max_steps": 20, "gradient_accumulation_steps": 2} | options)
    return state, list(train(state, IDS, config, BATCHES, ops=ops))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_twenty_steps_give_the_losses_of_numpy(gpu_once, assert_close, way, checkpointing):
    expected_state, expected = run(open_cpu(np.float64), way, np.float64, gradient_checkpointing=checkpointing)
    state, found = run(gpu_once, way, gradient_checkpointing=checkpointing)
    assert [metrics.loss for metrics in found] == [pytest.approx(metrics.loss, rel=1e-4) for metrics in expected]
    for name, value in expected_state.params.items():
        assert_close(state.params[name], value, 1e-3, name)
        if name not in state.names:
            assert state.params[name].tobytes() == value.astype(np.float32).tobytes()


@pytest.mark.parametrize("dropout", [None, Dropout(0.3, 4, 7)], ids=["", "dropout"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("limit", [None, 512], ids=["", "row parts"])
def test_gradients_of_all_seven_targets(gpu, assert_close, monkeypatch, limit, tied, dropout):
    config = CONFIG.model_copy(update={"tie_word_embeddings": tied, "use_bias": not tied})
    rng = np.random.default_rng(0)
    params = random_parameters(config, rng)
    tensors = {name: 0.3 * rng.standard_normal(shape) for name, shape in tensor_shapes(config, LORA).items()}
    both = {name: value.astype(np.float32) for name, value in (params | tensors).items()}
    batches = [random_batch(np.random.default_rng(n), config.vocab_size, 2, 19) for n in range(2)]
    found = adapters(config, LORA)
    exact = GradientBuffers(wide := {name: value.astype(np.float64) for name, value in both.items()}, tensors)
    cpu = open_cpu(np.float64)
    nll, _ = accumulate(cpu, wide, config, batches, exact, list(tensors), False, found, dropout)
    if limit:
        monkeypatch.setattr(gpu.device, "binding_limit", limit)
    mirror = Mirror(gpu, both)
    buffers = GradientBuffers(mirror.params, tensors, gpu)
    with gpu.scope():
        total, _ = accumulate(gpu, mirror.params, config, batches, buffers, list(tensors), False, found, dropout)
        assert total == pytest.approx(nll, rel=1e-4)
        for name, value in exact.arrays.items():
            assert_close(gpu.read(buffers.arrays[name]), value, 1e-3, name)
        if dropout is None:
            rows = gpu.rows(batches[0])
            beside = gpu.read(model.losses(gpu, mirror.params, config, rows, adapters=found))
            whole = merged(config, wide, found)
            with cpu.scope():
                assert_close(beside, model.losses(cpu, whole, config, cpu.rows(batches[0])).copy(), 1e-4)
