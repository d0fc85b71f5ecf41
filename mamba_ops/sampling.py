"""From logits to the next token: repetition penalty, temperature, top-k and top-p, in transformers' order."""

import numpy as np

from mamba_ops.config import GenerateConfig

LOWEST_EXPONENT = -700.0


def probabilities(logits: np.ndarray, seen: np.ndarray, settings: GenerateConfig) -> np.ndarray:
    """Return what the next token is drawn from: (vocab_size,) float64, 0 where a token is ruled out.

    With r = repetition_penalty, the logit l of a token in the text becomes l / r above 0 and l r below. Then
    softmax(l / temperature), over the top_k largest l and those equal to the last of them, then over the fewest
    likeliest that have top_p of the probability. Temperature 0: all on the first largest l.

    logits: (vocab_size,); seen: (vocab_size,) bool, the tokens in the text. Raises ValueError when a logit is not
    finite.
    """
    values = logits.astype(np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"logits are not finite: {np.count_nonzero(~np.isfinite(values))} of {len(values)}")
    own, penalty = values[seen], settings.repetition_penalty
    values[seen] = np.where(own > 0, own / penalty, own * penalty)
    weights = np.zeros_like(values)
    if settings.temperature == 0:
        weights[values.argmax()] = 1.0
        return weights
    kept = np.arange(len(values))
    if 0 < settings.top_k < len(values):
        kept = np.flatnonzero(values >= np.partition(values, -settings.top_k)[-settings.top_k])
    below = np.maximum(values[kept] - values.max(), LOWEST_EXPONENT * settings.temperature)
    weights[kept] = np.exp(below / settings.temperature)
    weights /= weights.sum()
    if settings.top_p < 1:
        rising = kept[np.argsort(values[kept], kind="stable")]
        weights[rising[:-1][weights[rising].cumsum()[:-1] <= 1 - settings.top_p]] = 0.0
        weights /= weights.sum()
    return weights


def draw(weights: np.ndarray, rng: np.random.Generator) -> int:
    """Return an index with the probability weights / sum(weights); never one of weight 0."""
    cumulative = weights.cumsum()
    drawn = np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right")
    return min(int(drawn), int(np.flatnonzero(weights)[-1]))
