"""The most memory that this process has held."""

import numpy as np

from mamba_ops import available
from mamba_ops.available import peak_memory, restart_peak


def test_the_peak_is_of_what_was_held_since_it_was_restarted():
    restart_peak()
    before = peak_memory()
    np.ones(8 << 20)
    held = peak_memory()
    assert held > before + (32 << 20)
    restart_peak()
    if available.PROCESS.is_dir():
        assert peak_memory() < held


def test_the_peak_is_known_without_proc(monkeypatch, tmp_path):
    here = peak_memory()
    monkeypatch.setattr(available, "PROCESS", tmp_path / "nowhere")
    restart_peak()
    assert peak_memory() > here / 2
    monkeypatch.setattr(available, "resource", None)
    assert peak_memory() is None
