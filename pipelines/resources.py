"""The one folder under which every output lies, and the adapter that runs the model."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
from pydantic import Field

from mamba_ops.accelerator import Opened, open_ops

ROOT_VARIABLE = "MAMBA_DATA"
ADAPTER_VARIABLE = "MAMBA_ADAPTER"


class Storage(dg.ConfigurableResource):
    """Where outputs are written and looked for."""

    root: str = Field(
        default="",
        description=f"Folder of all outputs; empty: the environment variable {ROOT_VARIABLE}, and without it ./data.",
    )

    skip_unchanged: bool = Field(
        default=False,
        description="Keep the output of a stage that was made from the same inputs, configuration, code and files from "
        "outside (by name, size and time or checksum) instead of computing it again.",
    )

    @property
    def path(self) -> Path:
        """The folder, absolute."""
        return Path(self.root or os.environ.get(ROOT_VARIABLE) or "data").expanduser().absolute()


class Accelerator(dg.ConfigurableResource):
    """Where the model runs; what is computed does not depend on it, but for rounding."""

    adapter: str = Field(
        default="",
        description="auto (a graphics card, and NumPy where there is none), cpu, gpu, or an adapter's name or index; "
        f"empty: the environment variable {ADAPTER_VARIABLE}, and without it auto.",
    )

    @contextmanager
    def opened(self, context: dg.AssetExecutionContext) -> Iterator[Opened]:
        """Open the ops for one step, and say in its log which side they are and why."""
        wanted = self.adapter or os.environ.get(ADAPTER_VARIABLE) or "auto"
        with open_ops(wanted, say=context.log.warning) as found:
            context.log.info(found.reason)
            yield found
