"""Recurrent decoding equals the parallel forward, draws what it says, and prints whole characters."""

import io
import itertools
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mamba_ops.checkpoint import fingerprint, load_model, save_model
from mamba_ops.config import GenerateConfig, LoraConfig, MambaConfig, TokenizerConfig
from mamba_ops.cpu import open_cpu
from mamba_ops.export import merge
from mamba_ops.generate import PROMPT_WINDOW, advance, continuation, generate, main, text_pieces
from mamba_ops.lora import tensor_shapes
from mamba_ops.model import empty_state, logits
from mamba_ops.ops import IGNORED, Batch
from mamba_ops.parameters import init
from mamba_ops.peft import save_adapter
from mamba_ops.tokenizer import build_tokenizer, embedding_rows, encode_texts, load_tokenizer, train_tokenizer

E = 0
CONFIGS = [
    MambaConfig(vocab_size=13, hidden_size=8, num_hidden_layers=2, state_size=3),
    MambaConfig(
        vocab_size=13,
        hidden_size=6,
        num_hidden_layers=1,
        conv_kernel=2,
        use_bias=True,
        tie_word_embeddings=False,
    ),
]
CONFIG = CONFIGS[0]


def sharp_parameters(config, dtype=np.float64):
    """Parameters whose logits are far apart and depend on more than the last token."""
    params = init(config, 3, dtype)
    for name, value in params.items():
        if name in ("backbone.embeddings.weight", "lm_head.weight"):
            value *= dtype(50)
        if name.endswith(("out_proj.weight", "dt_proj.bias")):
            value *= dtype(10 if name.endswith("weight") else 0.1)
    return params


def parallel(ops, params, config, ids):
    ids = np.array([ids])
    batch = Batch(ids, np.full_like(ids, IGNORED), np.arange(ids.size, dtype=np.uint32)[None])
    return logits(ops, params, config, ops.rows(batch))


def sample(params, prompt, config=CONFIG, stop_id=None, vocab_limit=None, **options):
    options = GenerateConfig(**({"max_new_tokens": 20, "temperature": 1.0} | options))
    ops = open_cpu(np.float64, threads=1)
    return list(generate(ops, params, config, prompt, options, stop_id=stop_id, vocab_limit=vocab_limit))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("prompt", [1, 2, 3, 5, PROMPT_WINDOW, PROMPT_WINDOW + 7])
def test_recurrent_logits_equal_parallel_logits_at_each_position(config, prompt):
    ops, params = open_cpu(np.float64), sharp_parameters(config)
    ids = np.random.default_rng(prompt).integers(0, config.vocab_size, prompt + 12)
    expected = parallel(ops, params, config, ids)
    state = empty_state(ops, config, 1)
    got = advance(ops, params, config, state, ids[:prompt], 0)
    np.testing.assert_allclose(got, expected[prompt - len(got) : prompt], rtol=0, atol=1e-10 * abs(expected).max())
    for position in range(prompt, len(ids)):
        got = advance(ops, params, config, state, ids[position : position + 1], position)
        np.testing.assert_allclose(got[0], expected[position], rtol=0, atol=1e-10 * abs(expected).max())


@pytest.mark.parametrize("config", CONFIGS)
def test_greedy_takes_the_likeliest_id_of_the_parallel_forward(config):
    ops, params = open_cpu(np.float64), sharp_parameters(config)
    prompt = [E, 3, 1]
    got = sample(params, prompt, config, temperature=0)
    text = list(prompt)
    for _ in range(20):
        text.append(int(parallel(ops, params, config, text)[-1].argmax()))
    assert got == text[len(prompt) :]
    assert got != [int(parallel(ops, params, config, [token])[0].argmax()) for token in text[2:-1]]
    assert sample(params, prompt, config, temperature=0, seed=9) == got


def test_a_seed_gives_the_same_ids_and_seeds_differ():
    params = init(CONFIG, 0, np.float64)
    assert sample(params, [E], seed=5) == sample(params, [E], seed=5)
    assert len({tuple(sample(params, [E], seed=seed)) for seed in range(8)}) == 8
    assert sample(params, [E], seed=5)[:7] == sample(params, [E], seed=5, max_new_tokens=7)


def test_the_text_ends_before_the_stop_id():
    params = init(CONFIG, 0, np.float64)
    whole = sample(params, [E], max_new_tokens=60)
    stop = whole[10]
    assert sample(params, [E], max_new_tokens=60, stop_id=stop) == whole[: whole.index(stop)]
    assert sample(params, [E], max_new_tokens=0) == []
    assert len(whole) == 60


