"""Run the main job on the default corpus as a person would, and print what came of it: `python -m pipelines.demo`."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from mamba_ops.fingerprint import write_json
from pipelines.evaluation import MODELS
from pipelines.io import newest
from pipelines.resources import ROOT_VARIABLE

CONFIG = Path("configs/demo.yaml")
BUILD = Path("build")
RESULT = Path("build/demo.json")
QUIET = "ignore:Function `job_execute_command` is superseded"
"""Every `dagster job execute` warns that another program may replace it."""

ERRORS = (
    re.compile(r"^pipelines\.configuration\.ConfigurationError: (.+)", re.M),
    re.compile(r"^dagster\._core\.definitions\.events\.Failure: (.+)", re.M),
    re.compile(r"^dagster\._core\.errors\.DagsterInvalidConfigError: .+\n\s*(?:Error 1: )?(.+)", re.M),
    re.compile(r"^dagster\._core\.errors\.\w+: Error occurred while .+\n\s*(.+)", re.M),
)


def main() -> int:
    """Run the job in a new folder, print a table and write it to build/demo.json; return the exit status."""
    BUILD.mkdir(exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix=time.strftime("demo-%Y%m%d-%H%M%S-"), dir=BUILD))
    began = time.monotonic()
    status, output = execute("train", CONFIG, root)
    seconds = round(time.monotonic() - began, 1)
    if status:
        print(error_message(output), flush=True)
        return status
    found = newest(root.absolute(), "perplexity").facts
    write_json(RESULT, {name: found[name] for name in MODELS} | {"seconds": seconds})
    print(f"\nPerplexity on {found['tokens']:,} validation tokens, after {seconds:.0f} s:\n")
    for name in MODELS:
        print(f"  {name:8} {found[name]:10.2f}")
    print(f"\nWeights: {newest(root.absolute(), 'trained_weights').path}\nThe same as JSON: {RESULT}")
    return 0


def execute(job: str, config: Path, root: Path) -> tuple[int, str]:
    """Run a job with `dagster job execute`, show its output as it comes, and return exit status and output."""
    command = [sys.executable, "-m", "dagster", "job", "execute", "-m", "pipelines", "-j", job, "-c", str(config)]
    environment = os.environ | {ROOT_VARIABLE: str(root), "PYTHONWARNINGS": QUIET}
    lines = []
    with (
        subprocess.Popen(
            command, env=environment, text=True, errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process,
        stops_with(process),
    ):
        assert process.stdout
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return process.returncode, "".join(lines)


@contextmanager
def stops_with(process: subprocess.Popen[str]) -> Iterator[None]:
    """Let a job that is asked to stop save and end: Ctrl-C reaches it as well, SIGTERM is handed on."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        signal.signal(signal.SIGINT, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def error_message(output: str) -> str:
    """Return the one line of Dagster's output that says what went wrong."""
    found = [match for pattern in ERRORS if (match := pattern.search(output))]
    if found:
        return min(found, key=lambda match: match.start())[1].strip()
    lines: Sequence[str] = output.strip().splitlines() or ["the job failed without a word"]
    return lines[-1].strip()


if __name__ == "__main__":
    sys.exit(main())
