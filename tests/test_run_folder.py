"""Runs on disk: resumed bit for bit, killed at any moment, refused to another run."""

import itertools
import json
import os
import random
import runpy
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from mamba_ops import run_folder
from mamba_ops.fingerprint import digest, file_digest
from mamba_ops.metrics import HISTORY, read_history
from mamba_ops.run_folder import checkpoints
from mamba_ops.tensors import CheckpointError, load_tensors

SCRIPT = Path(__file__).with_name("tiny_run.py")
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH")])),
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
tiny_run = runpy.run_path(str(SCRIPT))["tiny_run"]


def process(folder, **options):
    command = [sys.executable, str(SCRIPT), json.dumps({"folder": str(folder)} | options)]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(folder, **options):
    """Run in a new process to its end and return what it printed."""
    child = process(folder, **options)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    return json.loads(out)


def killed(folder, **options):
    """Run in a new process that kills itself; return whether it got that far."""
    child = process(folder, **options)
    _, err = child.communicate(timeout=60)
    assert child.returncode in (0, -9), err
    return child.returncode == -9


def run(folder, **options):
    state, steps = tiny_run(str(folder), **options)
    return state, list(steps)


def history(folder):
    """Everything that was recorded but the times."""
    return [
        {key: value for key, value in asdict(step).items() if not key.endswith("seconds")}
        for step in read_history(folder)
    ]


def final_tensors(folder):
    newest = checkpoints(folder)[-1]
    tensors = load_tensors(newest / "model.safetensors") | load_tensors(newest / "optimizer.safetensors")
    state = json.loads((newest / "state.json").read_text())
    counters = {name: state[name] for name in ("step", "skipped", "skipped_in_a_row", "tokens_seen", "counts")}
    return counters, {name: array.tobytes() for name, array in tensors.items()}


def assert_same_run(found, expected):
    assert final_tensors(found) == final_tensors(expected)
    assert history(found) == history(expected)


def assert_whole(folder):
    """Every checkpoint is complete to the last byte."""
    for path in checkpoints(folder):
        values = json.loads((path / "state.json").read_text())
        recorded = values.pop("digest")
        assert digest(values) == recorded
        assert {name: file_digest(path / name) for name in values["files"]} == values["files"]
        assert f"step-{values['step']:08d}" == path.name


def newest_step(folder):
    found = checkpoints(folder)
    return int(found[-1].name.removeprefix("step-")) if found else 0


def lines(folder):
    path = folder / HISTORY
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize(
    ("stop", "total", "accumulation"),
    [
        (3, 6, 1),  # 4 windows an epoch: in its middle
        (4, 8, 1),  # at its edge
        (3, 6, 3),  # 2 windows an epoch, of 3 and 1 batches: in its middle
        (2, 4, 3),  # at its edge
    ],
)
def test_case_23_a_run_in_two_processes_is_the_run_in_one(tmp_path, stop, total, accumulation):
    options = {"max_steps": total, "save_steps": stop, "accumulation": accumulation}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = finish(whole, **options)
    first = finish(parts, stop_after=stop, **options)
    assert newest_step(parts) == stop
    second = finish(parts, **options)
    assert first["batches"] + second["batches"] == expected["batches"]
    assert_same_run(parts, whole)
    assert [step["step"] for step in history(parts)] == list(range(1, total + 1))


def test_case_23_a_run_on_disk_is_the_run_in_memory(tmp_path):
    state, in_memory = tiny_run(None)
    in_memory = list(in_memory)
    other, on_disk = run(tmp_path)
    assert [(m.loss, m.grad_norm, m.learning_rate) for m in in_memory] == [
        (m.loss, m.grad_norm, m.learning_rate) for m in on_disk
    ]
    for name, value in state.params.items():
        assert value.tobytes() == other.params[name].tobytes()


@pytest.mark.parametrize("batch", [5, 8, 9])
def test_case_23_a_kill_inside_an_accumulation_window_resumes_from_the_last_optimizer_step(tmp_path, batch):
    # windows of 3 and 1 batches: steps 1 to 4 read batches 1-3, 4, 5-7, 8
    options = {"max_steps": 6, "save_steps": 1, "accumulation": 3}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = finish(whole, **options)["batches"]
    assert killed(parts, kill_at_batch=batch + 1, **options)
    done = newest_step(parts)
    begun = [0, 3, 4, 7, 8, 11, 12]
    assert begun[done] <= batch < begun[done + 1]
    assert finish(parts, **options)["batches"] == expected[begun[done] :]
    assert_same_run(parts, whole)


