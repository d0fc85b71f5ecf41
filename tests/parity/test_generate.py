"""Greedy text, and what sampling draws from, against transformers' `generate`."""

import numpy as np
import pytest

from mamba_ops.config import GenerateConfig, MambaConfig
from mamba_ops.generate import advance, generate
from mamba_ops.model import empty_state
from mamba_ops.sampling import probabilities

torch = pytest.importorskip("torch", reason="torch is missing: pip install -e .[parity]")
transformers = pytest.importorskip("transformers", reason="transformers is missing: pip install -e .[parity]")

pytestmark = pytest.mark.parity

CONFIGS = {
    "tied": MambaConfig(vocab_size=503, hidden_size=32, num_hidden_layers=2),
    "untied, biases, kernel 3": MambaConfig(
        vocab_size=211,
        hidden_size=24,
        num_hidden_layers=3,
        state_size=5,
        conv_kernel=3,
        time_step_rank=3,
        use_bias=True,
        tie_word_embeddings=False,
    ),
    "tied, expand 3, no conv bias": MambaConfig(
        vocab_size=97, hidden_size=20, num_hidden_layers=4, expand=3, use_conv_bias=False, layer_norm_epsilon=1e-3
    ),
    "one layer, odd": MambaConfig(
        vocab_size=1009, hidden_size=17, num_hidden_layers=1, state_size=7, tie_word_embeddings=False
    ),
}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
NEW = 200


@pytest.fixture(params=list(CONFIGS))
def model(request, random_parameters, reference):
    """A config, float32 parameters whose text is led by the mixers, not by the last token, and their model of them."""
    config = CONFIGS[request.param]
    params = random_parameters(config, 5, np.float32)
    for name, value in params.items():
        if name.endswith(("out_proj.weight", "norm_f.weight")):
            value *= np.float32(20 if name.endswith("out_proj.weight") else 3)
    theirs = reference(config, params).eval()
    theirs.generation_config.eos_token_id = None
    return config, params, theirs


def their_text(theirs, **options):
    """Return what `generate` makes of the prompt: new ids, and logits before and after its processors."""
    with torch.no_grad():
        made = theirs.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
            max_new_tokens=NEW,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
            **options,
        )
    return (
        made.sequences[0, len(PROMPT) :].tolist(),
        torch.cat(made.logits).numpy(),
        torch.cat(made.scores).double().softmax(-1).numpy(),
    )


def margin(logits):
    """The least distance between the two largest logits, by the largest magnitude: float32 differs by 1e-6."""
    top = np.sort(logits, axis=1)[:, -2:]
    return float((top[:, 1] - top[:, 0]).min() / np.abs(logits).max())


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_decoding_gives_the_same_200_tokens(penalty, model, ops32):
    config, params, theirs = model
    expected, logits, shares = their_text(theirs, do_sample=False, repetition_penalty=penalty)
    assert len(expected) == NEW
    assert margin(logits if penalty == 1 else np.log(np.maximum(shares, 1e-300))) > 1e-5
    settings = GenerateConfig(max_new_tokens=NEW, temperature=0, repetition_penalty=penalty)
    assert list(generate(ops32, params, config, PROMPT, settings)) == expected
    assert len(set(expected)) > 30


def test_the_logits_of_each_step_are_the_same(model, ops32):
    config, params, theirs = model
    text, logits, _ = their_text(theirs, do_sample=False)
    state = empty_state(ops32, config, 1)
    found = [advance(ops32, params, config, state, np.array(PROMPT), 0)[-1]]
    found += [
        advance(ops32, params, config, state, np.array([token]), len(PROMPT) + i)[0]
        for i, token in enumerate(text[:-1])
    ]
    assert np.abs(np.array(found) - logits).max() <= 1e-5 * np.abs(logits).max()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"top_k": 20},
        {"top_p": 0.9},
        {"repetition_penalty": 1.2},
        {"repetition_penalty": 0.8, "temperature": 1.5, "top_k": 50, "top_p": 0.8},
    ],
    ids=str,
)
def test_what_generate_draws_from_is_the_same(options, model):
    """With the logits of `generate`, of each of its 200 steps: the order of its processors, and what they do."""
    config, _, theirs = model
    torch.manual_seed(1)
    asked = {"top_k": 0, "top_p": 1.0, "temperature": 1.0} | options
    text, logits, expected = their_text(theirs, do_sample=True, **asked)
    settings = GenerateConfig(**asked)
    seen = np.zeros(config.vocab_size, bool)
    seen[PROMPT] = True
    for step, token in enumerate(text):
        found = probabilities(logits[step], seen, settings)
        np.testing.assert_array_equal(found > 0, expected[step] > 0)
        np.testing.assert_allclose(found, expected[step], rtol=1e-4, atol=1e-7)
        seen[token] = True
    assert len(set(text)) > 3


@pytest.mark.parametrize("seed", range(5))
def test_the_processors_give_the_same_in_float64(seed):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 1, 4001)
    text = rng.integers(0, len(logits), 300)
    penalty, temperature, top_p = float(rng.uniform(0.5, 2)), float(rng.uniform(0.5, 2)), float(rng.uniform(0.3, 0.99))
    top_k = int(rng.integers(50, 1000))
    seen = np.zeros(len(logits), bool)
    seen[text] = True
    processors = transformers.LogitsProcessorList(
        [
            transformers.RepetitionPenaltyLogitsProcessor(penalty),
            transformers.TemperatureLogitsWarper(temperature),
            transformers.TopKLogitsWarper(top_k),
            transformers.TopPLogitsWarper(top_p),
        ]
    )
    expected = processors(torch.from_numpy(text)[None], torch.from_numpy(logits)[None]).softmax(-1)[0].numpy()
    settings = GenerateConfig(temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=penalty)
    np.testing.assert_allclose(probabilities(logits, seen, settings), expected, rtol=1e-10, atol=0)
    assert 5 < np.count_nonzero(expected) < top_k
