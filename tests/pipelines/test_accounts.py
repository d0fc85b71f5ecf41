"""What a training run took."""

import numpy as np

from pipelines import accounts
from pipelines.accounts import peak_memory, restart_peak


def test_the_peak_is_of_what_was_held_since_it_was_restarted():
    restart_peak()
    before = peak_memory()
    np.ones(8 << 20)
    held = peak_memory()
    assert held > before + (32 << 20)
    restart_peak()
    if accounts.PROCESS.is_dir():
        assert peak_memory() < held


def test_the_peak_is_known_without_proc(monkeypatch, tmp_path):
    here = peak_memory()
    monkeypatch.setattr(accounts, "PROCESS", tmp_path / "nowhere")
    restart_peak()
    assert peak_memory() > here / 2
    monkeypatch.setattr(accounts, "resource", None)
    assert peak_memory() is None
