"""Ten clipped AdamW steps against torch.optim.AdamW on the same gradients."""

import numpy as np
import pytest

from mamba_ops import optimizer
from mamba_ops.config import MambaConfig, TrainConfig
from mamba_ops.gradients import clip_factor, total_norm
from mamba_ops.ops import IGNORED

torch = pytest.importorskip("torch", reason="torch is missing: pip install -e .[parity]")
pytest.importorskip("transformers", reason="transformers is missing: pip install -e .[parity]")

pytestmark = pytest.mark.parity

CONFIGS = {
    "tied": MambaConfig(vocab_size=37, hidden_size=16, num_hidden_layers=2),
    "untied with biases": MambaConfig(
        vocab_size=29, hidden_size=10, num_hidden_layers=1, use_bias=True, tie_word_embeddings=False
    ),
}
TORCH_EPSILON = 1e-6
"""clip_grad_norm_ divides by norm + 1e-6; `clip_factor` by the norm alone, so that the result has exactly max_norm."""


@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize(
    "train",
    [
        TrainConfig(max_grad_norm=1.0),
        TrainConfig(max_grad_norm=0.3, weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-5),
        TrainConfig(max_grad_norm=0.0, weight_decay=0.0),
    ],
    ids=["defaults", "other betas", "no clip, no decay"],
)
def test_ten_steps(name, train, ops64, random_parameters, random_batch, reference, float64_transformers):
    config = CONFIGS[name]
    params = random_parameters(config, seed=1)
    model = reference(config, params)
    decay = optimizer.decayed(config)
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for key, p in named.items() if (key in decay) == decayed], "weight_decay": weight}
        for decayed, weight in ((True, train.weight_decay), (False, 0.0))
    ]
    betas = (train.adam_beta1, train.adam_beta2)
    theirs = torch.optim.AdamW(groups, betas=betas, eps=train.adam_epsilon)
    state = optimizer.adam_state(params, params)
    clipped = 0
    for step in range(10):
        batch = random_batch(config, 20 + step, 2, 9 + step, ignored=0.1)
        gradients(model, batch, weight=0.05 if step in (2, 5) else 1.0)
        grads = {key: p.grad.numpy().copy() for key, p in named.items()}
        norm = total_norm(ops64.global_norm(grads))
        scale = clip_factor(norm, train.max_grad_norm)
        if train.max_grad_norm:
            expected = torch.nn.utils.clip_grad_norm_(model.parameters(), train.max_grad_norm).item()
            assert abs(norm - expected) <= 1e-12 * expected
            torch_scale = clip_factor(norm + TORCH_EPSILON, train.max_grad_norm)
            assert abs(scale - torch_scale) <= 1.01 * TORCH_EPSILON / norm
            clipped += scale < 1
            scale = torch_scale
        rate = 1e-3 * (1 + step)
        for group in theirs.param_groups:
            group["lr"] = rate
        theirs.step()
        optimizer.step(ops64, params, grads, state, train, rate, scale, decay)
        for key, parameter in named.items():
            np.testing.assert_allclose(params[key], parameter.detach().numpy(), rtol=1e-10, atol=0, err_msg=key)
    assert set(state.counts.values()) == {10}
    assert 0 < clipped < 10 or not train.max_grad_norm
    for key, parameter in named.items():
        for ours, kind in zip(state.moments[key], ("exp_avg", "exp_avg_sq"), strict=True):
            np.testing.assert_allclose(ours, theirs.state[parameter][kind].numpy(), rtol=1e-10, atol=0)


def gradients(model, batch, weight):
    """Set the model's gradients to those of weight * the mean loss."""
    model.zero_grad()
    ids = torch.from_numpy(batch.ids)
    targets = torch.from_numpy(np.where(batch.targets == IGNORED, -100, batch.targets))
    loss = model(input_ids=ids, labels=ids, shift_labels=targets, use_cache=False).loss
    (weight * loss).backward()
