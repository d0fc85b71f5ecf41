"""Documents as they are read: repaired, in parts, none held whole that is read from a file of its own.

A file whose name ends in .jsonl holds a document a line, one in .parquet a document a row; any other file is
one document. A name may go on with .gz or .zst (not .parquet's). A line or row has one of three forms:

    text    a string under the text column
    prompt  strings under prompt and completion; only the completion is learned
    chat    a list under messages of {"role": ..., "content": ...}; only what the assistant says is learned
"""

import codecs
import json
import re
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, TypeAlias

import pyarrow.parquet as pq

from mamba_ops.config import CorpusConfig
from mamba_ops.files import kind
from mamba_ops.storage import BLOCK, Advance, File, decompressed, open_files, reading

Repair: TypeAlias = Literal["undecodable", "byte_order_mark", "crlf"]
Role: TypeAlias = Literal["text", "prompt", "completion", "messages"]

PART_CHARACTERS = 1 << 20
FORMS: dict[str, tuple[str, ...]] = {"text": (), "prompt": ("prompt", "completion"), "chat": ("messages",)}
ASSISTANT = "assistant"
_SURROGATE = re.compile("[\ud800-\udfff]")


class Part(NamedTuple):
    """A piece of a document; pieces of one role that follow each other are one text. messages: JSON."""

    role: Role
    text: str


@dataclass(frozen=True)
class Document:
    """Where a document came from, its parts, to be read once and in order, and what was repaired by then."""

    source: str
    parts: Iterable[Part]
    repairs: set[Repair] = field(default_factory=set)


def default_documents(chosen: str = "all") -> Iterator[Document]:
    """Yield the documentation topics and the public top-level modules of the running CPython, each by name.

    chosen: as CorpusConfig.default. Raises FileNotFoundError when this Python came without the topics asked for.
    """
    if chosen != "sources":
        yield from _topics()
    if chosen != "documentation":
        yield from _modules()


def _topics() -> Iterator[Document]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise FileNotFoundError(
            f"the default corpus needs pydoc_data.topics, which {sys.executable} lacks; give corpus paths"
        ) from None
    for name in sorted(topics):
        repairs: set[Repair] = set()
        yield _document(f"pydoc_data.topics:{name}", [("text", _repaired(topics[name], repairs))], repairs)


def _modules() -> Iterator[Document]:
    library = Path(sysconfig.get_path("stdlib"))
    for name in sorted(sys.stdlib_module_names):
        path = library / f"{name}.py"
        if not name.startswith("_") and path.is_file():
            repairs: set[Repair] = set()
            yield _document(f"stdlib:{name}.py", [("text", _decoded(path.read_bytes(), repairs))], repairs)


def read_documents(files: Iterable[File], config: CorpusConfig, advance: Advance) -> Iterator[Document]:
    """Yield the documents of files in the order given; each has to be read before the next one is asked for.

    advance: called with the bytes read from the files.
    Raises ValueError, naming file and line or row, for one that has not the configured form, and naming the file
    where it is damaged; storage.ChangedError where it is not as it was listed.
    """
    for file, stream in open_files(files, advance):
        with reading(file):
            suffix, compression = kind(file.name)
            if suffix == ".jsonl":
                yield from _read_lines(file.name, decompressed(file, stream), config)
            elif suffix == ".parquet" and compression:
                raise ValueError(
                    f"{file.name}: expected a parquet file, which has its own compression, got {compression}"
                )
            elif suffix == ".parquet":
                yield from _read_rows(file.name, stream, config)
            else:
                yield _read_text(file, decompressed(file, stream))


def _read_text(file: File, stream: BinaryIO) -> Document:
    repairs: set[Repair] = set()

    def parts() -> Iterator[Part]:
        with reading(file):
            for piece in resized(_decode(stream, repairs), PART_CHARACTERS):
                yield Part("text", piece)

    return Document(file.name, parts(), repairs)


def _read_lines(name: str, stream: BinaryIO, config: CorpusConfig) -> Iterator[Document]:
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        repairs: set[Repair] = set()
        try:
            record = json.loads(_decoded(line, repairs))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name}, line {number}: expected {_expected(config)}, got {error}") from None
        repairs.discard("crlf")
        yield _record(f"{name}:{number}", f"{name}, line {number}", record, config, repairs)


