"""Text by recurrent decoding: one token at a time from a state of fixed size.

`python -m mamba_ops.generate FOLDER --prompt TEXT` prints the prompt and what a checkpoint makes of it, as it comes.
"""

import argparse
import io
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from pydantic import ValidationError
from tokenizers import Tokenizer

from mamba_ops.checkpoint import load_model
from mamba_ops.command_line import Parser
from mamba_ops.config import GenerateConfig, MambaConfig, TokenizerConfig
from mamba_ops.cpu import open_cpu
from mamba_ops.export import add_to_base, open_adapted
from mamba_ops.model import empty_state, logits
from mamba_ops.ops import IGNORED, Batch, LayerState, Ops, Parameters
from mamba_ops.sampling import draw, probabilities
from mamba_ops.tokenizer import check_ids, embedding_rows, encode_texts, end_of_text_id, load_tokenizer

PROMPT_WINDOW = 64
UNDECODED = "\ufffd"


def generate(
    ops: Ops,
    params: Parameters,
    config: MambaConfig,
    prompt_ids: Sequence[int] | np.ndarray,
    settings: GenerateConfig,
    *,
    stop_id: int | None = None,
    vocab_limit: int | None = None,
) -> Iterator[int]:
    """Yield up to settings.max_new_tokens ids that continue the prompt, drawn as `sampling.probabilities` says.

    stop_id ends the text and is not yielded. Ids from vocab_limit (the tokenizer's size) on are never drawn:
    padded rows of the embedding. The same seed gives the same ids. Raises ValueError on an empty prompt, an id
    outside the embedding and a vocab_limit below 1, and, while decoding, on logits that are not finite.
    """
    prompt = _check_prompt(prompt_ids, config.vocab_size)
    limit = config.vocab_size if vocab_limit is None else min(vocab_limit, config.vocab_size)
    if limit < 1:
        raise ValueError(f"vocab_limit: expected at least 1, got {vocab_limit}")
    rng = np.random.default_rng(settings.seed)
    seen = np.zeros(config.vocab_size, bool)
    seen[prompt] = True

    def decode() -> Iterator[int]:
        state = empty_state(ops, config, 1)
        new, position = prompt, 0
        for _ in range(settings.max_new_tokens):
            last = advance(ops, params, config, state, new, position)[-1, :limit]
            position += len(new)
            token = draw(probabilities(last, seen[:limit], settings), rng)
            if token == stop_id:
                return
            yield token
            seen[token] = True
            new = np.array([token])

    return decode()


def advance(
    ops: Ops, params: Parameters, config: MambaConfig, state: list[LayerState], ids: np.ndarray, position: int
) -> np.ndarray:
    """Feed ids of one document to the state and return the logits of the last window: (tokens, vocab_size).

    position: how many tokens of the document the state has seen. Windows are powers of two, so that only a
    few shapes occur, whatever the lengths.
    """
    begin = 0
    while True:
        window = min(PROMPT_WINDOW, 1 << ((len(ids) - begin).bit_length() - 1))
        part = ids[None, begin : begin + window]
        positions = position + np.arange(begin, begin + window)[None]
        batch = Batch(part, np.full_like(part, IGNORED), positions.astype(np.uint32))
        with ops.scope():
            result = logits(ops, params, config, ops.rows(batch), state)
        begin += window
        if begin == len(ids):
            return result


def continuation(
    ops: Ops,
    params: Parameters,
    config: MambaConfig,
    tokenizer: Tokenizer,
    end_of_text: int,
    prompt: str,
    settings: GenerateConfig,
) -> Iterator[str]:
    """Yield the text that continues a prompt, in pieces of whole characters, up to the end-of-text token.

    As in training the end-of-text token comes before the prompt, which so is the beginning of a document.
    end_of_text: its id. Raises what `generate` raises.
    """
    own = np.concatenate([*encode_texts(tokenizer, [prompt])]).tolist()
    limit = embedding_rows(tokenizer)
    ids = generate(ops, params, config, [end_of_text, *own], settings, stop_id=end_of_text, vocab_limit=limit)
    return text_pieces(tokenizer, ids, own)


