"""Unrolled loops in WGSL text."""

import pytest

from mamba_ops.gpu.wgsl import expand, program

TEXT = """\
//: for i in 0..ROWS
//: for j in 1..3
let c$i$j = $iu * $j;
//: end
//: end
//: if FAST
fast
//: if SLOW
both
//: end
//: else
slow
//: end
"""


def test_loops_and_conditions():
    assert expand(TEXT, dict(ROWS=2, FAST=1, SLOW=0)).split("\n") == [
        "let c01 = 0u * 1;",
        "let c02 = 0u * 2;",
        "let c11 = 1u * 1;",
        "let c12 = 1u * 2;",
        "fast",
        "",
    ]
    assert expand(TEXT, dict(ROWS=0, FAST=0, SLOW=1)) == "slow\n"
    assert expand(TEXT, dict(ROWS=0, FAST=1, SLOW=1)) == "fast\nboth\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\n//: end", "line 2: an `else` or `end` too many"),
        ("//: for i in 0..2\n", "has no end"),
        ("//: if A\nx\n//: else\n", "has no end"),
        ("//: while A", "line 1: '//: while A' is neither"),
    ],
)
def test_wrong_lines_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        expand(text, dict(A=1))


def test_constants_come_first():
    text = program("linear_cross_entropy", dict(B=True, A=3, C=0.5))
    assert text.startswith("const A = 3u;\nconst B = true;\nconst C = 0.5;\n")
