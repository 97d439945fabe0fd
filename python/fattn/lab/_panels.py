"""The panels of a figure: one matplotlib Axes each, of one pass. What is not ok breaks a line or leaves a bar out, and a sentence says why."""

import math
from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from . import _units as units
from ._cells import Cell, Cells
from ._growth import growth_of
from ._words import Words

# As the SVG figures of the command line have them: after Okabe and Ito, 3 : 1 of contrast at least on white; dashes and markers tell them apart, too.
_COLOURS = ("#0067a8", "#c44f00", "#007a58", "#a33c86", "#7a5c00", "#5b50c8", "#8a1f2d", "#4d5560")
_DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (6, 2)), (0, (3, 1, 1, 1, 1, 1)), (0, (2, 1)), (0, (1, 1)))
_MARKERS = "os^DvP<>"
_GREY = "#5d6570"
_NOTE_SIZE = 8
# What the documents that this laboratory began with say of the preset `headline` on a GPU that they do not name.
_DOCUMENTS = ((9.0, "the documents, another GPU: 9x forward"), (4.5, "and 4.5x backward"), (0.14, "the documents: 14 %"))


def look_of(index: int) -> dict[str, Any]:
    """Colour, dashes and marker of a contestant, for Axes.plot."""
    index %= len(_COLOURS)
    return {"color": _COLOURS[index], "linestyle": _DASHES[index], "marker": _MARKERS[index], "markersize": 5, "linewidth": 1.6}


def _wide(cells: Cells) -> bool:
    """Whether equal steps would hide the small values."""
    return len(cells.values) > 1 and cells.values[0] > 0 and cells.values[-1] >= 4 * cells.values[0]


def _horizontal(ax: Axes, cells: Cells, words: Words, log: bool) -> None:
    if log:
        ax.set_xscale("log", base=2)
    few = cells.values if len(cells.values) <= 9 else cells.values[:: math.ceil(len(cells.values) / 9)]
    labels = [units.plain(value) for value in few]
    ax.set_xticks(few, labels=labels, rotation=45 if sum(map(len, labels)) > 30 else 0)
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel(words(cells.axis))


def _vertical(ax: Axes, title: str, text_of: Callable[..., str], *, log: int = 0) -> None:
    """`log`: the base; 0: linear, from 0 on."""
    ax.set_ylabel(title)
    if log:
        ax.set_yscale("log", base=log)
        low, high = ax.get_ylim()
        if log == 2:  # powers of two, evenly chosen
            first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
            ticks = [2.0**e for e in range(first, last + 1, max(1, math.ceil((last - first + 1) / 7)))]
            if len(ticks) < 3:  # and between them
                ticks = [tick for e in range(first - 1, last + 1) for tick in (2.0**e, 1.5 * 2.0**e) if low <= tick <= high]
            ax.yaxis.set_major_locator(FixedLocator(ticks))
        else:
            decades = math.log10(high / low)
            ax.yaxis.set_major_locator(LogLocator(10, subs=(1.0,) if decades > 3 else (1.0, 2.0, 5.0), numticks=12))
        ax.yaxis.set_minor_locator(NullLocator())
    else:
        ax.set_ylim(bottom=0)
        if text_of is units.nbytes:
            top = ax.get_ylim()[1]
            step = 2.0 ** math.ceil(math.log2(top / 7)) if top > 0 else 1.0
            ax.yaxis.set_major_locator(FixedLocator([step * i for i in range(int(top / step) + 1)]))
        else:
            ax.yaxis.set_major_locator(MaxNLocator(6))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: text_of(value)))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _dress(ax: Axes, title: str) -> None:
    ax.set_title(title, fontsize=10, fontweight="bold", loc="left")
    ax.grid(True, color="#d8dce1", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelsize=8)
    ax.xaxis.label.set_size(9)
    ax.yaxis.label.set_size(9)


def _say(ax: Axes, text: str) -> None:
    """What a panel says that has nothing to show."""
    ax.set_xticks([])
    ax.set_yticks([])
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color=_GREY, fontsize=9, wrap=True)