@pytest.mark.parametrize("temperature", [0, 1.0, 1e6])
def test_case_43_generation_never_gives_the_ids_of_padded_rows(temperature):
    params = init(CONFIG, 0, np.float64)
    # whatever the sign of its product with the hidden state, one of these rows is far the likeliest
    params["backbone.embeddings.weight"][9:] = 100 * np.outer([1, 1, -1, -1], np.ones(CONFIG.hidden_size))
    if temperature <= 1:
        assert min(sample(params, [E], temperature=temperature, max_new_tokens=1)) >= 9
    got = sample(params, [E], temperature=temperature, vocab_limit=9, max_new_tokens=200)
    assert max(got) < 9
    assert len(got) == 200
    assert all(isinstance(token, int) for token in got)


def test_case_43_prompt_ids_outside_the_embedding():
    config = MambaConfig(vocab_size=8, hidden_size=4, num_hidden_layers=1)
    params = init(config, 0, np.float64)
    assert len(sample(params, [0, 7], config)) == 20
    with pytest.raises(ValueError, match="id 8 at index 2: expected 0 to 7, the embedding has 8 rows"):
        sample(params, [0, 7, 8], config)
    with pytest.raises(ValueError, match="id -1 at index 0"):
        sample(params, [-1], config)
    with pytest.raises(ValueError, match="expected integers, got float64"):
        sample(params, [1.0], config)


@pytest.mark.parametrize(
    ("prompt", "limit", "message"),
    [
        ([], None, "prompt_ids: expected at least one token id"),
        ([[1, 2]], None, "prompt_ids: expected at least one token id"),
        ([E], 0, "vocab_limit: .* got 0"),
    ],
)
def test_bad_settings_are_refused_before_the_first_token(prompt, limit, message):
    ops, params = open_cpu(np.float64), init(CONFIG, 0, np.float64)
    with pytest.raises(ValueError, match=message):
        generate(ops, params, CONFIG, prompt, GenerateConfig(), vocab_limit=limit)


@pytest.mark.parametrize("config", CONFIGS, ids=["tied", "untied"])
@settings(max_examples=25, deadline=None)
@given(
    pieces=st.lists(st.integers(1, 70), min_size=1, max_size=5),
    ends=st.sets(st.integers(1, 300), max_size=3),
    seed=st.integers(0, 99),
)
@example(pieces=[1] * 5, ends=set(), seed=0)
@example(pieces=[16, 64, 1, 65, 15], ends={64, 65, 66}, seed=1)
def test_text_in_pieces_of_any_size_has_the_logits_of_the_whole(config, pieces, ends, seed):
    """Each position, with the state carried from piece to piece, also where a document ends."""
    ops, params = open_cpu(np.float64, threads=1), sharp_parameters(config)
    total = sum(pieces)
    ids = np.random.default_rng(seed).integers(0, config.vocab_size, total)
    starts = np.array([0, *sorted(end for end in ends if end < total)])
    at = np.arange(total)
    positions = (at - starts[np.searchsorted(starts, at, side="right") - 1]).astype(np.uint32)
    whole = Batch(ids[None], np.full((1, total), IGNORED), positions[None])
    expected = logits(ops, params, config, ops.rows(whole))
    state, found = empty_state(ops, config, 1), []
    for first, size in zip(np.cumsum([0, *pieces]), pieces, strict=False):
        part = Batch(*(field[:, first : first + size] for field in (whole.ids, whole.targets, whole.positions)))
        found.append(logits(ops, params, config, ops.rows(part), state))
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=0, atol=1e-10 * abs(expected).max())


SAMPLING = pytest.mark.parametrize(
    "options", [{}, {"top_k": 8, "top_p": 0.9, "repetition_penalty": 1.3, "temperature": 0.7}], ids=["plain", "cut"]
)
DRAWN_FROM = MambaConfig(vocab_size=13, hidden_size=4, num_hidden_layers=1, state_size=2)


def drawn_parameters():
    params = init(DRAWN_FROM, 3, np.float64)
    params["backbone.embeddings.weight"] *= 10
    return params


