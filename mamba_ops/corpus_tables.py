"""The two tables of a corpus, written and read a row group at a time."""

import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mamba_ops.documents import Part
from mamba_ops.heap import trimmer

DOCUMENTS = "documents.parquet"
TEXTS = "texts.parquet"
ROW_GROUP_CHARACTERS = 1 << 20
ROW_GROUP_DOCUMENTS = 1 << 15
TRAINING_BYTES = 100_000_000
_DOCUMENT_SCHEMA = pa.schema(
    [
        ("document", pa.int64()),
        ("id", pa.string()),
        ("source", pa.string()),
        ("split", pa.string()),
        ("bytes", pa.int64()),
    ]
)
_TEXT_SCHEMA = pa.schema([("document", pa.int64()), ("role", pa.string()), ("text", pa.large_string())])


class Row(NamedTuple):
    """A document as the first table has it."""

    document: int
    id: str
    source: str
    bytes: int


class RowWriter:
    """Writes the rows of a table; they go to the file when there are enough of them."""

    def __init__(self, path: Path, schema: pa.Schema = _DOCUMENT_SCHEMA, dictionary: bool | list[str] = True):
        self._writer = pq.ParquetWriter(path, schema, use_dictionary=dictionary)
        self._schema = schema
        self.rows: list[tuple] = []

    def add(self, *row: object) -> None:
        """Add a row: the values of the columns in order."""
        self.rows.append(row)
        if len(self.rows) >= ROW_GROUP_DOCUMENTS:
            self.flush()

    def flush(self) -> None:
        """Write the rows that wait as a row group."""
        columns = zip(*self.rows, strict=True) if self.rows else [()] * len(self._schema)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, self._schema, strict=True)]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema))
        self.rows.clear()

    def __enter__(self) -> "RowWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if kind is None:
            self.flush()
        self._writer.close()


class TextWriter:
    """Writes the parts of one document after the other; number is that of the one at hand."""

    def __init__(self, folder: Path):
        self._table = RowWriter(folder / TEXTS, _TEXT_SCHEMA, ["document", "role"])
        self._characters = 0
        self._written = False
        self._passed = trimmer()
        self.number = 0

    def add(self, part: Part) -> None:
        """Add a part of the document at hand."""
        self._table.rows.append((self.number, part.role, part.text))
        self._characters += len(part.text)
        self._passed(len(part.text))
        if self._characters >= ROW_GROUP_CHARACTERS or len(self._table.rows) >= ROW_GROUP_DOCUMENTS:
            self._table.flush()
            self._characters, self._written = 0, True

    def keep(self) -> None:
        """End the document at hand."""
        self.number += 1
        self._written = False

    def drop(self) -> None:
        """Take the document at hand back; parts of it that are in the file already keep its number."""
        rows = self._table.rows
        while rows and rows[-1][0] == self.number:
            self._characters -= len(rows.pop()[2])
        if self._written:
            self.keep()

    def __enter__(self) -> "TextWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._table.__exit__(kind, error, trace)


def open_documents(directory: str | Path, split: str) -> Iterator[tuple[Row, Iterator[Part]]]:
    """Yield a split's documents in order, each with its parts, which have to be read before the next document."""
    texts = itertools.groupby(_text_rows(directory, split), key=lambda row: row[0])
    for row in _document_rows(directory, split):
        for number, parts in texts:
            if number == row.document:
                yield row, itertools.starmap(Part, (row[1:] for row in parts))
                break


def _document_rows(directory: str | Path, split: str) -> Iterator[Row]:
    with pq.ParquetFile(Path(directory) / DOCUMENTS) as file:
        for index in range(file.num_row_groups):
            table = file.read_row_group(index)
            chosen = table.filter(pc.equal(table["split"], split)).select(list(Row._fields)).to_pydict()
            yield from map(Row, *chosen.values())


def _text_rows(directory: str | Path, split: str) -> Iterator[tuple[int, str, str]]:
    """Yield the rows of a split's documents; row groups without one are not read."""
    table = pq.read_table(Path(directory) / DOCUMENTS, columns=["document", "split"])
    wanted = table.filter(pc.equal(table["split"], split))["document"].to_numpy()
    if not len(wanted):
        return
    with pq.ParquetFile(Path(directory) / TEXTS) as file:
        for index in range(file.num_row_groups):
            numbers = file.read_row_group(index, columns=["document"])["document"].to_numpy()
            at = np.minimum(np.searchsorted(wanted, numbers), len(wanted) - 1)
            chosen = wanted[at] == numbers
            if chosen.any():
                yield from _rows(file.read_row_group(index).filter(pa.array(chosen)))


def _rows(table: pa.Table) -> Iterator[tuple[int, str, str]]:
    for batch in table.to_batches(max_chunksize=256):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def training_texts(directory: str | Path, limit: int = TRAINING_BYTES) -> Iterator[str]:
    """Yield texts of the training split to train a tokenizer on: all, or pieces of at most `limit` bytes together.

    Which pieces depends on their content alone: those with the lowest hashes. Of a chat, what its messages say.
    """
    sizes, keys = [], []
    for piece in _training_pieces(directory):
        data = piece.encode()
        sizes.append(len(data))
        keys.append(_hash(data))
    if sum(sizes) <= limit:
        yield from _training_pieces(directory)
        return
    order = np.argsort(np.array(keys, np.uint64), kind="stable")
    fitting = np.cumsum(np.array(sizes)[order]) <= limit
    chosen = np.zeros(len(order), bool)
    chosen[order[fitting]] = True
    yield from itertools.compress(_training_pieces(directory), chosen.tolist())


def _training_pieces(directory: str | Path) -> Iterator[str]:
    passed = trimmer()
    for _, parts in open_documents(directory, "train"):
        for part in parts:
            passed(len(part.text))
            yield from _contents(part.text) if part.role == "messages" else [part.text]


def _contents(messages: str) -> list[str]:
    contents = (message.get("content") for message in json.loads(messages))
    return [content for content in contents if isinstance(content, str)]


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
