"""WSLA, write-through adaptation of the selective projection: x_proj alone trains, in steps of bounded size."""

from mamba_ops.config import MambaConfig
from mamba_ops.parameters import table

SELECTIVE = ".mixer.x_proj.weight"


def wsla_names(config: MambaConfig) -> list[str]:
    """Return the names of the parameters that train: the selective projection of each layer."""
    return [name for name in table(config) if name.endswith(SELECTIVE)]