@SAMPLING
def test_20_000_seeds_draw_from_the_distribution_of_the_parallel_forward(options, monkeypatch):
    """The first token after a prompt; its logits are computed once, as every seed has the same."""
    ops, params, prompt = open_cpu(np.float64, threads=1), drawn_parameters(), [E, 3, 5, 3]
    asked = {"temperature": 1.0, "max_new_tokens": 1} | options
    last = advance(ops, params, DRAWN_FROM, empty_state(ops, DRAWN_FROM, 1), np.array(prompt), 0)
    expected = parallel(ops, params, DRAWN_FROM, prompt)
    np.testing.assert_allclose(last, expected, rtol=0, atol=1e-10 * abs(expected).max())
    monkeypatch.setattr("mamba_ops.generate.advance", lambda *_: last)
    drawn = [
        next(generate(ops, params, DRAWN_FROM, prompt, GenerateConfig(seed=seed, **asked))) for seed in range(20_000)
    ]
    share = reference_distribution(expected, prompt, GenerateConfig(**asked))[-1]
    counts = np.bincount(drawn, minlength=13)
    assert not counts[share == 0].any()
    kept = share > 0
    assert chi_square(counts[kept], 20_000 * share[kept]) < critical(kept.sum() - 1)
    assert kept.sum() > 3


@SAMPLING
@pytest.mark.parametrize("draws", [2_000, pytest.param(20_000, marks=pytest.mark.large)])
def test_each_token_of_a_text_is_drawn_from_its_own_distribution(options, draws):
    """With F the distribution of a token, in whatever order, and v uniform, F(x - 1) + v p(x) is uniform."""
    params = drawn_parameters()
    text = [E, *sample(params, [E], DRAWN_FROM, max_new_tokens=draws, **options)]
    expected = parallel(open_cpu(np.float64, threads=1), params, DRAWN_FROM, text[:-1])
    shares = reference_distribution(expected, text, GenerateConfig(**{"temperature": 1.0} | options))
    drawn, at = np.array(text[1:]), np.arange(draws)
    assert shares[at, drawn].min() > 0
    below = shares.cumsum(axis=1)[at, drawn] - shares[at, drawn]
    uniform = below + np.random.default_rng(1).random(draws) * shares[at, drawn]
    counts = np.histogram(uniform, 100, (0, 1))[0]
    assert chi_square(counts, np.full(100, draws / 100)) < critical(99)
    assert len(np.unique(drawn)) > 3


def reference_distribution(values, text, options):
    """The definitions, token by token. values: (draws, vocab_size), the logits after each token of the text."""
    shares = np.zeros_like(values)
    seen = set()
    for t, row in enumerate(values):
        seen.add(text[t])
        r = options.repetition_penalty
        row = [(v / r if v > 0 else v * r) if token in seen else v for token, v in enumerate(row)]
        ranked = sorted(range(len(row)), key=lambda token: -row[token])[: options.top_k or None]
        weights = [np.exp((row[token] - row[ranked[0]]) / options.temperature) for token in ranked]
        mass = 0.0
        for token, weight in zip(ranked, weights, strict=True):
            if mass >= options.top_p * sum(weights):
                break
            mass += weight
            shares[t, token] = weight
        shares[t] /= mass
    return shares


def chi_square(counts, expected):
    return float(((counts - expected) ** 2 / expected).sum())


def critical(freedom, normal=3.719):
    """What chi-square is above once in 10,000 times (Wilson and Hilferty 1931)."""
    return freedom * (1 - 2 / (9 * freedom) + normal * np.sqrt(2 / (9 * freedom))) ** 3


@pytest.fixture(scope="module")
def byte_level():
    texts = ["naïve Größe 日本語 🙂🙃 🇩🇪 e\u0301 the theory of the thing \ufffd\ufffd"] * 3
    return train_tokenizer(texts, TokenizerConfig(vocab_size=290))


