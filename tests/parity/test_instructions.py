"""Prompts and completions, from the file to the gradients, against transformers with labels of -100 on the prompt."""

import json

import numpy as np
import pandas as pd
import pytest

from mamba_ops.config import BatchesConfig, CorpusConfig, MambaConfig, TokenizerConfig
from mamba_ops.corpus import build_corpus
from mamba_ops.corpus_tables import training_texts
from mamba_ops.gradients import GradientBuffers
from mamba_ops.model import losses_and_gradients
from mamba_ops.tokenized import encode_corpus
from mamba_ops.tokenizer import build_tokenizer
from mamba_ops.tokens import build_batches
from mamba_ops.training_data import load, open_rows

torch = pytest.importorskip("torch", reason="torch is missing: pip install -e .[parity]")
transformers = pytest.importorskip("transformers", reason="transformers is missing: pip install -e .[parity]")

pytestmark = pytest.mark.parity

TEMPLATE = """{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
SPECIAL = ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
END = "<|endoftext|>"
COUNT = 6


def instructions(form):
    questions = [(f"What is {i} and {i * 7}?\n", f"It is {i + i * 7}, 'tis said.") for i in range(COUNT)]
    if form == "prompt":
        return [{"prompt": question, "completion": answer} for question, answer in questions]
    talks = [
        [{"role": "user", "content": q}, {"role": "assistant", "content": a}] * (1 + i % 3)
        for i, (q, a) in enumerate(questions)
    ]
    return [{"messages": [{"role": "system", "content": f"Be {i}."}, *talk]} for i, talk in enumerate(talks)]


@pytest.fixture(params=["prompt", "chat"])
def run(request, tmp_path):
    """A corpus of instructions, encoded and cut into rows, and the records."""
    records = instructions(request.param)
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "v.jsonl").write_text('{"text": "other"}\n')
    config = CorpusConfig(paths=[str(tmp_path / "t.jsonl")], validation_paths=[str(tmp_path / "v.jsonl")])
    build_corpus(config, tmp_path / "corpus")
    build_tokenizer(TokenizerConfig(vocab_size=280), training_texts(tmp_path / "corpus"), tmp_path / "trained")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "trained")
    theirs.add_special_tokens({"additional_special_tokens": SPECIAL})
    theirs.chat_template = TEMPLATE
    theirs.save_pretrained(tmp_path / "with template")
    path = str(tmp_path / "with template")
    build_tokenizer(TokenizerConfig(path=path, end_of_text=END), [], tmp_path / "tokenizer")
    encode_corpus(tmp_path / "corpus", tmp_path / "tokenizer", tmp_path / "ids")
    build_batches(BatchesConfig(seq_len=37), tmp_path / "ids", tmp_path / "rows")
    return tmp_path, records, theirs


def labelled(theirs, record):
    """Return input ids and labels of a document between two ends of text, as transformers' users make them."""
    if "prompt" in record:
        parts = [(False, theirs(record["prompt"])["input_ids"]), (True, theirs(record["completion"])["input_ids"])]
    else:
        parts, done = [], []
        for end, message in enumerate(record["messages"]):
            if message["role"] == "assistant":
                options = {"tokenize": True, "return_dict": False}
                asked = theirs.apply_chat_template(record["messages"][:end], add_generation_prompt=True, **options)
                answered = theirs.apply_chat_template(record["messages"][: end + 1], **options)
                parts += [(False, asked[len(done) :]), (True, answered[len(asked) :])]
                done = answered
    end = theirs.convert_tokens_to_ids(END)
    ids = [end, *(i for _, part in parts for i in part), end]
    labels = [-100, *(i if learned else -100 for learned, part in parts for i in part), end]
    return torch.tensor([ids]), torch.tensor([labels])


def test_gradients_are_those_of_labels(run, ops64, random_parameters, reference, float64_transformers):
    folder, records, theirs = run
    config = MambaConfig(vocab_size=len(theirs), hidden_size=12, num_hidden_layers=2, state_size=5)
    params = random_parameters(config, seed=3)
    model = reference(config, params)
    expected_loss, expected_targets, together = 0.0, 0, []
    for record in records:
        ids, labels = labelled(theirs, record)
        together += ids[0, 1:].tolist()
        # the sum over the targets: nothing to divide by
        loss = model(input_ids=ids, labels=labels, num_items_in_batch=1, use_cache=False).loss
        loss.backward()
        expected_loss += loss.item()
        expected_targets += int((labels[:, 1:] != -100).sum())
    rows = open_rows(folder / "ids", folder / "rows")
    assert rows.ids[1 : len(together) + 1].tolist() == together
    table = pd.read_parquet(folder / "ids" / "documents.parquet")
    longest = int(table["tokens"].max()) + 1
    found_loss, found_targets = 0.0, 0
    buffers = GradientBuffers(params, params)
    for at in range(COUNT):  # a document a row, then all of them in one
        batch = batch_of(folder, at, longest)
        found_loss += losses_and_gradients(ops64, params, config, ops64.rows(batch), buffers, set(params))
        found_targets += batch.target_count
    assert_same(found_loss, found_targets, buffers.arrays, expected_loss, expected_targets, model)
    build_batches(BatchesConfig(seq_len=len(together)), folder / "ids", folder / "one row")
    batch = load(open_rows(folder / "ids", folder / "one row"), np.arange(1))
    buffers = GradientBuffers(params, params)
    loss = losses_and_gradients(ops64, params, config, ops64.rows(batch), buffers, set(params))
    assert_same(loss, batch.target_count, buffers.arrays, expected_loss, expected_targets, model)


def batch_of(folder, document, seq_len):
    """Return a document as a row of its own."""
    rows = open_rows(folder / "ids", folder / "rows")
    table = pd.read_parquet(folder / "ids" / "documents.parquet")
    row = table.iloc[document]
    cut = {"starts": np.array([row["offset"] - 1]), "lengths": np.array([row["tokens"] + 1]), "seq_len": seq_len}
    return load(type(rows)(**(vars(rows) | cut)), np.arange(1))


def assert_same(found_loss, found_targets, grads, expected_loss, expected_targets, model):
    assert found_targets == expected_targets
    assert abs(found_loss - expected_loss) <= 1e-10 * expected_loss
    for name, parameter in model.named_parameters():
        expected = parameter.grad.numpy()
        assert np.abs(grads[name] - expected).max() <= 1e-10 * np.abs(expected).max(), name
