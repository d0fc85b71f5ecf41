"""What travels between assets: a JSON manifest of paths and fingerprints, and a pointer to the newest.

<root>/<asset>/<fingerprint>/       content: made in a draft, then moved here whole, never changed
<root>/<asset>/<fingerprint>.json   its manifest
<root>/manifests/<asset>.json       the manifest of the newest good one, replaced atomically
<root>/manifests/runs/<run>/        those that one run made: runs side by side do not mix
"""

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import dagster as dg

from mamba_ops.fingerprint import digest, file_digest, sync, write_json
from pipelines.resources import Storage

POINTERS, RUNS, DRAFTS = "manifests", "runs", ".drafts"


class ManifestError(ValueError):
    """A manifest, or what it points to, is missing or not as it was written."""


@dataclass(frozen=True)
class Manifest:
    """An output: where it lies, what it is, what it was made from.

    folder: relative to the root. files: [bytes, SHA-256] by path inside the folder. config: what of the run
    configuration says what it is. inputs: fingerprints of the outputs it was made from. facts: what later stages
    ask about it.
    """

    asset: str
    fingerprint: str
    folder: str
    files: Mapping[str, list[Any]]
    config: Mapping[str, Any]
    inputs: Mapping[str, str]
    facts: Mapping[str, Any]
    root: Path = field(compare=False)

    @property
    def path(self) -> Path:
        """The folder, absolute."""
        return self.root / self.folder

    def to_json(self) -> dict[str, Any]:
        """Return everything but the root, which may be moved."""
        return {key: value for key, value in asdict(self).items() if key != "root"}


KINDS = {"asset": str, "fingerprint": str, "folder": str, "files": dict, "config": dict, "inputs": dict, "facts": dict}
"""Type of each field of a manifest in JSON."""


class Pointers(dg.ConfigurableIOManager):
    """Hands a manifest from one asset to the next: the run's own, else the newest good one."""

    storage: dg.ResourceDependency[Storage]

    def handle_output(self, context: dg.OutputContext, obj: Manifest) -> None:
        """Move the asset's pointer; reached only when its blocking checks have passed."""
        asset = context.asset_key.path[-1]
        for path in (pointer(obj.root, asset, context.run_id), pointer(obj.root, asset)):
            write_json(path, obj.to_json())

    def load_input(self, context: dg.InputContext) -> Manifest:
        """Return what this run made of the asset, or the run that it repeats, or else the newest good one."""
        root, asset, run = self.storage.path, context.asset_key.path[-1], context.step_context.dagster_run
        try:
            for run_id in filter(None, (run.run_id, run.parent_run_id, run.root_run_id)):
                if pointer(root, asset, run_id).is_file():
                    return whole(pointer(root, asset, run_id), root)
            return newest(root, asset)
        except ManifestError as error:
            raise dg.Failure(str(error), allow_retries=False) from error


def output(manifest: Manifest, metadata: Mapping[str, Any]) -> dg.MaterializeResult:
    """Return an asset's materialization: its manifest for the next step, and what Dagster's UI shows."""
    common: dict[str, Any] = {
        "path": dg.MetadataValue.path(str(manifest.path)),
        "fingerprint": manifest.fingerprint,
        "bytes_on_disk": sum(size for size, _ in manifest.files.values()),
        "made_from": dg.MetadataValue.json(dict(manifest.inputs)),
    }
    version = dg.DataVersion(manifest.fingerprint)
    return dg.MaterializeResult(value=manifest, metadata={**metadata, **common}, data_version=version)


def pointer(root: Path, asset: str, run_id: str | None = None) -> Path:
    """Return the name of an asset's pointer file, or of that of one run."""
    return (root / POINTERS / RUNS / run_id if run_id else root / POINTERS) / f"{asset}.json"


def newest(root: Path, asset: str) -> Manifest:
    """Return the newest good manifest of an asset.

    Raises ManifestError when there is none, or its files are missing or not as they were written.
    """
    path = pointer(root, asset)
    if not path.is_file():
        raise ManifestError(f"{asset}: nothing at {path}, expected a manifest; materialize {asset} first")
    return whole(path, root)


def whole(path: Path, root: Path) -> Manifest:
    """Return the manifest in a file after `verify`."""
    manifest = read(path, root)
    verify(manifest)
    return manifest


def read(path: Path, root: Path) -> Manifest:
    """Return the manifest in a file; raises ManifestError on anything else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        wrong = [key for key, kind in KINDS.items() if not isinstance(values[key], kind)]
        if wrong:
            raise TypeError(f"{wrong[0]} is {values[wrong[0]]!r}")
        return Manifest(root=root, **values)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ManifestError(
            f"{path}: found no readable manifest ({error}), expected the JSON that was written"
        ) from None


def candidates(root: Path, asset: str) -> Iterator[Manifest]:
    """Yield the whole manifests of an asset: the one its pointer names, then the others, newest first."""
    records = sorted((root / asset).glob("*.json"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    for path in [pointer(root, asset), *records]:
        with suppress(ManifestError):
            yield whole(path, root)


def verify(manifest: Manifest) -> None:
    """Raise ManifestError unless every file is there as it was written."""
    for name, (size, expected) in manifest.files.items():
        path = manifest.path / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            what, wanted = "no such file" if found is None else f"{found:,} bytes", f"{size:,} bytes"
        elif (what := file_digest(path)) != expected:
            what, wanted = f"the SHA-256 {what}", expected
        else:
            continue
        raise ManifestError(
            f"{path}: found {what}, expected {wanted}; remove {manifest.path} and materialize {manifest.asset} again"
        )


def contents(folder: Path) -> dict[str, list[Any]]:
    """Return [bytes, SHA-256] of each file in a folder by its path inside."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): [file.stat().st_size, file_digest(file)] for file in files}


@contextmanager
def draft(root: Path, asset: str) -> Iterator[Path]:
    """Yield the name of a folder to make, which is removed at the end unless `publish` has moved it away."""
    drafts = root / DRAFTS
    drafts.mkdir(parents=True, exist_ok=True)
    host = socket.gethostname()
    for left in drafts.glob(f"*@{host}@*"):
        if not _alive(left.name.split("@")[2]):
            shutil.rmtree(left, ignore_errors=True)
    holder = Path(tempfile.mkdtemp(prefix=f"{asset}@{host}@{os.getpid()}@", dir=drafts))
    try:
        yield holder / asset
    finally:
        shutil.rmtree(holder, ignore_errors=True)


def publish(
    root: Path,
    asset: str,
    folder: Path,
    content: Any,
    config: Mapping[str, Any],
    inputs: Sequence[Manifest],
    facts: Mapping[str, Any],
) -> Manifest:
    """Move a draft to the place that its content and configuration give it, and return its manifest.

    content: JSON, usually a fingerprint. What is there already is kept and the draft dropped.
    Raises ManifestError when what is there is damaged.
    """
    fingerprint = digest({"asset": asset, "content": content, "config": config})[:16]
    place = root / asset / fingerprint
    record = place.with_suffix(".json")
    made_from = {made.asset: made.fingerprint for made in inputs}
    manifest = Manifest(asset, fingerprint, f"{asset}/{fingerprint}", contents(folder), config, made_from, facts, root)
    if place.is_dir() and record.is_file():
        kept = read(record, root)
        verify(kept)
        return replace(kept, inputs=made_from)
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_dir() and contents(place) != manifest.files:
        shutil.rmtree(place)  # without a manifest beside it, nothing points to it
    if not place.is_dir():
        os.rename(folder, place)
    sync(place.parent)
    write_json(record, manifest.to_json())
    return manifest


def _alive(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError):
        return True
    return True
