"""Memory does not grow with the text that passes."""

import os
import runpy
from pathlib import Path

import pytest

from mamba_ops import heap

run = runpy.run_path(str(Path(__file__).with_name("encoding_run.py")))
documents, peak, MB = run["documents"], run["peak"], run["MB"]


@pytest.fixture
def trims(monkeypatch):
    """What would have been given back: a list that grows by one each time."""
    calls = []
    monkeypatch.setattr(heap, "_malloc_trim", lambda: calls.append)
    return calls


def test_memory_is_given_back_at_once_and_whenever_enough_has_passed(trims, monkeypatch):
    monkeypatch.setattr(heap, "TRIM_CHARACTERS", 100)
    passed = heap.trimmer()
    assert trims == [0]
    found = [passed(size) or len(trims) for size in (60, 39, 1, 60, 250, 99, 1)]
    assert found == [1, 1, 2, 2, 3, 3, 4]


def test_other_c_libraries_are_left_alone(monkeypatch):
    heap._malloc_trim.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr("sys.platform", "darwin")
        assert heap._malloc_trim() is None
        heap.trim()
    heap._malloc_trim.cache_clear()
    heap.trim()


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the peak is read from /proc")
@pytest.mark.parametrize(
    ("encode", "megabytes"),
    [pytest.param(False, 240, id="corpus"), pytest.param(True, 90, id="ids", marks=pytest.mark.large)],
)
def test_a_long_text_takes_the_memory_of_a_short_one(tmp_path, encode, megabytes):
    peaks = []
    for size in (30, megabytes):
        with open(tmp_path / f"{size}.txt", "w") as file:
            file.writelines(documents(size))
        peaks.append(peak(tmp_path / f"run-{size}", str(tmp_path / f"{size}.txt"), encode))
    assert peaks[1] - peaks[0] < 25 * MB