def _read_rows(name: str, stream: BinaryIO, config: CorpusConfig) -> Iterator[Document]:
    with pq.ParquetFile(stream, buffer_size=BLOCK) as file:
        names = file.schema_arrow.names
        wanted = [column for column in (config.text_column, *FORMS["prompt"], *FORMS["chat"]) if column in names]
        if not wanted:
            raise ValueError(f"{name}: expected {_expected(config)}, got the columns {sorted(names)}")
        bytes_of_row = sum(file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups))
        bytes_of_row //= max(1, file.metadata.num_rows)
        rows = max(1, min(1024, PART_CHARACTERS // max(1, bytes_of_row)))
        number = 0
        for batch in file.iter_batches(batch_size=rows, columns=wanted):
            for record in batch.to_pylist():
                number += 1
                yield _record(f"{name}:{number}", f"{name}, row {number}", record, config, set())


def _record(source: str, place: str, record: Any, config: CorpusConfig, repairs: set[Repair]) -> Document:
    try:
        if not isinstance(record, dict):
            raise ValueError(f"a {type(record).__name__}")
        form = _form(record, config)
        if form == "chat":
            return _document(source, [("messages", _messages(record["messages"], repairs))], repairs)
        roles: Mapping[str, Role] = {"prompt": "prompt", "completion": "completion"}
        columns: Mapping[str, Role] = roles if form == "prompt" else {config.text_column: "text"}
        texts = [(role, _repaired(_string(record, column), repairs)) for column, role in columns.items()]
    except ValueError as error:
        raise ValueError(f"{place}: expected {_expected(config)}, got {error}") from None
    return _document(source, texts, repairs)


def _form(keys: Collection[str], config: CorpusConfig) -> str:
    """Return the form that a record's keys say, or the configured one if they have it."""
    columns = FORMS | {"text": (config.text_column,)}
    present = [form for form, needed in columns.items() if set(needed) <= set(keys)]
    if config.form in present:
        return config.form
    if config.form != "auto" or not present:
        raise ValueError(f"the keys {sorted(keys)}")
    if len(present) > 1:
        raise ValueError(f"the keys of {' and '.join(present)}; set form to one of them")
    return present[0]


def _expected(config: CorpusConfig) -> str:
    text = f"a string under {config.text_column!r}"
    forms = {"text": text, "prompt": "strings under 'prompt' and 'completion'", "chat": "a list under 'messages'"}
    either = f"one of {forms['prompt']}, {forms['chat']}, {text}"
    return "an object with " + forms.get(config.form, either)


def _string(record: Mapping[str, Any], name: str) -> str:
    if not isinstance(record[name], str):
        raise ValueError(f"a {type(record[name]).__name__} there")
    return record[name]


def _messages(value: Any, repairs: set[Repair]) -> str:
    """Return a chat list as JSON: strings repaired, keys without a value dropped (parquet fills them in)."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"{'an empty list' if value == [] else f'a {type(value).__name__}'} there")
    messages = []
    for message in value:
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str):
            raise ValueError(f"a message without a role: {str(message)[:80]}")
        kept = {key: item for key, item in sorted(message.items()) if item is not None}
        messages.append({key: _repaired(v, repairs) if isinstance(v, str) else v for key, v in kept.items()})
    if not any(message["role"] == ASSISTANT for message in messages):
        raise ValueError(f"messages of {sorted({message['role'] for message in messages})} and none of the assistant")
    return _repaired(json.dumps(messages, ensure_ascii=False), repairs)


def _document(source: str, texts: Iterable[tuple[Role, str]], repairs: set[Repair]) -> Document:
    """Return a document in memory; messages stay one part, since they are JSON."""
    parts = [
        Part(role, piece)
        for role, text in texts
        for piece in (resized([text], PART_CHARACTERS) if role != "messages" and text else [text])
    ]
    return Document(source, parts, repairs)


def resized(texts: Iterable[str], size: int) -> Iterator[str]:
    """Yield the joined texts again in pieces of `size` characters, the last one shorter."""
    held = ""
    for text in texts:
        held += text
        start = 0
        while len(held) - start > size:
            yield held[start : start + size]
            start += size
        held = held[start:]
    if held:
        yield held


def _decoded(data: bytes, repairs: set[Repair]) -> str:
    try:
        return _repaired(data.decode(), repairs)
    except UnicodeDecodeError:
        repairs.add("undecodable")
        return _repaired(data.decode(errors="replace"), repairs)


def _repaired(text: str, repairs: set[Repair]) -> str:
    """Turn lone surrogates (a JSON escape can make them) into U+FFFD, drop a BOM, turn CRLF into LF."""
    if _SURROGATE.search(text):
        text = _SURROGATE.sub("\ufffd", text)
        repairs.add("undecodable")
    if text.startswith("\ufeff"):
        text = text[1:]
        repairs.add("byte_order_mark")
    return _unix_lines(text, repairs)


def _unix_lines(text: str, repairs: set[Repair]) -> str:
    if "\r\n" not in text:
        return text
    repairs.add("crlf")
    return text.replace("\r\n", "\n")


def _decode(stream: BinaryIO, repairs: set[Repair]) -> Iterator[str]:
    """Decode and repair a stream block by block, as if it were whole."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    held, begun = "", False
    while True:
        data = stream.read(BLOCK)
        state = decoder.getstate()
        try:
            text = decoder.decode(data, not data)
        except UnicodeDecodeError:
            repairs.add("undecodable")
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            decoder.setstate(state)
            text = decoder.decode(data, not data)
        if text and not begun:
            begun = True
            if text.startswith("\ufeff"):
                text = text[1:]
                repairs.add("byte_order_mark")
        text = held + text
        held = "\r" if data and text.endswith("\r") else ""  # its LF may come with the next block
        yield _unix_lines(text[: len(text) - len(held)], repairs)
        if not data:
            return
