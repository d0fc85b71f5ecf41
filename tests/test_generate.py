"""Recurrent decoding equals the parallel forward, and draws what it says."""

import numpy as np
import pytest

from mamba_ops.config import MambaConfig
from mamba_ops.cpu import open_cpu
from mamba_ops.generate import PROMPT_WINDOW, advance, choose, generate
from mamba_ops.model import empty_state, logits
from mamba_ops.ops import IGNORED, Batch
from mamba_ops.parameters import init

E = 0
CONFIGS = [
    MambaConfig(vocab_size=13, hidden_size=8, num_hidden_layers=2, state_size=3),
    MambaConfig(
        vocab_size=13,
        hidden_size=6,
        num_hidden_layers=1,
        conv_kernel=2,
        use_bias=True,
        tie_word_embeddings=False,
    ),
]
CONFIG = CONFIGS[0]


def sharp_parameters(config, dtype=np.float64):
    """Parameters whose logits are far apart and depend on more than the last token."""
    params = init(config, 3, dtype)
    for name, value in params.items():
        if name in ("backbone.embeddings.weight", "lm_head.weight"):
            value *= dtype(50)
        if name.endswith(("out_proj.weight", "dt_proj.bias")):
            value *= dtype(10 if name.endswith("weight") else 0.1)
    return params


def parallel(ops, params, config, ids):
    ids = np.array([ids])
    batch = Batch(ids, np.full_like(ids, IGNORED), np.arange(ids.size, dtype=np.uint32)[None])
    return logits(ops, params, config, ops.rows(batch))


def sample(params, prompt, config=CONFIG, **options):
    options = {"max_new_tokens": 20, "temperature": 1.0, "seed": 0} | options
    return list(generate(open_cpu(np.float64), params, config, prompt, **options))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("prompt", [1, 2, 3, 5, PROMPT_WINDOW, PROMPT_WINDOW + 7])
def test_recurrent_logits_equal_parallel_logits_at_each_position(config, prompt):
    ops, params = open_cpu(np.float64), sharp_parameters(config)
    ids = np.random.default_rng(prompt).integers(0, config.vocab_size, prompt + 12)
    expected = parallel(ops, params, config, ids)
    state = empty_state(ops, config, 1)
    got = advance(ops, params, config, state, ids[:prompt], 0)
    np.testing.assert_allclose(
        got, expected[prompt - len(got) : prompt], rtol=0, atol=1e-10 * abs(expected).max()
    )
    for position in range(prompt, len(ids)):
        got = advance(ops, params, config, state, ids[position : position + 1], position)
        np.testing.assert_allclose(got[0], expected[position], rtol=0, atol=1e-10 * abs(expected).max())


@pytest.mark.parametrize("config", CONFIGS)
def test_greedy_takes_the_likeliest_id_of_the_parallel_forward(config):
    ops, params = open_cpu(np.float64), sharp_parameters(config)
    prompt = [E, 3, 1]
    got = sample(params, prompt, config, temperature=0)
    text = list(prompt)
    for _ in range(20):
        text.append(int(parallel(ops, params, config, text)[-1].argmax()))
    assert got == text[len(prompt) :]
    assert got != [int(parallel(ops, params, config, [token])[0].argmax()) for token in text[2:-1]]
    assert sample(params, prompt, config, temperature=0, seed=9) == got


def test_a_seed_gives_the_same_ids_and_seeds_differ():
    params = init(CONFIG, 0, np.float64)
    assert sample(params, [E], seed=5) == sample(params, [E], seed=5)
    assert len({tuple(sample(params, [E], seed=seed)) for seed in range(8)}) == 8
    assert sample(params, [E], seed=5)[:7] == sample(params, [E], seed=5, max_new_tokens=7)


def test_the_text_ends_before_the_stop_id():
    params = init(CONFIG, 0, np.float64)
    whole = sample(params, [E], max_new_tokens=60)
    stop = whole[10]
    assert sample(params, [E], max_new_tokens=60, stop_id=stop) == whole[: whole.index(stop)]
    assert sample(params, [E], max_new_tokens=0) == []
    assert len(whole) == 60


@pytest.mark.parametrize("temperature", [0, 1.0, 1e6])
def test_case_43_generation_never_gives_the_ids_of_padded_rows(temperature):
    params = init(CONFIG, 0, np.float64)
    # whatever the sign of its product with the hidden state, one of these rows is far the likeliest
    params["backbone.embeddings.weight"][9:] = 100 * np.outer([1, 1, -1, -1], np.ones(CONFIG.hidden_size))
    if temperature <= 1:
        assert min(sample(params, [E], temperature=temperature, max_new_tokens=1)) >= 9
    got = sample(params, [E], temperature=temperature, vocab_limit=9, max_new_tokens=200)
    assert max(got) < 9
    assert len(got) == 200
    assert all(isinstance(token, int) for token in got)


def test_case_43_prompt_ids_outside_the_embedding():
    config = MambaConfig(vocab_size=8, hidden_size=4, num_hidden_layers=1)
    params = init(config, 0, np.float64)
    assert len(sample(params, [0, 7], config)) == 20
    with pytest.raises(ValueError, match="id 8 at index 2: expected 0 to 7, the embedding has 8 rows"):
        sample(params, [0, 7, 8], config)
    with pytest.raises(ValueError, match="id -1 at index 0"):
        sample(params, [-1], config)
    with pytest.raises(ValueError, match="expected integers, got float64"):
        sample(params, [1.0], config)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt_ids: expected at least one token id"),
        ([[1, 2]], {}, "prompt_ids: expected at least one token id"),
        ([E], {"temperature": -1.0}, "temperature: .* got -1.0"),
        ([E], {"temperature": float("nan")}, "temperature: .* got nan"),
        ([E], {"max_new_tokens": -1}, "max_new_tokens: .* got -1"),
        ([E], {"vocab_limit": 0}, "vocab_limit: .* got 0"),
    ],
)
def test_bad_settings_are_refused_before_the_first_token(prompt, options, message):
    options = {"max_new_tokens": 1, "temperature": 1.0, "seed": 0} | options
    with pytest.raises(ValueError, match=message):
        generate(open_cpu(np.float64), init(CONFIG, 0, np.float64), CONFIG, prompt, **options)


@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
def test_draws_follow_the_softmax_at_the_temperature(temperature):
    values = np.array([1.0, -0.5, 0.25, 0.0], np.float32)
    rng = np.random.default_rng(0)
    drawn = np.bincount([choose(values, temperature, rng) for _ in range(20_000)], minlength=4) / 20_000
    expected = np.exp(values.astype(np.float64) / temperature)
    np.testing.assert_allclose(drawn, expected / expected.sum(), atol=0.015)


def test_extreme_temperatures_and_logits():
    rng = np.random.default_rng(0)
    values = np.array([0.0, 3e38, -3e38], np.float32)
    for temperature in (5e-324, 1e-310, 1e-8, 1.0):
        assert choose(values, temperature, rng) == 1
    assert {choose(np.array([0.0, 1.0]), 1e308, rng) for _ in range(100)} == {0, 1}
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match="1 of 2"):
            choose(np.array([0.0, bad]), 1.0, rng)