def test_case_23_a_finished_run_does_nothing(tmp_path):
    finish(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert finish(tmp_path)["batches"] == []
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    state, steps = run(tmp_path)
    assert (steps, state.step) == ([], 6)
    trained = load_tensors(checkpoints(tmp_path)[-1] / "model.safetensors")
    assert {name: value.tobytes() for name, value in state.params.items()} == {
        name: value.tobytes() for name, value in trained.items()
    }


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": 12}, "model.hidden_size: found 12, expected 8"),
        ({"tokenizer": "another"}, "tokenizer: found another, expected a tokenizer"),
        ({"data_seed": 1}, "data: found"),
        ({"weights_seed": 1}, "weights: found"),
        ({"learning_rate": 2e-2}, "train.learning_rate: found 0.02, expected 0.01"),
        ({"max_steps": 7}, "train.max_steps: found 7, expected 6"),
        ({"accumulation": 2}, "train.gradient_accumulation_steps: found 2, expected 1"),
    ],
)
@pytest.mark.parametrize("before", ["a checkpoint", "the first checkpoint"])
def test_case_23_another_run_is_refused_by_what_differs(tmp_path, change, named, before):
    _, steps = tiny_run(str(tmp_path))
    for _ in itertools.islice(steps, 4 if before == "a checkpoint" else 1):
        pass
    steps.close()
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="belongs to another run") as error:
        run(tmp_path, **change)
    assert named in str(error.value)
    assert str(tmp_path) in str(error.value)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files
    assert len(run(tmp_path)[1]) == (3 if before == "a checkpoint" else 6)


def test_what_does_not_change_a_step_may_change_when_a_run_is_resumed(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole)
    _, steps = tiny_run(str(parts))
    for _ in itertools.islice(steps, 4):
        pass
    steps.close()
    changed = {"save_steps": 2, "logging_seconds": 1.0, "gradient_checkpointing": True, "max_skipped_steps": 1}
    assert len(run(parts, max_seconds=1000, **changed)[1]) == 3
    assert_same_run(parts, whole)


def test_checkpoints_come_every_save_steps_and_at_the_end_and_two_are_kept(tmp_path):
    state, steps = tiny_run(str(tmp_path), max_steps=8, save_steps=3)
    seen = [(m.step, [int(path.name.removeprefix("step-")) for path in checkpoints(tmp_path)]) for m in steps]
    assert seen == [
        (1, []), (2, []), (3, [3]), (4, [3]), (5, [3]), (6, [3, 6]), (7, [3, 6]), (8, [6, 8]),
    ]  # fmt: skip
    assert state.step == 8
    assert_whole(tmp_path)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000006", "step-00000008"]


def test_the_time_budget_counts_all_parts_together(tmp_path):
    options = {"max_steps": 100_000, "save_steps": 100_000}
    state, steps = run(tmp_path, max_seconds=0.1, **options)
    assert newest_step(tmp_path) == state.step == len(steps)
    again, more = run(tmp_path, max_seconds=0.1, **options)
    assert (more, again.step) == ([], state.step)
    began = time.monotonic()
    longer, more = run(tmp_path, max_seconds=0.3, **options)
    assert time.monotonic() - began < 1.0
    assert longer.step == state.step + len(more) > state.step
    assert 0.3 <= longer.seconds == more[-1].elapsed_seconds
    assert more[-2].elapsed_seconds < 0.3
    assert longer.seconds - sum(m.seconds for m in more) >= 0.1


