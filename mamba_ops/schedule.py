"""The learning rate of each step."""

import math

from mamba_ops.config import TrainConfig


def learning_rate(config: TrainConfig, step: int, total_steps: int) -> float:
    """Return the rate of optimizer step `step` = 1 ... total_steps, with W = warmup_steps.

    Warm-up, step <= W: learning_rate * step / (W + 1), so no step has rate 0. After it, with progress
    p = (step - 1 - W) / (total_steps - W): learning_rate times (1 + cos(pi p)) / 2 for cosine, 1 - p for
    linear and 1 for constant, as transformers' `get_*_schedule_with_warmup`. The peak is at step W + 1, and
    0 would be reached one step after the last. Raises ValueError when `step` lies outside the run.
    """
    if not 1 <= step <= total_steps:
        raise ValueError(f"step: expected 1 to {total_steps}, got {step}")
    warmup = config.warmup_steps
    if step <= warmup:
        return config.learning_rate * step / (warmup + 1)
    progress = (step - 1 - warmup) / (total_steps - warmup)
    if config.lr_scheduler_type == "cosine":
        return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))
    if config.lr_scheduler_type == "linear":
        return config.learning_rate * (1 - progress)
    return config.learning_rate