def _note(ax: Axes, text: str) -> None:
    """A line under the axis."""
    if text:
        ax.annotate(wrapped(text), (0, 0), xycoords=("axes fraction", ax.xaxis.label), xytext=(0, -6), textcoords="offset points", ha="left", va="top",
                    fontsize=_NOTE_SIZE, color=_GREY, annotation_clip=False)


def wrapped(text: str, width: int = 62) -> str:
    """Lines of about so many letters; a Chinese character is two wide, and a line may end behind each."""
    lines, line, used = [], "", 0
    for part in _parts(text):
        size = sum(2 if ord(letter) > 0x2E80 else 1 for letter in part)
        if line and used + size > width and part not in "，。；：、）」 ":
            lines.append(line.rstrip())
            line, used = "", 0
        line += part
        used += size
    return "\n".join([*lines, line.rstrip()])


def _parts(text: str) -> list[str]:
    parts, word = [], ""
    for letter in text:
        if ord(letter) > 0x2E80 or letter == " ":
            parts += [word + letter] if letter == " " else [word, letter]
            word = ""
        else:
            word += letter
    return [part for part in [*parts, word] if part]


def _missing(cells: Cells, pass_: str, words: Words) -> str:
    """ "standard: out of memory at 8192, 16384." """
    sentences = []
    for contestant in cells.contestants:
        found: dict[str, list[int]] = {}
        for value in cells.values:
            if (cell := cells.cell(value, contestant, pass_)) and not cell.ok:
                found.setdefault(cell.status, []).append(value)
        for status, values in found.items():
            sentences.append(words("{contestant}: {what} at {values}", contestant=contestant, what=words.failure(status),
                                   values=", ".join(units.plain(value) for value in values)))
    return words.joined(sentences)


def _lines(ax: Axes, cells: Cells, pass_: str, point: Callable[[Cell], tuple[float, float, float]], *, connected: bool = True) -> bool:
    """A line with its band for each contestant. `point`: the value and the ends of its interval, NaN where unknown. Whether there was anything."""
    any_line = False
    for index, contestant in enumerate(cells.contestants):
        points = [point(cell) if (cell := cells.cell(value, contestant, pass_)) and cell.ok else (math.nan,) * 3 for value in cells.values]
        middle, low, high = zip(*points)
        if not any(math.isfinite(y) for y in middle):
            continue
        any_line = True
        look = look_of(index)
        ax.plot(cells.values, middle, label=contestant, **(look if connected else look | {"linestyle": "none"}))
        known = [math.isfinite(a) and math.isfinite(b) for a, b in zip(low, high)]
        if any(known):
            if connected:
                ax.fill_between(cells.values, low, high, where=known, color=look["color"], alpha=0.2, linewidth=0)
            ax.vlines([x for x, k in zip(cells.values, known) if k], [y for y, k in zip(low, known) if k], [y for y, k in zip(high, known) if k],
                      color=look["color"], linewidth=1)  # of a point whose neighbours failed there is no band
    return any_line


def time_panel(ax: Axes, cells: Cells, pass_: str, words: Words) -> None:
    _dress(ax, words("{pass_}: time", pass_=words.pass_(pass_)))
    if _lines(ax, cells, pass_, lambda cell: (cell.seconds, cell.low, cell.high)):
        _horizontal(ax, cells, words, _wide(cells))
        _vertical(ax, words("median time of a call"), units.seconds, log=10 if _wide(cells) else 0)
    else:
        _say(ax, words("nothing was measured"))
    _note(ax, _missing(cells, pass_, words))


def memory_panel(ax: Axes, cells: Cells, pass_: str, words: Words) -> None:
    _dress(ax, words("{pass_}: peak extra memory", pass_=words.pass_(pass_)))
    if _lines(ax, cells, pass_, lambda cell: (cell.extra_bytes if cell.extra_bytes > 0 or not _wide(cells) else math.nan, math.nan, math.nan)):
        _horizontal(ax, cells, words, _wide(cells))
        _vertical(ax, words("bytes over the inputs"), units.nbytes, log=2 if _wide(cells) else 0)
    else:
        _say(ax, words("nothing was measured"))
    _note(ax, _missing(cells, pass_, words))


