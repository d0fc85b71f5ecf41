"""Speed and memory of turning text into ids, from a file to ids.bin, against `tokenizers` alone on the same cores.

`python benchmarks/encode.py --mb 1000` makes that much text as one file and as 1,000 parquet files on an S3 server
of its own on this machine (moto, in the dev extra). Each row is a process of its own: it reads, hashes and splits
the corpus, trains a tokenizer of its own (not timed), and encodes. What `tokenizers` alone needs is timed on the
same text, in memory, right after each row: its `encode_batch_fast` and nothing else. CPU seconds say more than
wall time on a machine that is not quiet. `--json FILE` keeps the rows.
"""

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers

from mamba_ops.available import peak_memory
from mamba_ops.config import CorpusConfig, TokenizerConfig
from mamba_ops.corpus import build_corpus, read_texts
from mamba_ops.corpus_tables import training_texts
from mamba_ops.documents import default_documents
from mamba_ops.tokenized import encode_corpus, open_ids
from mamba_ops.tokenizer import build_tokenizer, load_tokenizer

FILES = 1000
VOCAB_SIZE = 8192
ALONE_MB = 100
PIECE = 1 << 16
CALL = 1 << 22
SERVER = """
import sys, time
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""


def documents(megabytes: float, seed: int = 0) -> Iterator[str]:
    """Yield documents of 3 to 400 lines in the order of the default corpus, from places drawn by seed."""
    lines = [line for d in default_documents() for part in d.parts for line in part.text.splitlines(keepends=True)]
    rng, size = random.Random(seed), 0
    while size < megabytes * 1e6:
        start = rng.randrange(len(lines) - 400)
        text = f"{size}\n" + "".join(lines[start : start + rng.randrange(3, 400)])
        size += len(text.encode())
        yield text


def write_text(path: Path, megabytes: float) -> None:
    """Write one file that is one document."""
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(documents(megabytes))


def write_parquet(address: str, megabytes: float) -> None:
    """Write the same documents as parquet files of about the same size."""
    system, folder = fsspec.core.url_to_fs(address)
    system.mkdir(folder.split("/")[0])
    most, number, texts, size = megabytes * 1e6 / FILES, 0, [], 0
    for text in documents(megabytes):
        texts.append(text)
        size += len(text.encode())
        if size >= most * (number + 1):
            _put(system, f"{folder}/{number:05}.parquet", texts)
            texts, number = [], number + 1
    if texts:
        _put(system, f"{folder}/{number:05}.parquet", texts)


def _put(system: fsspec.AbstractFileSystem, path: str, texts: list[str]) -> None:
    with pa.BufferOutputStream() as sink:
        pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), sink)
    system.pipe_file(path, sink.getvalue().to_pybytes())


def measure(address: str, folder: Path) -> dict:
    """Do it all in this process; seconds (wall, CPU, and others' share of the cores) and memory's peak by stage."""
    config = CorpusConfig(paths=[address], validation_paths=[str(folder / "validation.txt")])
    row = {"start_peak_mb": (peak_memory() or 0) / 1e6}
    with _timed(row, "corpus"):
        corpus = build_corpus(config, folder / "corpus")
    row["corpus_peak_mb"] = (peak_memory() or 0) / 1e6
    with _timed(row, "training"):
        build_tokenizer(TokenizerConfig(vocab_size=VOCAB_SIZE), training_texts(folder / "corpus"), folder / "tokenizer")
    row["training_peak_mb"] = (peak_memory() or 0) / 1e6
    with _timed(row, "encoding"):
        made = encode_corpus(folder / "corpus", folder / "tokenizer", folder / "ids")
    return row | {
        "bytes": sum(corpus.bytes.values()),
        "documents": sum(corpus.documents.values()),
        "tokens": made.streams["train"].tokens,
        "peak_mb": (peak_memory() or 0) / 1e6,
    }


def alone(folder: Path, whole_documents: bool) -> dict:
    """Time `encode_batch_fast` on the beginning of the corpus, the texts being in memory already."""
    tokenizer = load_tokenizer(folder / "tokenizer")
    row: dict = {"bytes": 0}
    batch: list[str] = []
    for piece in _pieces(folder, whole_documents):
        batch.append(piece)
        if sum(map(len, batch)) >= CALL:
            with _timed(row, "encoding"):
                encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            row["bytes"] += sum(len(text.encode()) for text in batch)
            del encodings
            batch = []
        if row["bytes"] >= ALONE_MB * 1e6:
            break
    return row


def check(folder: Path) -> int:
    """Compare the first megabyte of ids with those of `tokenizers` on whole documents; return how many."""
    first = "".join(text for text, _ in zip(read_texts(folder / "corpus", "validation"), range(1), strict=False))
    expected = load_tokenizer(folder / "tokenizer").encode_batch_fast([first], add_special_tokens=False)[0].ids
    found = open_ids(folder / "ids")[-1 - len(expected) : -1]
    if not np.array_equal(found, expected):
        raise SystemExit("the ids are not those of tokenizers")
    return len(expected)


def _pieces(folder: Path, whole_documents: bool) -> Iterator[str]:
    texts = training_texts(folder / "corpus", sys.maxsize)
    for text in texts:
        yield from [text] if whole_documents else (text[i : i + PIECE] for i in range(0, len(text), PIECE))


@contextmanager
def _timed(row: dict, name: str) -> Iterator[None]:
    """Add to a row's wall and CPU seconds, and to the seconds that other processes had of all cores."""
    wall, cpu, busy = time.perf_counter(), time.process_time(), _busy_seconds()
    yield
    spent = {"s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    spent["others_s"] = max(0.0, _busy_seconds() - busy - spent["cpu_s"])
    for key, value in spent.items():
        row[f"{name}_{key}"] = row.get(f"{name}_{key}", 0.0) + value


def _busy_seconds() -> float:
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    values = [int(x) for x in stat.read_text().splitlines()[0].split()[1:]]
    return (sum(values[:8]) - values[3] - values[4]) / os.sysconf("SC_CLK_TCK")


@contextmanager
def s3_server() -> Iterator[None]:
    """Run an S3 server on the loopback interface and point the environment to it."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin
    assert process.stdout
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{process.stdout.readline().strip()}",
    }
    try:
        yield
    finally:
        process.stdin.close()
        process.wait(timeout=60)


def _own_process(*arguments: str) -> dict:
    command = [sys.executable, __file__, *arguments]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def compared(name: str, address: str, folder: Path) -> dict:
    """Measure a corpus, and `tokenizers` alone before and after it."""
    folder.mkdir()
    (folder / "validation.txt").write_text("".join(documents(0.5, seed=1)), encoding="utf-8")
    kind = ["--whole-documents"] if name != "one text file" else []
    own = _own_process("--measure", address, "--folder", str(folder))
    alone_rows = [_own_process("--alone", "--folder", str(folder), *kind) for _ in range(2)]
    seconds = own["corpus_s"] + own["encoding_s"]
    cpu = own["corpus_cpu_s"] + own["encoding_cpu_s"]
    both = {key: sum(row[key] for row in alone_rows) for key in alone_rows[0]}
    return own | {
        "name": name,
        "mb_per_s": own["bytes"] / seconds / 1e6,
        "alone_mb_per_s": both["bytes"] / both["encoding_s"] / 1e6,
        "share": own["bytes"] / seconds / (both["bytes"] / both["encoding_s"]),
        "cpu_share": own["bytes"] / cpu / (both["bytes"] / both["encoding_cpu_s"]),
        "alone_cores": both["encoding_cpu_s"] / both["encoding_s"],
        "alone_others": both["encoding_others_s"] / both["encoding_s"],
    }


def main() -> None:
    """Print one row a corpus."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=100)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--whole-documents", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.folder)))
        return
    if options.alone:
        print(json.dumps(alone(options.folder, options.whole_documents)))
        return
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, tokenizers {tokenizers.__version__}")
    rows = []
    with tempfile.TemporaryDirectory() as name, s3_server():
        root = Path(name)
        write_text(root / "one.txt", options.mb)
        write_parquet("s3://corpus/parts", options.mb)
        for title, address in (("one text file", str(root / "one.txt")), ("parquet on S3", "s3://corpus/parts")):
            rows.append(compared(title, address, root / title.replace(" ", "-")))
            print(f"check: {check(root / title.replace(' ', '-'))} ids are those of tokenizers")
    _print(rows)
    if options.json:
        machine = {"machine": platform.platform(), "cores": os.cpu_count(), "tokenizers": tokenizers.__version__}
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")


def _print(rows: list[dict]) -> None:
    heads = ("corpus", "MB", "documents", "corpus s", "encode s", "MB/s", "alone MB/s", "share", "CPU share", "peak MB")
    print("".join(f"{head:>{18 if head == 'corpus' else 11}}" for head in heads), "  cores in use, of others")
    for row in rows:
        own = [row["encoding_cpu_s"] / row["encoding_s"], row["alone_cores"]]
        others = [row["encoding_others_s"] / row["encoding_s"], row["alone_others"]]
        print(
            f"{row['name']:>18}{row['bytes'] / 1e6:11.0f}{row['documents']:11}{row['corpus_s']:11.1f}"
            f"{row['encoding_s']:11.1f}{row['mb_per_s']:11.2f}{row['alone_mb_per_s']:11.2f}{row['share']:11.0%}"
            f"{row['cpu_share']:11.0%}{row['peak_mb']:11.0f}   "
            + "   alone".join(f" {a:.2f}, {b:.2f}" for a, b in zip(own, others, strict=True))
        )


if __name__ == "__main__":
    main()
