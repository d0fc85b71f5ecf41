"""Text by recurrent decoding: one token at a time from a state of fixed size."""

from collections.abc import Iterator, Sequence

import numpy as np

from mamba_ops.config import MambaConfig
from mamba_ops.model import empty_state, logits
from mamba_ops.ops import IGNORED, Batch, LayerState, Ops, Parameters
from mamba_ops.tokenizer import check_ids

PROMPT_WINDOW = 64
LOWEST_EXPONENT = -700.0


def generate(
    ops: Ops,
    params: Parameters,
    config: MambaConfig,
    prompt_ids: Sequence[int] | np.ndarray,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    stop_id: int | None = None,
    vocab_limit: int | None = None,
) -> Iterator[int]:
    """Yield up to max_new_tokens ids that continue the prompt, drawn from softmax(logits / temperature).

    Temperature 0 takes the likeliest id. stop_id ends the text and is not yielded. Ids from vocab_limit (the
    tokenizer's size) on are never drawn: padded rows of the embedding. The same seed gives the same ids.
    Raises ValueError on an empty prompt, an id outside the embedding, a setting out of range, and, while
    decoding, on logits that are not finite.
    """
    prompt = _check_prompt(prompt_ids, config.vocab_size)
    limit = config.vocab_size if vocab_limit is None else min(vocab_limit, config.vocab_size)
    if limit < 1:
        raise ValueError(f"vocab_limit: expected at least 1, got {vocab_limit}")
    if not 0 <= temperature < np.inf:
        raise ValueError(f"temperature: expected a finite number from 0 on, got {temperature}")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens: expected at least 0, got {max_new_tokens}")
    rng = np.random.default_rng(seed)

    def decode() -> Iterator[int]:
        state = empty_state(ops, config, 1)
        new, position = prompt, 0
        for _ in range(max_new_tokens):
            last = advance(ops, params, config, state, new, position)[-1, :limit]
            position += len(new)
            token = choose(last, temperature, rng)
            if token == stop_id:
                return
            yield token
            new = np.array([token])

    return decode()


def advance(
    ops: Ops, params: Parameters, config: MambaConfig, state: list[LayerState], ids: np.ndarray, position: int
) -> np.ndarray:
    """Feed ids of one document to the state and return the logits of the last window: (tokens, vocab_size).

    position: how many tokens of the document the state has seen. Windows are powers of two, so that only a
    few shapes occur, whatever the lengths.
    """
    begin = 0
    while True:
        window = min(PROMPT_WINDOW, 1 << ((len(ids) - begin).bit_length() - 1))
        part = ids[None, begin : begin + window]
        positions = position + np.arange(begin, begin + window)[None]
        batch = Batch(part, np.full_like(part, IGNORED), positions.astype(np.uint32))
        with ops.scope():
            result = logits(ops, params, config, ops.rows(batch), state)
        begin += window
        if begin == len(ids):
            return result


def choose(values: np.ndarray, temperature: float, rng: np.random.Generator) -> int:
    """Draw an index from softmax(values / temperature), in float64; the first largest for temperature 0.

    Raises ValueError when a value is not finite.
    """
    values = values.astype(np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"logits are not finite: {np.count_nonzero(~np.isfinite(values))} of {len(values)}")
    if temperature == 0:
        return int(values.argmax())
    below = np.maximum(values - values.max(), LOWEST_EXPONENT * temperature)
    cumulative = np.exp(below / temperature).cumsum()
    drawn = np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right")
    return min(int(drawn), len(values) - 1)


def _check_prompt(prompt_ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    prompt = np.asarray(prompt_ids)
    if prompt.ndim != 1 or prompt.size == 0:
        raise ValueError(f"prompt_ids: expected at least one token id, got shape {prompt.shape}")
    if prompt.dtype.kind not in "iu":
        raise ValueError(f"prompt_ids: expected integers, got {prompt.dtype}")
    check_ids(prompt, vocab_size)
    return prompt.astype(np.int64)