def text_pieces(tokenizer: Tokenizer, ids: Iterable[int], before: Sequence[int] = ()) -> Iterator[str]:
    """Yield the text that ids add to the text of those before, as soon as its characters are whole.

    A token may end inside a character's UTF-8 bytes. What could be the beginning of one is held back until the
    next tokens complete it or show that it is none; joined, the pieces are the text that decoding all ids gives.
    """
    known, new = list(before), []
    told = len(tokenizer.decode(known))
    for token in ids:
        new.append(token)
        text = tokenizer.decode(known + new)
        if len(text) > told and not text.endswith(UNDECODED):
            yield text[told:]
            # a decoder may treat the first token of a text in its own way: one that was told stays before the new
            known, new = new, []
            told = len(tokenizer.decode(known))
    if len(text := tokenizer.decode(known + new)) > told:
        yield text[told:]


def _check_prompt(prompt_ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    prompt = np.asarray(prompt_ids)
    if prompt.ndim != 1 or prompt.size == 0:
        raise ValueError(f"prompt_ids: expected at least one token id, got shape {prompt.shape}")
    if prompt.dtype.kind not in "iu":
        raise ValueError(f"prompt_ids: expected integers, got {prompt.dtype}")
    check_ids(prompt, vocab_size)
    return prompt.astype(np.int64)


def _parser() -> Parser:
    parser = Parser(prog="mamba_ops.generate", description="Continue a text with a checkpoint.", allow_abbrev=False)
    parser.add_argument("folder", help="Checkpoint folder in Hugging Face's layout, with its tokenizer.json.")
    parser.add_argument("--prompt", default="", help="Text to continue, the beginning of a document; default: none.")
    parser.add_argument("--adapter", metavar="FOLDER", help="Adapter folder to add to the checkpoint; default: none.")
    for name, field in GenerateConfig.model_fields.items():
        text = f"{field.description} Default: {field.default}."
        parser.add_argument("--" + name.replace("_", "-"), default=field.default, metavar="N", help=text)
    return parser


def _settings(parser: Parser, options: argparse.Namespace) -> GenerateConfig:
    try:
        options.prompt.encode()
    except UnicodeEncodeError as error:
        parser.error(f"--prompt: expected UTF-8 text, got other bytes from character {error.start} on")
    try:
        return GenerateConfig(**{name: getattr(options, name) for name in GenerateConfig.model_fields})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        message = first["msg"].removeprefix("Value error, ")
        parser.error(f"--{str(first['loc'][0]).replace('_', '-')}: {message}; got {first['input']!r}")


def _model(folder: str, adapter: str | None) -> tuple[MambaConfig, dict[str, np.ndarray]]:
    """Return the model of a folder, with an adapter added to its weights where one is given."""
    if adapter is None:
        return load_model(folder)
    found = open_adapted(folder, adapter)
    return found.config, add_to_base(found)


def _end_of_text(tokenizer: Tokenizer, config: MambaConfig, folder: str) -> int:
    """Return the end-of-text id of a folder: that of its config.json, or of its tokenizer where none is given there.

    Raises ValueError where the tokenizer needs more rows than the embedding has.
    """
    rows = embedding_rows(tokenizer)
    if rows > config.vocab_size:
        raise ValueError(f"{folder}: the tokenizer needs {rows} embedding rows, the checkpoint has {config.vocab_size}")
    given = config.eos_token_id if "eos_token_id" in config.model_fields_set else None
    if given is not None and tokenizer.id_to_token(given) is not None:
        return given
    return end_of_text_id(tokenizer, TokenizerConfig().end_of_text, folder)


def _print(prompt: str, pieces: Iterator[str]) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    for piece in itertools.chain([prompt], pieces):
        print(piece, end="", flush=True)
    print()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the prompt and its continuation; return 0, or 1 with one line on stderr; wrong arguments exit with 2."""
    parser = _parser()
    options = parser.parse_args(arguments)
    settings = _settings(parser, options)
    try:
        config, params = _model(options.folder, options.adapter)
        tokenizer = load_tokenizer(options.folder)
        end = _end_of_text(tokenizer, config, options.folder)
        pieces = continuation(open_cpu(), params, config, tokenizer, end, options.prompt, settings)
        _print(options.prompt, pieces)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads what is left to flush
        return 1
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
