"""The tokenizer: train a byte-level BPE or load a tokenizer.json, and turn texts into ids.

A tokenizer is used for plain text here: nothing is padded, cut or added, and a text that spells a special
token is encoded like any other text. End-of-text ids come from this library only, between documents.
"""

import itertools
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from mamba_ops.config import TokenizerConfig
from mamba_ops.corpus import MANIFEST, Manifest
from mamba_ops.encoding import cut, encode_slices
from mamba_ops.fingerprint import atomic_directory, digest, write_json

TOKENIZER = "tokenizer.json"
BESIDE = ("tokenizer_config.json", "special_tokens_map.json")
TEMPLATE = "chat_template.jinja"
PARTS = ("normalizer", "pre_tokenizer", "model", "decoder", "added_tokens")
_PARALLELISM = "TOKENIZERS_PARALLELISM"


class TokenizerManifest(Manifest):
    """A tokenizer's fingerprint, the embedding rows that its ids need, and its end-of-text token.

    trained: here, from the training split; otherwise copied from `TokenizerConfig.path`.
    """

    vocab_size: int
    end_of_text: str
    end_of_text_id: int
    trained: bool


def _keep_forks_quiet() -> None:
    """Turn the threads of tokenizers off in forked children, where it hangs or prints a warning."""
    added: list[bool] = []

    def before() -> None:
        if _PARALLELISM not in os.environ:
            os.environ[_PARALLELISM] = "false"
            added.append(True)

    def after_in_parent() -> None:
        if added:
            added.pop()
            os.environ.pop(_PARALLELISM, None)

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=before, after_in_parent=after_in_parent, after_in_child=added.clear)


_keep_forks_quiet()

_LONG_WORD = re.compile(r"(\S{1000}|\s{1000})")
"""Training takes time quadratic in the length of a word; merges do not come from such ones."""


