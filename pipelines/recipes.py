"""What an output was made from, so that on request a stage that would make the same again is skipped.

<root>/manifests/recipes/<asset>/<recipe>.json   the manifest that came of a recipe
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import dagster as dg

from mamba_ops.fingerprint import digest, write_json
from mamba_ops.storage import find
from pipelines.io import POINTERS, Manifest, ManifestError, output, whole

RECIPES = "recipes"


def recipe(context: dg.AssetExecutionContext, inputs: Mapping[str, Any]) -> str:
    """Return the fingerprint of a stage's code version, configuration, inputs and files from outside."""
    config = inputs.get("config")
    return digest(
        {
            "asset": context.asset_key.path[-1],
            "code": context.assets_def.code_versions_by_key.get(context.asset_key),
            "config": config.model_dump(mode="json") if config is not None else {},
            "inputs": {made.asset: made.fingerprint for made in inputs.values() if isinstance(made, Manifest)},
            "outside": [] if config is None else list(outside(config)),
        }
    )


def outside(config: Any) -> Iterator[list[Any]]:
    """Yield name, size and version of each file that a configuration names; for the default corpus Python's version.

    A version is a checksum or a time, as the file system has it.
    """
    paths = [*getattr(config, "paths", []), *getattr(config, "validation_paths", [])]
    if hasattr(config, "paths") and not config.paths:
        yield ["python", sys.version]
    for entry in paths:
        for file in find(entry, config.storage_options)[0]:
            yield [file.name, file.size, file.version]
    for entry in filter(None, (getattr(config, name, None) for name in ("path", "checkpoint", "adapter"))):
        place = Path(entry).expanduser()
        for path in sorted(path for path in [place, *place.rglob("*")] if path.is_file()):
            found = path.stat()
            yield [str(path), found.st_size, found.st_mtime_ns]


def record(context: dg.AssetExecutionContext, key: str, manifest: Manifest) -> None:
    """Remember what came of a recipe, the newest if it was made more than once."""
    write_json(_place(manifest.root, context, key), manifest.to_json())


def made_before(context: dg.AssetExecutionContext, root: Path, key: str, config: Any) -> Manifest | None:
    """Return what came of a recipe if it is still there, whole, and is not asked for anew (`retrain`)."""
    place = _place(root, context, key)
    if not place.is_file() or getattr(config, "retrain", False):
        return None
    try:
        manifest = whole(place, root)
    except ManifestError as error:
        context.log.warning(f"computed again: {error}")
        return None
    context.log.info(
        f"not computed again: {manifest.asset} {manifest.fingerprint} was made from the same inputs, configuration "
        "and code"
    )
    return manifest


def again(
    context: dg.AssetExecutionContext, manifest: Manifest
) -> Iterator[dg.AssetCheckResult | dg.MaterializeResult]:
    """Yield what a stage yields that has made the manifest: its checks, which have passed then, and its output."""
    text = f"Not computed again: passed when {manifest.fingerprint} was made."
    for name in sorted(key.name for key in context.selected_asset_check_keys):
        yield dg.AssetCheckResult(check_name=name, passed=True, description=text)
    facts = dg.MetadataValue.json(dict(manifest.facts))
    yield output(manifest, {"not_computed_again": True, "facts": facts})


def _place(root: Path, context: dg.AssetExecutionContext, key: str) -> Path:
    return root / POINTERS / RECIPES / context.asset_key.path[-1] / f"{key}.json"
