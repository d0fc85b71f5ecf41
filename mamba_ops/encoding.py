"""Texts of any length to ids: cut where the cut changes no id, in batches on several threads, in order.

A text over `WHOLE_CHARACTERS` is cut after a line end that stands between two characters that are not spaces.
A slice is encoded together with a little of what comes before it, whose ids are then dropped; a cut is made only
where the ids on its left are the same with and without its right side. Where words are split by the byte-level
pattern a cut is known to change nothing: then shorter texts are cut as well, nothing before a slice is encoded
again, and without line ends a cut is made before a space.
"""

import array
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from tokenizers import Tokenizer, normalizers, pre_tokenizers

SLICE_CHARACTERS = 1 << 16
WHOLE_CHARACTERS = 1 << 20
BATCH_CHARACTERS = 1 << 18
LONGEST_CHARACTERS = 1 << 24
CONTEXT_CHARACTERS = 1 << 10
TRIES = 64
MOST_THREADS = 8
_LINE_END = re.compile("[^\\s\u180e]\n(?=[^\\s\u180e])")
_SPACE = re.compile("[^\\s\u180e](?=[ \n])")

Key = TypeVar("Key")
Item = TypeVar("Item")
Result = TypeVar("Result")


class Slice(NamedTuple, Generic[Key]):
    """A piece of the text called `key`; before: what comes before it, as far as it is encoded again."""

    key: Key
    before: str
    text: str


def encode_slices(
    tokenizer: Tokenizer, slices: Iterable[Slice[Key]], threads: int | None = None
) -> Iterator[tuple[Slice[Key], np.ndarray]]:
    """Yield each slice with its ids, in order whatever the threads; none for as many as there are cores.

    ids: (tokens,) uint32, without end-of-text. Memory is about 150 bytes for a character that is being encoded:
    `BATCH_CHARACTERS`, or a text that is not cut, for each thread.
    """
    count = threads or max(1, min(MOST_THREADS, _cores()))

    def encode(batch: list[Slice[Key]]) -> list[tuple[Slice[Key], np.ndarray]]:
        try:
            return encoded(batch)
        except BaseException as error:  # `tokenizers` raises plain Exception, and a panic is none
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            names = [getattr(s.key, "source", "a text") for s in batch[:3]]
            raise ValueError(f"the tokenizer cannot encode a text among {names}: {error}") from error

    def encoded(batch: list[Slice[Key]]) -> list[tuple[Slice[Key], np.ndarray]]:
        found = tokenizer.encode_batch_fast([s.before + s.text for s in batch], add_special_tokens=False)
        ids = [np.frombuffer(array.array("I", encoding.ids), np.uint32) for encoding in found]
        if any(s.before for s in batch):
            known = tokenizer.encode_batch_fast([s.before for s in batch], add_special_tokens=False)
            ids = [own[len(before) :] for own, before in zip(ids, known, strict=True)]
        return list(zip(batch, ids, strict=True))

    batches = _batches(slices, lambda s: len(s.before) + len(s.text))
    for found in _in_order(encode, batches, count):
        yield from found


def cut(tokenizer: Tokenizer, texts: Iterable[tuple[Key, Iterable[str]]]) -> Iterator[Slice[Key]]:
    """Yield the slices of each text, given in pieces that need not end anywhere in particular; at least one each.

    Raises ValueError for a text with no place to cut in `LONGEST_CHARACTERS`.
    """
    exact = cuts_are_exact(tokenizer)
    for key, pieces in texts:
        before, held = "", ""
        for piece in pieces:
            held += piece
            while len(held) > (SLICE_CHARACTERS if exact else WHOLE_CHARACTERS):
                end = _byte_level_end(held) if exact else _tried_end(tokenizer, held)
                if not end:
                    if len(held) > LONGEST_CHARACTERS:
                        raise ValueError(_no_place(key, held))
                    break
                yield Slice(key, before, held[:end])
                before = "" if exact else held[max(0, end - CONTEXT_CHARACTERS) : end]
                held = held[end:]
        yield Slice(key, before, held)


def cuts_are_exact(tokenizer: Tokenizer) -> bool:
    """Whether words are split by the byte-level pattern and no added token reaches across a cut."""
    words = tokenizer.pre_tokenizer
    if not isinstance(tokenizer.normalizer, normalizers.NFC | None) or not isinstance(words, pre_tokenizers.ByteLevel):
        return False
    if words.add_prefix_space or not words.use_regex:
        return False
    added = tokenizer.get_added_tokens_decoder().values()
    matched = [token for token in added if not (token.special and tokenizer.encode_special_tokens)]
    return not any(token.lstrip or token.rstrip or re.search(r"\S\s|\n\S", token.content) for token in matched)


def _byte_level_end(text: str) -> int:
    """Return the end of a slice, 0 for none: words of the byte-level pattern end there.

    The last character is not looked past: what follows it is not known yet.
    """
    limit = min(len(text), 2 * SLICE_CHARACTERS)
    found = _LINE_END.search(text, SLICE_CHARACTERS - 1, limit) or _SPACE.search(text, SLICE_CHARACTERS - 1)
    return found.end() if found else 0


def _tried_end(tokenizer: Tokenizer, text: str) -> int:
    """Return the end of a slice, 0 for none: the ids before it do not depend on what follows."""
    start = SLICE_CHARACTERS - 1
    for _ in range(TRIES):
        found = _LINE_END.search(text, start, len(text) - CONTEXT_CHARACTERS)
        if not found:
            return 0
        end = start = found.end()
        left = _ids(tokenizer, text[max(0, end - CONTEXT_CHARACTERS) : end])
        both = _ids(tokenizer, text[max(0, end - CONTEXT_CHARACTERS) : end + CONTEXT_CHARACTERS])
        if both[: len(left)] == left:
            return end
    return 0


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _no_place(key: object, text: str) -> str:
    return (
        f"{getattr(key, 'source', 'a text')}: expected a line end between two words, where this tokenizer can be "
        f"stopped, in each {LONGEST_CHARACTERS} characters, got none in {len(text)}; split it into documents"
    )


def _batches(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    batch: list[Item] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= BATCH_CHARACTERS:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def _in_order(function: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[Result]:
    """Yield function(item) for each item; one more than there are threads is under way or waits."""
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[Result]] = deque()
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
