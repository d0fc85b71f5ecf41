"""The parameter table and the initial values."""

import math

import numpy as np
import pytest

from mamba_ops.config import MambaConfig
from mamba_ops.parameters import (
    EMBEDDING,
    LM_HEAD,
    count,
    head_name,
    init,
    inverse_softplus,
    resize_embeddings,
    select,
    table,
)


def test_case_10_fresh_model_follows_the_official_recipe():
    config = MambaConfig(vocab_size=64, hidden_size=768, num_hidden_layers=1)
    params = init(config, seed=0)
    prefix = "backbone.layers.0.mixer."
    bias = params[prefix + "dt_proj.bias"].astype(np.float64)
    dt = np.log1p(np.exp(bias))
    assert bias.shape == (1536,)
    assert dt.min() >= 1e-3 * (1 - 1e-5)
    assert dt.max() <= 0.1 * (1 + 1e-5)
    assert 0.007 <= math.exp(np.log(dt).mean()) <= 0.014
    np.testing.assert_allclose(params[prefix + "A_log"], np.log(np.arange(1, 17)) * np.ones((1536, 1)), rtol=1e-6)
    np.testing.assert_array_equal(params[prefix + "D"], 1)
    weight = params[prefix + "dt_proj.weight"]
    assert np.abs(weight).max() <= 48**-0.5
    assert np.abs(weight).max() > 0.99 * 48**-0.5


def test_case_10_inverse_softplus():
    np.testing.assert_allclose(inverse_softplus(np.array([1e-3, 0.1])), [-6.907255, -2.252168], atol=1e-6)


@pytest.mark.parametrize(("rescale", "divisor"), [(True, 2.0), (False, 1.0)])
def test_case_10_out_proj_is_scaled_by_the_root_of_the_layers(rescale, divisor):
    config = MambaConfig(vocab_size=8, hidden_size=64, num_hidden_layers=4, rescale_prenorm_residual=rescale)
    weight = init(config, 0)["backbone.layers.3.mixer.out_proj.weight"]
    bound = 128**-0.5 / divisor
    assert 0.99 * bound < np.abs(weight).max() <= bound


def test_case_10_same_seed_same_bytes_and_other_seed_other_bytes():
    config = MambaConfig(vocab_size=16, hidden_size=8, num_hidden_layers=2)
    a, b, c = init(config, 1), init(config, 1), init(config, 2)
    assert all(a[name].tobytes() == b[name].tobytes() for name in a)
    assert a["backbone.embeddings.weight"].tobytes() != c["backbone.embeddings.weight"].tobytes()


def test_a_parameter_does_not_depend_on_the_others():
    small = init(MambaConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, tie_word_embeddings=True), 1)
    other = MambaConfig(vocab_size=16, hidden_size=8, num_hidden_layers=2, tie_word_embeddings=False, use_bias=True)
    large = init(other, 1)
    for name in small:
        assert small[name].tobytes() == large[name].tobytes()


def test_decay_skips_A_log_D_norms_and_biases():
    config = MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, use_bias=True)
    kept = {name for name, entry in table(config).items() if not entry.decay}
    prefix = "backbone.layers.0."
    assert kept == {prefix + "norm.weight", "backbone.norm_f.weight"} | {
        prefix + "mixer." + name
        for name in ("A_log", "D", "dt_proj.bias", "conv1d.bias", "in_proj.bias", "out_proj.bias")
    }


def test_select_names_what_it_does_not_know():
    config = MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1)
    assert select(config) == list(table(config))
    assert select(config, ["backbone.norm_f.weight"]) == ["backbone.norm_f.weight"]
    with pytest.raises(ValueError, match="q_proj"):
        select(config, ["q_proj"])


def test_count_is_the_size_of_the_arrays():
    config = MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=2, tie_word_embeddings=False)
    assert count(config) == sum(value.size for value in init(config, 0).values())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_resizing_adds_rows_and_keeps_the_rest(tied, dtype):
    config = MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, tie_word_embeddings=tied)
    params = init(config, 0, dtype)
    larger, resized = resize_embeddings(config, params, 47, seed=5)
    assert larger == config.model_copy(update={"vocab_size": 47})
    assert list(resized) == list(table(larger))
    for name, array in resized.items():
        assert array.shape == table(larger)[name].shape
        assert array.dtype == dtype
        assert array[: len(params[name])].tobytes() == params[name].tobytes()
    for name in {EMBEDDING, head_name(config)}:
        new, old = resized[name][40:], params[name]
        away = np.abs(new - old.mean(axis=0)) / old.std(axis=0)
        assert away.min() > 0
        assert away.max() < 0.05
        assert len(np.unique(new, axis=0)) == 7
    if not tied:
        assert not np.array_equal(resized[EMBEDDING][40:], resized[LM_HEAD][40:])


def test_resizing_follows_the_seed_only():
    config = MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1)
    params = init(config, 0)
    first, same, other = (resize_embeddings(config, params, 50, seed)[1][EMBEDDING] for seed in (1, 1, 2))
    assert first.tobytes() == same.tobytes()
    assert not np.array_equal(first[40:], other[40:])


@pytest.mark.parametrize("rows", [1, 39, 40])
def test_resizing_never_takes_rows_away(rows):
    config = MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1)
    params = init(config, 0)
    same, kept = resize_embeddings(config, params, rows, seed=1)
    assert same == config
    assert kept[EMBEDDING] is params[EMBEDDING]


def test_new_rows_take_no_more_of_the_probability_than_their_share():
    """Whatever the hidden state, confident or not, k new tokens among n get at most k / (n + k)."""
    rng = np.random.default_rng(0)
    config = MambaConfig(vocab_size=200, hidden_size=64, num_hidden_layers=1, tie_word_embeddings=False)
    params = init(config, 0, np.float64)
    params[LM_HEAD] = rng.normal(0.3, 1, (200, 64)) * rng.lognormal(0, 1, (200, 1))
    head = resize_embeddings(config, params, 220, seed=1)[1][LM_HEAD]
    logits = rng.normal(0, 1, (500, 64)) * rng.lognormal(-1, 1, (500, 1)) @ head.T
    probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
    share = probabilities[:, 200:].sum(axis=1) / probabilities.sum(axis=1)
    assert share.max() < 1.02 * 20 / 220
