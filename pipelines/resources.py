"""The one folder under which every output lies."""

import os
from pathlib import Path

import dagster as dg
from pydantic import Field

ROOT_VARIABLE = "MAMBA_DATA"


class Storage(dg.ConfigurableResource):
    """Where outputs are written and looked for."""

    root: str = Field(
        default="",
        description=f"Folder of all outputs; empty: the environment variable {ROOT_VARIABLE}, and without it ./data.",
    )

    @property
    def path(self) -> Path:
        """The folder, absolute."""
        return Path(self.root or os.environ.get(ROOT_VARIABLE) or "data").expanduser().absolute()
