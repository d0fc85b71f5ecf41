"""A corpus built, and encoded, in a process of its own: `python encoding_run.py OPTIONS`, a JSON object.

Prints the most memory that the process had, in bytes.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from mamba_ops.available import peak_memory
from mamba_ops.config import CorpusConfig, TokenizerConfig
from mamba_ops.corpus import build_corpus
from mamba_ops.corpus_tables import training_texts
from mamba_ops.documents import default_documents
from mamba_ops.tokenized import encode_corpus
from mamba_ops.tokenizer import build_tokenizer

IMPORTS = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
MB = 10**6


def documents(megabytes: int) -> Iterator[str]:
    """Yield documents of up to 400 lines of the default corpus, each with a character of three bytes."""
    lines = [line for d in default_documents() for part in d.parts for line in part.text.splitlines(keepends=True)]
    rng, size = random.Random(0), 0
    while size < megabytes * MB:
        start = rng.randrange(len(lines) - 400)
        text = f"{size} €\n" + "".join(lines[start : start + rng.randrange(400)])
        size += len(text.encode())
        yield text


def peak(folder: Path, path: str, encode: bool) -> int:
    """Return the most bytes of memory that a process had which built the corpus at `path` in a new folder."""
    folder.mkdir()
    (folder / "validation.txt").write_text("".join(documents(1)))
    call = [sys.executable, __file__, json.dumps({"folder": str(folder), "path": path, "encode": encode})]
    done = subprocess.run(call, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": IMPORTS})
    print(f"{path}: {int(done.stdout) / MB:.1f} MB")
    return int(done.stdout)


def main(folder: str, path: str, encode: bool) -> None:
    """Build in a folder with a validation.txt."""
    root, validation = Path(folder), Path(folder) / "validation.txt"
    build_corpus(CorpusConfig(paths=[path], validation_paths=[str(validation)]), root / "corpus")
    assert sum(map(len, training_texts(root / "corpus"))) > 0
    if encode:
        build_tokenizer(TokenizerConfig(vocab_size=400), [validation.read_text()], root / "tokenizer")
        encode_corpus(root / "corpus", root / "tokenizer", root / "ids", threads=2)
    print(peak_memory())


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
