"""Plots and tables as Dagster metadata."""

import base64
import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dagster as dg
import numpy as np
from matplotlib.figure import Figure
from matplotlib.text import Text
from numpy.typing import ArrayLike
from PIL import Image

INLINE_CHARACTERS = 1000
"""Longer markdown opens behind a link in Dagster's UI."""

SIZES = ((4.6, 2.1), (4.2, 1.9), (3.8, 1.7), (3.4, 1.5), (3.0, 1.4), (2.2, 1.1))


def sketch(title: str, x: ArrayLike, y: ArrayLike, labels: tuple[str, str]) -> dg.MarkdownMetadataValue:
    """Return a black and white line plot, small enough for Dagster's UI to show it in place."""
    return _inline(title, labels, lambda axes: axes.plot(x, y, color="black", linewidth=1, antialiased=False))


def histogram(title: str, values: ArrayLike, label: str) -> dg.MarkdownMetadataValue:
    """Return a black and white histogram of the values' decimal logarithms, shown in place."""
    counts = np.log10(np.maximum(np.asarray(values, np.float64), 1))
    return _inline(title, (label, "count"), lambda axes: axes.hist(counts, bins=24, color="black"))


def _inline(title: str, labels: tuple[str, str], draw: Callable[[Any], Any]) -> dg.MarkdownMetadataValue:
    for size in SIZES:
        figure = Figure(figsize=size, dpi=72, layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        axes.set_xlabel(labels[0], fontsize=8, labelpad=1)
        axes.set_ylabel(labels[1], fontsize=8, labelpad=1)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        for text in axes.findobj(Text):
            text.set_antialiased(False)
        markdown = _markdown(title, _png(figure, black_and_white=True))
        if len(markdown) < INLINE_CHARACTERS:
            break
    return dg.MetadataValue.md(markdown)


def plot(title: str, x: ArrayLike, lines: Mapping[str, ArrayLike], labels: tuple[str, str]) -> dg.MarkdownMetadataValue:
    """Return a line plot with a legend."""
    figure = Figure(figsize=(7, 3.5), dpi=80, layout="constrained")
    axes = figure.add_subplot()
    for name, y in lines.items():
        axes.plot(x, y, label=name, linewidth=1)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.grid(alpha=0.3)
    if len(lines) > 1:
        axes.legend()
    return dg.MetadataValue.md(_markdown(title, _png(figure)))


def table(rows: Sequence[Mapping[Any, Any]]) -> dg.TableMetadataValue:
    """Return rows of one kind as a table, numbers to five digits."""
    return dg.MetadataValue.table([dg.TableRecord({str(k): _short(v) for k, v in row.items()}) for row in rows])


def thinned(count: int, most: int) -> np.ndarray:
    """Return at most `most` evenly spread indices below `count`, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _png(figure: Figure, black_and_white: bool = False) -> bytes:
    drawn, written = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png")
    with Image.open(drawn) as image:
        if black_and_white:
            image.convert("L").point(lambda value: 255 * (value > 150)).convert("1").save(written, "PNG", optimize=True)
        else:
            image.convert("RGB").convert("P", palette=Image.Palette.ADAPTIVE, colors=32).save(
                written, "PNG", optimize=True
            )
    return written.getvalue()


def _markdown(title: str, png: bytes) -> str:
    return f"![{title}](data:image/png;base64,{base64.b64encode(png).decode()})"


def quoted(text: str) -> str:
    """Return text as a block of markdown that shows it as it is."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=2))
    return f"{fence}text\n{text}\n{fence}"
