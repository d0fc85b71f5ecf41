"""Reading manifests that somebody changed by hand."""

import json

import pytest

from pipelines.io import ManifestError, read

GOOD = {"asset": "a", "fingerprint": "f", "folder": "x", "files": {}, "config": {}, "inputs": {}, "facts": {}}


def test_a_manifest_is_what_was_written(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(GOOD))
    assert read(tmp_path / "a.json", tmp_path).to_json() == GOOD


@pytest.mark.parametrize(
    "text", ["", "[]", "null", json.dumps(GOOD | {"files": 3}), json.dumps(GOOD | {"more": 1}), "{}"]
)
def test_anything_else_is_one_error_that_names_the_file(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(
        ManifestError, match=r"a\.json: found no readable manifest .* expected the JSON that was written"
    ):
        read(tmp_path / "a.json", tmp_path)
