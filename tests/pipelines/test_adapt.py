"""`make adapt`: what it runs, and what it says of the result."""

import pytest
import yaml

from pipelines import adapt
from pipelines.ways import FULL, LORA, WAYS, WSLA


def measured(difference, low, high):
    return {
        "tokens": 1000,
        "documents": 9,
        "nats_per_token_before": 5.0,
        "nats_per_token_after": None if difference is None else 5.0 + difference,
        "difference": difference,
        "difference_low": low,
        "difference_high": high,
    }


GOOD = {
    FULL.weights: measured(-2.0, -2.2, -1.8),
    WSLA.weights: measured(-0.4, -0.5, -0.3),
    LORA.weights: measured(-1.2, -1.3, -1.1),
}


@pytest.mark.parametrize("way", WAYS, ids=[way.job for way in WAYS])
def test_each_way_keeps_what_its_shipped_configuration_says_of_it(way, tmp_path):
    shipped = yaml.safe_load((adapt.CONFIGS / adapt.SHIPPED[way.weights]).read_text())["ops"]
    ops = adapt.adapting(way, tmp_path / "base")["ops"]
    paced = {*adapt.STEPS, "learning_rate"}
    kept = {name: value for name, value in shipped[way.weights]["config"].items() if name not in paced}
    assert kept.items() <= ops[way.weights]["config"].items()
    assert ops["corpus"]["config"] == {"default": "sources"}
    assert ops["weights_mirror"]["config"]["checkpoint"] == ops["tokenizer"]["config"]["path"] == str(tmp_path / "base")


def test_a_good_result_is_a_table_and_exit_code_0(capsys):
    assert adapt._report(GOOD) == 0
    out = capsys.readouterr().out
    assert "lora_adapter       5.0000   3.8000  -1.2000  [-1.3000, -1.1000]" in out
    assert "LoRA reaches 60% of full training's drop" in out


@pytest.mark.parametrize(
    ("name", "made", "message"),
    [
        (WSLA.weights, measured(-0.4, -0.9, 0.1), "wsla_weights: found a change of up to 0.1000 nats per token"),
        (FULL.weights, measured(0.5, 0.4, 0.6), "trained_weights: found a change of up to 0.6000 nats per token"),
        (
            LORA.weights,
            measured(-0.9, -1.0, -0.8),
            "found a change of -0.9000, expected 50% of full training's -2.0000",
        ),
        (LORA.weights, measured(-1.2, None, None), "lora_adapter: found a change of up to unknown nats per token"),
        (FULL.weights, measured(None, None, None), "trained_weights: found a change of up to unknown nats per token"),
    ],
)
def test_what_does_not_hold_is_a_line_and_exit_code_1(name, made, message, capsys):
    assert adapt._report(GOOD | {name: made}) == 1
    assert message in capsys.readouterr().out