@pytest.fixture(scope="module")
def byte_fallback():
    """As Llama's: words open with a mark, spaces before the first are dropped, unknown characters are bytes."""
    tokens = ["<unk>", "▁", "▁a", "b", "▁the", "ä", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_join_to_the_decoded_text(kind, data, request):
    tokenizer = request.getfixturevalue(kind)
    ids = data.draw(st.lists(st.integers(0, embedding_rows(tokenizer) - 1), max_size=30))
    split = data.draw(st.integers(0, len(ids)))
    before = ids[:split]
    if tokenizer.decode(before).endswith("\ufffd"):  # a prompt is text, it has no broken end
        before = []
    pieces = list(text_pieces(tokenizer, ids[len(before) :], before))
    whole = tokenizer.decode(ids)
    # one wrong byte makes that decoder replace the whole run of bytes, those that were told already too
    if kind == "byte_level" or "\ufffd" not in whole:
        assert tokenizer.decode(before) + "".join(pieces) == whole
    assert all(pieces)


@pytest.mark.parametrize("text", ["🙂", "日本語 and 🇩🇪", "e\u0301", "plain", " a\n b", "\ufffd. real \ufffd"])
def test_no_piece_breaks_a_character(byte_level, text):
    """One token a byte, which cuts every character, gives the same characters one at a time."""
    one_a_byte = train_tokenizer(["x"], TokenizerConfig(vocab_size=257))
    for tokenizer in (byte_level, one_a_byte):
        (ids,) = encode_texts(tokenizer, [text])
        pieces = list(text_pieces(tokenizer, ids.tolist()))
        assert "".join(pieces) == text
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces)
            assert all(len(piece) == 1 for piece in pieces) or tokenizer is byte_level
    assert len(ids) == len(text.encode())


def test_a_piece_is_told_as_soon_as_it_is_whole():
    one_a_byte = train_tokenizer(["x"], TokenizerConfig(vocab_size=257))
    (ids,) = encode_texts(one_a_byte, ["🙂x"])
    told = []
    pieces = text_pieces(one_a_byte, (told.append(token) or token for token in ids.tolist()))
    assert (next(pieces), len(told)) == ("🙂", 4)
    assert list(pieces) == ["x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint with 7 rows more than its tokenizer has tokens; the extra rows are the likeliest."""
    path = tmp_path_factory.mktemp("generate")
    build_tokenizer(TokenizerConfig(vocab_size=280), ["the state of the scan 🙂 日本語"] * 3, path / "tokenizer")
    rows = embedding_rows(load_tokenizer(path / "tokenizer"))
    config = MambaConfig(vocab_size=rows + 7, hidden_size=8, num_hidden_layers=1, state_size=3, eos_token_id=0)
    params = init(config, 3)
    params["backbone.embeddings.weight"][rows:] = 30 * np.outer([1, -1, 1, -1, 1, -1, 1], np.ones(8))
    save_model(path / "model", config, params, path / "tokenizer" / "tokenizer.json")
    return path / "model"


def command(folder, *arguments):
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"}
    call = [sys.executable, "-m", "mamba_ops.generate", str(folder), *arguments]
    return subprocess.run(call, capture_output=True, env=environment)


def expected_text(folder, prompt, **options):
    config, params = load_model(folder)
    tokenizer = load_tokenizer(folder)
    rest = continuation(open_cpu(), params, config, tokenizer, 0, prompt, GenerateConfig(**options))
    return prompt + "".join(rest)


def test_the_command_prints_utf8_whatever_the_locale(folder):
    arguments = ["--max-new-tokens", "60", "--temperature", "1e1", "--top-k", "200", "--top-p", "0.99", "--seed", "4"]
    done = command(folder, "--prompt", "日本 🙂", "--repetition-penalty", "1.1", *arguments)
    assert (done.returncode, done.stderr) == (0, b"")
    options = {"max_new_tokens": 60, "temperature": 10, "top_k": 200, "top_p": 0.99, "repetition_penalty": 1.1}
    assert done.stdout.decode() == expected_text(folder, "日本 🙂", seed=4, **options) + "\n"


def test_the_command_prints_as_it_goes(folder, monkeypatch):
    printed = []

    class Screen(io.StringIO):
        def flush(self):
            printed.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Screen())
    assert main([str(folder), "--prompt", "the", "--max-new-tokens", "20"]) == 0
    assert printed[0] == "the"
    assert len(set(printed)) > 5
    assert all(later.startswith(before) for before, later in itertools.pairwise(printed))


