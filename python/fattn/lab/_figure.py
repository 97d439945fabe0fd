"""Whole figures: the panels that fit what was swept, a legend for all of them, and what the marks mean."""

import os
from collections.abc import Iterable

import matplotlib.figure
import pandas as pd
from matplotlib.lines import Line2D

from . import _panels as panels
from ._cells import Cells
from ._fonts import give_every_character_a_font
from ._words import Words

_PANELS = {
    "seqlen": (panels.time_panel, panels.memory_panel, panels.speedup_panel, panels.growth_panel, panels.rate_panel),
    "batch": (panels.time_panel, panels.memory_panel, panels.tokens_panel),
}
_OTHERS = (panels.time_panel, panels.rate_panel, panels.memory_panel)  # of every other axis
_WIDTH, _HEIGHT = 4.4, 3.3  # inches of a panel


class Figure(matplotlib.figure.Figure):
    """matplotlib's Figure, which also shows itself at the end of a notebook's cell without pyplot."""

    def _repr_png_(self) -> bytes:
        from io import BytesIO

        image = BytesIO()
        self.savefig(image, format="png")
        return image.getvalue()


def figure(source: pd.DataFrame | str | os.PathLike | dict | list, *, over: str | None = None, pass_: str | Iterable[str] | None = None,
           baseline: str = "standard", lang: str = "en", title: str | None = None) -> Figure:
    """Draws measurements as `fattn sweep --figure` does.

    Over seqlen: time, peak memory, speed-up, growth with its fitted exponent, FLOP/s beside the measured ceiling; over batch: time, memory, tokens/s;
    over causal: speed-up and memory of all passes; over others: time, FLOP/s, memory. One pass fills a grid, several a row of panels each. Bands and
    whiskers are 95 % intervals. Rows that failed break a line or leave a bar out, and are named below; they are never drawn as numbers.

    Args:
        source: a frame of `read` or `sweep` (rows may be filtered away), or what `read` takes.
        over: "seqlen", "batch", "nheads", "headdim", "embed", "seqlen-k", "threads" or "causal"; not needed where the rows are of one sweep.
        pass_: "fwd", "bwd" or "fwdbwd", or some of them; all that are there by default.
        baseline: the contestant whose time is divided by the others'; where it was not measured, there is no speed-up.
        lang: "en" or "zh-TW".
        title: instead of what was measured where.

    Returns:
        A matplotlib Figure of its own, unknown to pyplot: `.savefig("x.png")`, also .svg and .pdf; a notebook shows it.

    Raises:
        ValueError: an argument is not allowed, or the rows cannot stand in one figure: the message says which and why.
        RuntimeError: no installed font has the characters of "zh-TW"; the message says what to install.
        RecordError, FileNotFoundError: as `read`.
    """
    words = Words(lang)
    cells = Cells(source, over=over, pass_=pass_, baseline=baseline)
    causal = cells.axis == "causal"
    drawn = () if causal else _PANELS.get(cells.axis, _OTHERS)
    count = 2 if causal else len(drawn)
    columns = 2 if len(cells.passes) == 1 and count > 3 else count
    rows = -(-count // columns) if len(cells.passes) == 1 or causal else len(cells.passes)
    drawing = Figure(figsize=(_WIDTH * columns, _HEIGHT * rows + 1.0), dpi=110, layout="constrained", facecolor="white")
    axes = drawing.subplots(rows, columns, squeeze=False)
    if causal:
        panels.causal_panels(list(axes[0]), cells, words)
    elif len(cells.passes) == 1:
        for ax, panel in zip(axes.flat, drawn):
            panel(ax, cells, cells.passes[0], words)
        for ax in list(axes.flat)[count:]:
            ax.remove()
    else:
        for row, pass_name in zip(axes, cells.passes):
            for ax, panel in zip(row, drawn):
                panel(ax, cells, pass_name, words)
    if title is None:
        title = words("Attention by {axis}: {problem}, on {device}", axis=words("mask" if causal else cells.axis), problem=cells.problem, device=cells.device)
    _head(drawing, panels.wrapped(title, 44 * columns), cells)
    note = words("Medians of checked results; bands and whiskers: 95 % intervals, of ratios from the ends of both. \"?\": undecided. Memory is what a call adds to "
                 "its inputs.")
    if not cells.complete:
        note += (" " if lang == "en" else "") + words("The measurement is not complete.")
    drawing.supxlabel(panels.wrapped(note, 68 * columns), fontsize=8, color="#4a525c", x=0.01, ha="left")
    give_every_character_a_font(drawing, words.chinese)
    return drawing


def _head(drawing: Figure, title: str, cells: Cells) -> None:
    """The title, and under it who is who, in a strip that the panels keep free."""
    strip, height = 0.3 * (title.count("\n") + 1), drawing.get_figheight()
    drawing.suptitle(title, fontsize=12, x=0.01, y=1 - 0.08 / height, ha="left", va="top").set_in_layout(False)
    shown = [name for name in cells.contestants if cells.axis != "causal" or name != cells.baseline]
    handles = [Line2D([], [], label="-", **panels.look_of(cells.contestants.index(name))) for name in shown]
    columns = max(1, min(len(handles), int(drawing.get_figwidth() / 1.6)))
    legend = drawing.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.0, 1 - (0.04 + strip) / height), ncols=columns, frameon=False, fontsize=9,
                            handlelength=3, borderpad=0.2)
    panels.name_all(legend, shown)
    legend.set_in_layout(False)
    free = (0.1 + strip + 0.25 * -(-len(handles) // columns)) / height
    drawing.get_layout_engine().set(rect=(0, 0, 1, 1 - free))
