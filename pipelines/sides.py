"""Base weights on the host and on the device: uploaded, read back, and compared."""

from collections.abc import Mapping
from contextlib import closing
from typing import Any

import numpy as np

from mamba_ops.accelerator import Opened
from mamba_ops.config import MambaConfig
from mamba_ops.mirror import TOLERANCE, Agreement, Mirror, compare
from pipelines.checks import Verdict


def both_sides(opened: Opened, model: MambaConfig, weights: Mapping[str, np.ndarray]) -> Agreement | None:
    """Upload the weights and compare both sides; None where they are one."""
    with closing(Mirror(opened.ops, dict(weights))) as mirror:
        return None if mirror.one_side else compare(mirror, model)


def mirror_agrees(found: Agreement | None) -> Verdict:
    """Whether the device holds the same bytes as the host, and computes the same logits."""
    if found is None:
        return Verdict(True, "NumPy runs the model: host and device are one side")
    bytes_ = "the same bytes" if found.host == found.device else f"{found.device[:16]} for the host's {found.host[:16]}"
    return Verdict(
        found.agrees,
        f"found {bytes_} on the device and logits that differ by up to {found.difference:.3g}, expected the same bytes "
        f"and at most {TOLERANCE * found.largest:.3g}, {TOLERANCE:g} of the largest logit",
    )


def sides_metadata(opened: Opened, found: Agreement | None) -> dict[str, Any]:
    """Return what runs the model, and on a device its driver, the bytes there and the largest difference."""
    if found is None:
        return {"adapter": opened.ops.name}
    return {
        "adapter": opened.ops.name,
        "driver": opened.driver,
        "bytes_on_device": found.nbytes,
        "largest_difference": found.difference,
        "largest_logit": found.largest,
    }