def train_tokenizer(texts: Iterable[str], config: TokenizerConfig) -> Tokenizer:
    """Return a byte-level BPE trained on texts; decode(encode(text)) is the text, whatever it is.

    Id 0 is the end-of-text token, ids 1 to 256 are the bytes. A merge needs a pair that occurs twice, so few
    or short texts give fewer than `vocab_size` tokens. The same texts give the same tokenizer.
    Raises ValueError without texts.
    """
    tokenizer = _byte_level_bpe()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[AddedToken(config.end_of_text, special=True, normalized=False)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    first = next(iterator := iter(texts), None)
    if first is None:
        raise ValueError("tokenizer training: got 0 texts, expected at least 1")
    pieces = cut(_byte_level_bpe(), ((None, [text]) for text in itertools.chain([first], iterator)))
    tokenizer.train_from_iterator((_LONG_WORD.sub(r"\1\n", piece.text) for piece in pieces), trainer)
    return _plain(tokenizer)


def _byte_level_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json, or of a folder with one, set to plain text.

    Raises FileNotFoundError when it is not there, ValueError when it is corrupt.
    """
    path = tokenizer_file(path)
    try:
        return _plain(Tokenizer.from_str(path.read_text(encoding="utf-8")))
    except Exception as error:
        raise ValueError(f"{path} is not a tokenizer.json that tokenizers can read: {error}") from None


def _plain(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    if isinstance(tokenizer.model, models.BPE):
        tokenizer.model.dropout = None
    return tokenizer


def tokenizer_file(path: str | Path) -> Path:
    """Return the tokenizer.json that a file's or a folder's path means; FileNotFoundError without one."""
    path = Path(path).expanduser()
    file = path / TOKENIZER if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"tokenizer {file} does not exist, expected a tokenizer.json or a folder with one")
    return file


def tokenizer_fingerprint(path: str | Path) -> str:
    """Return the digest of what turns plain text into ids and back in a tokenizer.json: its layout, padding,
    truncation and post-processor do not count.
    """
    content = read_object(tokenizer_file(path))
    return digest({part: content.get(part) for part in PARTS})


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raises ValueError when there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected a JSON object, got {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got a {type(value).__name__}")
    return value


def special_tokens(tokenizer: Tokenizer) -> list[str]:
    """Return the special tokens in the order of their ids."""
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    return [token.content for _, token in added if token.special]


def end_of_text_token(tokenizer: Tokenizer, token: str, path: str | Path | None = None) -> str:
    """Return `token` if the tokenizer has it, else the eos_token declared beside its file `path`.

    Raises ValueError, listing the special tokens, when there is neither.
    """
    if tokenizer.token_to_id(token) is not None:
        return token
    declared = _declared(tokenizer_file(path).parent) if path is not None else None
    if declared is not None and tokenizer.token_to_id(declared) is not None:
        return declared
    where = f"the tokenizer {path}" if path is not None else "the tokenizer"
    raise ValueError(
        f"end_of_text: {where} has no token {token!r}, and the eos_token declared beside it is {declared!r}; "
        f"expected one of its special tokens {special_tokens(tokenizer)}"
    )


def _declared(folder: Path) -> str | None:
    for name in BESIDE:
        if (folder / name).is_file():
            content = token_text(read_object(folder / name).get("eos_token"))
            if content is not None:
                return content
    return None


def token_text(declared: Any) -> str | None:
    """Return the text of a token as tokenizer_config.json declares it, None for anything else."""
    content = declared.get("content") if isinstance(declared, dict) else declared
    return content if isinstance(content, str) else None


def end_of_text_id(tokenizer: Tokenizer, token: str, path: str | Path | None = None) -> int:
    """Return the id of `end_of_text_token`; raises as it does."""
    return tokenizer.get_vocab()[end_of_text_token(tokenizer, token, path)]


def embedding_rows(tokenizer: Tokenizer) -> int:
    """Return the embedding rows that the ids need: the largest id + 1, added tokens and gaps included."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def check_ids(ids: np.ndarray, rows: int, tokenizer: Tokenizer | None = None, first: int = 0, source: str = "") -> None:
    """Raise ValueError, naming the first id outside 0 .. rows - 1, its index, its text and both sizes.

    ids: integers of any shape. rows: of the embedding. first: the index of ids[0] in what it was taken from.
    source: what that is.
    """
    if not ids.size or (int(ids.max()) < rows and int(ids.min()) >= 0):
        return
    flat = ids.reshape(-1)
    where = int(np.argmax((flat >= rows) | (flat < 0)))
    bad = int(flat[where])
    where += first
    text = size = ""
    if tokenizer is not None:
        token = tokenizer.id_to_token(bad) if 0 <= bad < 2**32 else None
        text = f" ({token!r})" if token is not None else " (no token)"
        size = f", the tokenizer {tokenizer.get_vocab_size(with_added_tokens=True)} tokens with added ones"
    of_source = f"{source}: " if source else ""
    raise ValueError(
        f"{of_source}id {bad}{text} at index {where}: expected 0 to {rows - 1}, the embedding has {rows} rows{size}"
    )


def encode_texts(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[np.ndarray]:
    """Yield the ids of each text. ids: (tokens,) uint32, without end-of-text.

    Texts go through as `encoding` says. Raises ValueError for a text too long to encode whole and to cut.
    """
    slices = cut(tokenizer, ((index, [text]) for index, text in enumerate(texts)))
    for _, parts in itertools.groupby(encode_slices(tokenizer, slices), key=lambda found: found[0].key):
        yield np.concatenate([ids for _, ids in parts])


def build_tokenizer(config: TokenizerConfig, texts: Iterable[str], directory: str | Path) -> TokenizerManifest:
    """Train on texts, or copy the files of `config.path`, into a new folder that AutoTokenizer opens too.

    Raises FileExistsError when `directory` exists, and what `train_tokenizer`, `load_tokenizer` and
    `end_of_text_token` raise.
    """
    with atomic_directory(directory) as folder:
        if config.path is None:
            tokenizer = train_tokenizer(texts, config)
            end = config.end_of_text
            _check_trained(tokenizer, end)
            (folder / TOKENIZER).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        else:
            tokenizer = load_tokenizer(config.path)
            end = end_of_text_token(tokenizer, config.end_of_text, config.path)
            _check_unknown(tokenizer, end, config.path)
            file = tokenizer_file(config.path)
            shutil.copyfile(file, folder / TOKENIZER)
            for name in (*BESIDE, TEMPLATE):
                if (file.parent / name).is_file():
                    shutil.copyfile(file.parent / name, folder / name)
        if not (folder / BESIDE[0]).is_file():
            write_json(folder / BESIDE[0], _tokenizer_config(end))
        manifest = TokenizerManifest(
            fingerprint=tokenizer_fingerprint(folder),
            vocab_size=embedding_rows(tokenizer),
            end_of_text=end,
            end_of_text_id=end_of_text_id(tokenizer, end),
            trained=config.path is None,
        )
        write_json(folder / MANIFEST, manifest.model_dump())
    return manifest


def _check_trained(tokenizer: Tokenizer, end: str) -> None:
    """Raise ValueError when a text can become the end-of-text id: the token is a byte's or a word's as well."""
    number = tokenizer.token_to_id(end)
    if any(number in tokenizer.encode(text, add_special_tokens=False).ids for text in (end, f"a{end}", f"a {end} a")):
        raise ValueError(f"end_of_text: {end!r} is also what a text becomes, expected a token that no text gives")


def _check_unknown(tokenizer: Tokenizer, end: str, path: str) -> None:
    """Raise ValueError when words that the tokenizer does not know become the end-of-text id."""
    if not isinstance(tokenizer.model, models.BPE) and getattr(tokenizer.model, "unk_token", None) == end:
        raise ValueError(f"{path}: {end!r} stands for unknown words, expected an end-of-text token of its own")


def _tokenizer_config(end_of_text: str) -> dict[str, Any]:
    return {
        "bos_token": end_of_text,
        "clean_up_tokenization_spaces": False,
        "eos_token": end_of_text,
        "model_max_length": 10**30,
        "pad_token": end_of_text,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