def test_a_second_process_is_kept_out_and_let_in_after_a_kill(tmp_path):
    _, steps = tiny_run(str(tmp_path))
    next(steps)
    with pytest.raises(RuntimeError, match="another process trains in this folder"):
        run(tmp_path)
    child = process(tmp_path)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 1
    assert "RuntimeError" in err
    steps.close()
    assert killed(tmp_path, kill_at_batch=2)
    assert len(run(tmp_path)[1]) == 6


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["a bit", "cut", "gone"])
def test_a_corrupt_newest_checkpoint_is_an_error_that_names_it_and_the_way_out(tmp_path, file, damage):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole)
    run(parts)
    newest, before = checkpoints(parts)[-1], checkpoints(parts)[-2]
    content = bytearray((newest / file).read_bytes())
    if damage == "gone":
        (newest / file).unlink()
    else:
        content[len(content) // 2] ^= 1
        (newest / file).write_bytes(content if damage == "a bit" else content[: len(content) // 2])
    with pytest.raises(CheckpointError) as error:
        run(parts)
    message = str(error.value)
    assert str(newest / file) in message
    assert "expected" in message
    assert f"remove {newest} to continue from the checkpoint before it, {before}" in message
    for path in newest.iterdir():
        path.unlink()
    newest.rmdir()
    assert len(run(parts)[1]) == 3
    assert_same_run(parts, whole)


def test_a_history_shorter_than_its_checkpoint_is_an_error(tmp_path):
    run(tmp_path)
    (tmp_path / HISTORY).write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"metrics.jsonl: expected at least \d+ bytes, as the checkpoint says, found 0"
    ):
        run(tmp_path)


def test_lines_of_lost_steps_are_cut_off_the_history(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole)
    _, steps = tiny_run(str(parts))
    for _ in itertools.islice(steps, 5):
        pass
    steps.close()
    assert lines(parts) == 5
    with open(parts / HISTORY, "ab") as file:
        file.write(b'{"step": 6, "lo')
    assert [step["step"] for step in history(parts)] == [1, 2, 3, 4, 5]
    assert [m.step for m in run(parts)[1]] == [4, 5, 6]
    assert_same_run(parts, whole)


def test_a_state_that_has_begun_elsewhere_is_not_mixed_into_a_new_folder(tmp_path):
    options = {"max_steps": 6, "save_steps": 3}
    state, steps = tiny_run(str(tmp_path), **options)
    for _ in itertools.islice(steps, 2):
        pass
    steps.close()
    with pytest.raises(ValueError, match="expected a checkpoint of this run or a fresh state, got step 2"):
        run(tmp_path, state=state, **options)
    assert len(run(tmp_path, **options)[1]) == 6


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / HISTORY).write_text("my own notes\n")
    with pytest.raises(ValueError, match=r"found \['metrics.jsonl'\] without run.json"):
        run(tmp_path)
    assert (tmp_path / HISTORY).read_text() == "my own notes\n"


def test_an_unreadable_run_file_is_named(tmp_path):
    run(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"run.json: found no readable JSON"):
        run(tmp_path)


def test_a_checkpoint_of_another_run_put_into_the_folder_is_refused(tmp_path):
    run(tmp_path / "one")
    run(tmp_path / "other", weights_seed=1)
    newest = checkpoints(tmp_path / "one")[-1]
    for path in newest.iterdir():
        path.write_bytes((checkpoints(tmp_path / "other")[-1] / path.name).read_bytes())
    with pytest.raises(CheckpointError, match=r"state\.json: run: found"):
        run(tmp_path / "one")


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    state, steps = tiny_run(str(tmp_path))
    for _ in itertools.islice(steps, 5):
        pass
    state.adam.moments["backbone.norm_f.weight"][0].fill(np.inf)
    with pytest.raises(CheckpointError, match="expected finite values"), np.errstate(all="ignore"):
        list(steps)
    assert newest_step(tmp_path) == 3
    assert_whole(tmp_path)


def test_another_version_of_numpy_is_said_to_break_bit_identity(tmp_path, monkeypatch, caplog):
    run(tmp_path)
    assert not caplog.records
    monkeypatch.setattr(run_folder, "VERSIONS", run_folder.VERSIONS | {"numpy": "1.0"})
    run(tmp_path)
    assert "not bit for bit" in caplog.text


def test_twenty_kills_at_random_moments_end_in_the_uninterrupted_run(tmp_path):
    options = {"max_steps": 260, "save_steps": 2, "accumulation": 2}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    finish(whole, **options)
    random_moment = random.Random(7)
    kills, saved = 0, 0
    while kills < 20:
        target, delay = saved + random_moment.randint(0, 7), random_moment.uniform(0, 0.01)
        child = process(parts, **options)
        while lines(parts) < target and child.poll() is None:
            time.sleep(0.001)
        time.sleep(delay if target else random_moment.uniform(0, 1))
        child.kill()
        _, err = child.communicate(timeout=60)
        assert child.returncode == -9, err
        kills += 1
        assert_whole(parts)
        assert newest_step(parts) >= saved
        saved = newest_step(parts)
        assert lines(parts) - saved <= options["save_steps"]
    assert saved < options["max_steps"]
    finish(parts, **options)
    assert_same_run(parts, whole)
    assert [step["step"] for step in history(parts)] == list(range(1, 261))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_kill_before_any_file_system_operation_ends_in_the_uninterrupted_run(tmp_path):
    """Kills right before each making, syncing, renaming and removing of a file or folder, from a resume to the end."""
    options = {"max_steps": 4, "save_steps": 1}
    whole, base = tmp_path / "whole", tmp_path / "base"
    finish(whole, **options)
    finish(base, stop_after=3, **options)
    shutil.copytree(base, tmp_path / "counted")
    count = finish(tmp_path / "counted", **options)["operations"]
    assert count > 40
    folders = [tmp_path / f"killed-{number}" for number in range(1, count + 1)]
    for folder in folders:
        shutil.copytree(base, folder)
    command = [sys.executable, str(SCRIPT), json.dumps({"folders": list(map(str, folders))} | options)]
    signals = json.loads(subprocess.run(command, env=ENVIRONMENT, capture_output=True, timeout=80, check=True).stdout)
    assert signals == [-9] * count
    steps_after = []
    for folder in folders:
        assert_whole(folder)
        steps_after.append(newest_step(folder))
        assert lines(folder) - steps_after[-1] <= 1
        run(folder, **options)
        assert_same_run(folder, whole)
        assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000003", "step-00000004"]
    assert steps_after == sorted(steps_after)
    assert set(steps_after) == {3, 4}


def test_a_kill_before_any_operation_of_a_new_run_is_a_new_run(tmp_path):
    options = {"max_steps": 2, "save_steps": 1}
    finish(tmp_path / "whole", **options)
    for operation in (1, 2, 4, 6, 9, 14, 30):
        folder = tmp_path / str(operation)
        assert killed(folder, kill_at_operation=operation, **options)
        run(folder, **options)
        assert_same_run(folder, tmp_path / "whole")