def rate_panel(ax: Axes, cells: Cells, pass_: str, words: Words) -> None:
    _dress(ax, words("{pass_}: FLOP/s", pass_=words.pass_(pass_)))
    if not _lines(ax, cells, pass_, lambda cell: (cell.flops / cell.seconds, cell.flops / cell.high, cell.flops / cell.low)):
        _say(ax, words("nothing was measured"))
        return
    ceiling = max((cell for cell in cells.all() if cell.ok and cell.peak_flops_per_s > 0), key=lambda cell: cell.peak_flops_per_s, default=None)
    if ceiling:
        line = ax.axhline(ceiling.peak_flops_per_s, color=_GREY, linestyle=(0, (5, 4)), linewidth=1.2)
        ax.set_ylim(0, 1.22 * max(ceiling.peak_flops_per_s, ax.dataLim.y1))
        _own_legend(ax, [(line, words("ceiling measured here: {peak} ({rate}FLOP/s)", peak=ceiling.peak, rate=units.rate(ceiling.peak_flops_per_s)))])
    _horizontal(ax, cells, words, _wide(cells))
    _vertical(ax, words("FLOP/s"), units.rate)


def tokens_panel(ax: Axes, cells: Cells, pass_: str, words: Words) -> None:
    _dress(ax, words("{pass_}: throughput", pass_=words.pass_(pass_)))
    if _lines(ax, cells, pass_, lambda cell: (cell.tokens / cell.seconds, cell.tokens / cell.high, cell.tokens / cell.low)):
        _horizontal(ax, cells, words, _wide(cells))
        _vertical(ax, words("tokens/s"), units.rate)
    else:
        _say(ax, words("nothing was measured"))


def growth_panel(ax: Axes, cells: Cells, pass_: str, words: Words) -> None:
    _dress(ax, words("{pass_}: how time grows with seqlen", pass_=words.pass_(pass_)))
    if not _lines(ax, cells, pass_, lambda cell: (cell.seconds, cell.low, cell.high), connected=False):
        _say(ax, words("nothing was measured"))
        return
    notes, shown = [], []
    for index, contestant in enumerate(cells.contestants):
        measured = [value for value in cells.values if (cell := cells.cell(value, contestant, pass_)) and cell.ok]
        law, _ = growth_of(cells, contestant, pass_)
        if law:
            ends = [measured[0], measured[-1]]
            label = words("{contestant}: seqlen^{exponent} (95 %: {low} to {high})", contestant=contestant, exponent=f"{law.exponent:.2f}", low=f"{law.low:.2f}",
                          high=f"{law.high:.2f}")
            shown += [(line, label) for line in ax.plot(ends, [law.factor * x**law.exponent for x in ends], linewidth=1.3, color=look_of(index)["color"],
                                                        linestyle=look_of(index)["linestyle"])]
        elif measured:
            notes.append(words("{contestant}: too few lengths for an exponent", contestant=contestant))
    # A little below the last point of the first line: beside the measurements.
    first = next((name for name in cells.contestants if any((cell := cells.cell(value, name, pass_)) and cell.ok for value in cells.values)), "")
    at = [(value, cell.seconds) for value in cells.values if (cell := cells.cell(value, first, pass_)) and cell.ok]
    if cells.slope and len(cells.values) > 1:
        (x, last), below = at[-1], 0.4
        ends = [cells.values[0], cells.values[-1]]
        label = words("slope 2: seqlen^2, as the operations") if cells.slope == 2 else words("slope 1: seqlen, as the operations")
        shown += [(line, label) for line in ax.plot(ends, [below * last * (end / x) ** cells.slope for end in ends], color=_GREY, linestyle=(0, (5, 4)), linewidth=1.2)]
    _horizontal(ax, cells, words, True)
    low, high = ax.dataLim.y0, ax.dataLim.y1
    _vertical(ax, words("median time of a call"), units.seconds, log=10)
    ax.set_ylim(low / 1.5, high * (high / low) ** (0.13 * len(shown) + 0.05) * 1.2)  # room for the legend
    _own_legend(ax, shown)
    _note(ax, words.joined(notes))


