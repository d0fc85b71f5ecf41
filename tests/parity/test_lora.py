"""Gradients and steps of adapters against PEFT's, and against torch through W + s B A for every target."""

import math

import numpy as np
import pytest

from mamba_ops import optimizer
from mamba_ops.config import TARGETS, LoraConfig, MambaConfig, TrainConfig
from mamba_ops.gradients import GradientBuffers
from mamba_ops.lora import adapters, initial, targets, tensor_names, tensor_shapes
from mamba_ops.model import losses_and_gradients
from mamba_ops.ops import IGNORED
from mamba_ops.parameters import EMBEDDING
from mamba_ops.train import train_step

torch = pytest.importorskip("torch", reason="torch is missing: pip install -e .[parity]")
pytest.importorskip("transformers", reason="transformers is missing: pip install -e .[parity]")
peft = pytest.importorskip("peft", reason="peft is missing: pip install -e .[parity]")

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),
]

CONFIGS = {
    "tied": MambaConfig(vocab_size=37, hidden_size=16, num_hidden_layers=2),
    "untied": MambaConfig(
        vocab_size=29,
        hidden_size=10,
        num_hidden_layers=2,
        state_size=5,
        time_step_rank=3,
        conv_kernel=3,
        use_bias=True,
        tie_word_embeddings=False,
    ),
}
SETTINGS = {
    "defaults": dict(r=4, lora_alpha=8),
    "rank-stabilised and clamped": dict(r=14, lora_alpha=3, use_rslora=True),
}
KEY = "base_model.model.{}.default{}"


def drawn(config, lora, seed):
    rng = np.random.default_rng(seed)
    return {name: 0.3 * rng.standard_normal(shape) for name, shape in tensor_shapes(config, lora).items()}


def run_ours(ops, params, config, lora, batch, gradient_checkpointing=False):
    """Return the summed loss and the gradients of the adapters' tensors."""
    need = set(tensor_shapes(config, lora))
    buffers = GradientBuffers(params, need)
    total = losses_and_gradients(
        ops, params, config, ops.rows(batch), buffers, need, gradient_checkpointing, adapters(config, lora)
    )
    return total, buffers.arrays


def inputs(batch):
    ids = torch.from_numpy(batch.ids)
    labels = torch.from_numpy(np.where(batch.targets == IGNORED, -100, batch.targets))
    return dict(input_ids=ids, labels=ids, shift_labels=labels, use_cache=False)


def in_peft(model, config, lora, tensors):
    """Return PEFT's model in training mode with the adapter's tensors, and these as its parameters by our names."""
    ranks = {weight.removesuffix(".weight"): rank for weight, rank in targets(config, lora).items() if rank < lora.r}
    chosen = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        use_rslora=lora.use_rslora,
        target_modules=lora.target_modules,
        rank_pattern=ranks,
    )
    model = peft.get_peft_model(model, chosen).double().train()
    named = dict(model.named_parameters())
    ends = {name: ".weight" if name.endswith(".weight") else "" for name in tensors}
    found = {name: named[KEY.format(name.removesuffix(".weight"), ends[name])] for name in tensors}
    assert {id(p) for p in found.values()} == {id(p) for p in named.values() if p.requires_grad}
    for name, parameter in found.items():
        parameter.data.copy_(torch.from_numpy(tensors[name]))
    return model, found


def assert_close(found, expected, name):
    assert expected.any(), name
    worst = np.abs(found - expected).max() / np.abs(expected).max()
    assert worst <= 1e-10, f"{name}: {worst:.2e}"


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("settings", list(SETTINGS))
@pytest.mark.parametrize("name", list(CONFIGS))
def test_gradients_are_those_of_peft(
    name, settings, gradient_checkpointing, ops64, random_parameters, random_batch, reference, float64_transformers
):
    config = CONFIGS[name]
    chosen = ["in_proj", "x_proj", *(["embeddings"] if name == "untied" else [])]
    lora = LoraConfig(target_modules=chosen, **SETTINGS[settings])
    params, tensors = random_parameters(config, seed=1), drawn(config, lora, seed=2)
    batch = random_batch(config, 3, 3, 21, ignored=0.2)
    model, parameters = in_peft(reference(config, params), config, lora, tensors)
    loss = model(**inputs(batch), num_items_in_batch=1).loss
    loss.backward()
    found_loss, grads = run_ours(ops64, params | tensors, config, lora, batch, gradient_checkpointing)
    assert abs(found_loss - loss.item()) <= 1e-10 * loss.item()
    assert grads.keys() == parameters.keys()
    for key, parameter in parameters.items():
        assert parameter.grad.dtype == torch.float64
        assert_close(grads[key], parameter.grad.numpy(), key)


