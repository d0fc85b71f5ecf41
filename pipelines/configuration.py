"""The library's stage configurations as Dagster run configuration."""

from collections.abc import Iterator, Mapping
from copy import copy
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import dagster as dg
from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, create_model, model_validator
from pydantic.fields import FieldInfo

from mamba_ops.config import (
    BatchesConfig,
    CorpusConfig,
    EvaluateConfig,
    LoraTrainConfig,
    SamplesConfig,
    SaveConfig,
    TokenizerConfig,
    TrainConfig,
    WeightsConfig,
    WslaTrainConfig,
)
from mamba_ops.training_state import UNRELATED_TO_RESULT

PLACES = frozenset(
    {"paths", "validation_paths", "default", "storage_options", "path", "checkpoint", "adapter", "retrain"}
)
"""Fields that say where content comes from; what it is has a fingerprint of its own."""

PACE = UNRELATED_TO_RESULT
"""Fields that say how a run goes on, not what comes of it; how weights are saved is part of their content."""

ALLOWED = "Allowed: "
COMPARISONS = ((Gt, "gt", ">"), (Ge, "ge", ">="), (Lt, "lt", "<"), (Le, "le", "<="))


class ConfigurationError(ValueError):
    """A value of the run configuration that its field does not allow."""


class Launchable(dg.Config, extra="forbid"):
    """A Dagster configuration whose errors name field, value and range in one line."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigurationError(explain(error, type(self).model_fields)) from None


C = TypeVar("C", bound=Launchable)


def launchable(stage: type[C]) -> type[C]:
    """Return the class with each field's range in its description, as Dagster shows it.

    Dagster checks a value's type before the validators run, so that it would refuse YAML's `1e-4`, which is
    text. Fields with a validator of that kind are declared as Any and go through the library's own.
    """
    fields: dict[str, Any] = {}
    for name, info in stage.model_fields.items():
        described = copy(info)
        described.description = " ".join(filter(None, [info.description, _sentence(allowed(info))]))
        if any(isinstance(part, BeforeValidator) for part in _parts(info)):
            own: Any = Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation
            check = TypeAdapter(own).validate_python
            described = Field(default=info.default, description=described.description)
            fields[name] = (Annotated[Any, BeforeValidator(check)], described)
        else:
            fields[name] = (info.annotation, described)
    return create_model(stage.__name__, __base__=stage, __module__=stage.__module__, __doc__=stage.__doc__, **fields)


def allowed(info: FieldInfo) -> str:
    """Return what a field may be in words, such as `> 0 and <= 10`; empty where its type says it all."""
    words = []
    for part in _parts(info):
        words += [f"{sign} {getattr(part, key):g}" for kind, key, sign in COMPARISONS if isinstance(part, kind)]
        if isinstance(part, MinLen):
            words.append(f"not shorter than {part.min_length}")
        elif get_origin(part) is Literal:
            words.append("one of " + ", ".join(map(str, get_args(part))))
    return " and ".join(words)


def explain(error: ValidationError, fields: Mapping[str, FieldInfo]) -> str:
    """Return pydantic's findings in one line: field, what came, what was expected."""
    findings = []
    for found in error.errors(include_url=False):
        message = found["msg"].removeprefix("Value error, ")
        if not found["loc"]:
            findings.append(message)
            continue
        name = str(found["loc"][0])
        given = "" if f"got {found['input']!r}" in message else f", got {found['input']!r}"
        description = fields[name].description if name in fields else None
        limits = (description or "").partition(ALLOWED)[2].removesuffix(".")
        findings.append(f"{name}: {message[:1].lower()}{message[1:]}{given}" + f" ({limits})" * bool(limits))
    return "; ".join(dict.fromkeys(findings))


def check_stages(run_config: Mapping[str, Any]) -> None:
    """Check the values of every stage before the first one starts.

    Raises ConfigurationError that names the stage; fields that come from environment variables are left to
    their stage.
    """
    for name, op in run_config.get("ops", {}).items():
        values = op.get("config", {}) if isinstance(op, dict) else {}
        if name in STAGES and isinstance(values, dict):
            given = {key: value for key, value in values.items() if not _from_environment(value)}
            try:
                STAGES[name](**given)
            except ConfigurationError as error:
                raise ConfigurationError(f"{name}: {error}") from None


def identity(config: Launchable) -> dict[str, Any]:
    """Return what a stage's configuration says about its result, as JSON: neither places nor pace."""
    return config.model_dump(mode="json", exclude=set(PLACES | PACE))


def _from_environment(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == {"env"}


def _sentence(limits: str) -> str:
    return f"{ALLOWED}{limits}." if limits else ""


def _parts(info: FieldInfo) -> Iterator[Any]:
    """Yield a field's type, what that is made of, and its constraints."""
    waiting = [info.annotation, *info.metadata]
    while waiting:
        part = waiting.pop(0)
        yield part
        if isinstance(part, FieldInfo):
            waiting += part.metadata
        elif get_origin(part) is not Literal:
            waiting += get_args(part)


@launchable
class CorpusRun(CorpusConfig, Launchable, extra="forbid"):
    """Which documents are read, and how they are split."""


@launchable
class TokenizerRun(TokenizerConfig, Launchable, extra="forbid"):
    """Which tokenizer turns text into ids."""


@launchable
class BatchesRun(BatchesConfig, Launchable, extra="forbid"):
    """How the training split is cut into rows and batches."""


@launchable
class WeightsRun(WeightsConfig, Launchable, extra="forbid"):
    """Where the base weights come from."""


@launchable
class TrainRun(TrainConfig, Launchable, extra="forbid"):
    """How the weights are trained."""


@launchable
class WslaRun(WslaTrainConfig, Launchable, extra="forbid"):
    """How the selective projections are trained."""


@launchable
class LoraRun(LoraTrainConfig, Launchable, extra="forbid"):
    """How an adapter is trained."""

    @model_validator(mode="after")
    def _one_file(self) -> "LoraRun":
        changed = [name for name, field in SaveConfig.model_fields.items() if getattr(self, name) != field.default]
        if changed:
            raise ValueError(f"{', '.join(changed)}: an adapter is one float32 file; set it for merged_weights")
        return self


@launchable
class MergeRun(SaveConfig, Launchable, extra="forbid"):
    """How merged weights are written."""


@launchable
class EvaluateRun(EvaluateConfig, Launchable, extra="forbid"):
    """How perplexity is measured and text is sampled."""


@launchable
class SamplesRun(SamplesConfig, Launchable, extra="forbid"):
    """Which prompts are continued, and how."""


STAGES: dict[str, type[Launchable]] = {
    "corpus": CorpusRun,
    "tokenizer": TokenizerRun,
    "token_batches": BatchesRun,
    "weights_mirror": WeightsRun,
    "trained_weights": TrainRun,
    "wsla_weights": WslaRun,
    "lora_adapter": LoraRun,
    "merged_weights": MergeRun,
    "perplexity": EvaluateRun,
    "wsla_perplexity": EvaluateRun,
    "lora_perplexity": EvaluateRun,
    "samples": SamplesRun,
}
"""Configuration class by asset; `tokenized_corpus` has none."""
