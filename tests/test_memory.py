"""The memory of a run is known before it starts, and a run that does not fit says what would."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mamba_ops.available import available_memory
from mamba_ops.config import BatchesConfig, MambaConfig, TrainConfig
from mamba_ops.cpu import open_cpu
from mamba_ops.cpu.tally import Tally
from mamba_ops.cpu.workspace import Rows
from mamba_ops.memory import Shapes, estimate_memory, require_memory, size
from mamba_ops.model import losses_and_gradients
from mamba_ops.parameters import table
from mamba_ops.train import start, train
from mamba_ops.training_data import token_rows

MODELS = st.builds(
    MambaConfig,
    vocab_size=st.sampled_from([5, 40, 300]),
    hidden_size=st.integers(1, 40),
    num_hidden_layers=st.integers(1, 3),
    state_size=st.integers(1, 20),
    conv_kernel=st.integers(1, 5),
    expand=st.integers(1, 3),
    use_bias=st.booleans(),
    use_conv_bias=st.booleans(),
    tie_word_embeddings=st.booleans(),
)
TINY = MambaConfig(vocab_size=11, hidden_size=8, num_hidden_layers=2, state_size=3)


@settings(max_examples=40, deadline=None)
@given(
    config=MODELS,
    seq_len=st.integers(1, 70),
    batch_size=st.integers(1, 5),
    rows=st.integers(1, 12),
    accumulation=st.integers(1, 3),
    checkpointing=st.booleans(),
    frozen=st.sets(st.integers(0, 40)),
    dtype=st.sampled_from([np.float32, np.float64]),
)
@example(MambaConfig(vocab_size=9, hidden_size=300, num_hidden_layers=1), 130, 2, 4, 2, False, set(), np.float32)
def test_the_pools_and_the_scratch_are_counted_exactly(
    config, seq_len, batch_size, rows, accumulation, checkpointing, frozen, dtype
):
    names = [name for i, name in enumerate(table(config)) if i not in frozen] or [next(iter(table(config)))]
    ids = np.random.default_rng(0).integers(0, config.vocab_size, rows * seq_len + 1)
    options = TrainConfig(
        gradient_accumulation_steps=accumulation, gradient_checkpointing=checkpointing, num_train_epochs=1
    )
    batches = BatchesConfig(seq_len=seq_len, batch_size=batch_size)
    ops, state = open_cpu(dtype, threads=1), start(config, names=names, dtype=dtype)
    steps = list(train(state, token_rows(ids, batches), options, batches, ops=ops))
    assert steps[-1].tokens_seen == rows * seq_len
    found = estimate_memory(config, options, batches, rows, names=names, dtype=dtype)
    assert found.activations == ops.held_bytes()
    assert found.parameters == sum(value.nbytes for value in state.params.values())
    assert found.gradients == sum(state.params[name].nbytes for name in names)
    assert found.moments == sum(moment.nbytes for pair in state.adam.moments.values() for moment in pair)


@pytest.mark.parametrize("width", [8, 200, 256, 300])
def test_the_scratch_is_counted_exactly(width):
    """Below and past the tiles of the convolution (512 channels) and of the scan (512 channels of 16 states)."""
    config = MambaConfig(vocab_size=9, hidden_size=width, num_hidden_layers=1)
    ops, tally, rows = open_cpu(threads=1), Tally(np.float32), Rows(2, 70, *3 * [np.empty(0)])
    list(
        train(
            start(config),
            np.arange(141) % 9,
            TrainConfig(max_steps=1),
            BatchesConfig(seq_len=70, batch_size=2),
            ops=ops,
        )
    )
    shapes = {name: entry.shape for name, entry in table(config).items()}
    losses_and_gradients(tally, shapes, config, rows, Shapes(shapes), list(shapes))
    tally.step()
    assert tally.scratch_bytes == sum(array.nbytes for array in ops._local.arrays.values())


SMALL = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2}, {"batch_size": 8, "seq_len": 128}, 64
MEDIUM = {"vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 4}, {"batch_size": 4, "seq_len": 256}, 16
LARGE = {"vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 4}, {"batch_size": 1, "seq_len": 256}, 4
KEPT = {"gradient_checkpointing": True}
IMPORTS = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the peak is read from /proc")
@pytest.mark.parametrize(
    ("shape", "options", "way"),
    [
        pytest.param(SMALL, {}, "full", id="small"),
        pytest.param(SMALL, KEPT, "full", id="small, checkpointing"),
        pytest.param(MEDIUM, {}, "full", id="medium"),
        pytest.param(
            MEDIUM, KEPT | {"gradient_accumulation_steps": 2}, "full", id="medium, checkpointing, accumulation"
        ),
        pytest.param(LARGE, {}, "full", id="130m with 4 layers", marks=pytest.mark.large),
        pytest.param(LARGE, KEPT, "full", id="130m with 4 layers, checkpointing", marks=pytest.mark.large),
        pytest.param(MEDIUM, {}, "lora", id="medium, lora"),
        pytest.param(MEDIUM, {}, "wsla", id="medium, wsla"),
        pytest.param(LARGE, {}, "lora", id="130m with 4 layers, lora", marks=pytest.mark.large),
        pytest.param(LARGE, {}, "wsla", id="130m with 4 layers, wsla", marks=pytest.mark.large),
    ],
)
def test_the_estimate_is_within_20_percent_of_the_measured_peak(shape, options, way, tmp_path):
    """What the process takes on top of the interpreter and its imports, in two steps and a saved checkpoint."""
    model, batches, rows = shape
    asked = {
        "folder": str(tmp_path / "run"),
        "model": model,
        "train_options": options,
        "batches": batches,
        "rows": rows,
        "way": way,
    }
    call = [sys.executable, str(Path(__file__).with_name("memory_run.py")), json.dumps(asked)]
    done = subprocess.run(call, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": IMPORTS})
    found = json.loads(done.stdout)
    taken = found["peak"] - found["baseline"]
    print(f"measured {taken / 1e6:.1f} MB, estimated {found['estimate'] / 1e6:.1f} MB")
    assert abs(found["estimate"] - taken) <= 0.2 * taken


def demanded(limit, batches=None, rows=160, **options):
    """What is said about a run that may not take more than `limit`."""
    config = MambaConfig(vocab_size=1000, hidden_size=64, num_hidden_layers=8)
    batches = BatchesConfig(**{"batch_size": 16, "seq_len": 256} | (batches or {}))
    return require_memory(config, TrainConfig(memory_limit=limit, **options), batches, rows)


def test_a_run_that_fits_is_not_refused():
    needed = demanded("2GB")
    assert demanded(str(needed.total)) == needed
    with pytest.raises(ValueError, match="expected at most"):
        demanded(str(needed.total - 1))


def test_a_run_that_does_not_fit_is_told_what_would():
    with pytest.raises(ValueError, match="training takes") as error:
        demanded("120MB")
    text = str(error.value)
    assert text.count("\n") == 0
    assert re.match(r"memory: training takes about \S+ MB \(parameters \S+ MB, .*\), expected at most 120 MB, ", text)
    assert "the memory_limit; it fits with gradient_checkpointing (" in text
    fewer = re.search(r"or with batch_size (\d+) instead of 16 with gradient_accumulation_steps (\d+) \(", text)
    shorter = re.search(r"or with seq_len (\d+) instead of 256 \(", text)
    rows, steps, columns = int(fewer[1]), int(fewer[2]), int(shorter[1])
    demanded("120MB", gradient_checkpointing=True)
    demanded("120MB", {"batch_size": rows}, gradient_accumulation_steps=steps)
    assert rows * steps >= 16
    demanded("120MB", {"seq_len": columns}, rows=-(-160 * 256 // columns))
    with pytest.raises(ValueError, match="expected at most"):
        demanded("120MB", {"batch_size": rows + 1}, gradient_accumulation_steps=-(-16 // (rows + 1)))
    with pytest.raises(ValueError, match="expected at most"):
        demanded("120MB", {"seq_len": columns + 1}, rows=-(-160 * 256 // (columns + 1)))


def test_checkpointing_is_part_of_the_advice_where_nothing_else_is_enough():
    with pytest.raises(ValueError, match=r"it fits with batch_size \d+ instead of 16 .* and gradient_checkpointing \("):
        demanded("40MB", {"seq_len": 1024})


def test_a_model_that_never_fits_is_told_so():
    with pytest.raises(ValueError, match=r"no batch_size and seq_len make it fit: parameters, .* alone take 5.* MB"):
        demanded("10MB", gradient_checkpointing=True)


def test_what_is_available_is_the_limit_unless_one_is_set(monkeypatch):
    monkeypatch.setattr("mamba_ops.memory.available_memory", lambda: 1 << 20)
    with pytest.raises(ValueError, match=r"expected at most 1\.05 MB, what is available"):
        demanded(None)
    monkeypatch.setattr("mamba_ops.memory.available_memory", lambda: None)
    demanded(None)


def test_what_the_process_holds_already_is_not_asked_for_twice(monkeypatch):
    needed = demanded(None).total
    monkeypatch.setattr("mamba_ops.memory.available_memory", lambda: needed - 1000)
    config, batches = (
        MambaConfig(vocab_size=1000, hidden_size=64, num_hidden_layers=8),
        BatchesConfig(batch_size=16, seq_len=256),
    )
    require_memory(config, TrainConfig(), batches, 160, held=1000)
    with pytest.raises(ValueError, match="what is available"):
        require_memory(config, TrainConfig(), batches, 160, held=999)


def test_training_is_refused_before_the_first_step():
    state = start(TINY)
    before = {name: value.copy() for name, value in state.params.items()}
    with pytest.raises(ValueError, match=r"memory: training takes about .* expected at most 1 MB, the memory_limit"):
        train(state, np.arange(40) % 11, TrainConfig(memory_limit="1MB"), BatchesConfig())
    assert all(np.array_equal(value, state.params[name]) for name, value in before.items())


def test_the_limit_may_change_when_a_run_is_continued(tmp_path):
    ids, batches = np.arange(40) % 11, BatchesConfig(seq_len=5)
    for limit in ("1GB", None, "2GB"):
        list(train(start(TINY), ids, TrainConfig(max_steps=2, memory_limit=limit), batches, folder=tmp_path / "run"))


def written(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 2000 kB\nMemAvailable:    1000 kB\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 1000 * 1024),
        ({"proc/self/cgroup": "0::/\n"}, 1000 * 1024),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/b/memory.current": "100\n",
                "sys/fs/cgroup/a/memory.max": "5000\n",
                "sys/fs/cgroup/a/memory.current": "4000\n",
                "sys/fs/cgroup/a/memory.stat": "anon 3000\ninactive_file 700\n",
            },
            1700,
        ),
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "3000\n",
                "sys/fs/cgroup/memory.current": "4000\n",
            },
            0,
        ),
        (
            {
                "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/docker/x\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "6000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "2500\n",
                "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 500\n",
            },
            4000,
        ),
        (
            {"proc/self/cgroup": "4:memory:/docker/x\n", "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": "9\n"},
            1000 * 1024,
        ),
    ],
    ids=["none", "no limit", "v2, the outer one", "v2, used up", "v1, the container's own", "no usage"],
)
def test_available_memory(files, expected, tmp_path):
    assert available_memory(written(tmp_path, MEMINFO | files)) == expected


def test_available_memory_without_proc(tmp_path):
    found = available_memory(tmp_path)
    assert found is None or found > 1 << 20


def test_available_memory_here():
    assert available_memory() > 1 << 20


def test_sizes():
    assert [size(n) for n in (1, 999, 1000, 1_234_567, 999_600, 2.5e9, 1e12)] == [
        "1 bytes",
        "999 bytes",
        "1 kB",
        "1.23 MB",
        "1 MB",
        "2.5 GB",
        "1,000 GB",
    ]