@pytest.mark.parametrize("settings", list(SETTINGS))
@pytest.mark.parametrize("chosen", [*([target] for target in TARGETS), list(TARGETS)], ids=[*TARGETS, "all"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_gradients_are_those_through_the_sum_of_weight_and_product(
    name, chosen, settings, ops64, random_parameters, random_batch, reference, float64_transformers
):
    config = CONFIGS[name]
    lora = LoraConfig(target_modules=chosen, **SETTINGS[settings])
    params, tensors = random_parameters(config, seed=4), drawn(config, lora, seed=5)
    batch = random_batch(config, 6, 2, 19, ignored=0.2)
    leaves = {key: torch.from_numpy(array.copy()).requires_grad_() for key, array in tensors.items()}
    weights = {}
    for weight, rank in targets(config, lora).items():
        A, B = (leaves[key] for key in tensor_names(weight))
        scale = lora.lora_alpha / (math.sqrt(rank) if lora.use_rslora else rank)
        product = (B @ A).T if weight == EMBEDDING else (B @ A).reshape(params[weight].shape)
        weights[weight] = torch.from_numpy(params[weight]) + scale * product
    model = reference(config, params)
    call = inputs(batch) | {"num_items_in_batch": 1}
    loss = torch.func.functional_call(model, weights, args=(), kwargs=call).loss
    loss.backward()
    found_loss, grads = run_ours(ops64, params | tensors, config, lora, batch)
    assert abs(found_loss - loss.item()) <= 1e-10 * loss.item()
    assert grads.keys() == leaves.keys()
    for key, leaf in leaves.items():
        assert_close(grads[key], leaf.grad.numpy(), key)


@pytest.mark.parametrize(
    "train",
    [
        TrainConfig(max_grad_norm=0.0),
        TrainConfig(max_grad_norm=0.2, weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6),
    ],
    ids=["defaults, no clip", "clipped, other betas"],
)
@pytest.mark.parametrize("fresh", [True, False], ids=["from B = 0", "from B other than 0"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_ten_steps_are_those_of_peft_and_torch(
    name, fresh, train, ops64, random_parameters, random_batch, reference, float64_transformers
):
    config = CONFIGS[name]
    lora = LoraConfig(r=4, lora_alpha=8)
    base = random_parameters(config, seed=1)
    tensors = initial(config, lora, 2, np.float64) if fresh else drawn(config, lora, seed=2)
    params = {key: array.copy() for key, array in (base | tensors).items()}
    found = adapters(config, lora)
    state = optimizer.adam_state(params, tensors)
    buffers = GradientBuffers(params, tensors)
    model, parameters = in_peft(reference(config, base), config, lora, tensors)
    betas = (train.adam_beta1, train.adam_beta2)
    theirs = torch.optim.AdamW(
        parameters.values(), betas=betas, eps=train.adam_epsilon, weight_decay=train.weight_decay
    )
    clipped = 0
    for step in range(10):
        batch = random_batch(config, 20 + step, 2, 9 + step, ignored=0.1)
        rate = 1e-3 * (1 + step)
        result = train_step(ops64, params, config, [batch], buffers, state, train, rate, set(tensors), found)
        theirs.zero_grad()
        loss = model(**inputs(batch)).loss
        loss.backward()
        norm = math.sqrt(math.fsum(float((p.grad**2).sum()) for p in parameters.values()))
        if train.max_grad_norm and norm > train.max_grad_norm:
            clipped += 1
            for parameter in parameters.values():
                parameter.grad *= train.max_grad_norm / norm
        for group in theirs.param_groups:
            group["lr"] = rate
        theirs.step()
        assert abs(result.loss - loss.item()) <= 1e-10 * loss.item()
        assert abs(result.grad_norm - norm) <= 1e-10 * norm
        for key, parameter in parameters.items():
            np.testing.assert_allclose(params[key], parameter.detach().numpy(), rtol=1e-8, atol=0, err_msg=key)
    assert clipped or not train.max_grad_norm
    for key, array in base.items():
        assert params[key].tobytes() == array.tobytes()