def _own_legend(ax: Axes, shown: list[tuple[Line2D, str]]) -> None:
    name_all(ax.legend([line for line, _ in shown], ["-"] * len(shown), loc="upper left", fontsize=7.5, frameon=False, handlelength=2.4, labelspacing=0.25,
                       borderaxespad=0.2), [label for _, label in shown])


def name_all(legend: Legend, names: list[str]) -> None:
    """Afterwards, because legends leave out what is called with an underscore first."""
    for text, name in zip(legend.get_texts(), names):
        text.set_text(name)


def _bars(ax: Axes, cells: Cells, categories: list[str], bars: dict[str, list[tuple[float, float, float, str]]], text_of: Callable[[float], str]) -> None:
    """For each contestant, in each category: the value, the ends of its interval, and what is written where there is no value or behind it."""
    width = 0.8 / max(1, len(bars))
    many = len(bars) * len(categories) > 8
    size = 6.5 if many else 8
    most = max((entry[0] for row in bars.values() for entry in row if math.isfinite(entry[0])), default=1.0)
    behind = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.4}
    for category, entries in enumerate(zip(*bars.values())):  # where nobody has a bar for one reason, that is said once
        if entries[0][3] and all(entry[3] == entries[0][3] and not math.isfinite(entry[0]) for entry in entries):
            ax.annotate(entries[0][3], (category, 0), xytext=(0, 3), textcoords="offset points", ha="center", va="bottom", fontsize=8, rotation=90, color=_GREY,
                        bbox=behind)
            bars = {name: [entry if i != category else (math.nan, math.nan, math.nan, "") for i, entry in enumerate(row)] for name, row in bars.items()}
    for number, (contestant, values) in enumerate(bars.items()):
        look = look_of(cells.contestants.index(contestant))
        for category, (value, low, high, text) in enumerate(values):
            x = category + (number - (len(bars) - 1) / 2) * width
            if math.isfinite(value):
                ax.bar(x, value, width * 0.92, color=look["color"])
                if math.isfinite(low) and math.isfinite(high):
                    ax.errorbar(x, value, [[value - low], [high - value]], color="#1c2128", linewidth=0.9, capsize=2)
                ax.annotate(text_of(value) + text, (x, high if high <= 2 * most else value), xytext=(0, 2), textcoords="offset points", ha="center", va="bottom",
                            fontsize=size, rotation=90 if many else 0, bbox=behind)
            elif text:
                ax.annotate(text, (x, 0), xytext=(0, 3), textcoords="offset points", ha="center", va="bottom", fontsize=size, rotation=90, color=_GREY,
                            bbox=behind)
    ax.set_xticks(range(len(categories)), labels=categories, rotation=45 if sum(map(len, categories)) > 34 else 0)
    ax.set_xlim(-0.6, len(categories) - 0.4)
    whiskers = [entry[2] for row in bars.values() for entry in row if entry[2] <= 2 * most]  # longer ones leave the panel, so that the bars can be told apart
    ax.set_ylim(0, 1.35 * max(most, *whiskers, 0.0))


