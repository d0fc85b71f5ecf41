"""What `make demo` runs."""

import json

import pytest
import yaml

from pipelines import demo

from .running import REPOSITORY, merged


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A demo of seconds in a folder of its own; returns how to change its configuration."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setattr(demo, "CONFIG", tmp_path / "demo.yaml")
    config = yaml.safe_load((REPOSITORY / "configs/smoke.yaml").read_text())

    def write(**changes):
        (tmp_path / "demo.yaml").write_text(yaml.safe_dump(merged(config, changes)))

    write()
    return write


def test_it_prints_a_table_and_writes_the_same_as_json(small, tmp_path, capfd):
    (tmp_path / "build/demo-before").mkdir(parents=True)
    (tmp_path / "build/demo-before/kept").touch()
    assert demo.main() == 0
    result = json.loads((tmp_path / "build/demo.json").read_text())
    assert result.keys() == {"uniform", "unigram", "bigram", "before", "after", "seconds"}
    assert result["uniform"] == 300
    assert 1 < result["bigram"] < result["unigram"]
    assert result["after"] < result["before"]
    assert result["seconds"] > 0
    printed = capfd.readouterr().out
    assert f"after    {result['after']:10.2f}" in printed
    assert "tokens/s" in printed
    assert "Warning" not in printed
    assert (tmp_path / "build/demo-before/kept").exists()


def test_a_failure_s_message_is_the_last_line(small, tmp_path, capfd):
    (tmp_path / "build").mkdir()
    (tmp_path / "build/demo.json").write_text("{}")
    small(perplexity={"baseline": 1.5}, trained_weights={"max_steps": 2})
    assert demo.main() == 1
    last = capfd.readouterr().out.rstrip().splitlines()[-1]
    assert last.startswith("check better_than_baseline of perplexity failed: found perplexity ")
    assert last.endswith("expected below 1.5")
    assert (tmp_path / "build/demo.json").read_text() == "{}"


def test_a_missing_file_is_named_in_the_last_line(small, tmp_path, capfd):
    (tmp_path / "demo.yaml").unlink()
    assert demo.main() == 2
    assert "demo.yaml" in capfd.readouterr().out.rstrip().splitlines()[-1]
