"""Shards own every row once, by a rule that depends on shapes and number alone, and evenly."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_ops.config import TARGETS, LoraConfig, MambaConfig
from mamba_ops.lora import tensor_shapes
from mamba_ops.ownership import shards
from mamba_ops.parameters import table
from mamba_ops.wsla import wsla_names

SIZES = {
    "mamba-130m": MambaConfig(vocab_size=50280, hidden_size=768, num_hidden_layers=24),
    "mamba-2.8b": MambaConfig(vocab_size=50280, hidden_size=2560, num_hidden_layers=64),
    "small": MambaConfig(vocab_size=512, hidden_size=64, num_hidden_layers=2),
}
SHAPES = st.dictionaries(
    st.text("abc.", max_size=3), st.lists(st.integers(0, 12), min_size=1, max_size=3).map(tuple), max_size=8
)


def trained(way, config):
    full = {name: entry.shape for name, entry in table(config).items()}
    if way == "full":
        return full
    if way == "wsla":
        return {name: full[name] for name in wsla_names(config)}
    return tensor_shapes(config, LoraConfig(target_modules=list(TARGETS)) if way == "lora on all" else LoraConfig())


def elements(owned, shapes):
    return sum((end - first) * math.prod(shapes[name][1:]) for name, (first, end) in owned.items())


@settings(deadline=None)
@given(SHAPES, st.integers(1, 9))
def test_every_row_is_owned_once(shapes, number):
    owners = {(name, row): 0 for name, shape in shapes.items() for row in range(shape[0])}
    found = shards(shapes, number)
    assert len(found) == number
    for owned in found:
        for name, (first, end) in owned.items():
            assert first < end
            for row in range(first, end):
                owners[name, row] += 1
    assert set(owners.values()) <= {1}


@settings(deadline=None)
@given(SHAPES, st.integers(1, 9))
def test_ranges_of_a_name_follow_each_other_in_the_order_of_shards(shapes, number):
    ends = dict.fromkeys(shapes, 0)
    for owned in shards(shapes, number):
        for name, (first, end) in owned.items():
            assert first == ends[name]
            ends[name] = end
    assert ends == {name: shape[0] for name, shape in shapes.items()}


@settings(deadline=None)
@given(SHAPES, st.integers(1, 9), st.randoms())
def test_the_order_of_the_tensors_does_not_count(shapes, number, rng):
    found = shards(shapes, number)
    items = list(shapes.items())
    rng.shuffle(items)
    again = shards(dict(items), number)
    assert [list(owned.items()) for owned in again] == [list(owned.items()) for owned in found]


@settings(deadline=None)
@given(SHAPES, st.integers(1, 9))
def test_no_shard_has_more_than_the_mean_and_one_row(shapes, number):
    wide = {name: shape for name, shape in shapes.items() if math.prod(shape)}
    sizes = [elements(owned, wide) for owned in shards(wide, number)]
    widest = max((math.prod(shape[1:]) for shape in wide.values()), default=0)
    assert max(sizes) <= sum(sizes) / number + widest


@settings(deadline=None)
@given(SHAPES, st.integers(1, 9))
def test_shards_are_empty_only_when_there_are_fewer_rows(shapes, number):
    rows = sum(shape[0] for shape in shapes.values())
    assert sum(map(bool, shards(shapes, number))) == min(rows, number)


@pytest.mark.parametrize("way", ["full", "wsla", "lora", "lora on all"])
@pytest.mark.parametrize("size", SIZES)
def test_shards_are_even(size, way):
    shapes = trained(way, SIZES[size])
    # WSLA of the small model has 72 rows of one width: from 7 shards on, 5 % of a shard are less than a row
    for number in range(1, 6 if (size, way) == ("small", "wsla") else 9):
        sizes = [elements(owned, shapes) for owned in shards(shapes, number)]
        assert sum(sizes) == sum(map(math.prod, shapes.values()))
        assert 0.95 * sum(sizes) / number <= min(sizes) <= max(sizes) <= 1.05 * sum(sizes) / number


def test_wide_rows_are_evened_out_by_narrow_ones():
    found = shards({"wide": (3, 10), "narrow": (30,)}, 2)
    assert found == [{"wide": (0, 2), "narrow": (0, 10)}, {"wide": (2, 3), "narrow": (10, 30)}]


def test_what_a_shard_owns_does_not_change():
    """Written down: moments are kept by it, and another release must find its own again."""
    shapes = {"b": (5, 4), "a": (3, 4), "c": (7,), "d": (2, 1, 3)}
    assert shards(shapes, 3) == [
        {"a": (0, 3), "c": (0, 3)},
        {"b": (0, 2), "d": (0, 2), "c": (3, 4)},
        {"b": (2, 5), "c": (4, 7)},
    ]


@pytest.mark.parametrize("number", [0, -1])
def test_fewer_than_one_shard(number):
    with pytest.raises(ValueError, match=f"at least 1, got {number}"):
        shards({"a": (2,)}, number)