def test_case_43_the_text_has_no_token_of_the_padded_rows(folder):
    """The rows beyond the tokenizer are the likeliest here; the end-of-text token ends the text unprinted."""
    config, params = load_model(folder)
    tokenizer = load_tokenizer(folder)
    rows = embedding_rows(tokenizer)
    prompt = [0, *next(encode_texts(tokenizer, ["the"]))]
    last = parallel(open_cpu(), params, config, prompt)[-1]
    assert last.argmax() >= rows
    likeliest = int(last[:rows].argmax())
    assert expected_text(folder, "the", temperature=0, max_new_tokens=1) == "the" + tokenizer.decode([likeliest])
    options = GenerateConfig(temperature=0)
    rest = generate(open_cpu(), params, config, prompt, options, stop_id=likeliest, vocab_limit=rows)
    assert list(rest) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "--temperature: .*greater than or equal to 0; got"),
        (["--temperature", "warm"], "--temperature: expected a number, got 'warm'"),
        (["--temperature", "nan"], "--temperature: .*got .*nan"),
        (["--temperature", "inf"], "--temperature: .*finite number; got 'inf'"),
        (["--top-p", "1.5"], "--top-p: .*less than or equal to 1"),
        (["--top-k", "2.5"], "--top-k: .*integer"),
        (["--repetition-penalty", "0"], "--repetition-penalty: .*0.01"),
        (["--max-new-tokens", "-3"], "--max-new-tokens: .*greater than or equal to 0"),
        (["--seed", "x"], "--seed: .*integer"),
        (["--prompt", "a\udcff"], "--prompt: expected UTF-8 text, got other bytes from character 1 on"),
        (["--temp", "1"], "unrecognized arguments: --temp 1"),
        (["--top-k"], "--top-k: expected one argument"),
    ],
)
def test_wrong_arguments_exit_with_2_and_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["no such folder", *arguments])
    assert stopped.value.code == 2
    assert_one_line(capsys, message)


def test_no_folder_is_a_wrong_argument(capsys):
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    assert_one_line(capsys, "required: folder")


def assert_one_line(capsys, message):
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    assert re.fullmatch(rf"mamba_ops\.generate: .*{message}.*\n", error)


def broken(folder, to, kind):
    """A copy of a folder with something wrong."""
    shutil.copytree(folder, to)
    if kind == "no tokenizer":
        (to / "tokenizer.json").unlink()
    elif kind == "small embedding":
        config = MambaConfig(vocab_size=100, hidden_size=8, num_hidden_layers=1)
        tokenizer = (to / "tokenizer.json").read_bytes()
        shutil.rmtree(to)
        save_model(to, config, init(config, 0))
        (to / "tokenizer.json").write_bytes(tokenizer)
    elif kind == "overflow":
        config, params = load_model(to)
        params["backbone.norm_f.weight"][:] = 3e38
        shutil.rmtree(to)
        save_model(to, config, params, folder / "tokenizer.json")
    elif kind == "no weights":
        (to / "model.safetensors").unlink()
    return to


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no tokenizer", "tokenizer.json does not exist"),
        ("no weights", "model.safetensors: found no such file"),
        ("small embedding", r"the tokenizer needs 2\d\d embedding rows, the checkpoint has 100"),
    ],
)
def test_a_bad_folder_exits_with_1_and_one_line(kind, message, folder, tmp_path, capsys):
    assert main([str(broken(folder, tmp_path / "bad", kind)), "--prompt", "the"]) == 1
    assert_one_line(capsys, message)


def test_an_adapter_is_added_to_the_checkpoint(folder, tmp_path, capsys):
    config, params = load_model(folder)
    lora = LoraConfig(r=2, lora_alpha=8)
    rng = np.random.default_rng(0)
    shapes = tensor_shapes(config, lora)
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    save_adapter(tmp_path / "adapter", config, lora, tensors, fingerprint(params))
    merge(folder, tmp_path / "adapter", tmp_path / "merged")
    options = ["--prompt", "the", "--max-new-tokens", "20", "--temperature", "0"]
    assert main([str(tmp_path / "merged"), *options]) == 0
    expected = capsys.readouterr().out
    assert main([str(folder), "--adapter", str(tmp_path / "adapter"), *options]) == 0
    assert capsys.readouterr().out == expected
    assert main([str(folder), *options]) == 0
    assert capsys.readouterr().out != expected
    assert main([str(folder), "--adapter", str(tmp_path / "none"), *options]) == 1
    assert_one_line(capsys, str(tmp_path / "none"))


def test_a_missing_folder_exits_with_1_and_one_line(tmp_path, capsys):
    assert main([str(tmp_path / "none")]) == 1
    assert_one_line(capsys, "found nothing there, expected a local Hugging Face folder")


def test_logits_that_are_not_finite_exit_with_1(folder, tmp_path, capsys):
    with np.errstate(all="ignore"):
        assert main([str(broken(folder, tmp_path / "bad", "overflow"))]) == 1
    assert "logits are not finite" in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_error_message(folder):
    call = [sys.executable, "-m", "mamba_ops.generate", str(folder), "--max-new-tokens", "5000", "--temperature", "9"]
    process = subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(10)
    process.stdout.close()
    assert process.wait() == 1
    assert process.stderr.read() == b""
    process.stderr.close()