def speedup_panel(ax: Axes, cells: Cells, pass_: str, words: Words) -> None:
    title = words.pass_(pass_)
    if not cells.baseline:
        _dress(ax, words("{pass_}: speed-up", pass_=title))
        _say(ax, words("{baseline} was not measured, so there is no speed-up", baseline="standard"))
        return
    _dress(ax, words("{pass_}: speed-up over {baseline}", pass_=title, baseline=cells.baseline))
    bars = {}
    for contestant in cells.contestants:
        if contestant == cells.baseline:
            continue
        row = []
        for value in cells.values:
            ratio = cells.speedup(value, contestant, pass_)
            if ratio:
                row.append((ratio.value, ratio.low, ratio.high, " ?" if ratio.undecided else ""))
                continue
            both = [(name, cell) for name in (contestant, cells.baseline) if (cell := cells.cell(value, name, pass_)) and not cell.ok]
            what = words("{contestant}: {what}", contestant=both[0][0], what=words.failure(both[0][1].status)) if both else ""
            row.append((math.nan, math.nan, math.nan, what))
        if any(math.isfinite(entry[0]) for entry in row):
            bars[contestant] = row
    if not bars:
        _say(ax, words("nothing was measured together with {baseline}", baseline=cells.baseline))
        return
    _bars(ax, cells, [units.plain(value) for value in cells.values], bars, units.times)
    _one(ax, cells, words)
    ax.set_xlabel(words(cells.axis))


def _one(ax: Axes, cells: Cells, words: Words, beside: tuple[tuple[float, str], ...] = ()) -> None:
    """The line of the baseline's speed, and the axis of what is compared with it."""
    line = ax.axhline(1, color=_GREY, linestyle=(0, (5, 4)), linewidth=1.2, zorder=1.5)
    ax.set_ylim(0, max(1.35, ax.get_ylim()[1]))
    levels = _levels(ax, beside, words)
    _vertical(ax, words("times as fast"), units.times)
    _own_legend(ax, [(line, words("as fast as {baseline}", baseline=cells.baseline)), *levels])


def _levels(ax: Axes, levels: tuple[tuple[float, str], ...], words: Words) -> list[tuple[Line2D, str]]:
    lines = [(ax.axhline(value, color=_GREY, linestyle=_DASHES[2 + i], linewidth=1.2, zorder=1.5), words(text)) for i, (value, text) in enumerate(levels)]
    ax.set_ylim(0, max([ax.get_ylim()[1], *(1.5 * value for value, _ in levels)]))
    return lines


def causal_panels(axes: list[Axes], cells: Cells, words: Words) -> None:
    """Of a sweep over no more than the mask: bars of all passes, speed-up and share of memory."""
    _dress(axes[0], words("Speed-up over {baseline}", baseline=cells.baseline or "standard"))
    _dress(axes[1], words("Extra memory, as a share of {baseline}'s", baseline=cells.baseline or "standard"))
    keys = [(pass_, value) for pass_ in cells.passes for value in cells.values]
    labels = [words("{pass_}, causal", pass_=pass_) if value else pass_ for pass_, value in keys]
    faster, less = {}, {}
    for contestant in cells.contestants:
        if contestant == cells.baseline or not cells.baseline:
            continue
        ratios = [(cells.speedup(value, contestant, pass_), cells.cell(value, contestant, pass_)) for pass_, value in keys]
        row = [(r.value, r.low, r.high, " ?" if r.undecided else "") if r else (math.nan, math.nan, math.nan, words.failure(c.status) if c and not c.ok else "")
               for r, c in ratios]
        shares = [(cells.memory_share(value, contestant, pass_), math.nan, math.nan, "") for pass_, value in keys]
        if any(math.isfinite(entry[0]) for entry in row):
            faster[contestant], less[contestant] = row, shares
    if not faster:
        for ax in axes:
            _say(ax, words("nothing was measured together with {baseline}", baseline=cells.baseline or "standard"))
        return
    _bars(axes[0], cells, labels, faster, units.times)
    _one(axes[0], cells, words, _DOCUMENTS[:2] if cells.preset == "headline" else ())
    _bars(axes[1], cells, labels, less, lambda value: units.share(value, 2))
    if cells.preset == "headline":
        _own_legend(axes[1], _levels(axes[1], _DOCUMENTS[2:], words))
    _vertical(axes[1], words("share"), units.share)
    for ax in axes:
        ax.set_xlabel(words("pass"))
        ax.tick_params(axis="x", labelrotation=20)
