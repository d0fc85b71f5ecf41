"""Conversations as text, by the chat template that lies beside a tokenizer, and which part of it is learned.

Only what the assistant says is. A conversation is rendered up to each of its messages; the template has to
render the beginning of a conversation the same whatever follows. What comes after its last message is left out.
Special tokens that a template writes become themselves, in what it is given too.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mamba_ops.documents import ASSISTANT
from mamba_ops.tokenizer import BESIDE, TEMPLATE, read_object, token_text, tokenizer_file


@dataclass(frozen=True)
class ChatTemplate:
    """A template, the special tokens that it may name, and where it is from."""

    text: str
    tokens: Mapping[str, str]
    path: Path


def load_template(path: str | Path) -> ChatTemplate:
    """Return the chat template beside a tokenizer.json: chat_template.jinja, or in tokenizer_config.json.

    Raises ValueError when there is none.
    """
    folder = tokenizer_file(path).parent
    declared = read_object(folder / BESIDE[0]) if (folder / BESIDE[0]).is_file() else {}
    texts = {key: token_text(value) for key, value in declared.items() if key.endswith("_token")}
    tokens = {key: text for key, text in texts.items() if text is not None}
    if (folder / TEMPLATE).is_file():
        return ChatTemplate((folder / TEMPLATE).read_text(encoding="utf-8"), tokens, folder / TEMPLATE)
    template = declared.get("chat_template")
    if isinstance(template, list):
        template = {named.get("name"): named.get("template") for named in template}.get("default")
    if not isinstance(template, str):
        raise ValueError(
            f"{folder}: the corpus has messages, expected a chat_template in {BESIDE[0]} or {TEMPLATE} beside the "
            f"tokenizer, got {'none' if template is None else type(template).__name__}"
        )
    return ChatTemplate(template, tokens, folder / BESIDE[0])


def render(template: ChatTemplate, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
    """Return a conversation as text, as transformers' `apply_chat_template(tokenize=False)` does.

    A template sees neither the time nor anything outside. Raises ValueError with the template's own message.
    """
    names: dict[str, Any] = {**template.tokens, "tools": None, "documents": None}
    names |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
    try:
        return _compiled(template.text).render(names)
    except Exception as error:  # a template raises what it likes
        raise ValueError(f"chat template of {template.path}: {type(error).__name__}: {error}") from None


def learned_parts(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], end_of_text: str, source: str
) -> list[tuple[bool, str]]:
    """Return a conversation as texts, in order, with whether they are learned.

    An end of text at the very end, and spaces behind it, are left out: there the one stands that closes a document.
    Raises ValueError when the template renders a beginning differently once more follows.
    """
    parts: list[tuple[bool, str]] = []
    done = ""
    for index, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        asked = render(template, messages[:index], add_generation_prompt=True) if index else ""
        answered = render(template, messages[: index + 1], add_generation_prompt=False)
        if not asked.startswith(done) or not answered.startswith(asked):
            raise ValueError(
                f"{source}: the chat template of {template.path} is expected to render a conversation's beginning the "
                f"same whatever follows; with message {index} it gives {answered[: len(asked)][-40:]!r} in place of "
                f"{asked[-40:]!r}"
            )
        parts += [(False, asked[len(done) :]), (True, answered[len(asked) :])]
        done = answered
    learned, last = parts[-1]
    if last.rstrip().endswith(end_of_text):
        last = last.rstrip().removesuffix(end_of_text)
    return [*parts[:-1], (learned, last)]


@functools.lru_cache(maxsize=4)
def _compiled(text: str) -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Said, loopcontrols])
    environment.globals["raise_exception"] = _raise
    environment.filters["tojson"] = _json
    return environment.from_string(text)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


class _Said(Extension):
    """{% generation %} ... {% endgeneration %}, with which transformers marks what the assistant says."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return what is inside."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
