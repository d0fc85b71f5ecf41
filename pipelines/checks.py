"""Blocking checks, computed in the asset's own step, before anything that is good is replaced."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import dagster as dg
from pydantic import ValidationError

from pipelines.configuration import check_stages
from pipelines.recipes import again, made_before, recipe, record

Events: TypeAlias = Iterator[dg.AssetCheckResult | dg.MaterializeResult]


class Verdict(NamedTuple):
    """The outcome of a check; text says what was found and what is expected."""

    passed: bool
    text: str


def blocking(asset: str, **descriptions: str) -> list[dg.AssetCheckSpec]:
    """Declare an asset's blocking checks, by name."""
    return [
        dg.AssetCheckSpec(name, asset=asset, description=description, blocking=True)
        for name, description in descriptions.items()
    ]


def passed(asset: str, **checks: Callable[[], Verdict]) -> Iterator[dg.AssetCheckResult]:
    """Compute and report each check; one that cannot be computed has failed.

    Raises dagster.Failure naming those that failed, before the asset is materialized.
    """
    failed = []
    for name, compute in checks.items():
        verdict = _verdict(compute)
        if not verdict.passed:
            failed.append(f"check {name} of {asset} failed: {verdict.text}")
        yield dg.AssetCheckResult(check_name=name, passed=verdict.passed, description=verdict.text)
    if failed:
        raise dg.Failure("; ".join(failed), allow_retries=False)


def reported(body: Callable[..., Events]) -> Callable[..., Events]:
    """Skip what was made before, on request; turn what the library refuses into one Failure with its message.

    Checks that are not reached then have failed.
    """

    @functools.wraps(body)
    def events(context: dg.AssetExecutionContext, **inputs: Any) -> Events:
        waiting = sorted(key.name for key in context.selected_asset_check_keys)
        try:
            check_stages(context.run.run_config)
            key, storage = recipe(context, inputs), inputs["storage"]
            config = inputs.get("config")
            made = made_before(context, storage.path, key, config) if storage.skip_unchanged else None
            for event in body(context, **inputs) if made is None else again(context, made):
                if isinstance(event, dg.MaterializeResult):
                    record(context, key, event.value)
                if isinstance(event, dg.AssetCheckResult) and event.check_name in waiting:
                    waiting.remove(event.check_name)
                yield event
        except (ValueError, ArithmeticError, OSError, RuntimeError, MemoryError) as error:
            text = ("not enough memory: " if isinstance(error, MemoryError) else "") + one_line(error)
            for name in waiting:
                yield dg.AssetCheckResult(check_name=name, passed=False, description=f"Not computed: {text}")
            raise dg.Failure(text, allow_retries=False) from error

    return events


def one_line(error: BaseException) -> str:
    """Return an error's message in one line."""
    if isinstance(error, ValidationError):
        parts = [f"{'.'.join(map(str, found['loc']))}: {found['msg']}" for found in error.errors(include_url=False)]
        return "; ".join(parts)
    return " ".join(str(error).split()) or type(error).__name__


def _verdict(compute: Callable[[], Verdict]) -> Verdict:
    try:
        return compute()
    except Exception as error:
        return Verdict(False, f"it cannot be computed: {one_line(error)}")
