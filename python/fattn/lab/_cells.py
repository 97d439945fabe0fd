"""Rows of a frame as the figures need them: a cell for each value, contestant and pass, after a check that they can stand in one figure."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import pandas as pd

from ._frames import read

# What can be on the axis, and its columns.
AXES = {"seqlen": ("seqlen_q",), "batch": ("batch",), "nheads": ("nheads",), "headdim": ("headdim",), "embed": ("nheads", "headdim"),
        "seqlen-k": ("seqlen_k",), "threads": ("threads",), "causal": ("causal",)}
PASSES = ("fwd", "bwd", "fwdbwd")
_SIZES = ("batch", "seqlen_q", "seqlen_k", "nheads", "nheads_k", "headdim", "headdim_v")
_OPTIONS = ("window_left", "window_right", "softcap", "p_dropout", "alibi", "bias", "bias_dtype", "dbias", "mask", "least_seqused_k", "least_packed",
            "documents", "page_size")
_ALIKE = ("dtype", "causal", *_OPTIONS)  # of all rows of a figure
_NAN = math.nan


@dataclasses.dataclass(frozen=True)
class Cell:
    """Seconds and bytes of one row; NaN where it is not known, and everywhere if the status is not "ok"."""

    status: str
    reason: str
    seconds: float = _NAN
    low: float = _NAN
    high: float = _NAN
    extra_bytes: float = _NAN
    flops: float = _NAN  # of a call
    tokens: float = _NAN
    peak_flops_per_s: float = _NAN
    peak: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "ok" and self.seconds > 0


@dataclasses.dataclass(frozen=True)
class Ratio:
    """One time over another. The interval is that of the ends of both: at least as wide as one of 95 % would be."""

    value: float
    low: float
    high: float

    @property
    def undecided(self) -> bool:
        return not (self.low > 1 or self.high < 1)


def frame_of(source: object) -> pd.DataFrame:
    return source if isinstance(source, pd.DataFrame) else read(source)


def _number(value: object) -> float:
    return _NAN if value is None or value is pd.NA or not isinstance(value, (int, float)) and not hasattr(value, "__float__") else float(value)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


class Cells:
    """What one figure shows.

    Attributes:
        axis: a key of AXES. `values`: what was measured at, sorted. `contestants`, `passes`: in the order of the rows, of the passes.
        baseline: a contestant, or "".
        problem: what all rows have in common: "B4 H12 D64 fp32 causal". `device`: where they were measured.
        preset: of the sweep, or "". `complete`: no row is of a record that was interrupted.

    Raises:
        ValueError: no rows, or rows that cannot stand in one figure; the message says why and what to do.
    """

    def __init__(self, source: object, *, over: str | None = None, pass_: str | Iterable[str] | None = None, baseline: str = "standard"):
        frame = frame_of(source)
        _require_measurements(frame)
        self.axis = _axis_of(frame, over)
        self.passes = _passes_of(frame, pass_)
        frame = frame[frame["pass"].isin(self.passes)]
        frame = frame.assign(_value=_values_of(frame, self.axis))
        self.values: list[int] = sorted(int(value) for value in frame["_value"].unique())
        self.contestants: list[str] = [str(name) for name in frame["contestant"].unique()]
        self.baseline = baseline if baseline in self.contestants else ""
        presets = frame["preset"].unique() if "preset" in frame else []
        self.preset = _text(presets[0]) if len(presets) == 1 else ""
        self.complete = not ("complete" in frame and (frame["complete"] == False).any())  # noqa: E712: missing is not False
        _require_one_problem_a_value(frame, self.axis)
        self.problem, self.device = _in_common(frame, self.axis), _device_of(frame, self.axis)
        self.slope = _slope_of_operations(frame, self.axis)
        self._cells = {(int(row["_value"]), str(row["contestant"]), str(row["pass"])): _cell_of(row) for row in frame.to_dict("records")}

    def cell(self, value: int, contestant: str, pass_: str) -> Cell | None:
        return self._cells.get((value, contestant, pass_))

    def speedup(self, value: int, contestant: str, pass_: str) -> Ratio | None:
        """The baseline's time over the contestant's; None unless both are ok."""
        mine, base = self.cell(value, contestant, pass_), self.cell(value, self.baseline, pass_)
        if not (mine and base and mine.ok and base.ok):
            return None
        return Ratio(base.seconds / mine.seconds, base.low / mine.high, base.high / mine.low)

    def memory_share(self, value: int, contestant: str, pass_: str) -> float:
        mine, base = self.cell(value, contestant, pass_), self.cell(value, self.baseline, pass_)
        return mine.extra_bytes / base.extra_bytes if mine and base and mine.ok and base.ok and base.extra_bytes > 0 else _NAN

    def all(self) -> Iterable[Cell]:
        return self._cells.values()


def _require_measurements(frame: pd.DataFrame) -> None:
    lacking = [name for name in ("contestant", "pass", "status", *_SIZES[:6]) if name not in frame]
    if lacking:
        raise ValueError(f"the frame has no column {', '.join(repr(name) for name in lacking)}; figures are drawn from rows of fattn bench, compare and sweep, as "
                         "fattn.lab.read and fattn.lab.sweep give them")
    if frame.empty:
        raise ValueError("the frame has no rows; was everything filtered away?")


def _axis_of(frame: pd.DataFrame, over: str | None) -> str:
    if over is None:
        swept = [name for name in frame["over"].dropna().unique()] if "over" in frame else []
        if len(swept) == 1 and not frame["over"].isna().any():
            over = swept[0]
        else:
            vary = [name for name in _SIZES if name in frame and frame[name].nunique() > 1]
            found = f"{', '.join(vary)} vary in these rows" if vary else "no size varies in these rows"
            raise ValueError(f"over: what is on the horizontal axis? allowed: {', '.join(AXES)}; {found}")
    axis = str(over).replace("_", "-")
    axis = "seqlen" if axis == "seqlen-q" else axis
    if axis not in AXES:
        raise ValueError(f"over is '{str(over)[:40]}'; allowed: {', '.join(AXES)}")
    lacking = [name for name in AXES[axis] if name not in frame]
    if lacking:
        raise ValueError(f"over='{over}' needs the column {lacking[0]}, which the frame lacks")
    return axis


def _values_of(frame: pd.DataFrame, axis: str) -> Any:
    if "value" in frame and "over" in frame and (frame["over"] == axis).all():
        return frame["value"].astype("int64").to_numpy()
    return pd.concat([frame[name].astype("float64") for name in AXES[axis]], axis=1).prod(axis=1).astype("int64").to_numpy()


def _passes_of(frame: pd.DataFrame, pass_: str | Iterable[str] | None) -> list[str]:
    there = [name for name in PASSES if (frame["pass"] == name).any()]
    if pass_ is None:
        return there
    wanted = [part.strip() for part in pass_.split(",")] if isinstance(pass_, str) else list(pass_)
    for name in wanted or [""]:
        if name not in PASSES:
            raise ValueError(f"pass_ is '{str(name)[:40]}'; allowed: {', '.join(PASSES)}")
        if name not in there:
            raise ValueError(f"no row is of the pass '{name}'; the frame has {', '.join(there)}")
    return [name for name in PASSES if name in wanted]


def _differing(rows: pd.DataFrame, columns: Iterable[str]) -> list[str]:
    return [name for name in columns if name in rows and rows[name].nunique(dropna=False) > 1]


def _example(rows: pd.DataFrame, name: str) -> str:
    values = list(rows[name].unique())
    shown = ", ".join("none" if pd.isna(value) else str(value)[:40] for value in values[:4])
    return f"{name} ({shown}{', ...' if len(values) > 4 else ''})"


def _require_one_problem_a_value(frame: pd.DataFrame, axis: str) -> None:
    alike = _differing(frame, [name for name in _ALIKE if name not in AXES[axis]])
    if alike:
        raise ValueError(f"the rows are of problems that do not belong into one figure; they differ in {', '.join(_example(frame, name) for name in alike)}. Keep "
                         f"those of one: frame[frame.{alike[0]} == {frame[alike[0]].iloc[0]!r}]")
    for value, rows in frame.groupby("_value", sort=True):
        sizes = _differing(rows, _SIZES)
        if sizes:
            raise ValueError(f"at {axis} {value} there are several problems; they differ in {', '.join(_example(rows, name) for name in sizes)}. Keep one at each: "
                             f"frame[frame.{sizes[0]} == {rows[sizes[0]].iloc[0]!r}]")
    twice = frame[frame.duplicated(["_value", "contestant", "pass"], keep=False)].sort_values("_value", kind="stable")
    if not twice.empty:
        first = twice.iloc[0]
        rows = twice[(twice["_value"] == first["_value"]) & (twice["contestant"] == first["contestant"]) & (twice["pass"] == first["pass"])]
        why = _differing(rows, ("file", "command", "kernel", "isa", "threads", "version", "device", "env_date", "env_cpu_model", "env_gpu_name"))
        differ = f"; they differ in {', '.join(_example(rows, name) for name in why)}" if why else "; they are the same row twice"
        raise ValueError(f"{len(rows)} rows are of {first['contestant']}, {first['pass']}, at {axis} {first['_value']}{differ}. Keep one of them")


def _in_common(frame: pd.DataFrame, axis: str) -> str:
    def one(name: str) -> object | None:
        return frame[name].iloc[0] if name in frame and frame[name].nunique(dropna=False) == 1 else None

    parts = [f"{letter}{one(name)}" for letter, name in (("B", "batch"), ("S", "seqlen_q"), ("H", "nheads"), ("D", "headdim")) if one(name) is not None
             and name not in AXES[axis]]
    if axis != "seqlen" and one("seqlen_k") is not None and one("seqlen_k") != one("seqlen_q"):
        parts.insert(2, f"K{one('seqlen_k')}")
    parts.append(str(one("dtype") or ""))
    if axis != "causal" and one("causal"):
        parts.append("causal")
    for name in _OPTIONS:
        if (value := one(name)) is not None and not pd.isna(value):
            parts.append(f"{name}={value}")
    return " ".join(part for part in parts if part)


def _device_of(frame: pd.DataFrame, axis: str) -> str:
    names = []
    for row in frame.to_dict("records"):
        name = _text(row.get("env_gpu_name")) or _text(row.get("env_cpu_model")) or _text(row.get("device"))
        threads = _number(row.get("threads"))
        if not _text(row.get("env_gpu_name")) and axis != "threads" and threads > 0:
            name += f", {threads:.0f} thread{'' if threads == 1 else 's'}"
        if name and name not in names:
            names.append(name)
    return " / ".join(names[:3]) + (" / ..." if len(names) > 3 else "")


def _slope_of_operations(frame: pd.DataFrame, axis: str) -> int | None:
    """The exponent by which operations grow with seqlen; None where other sizes change, too."""
    if axis != "seqlen" or _differing(frame, ("nheads", "headdim", "headdim_v")) or not (frame["seqlen_q"] == frame["seqlen_k"]).all():
        return None
    if frame["batch"].nunique() == 1:
        return 2
    return 1 if (frame["batch"].astype("float64") * frame["seqlen_q"]).nunique() == 1 else None


def _cell_of(row: dict) -> Cell:
    status, reason = str(row["status"]), _text(row.get("reason"))
    seconds = _number(row.get("time_median_s"))
    if status != "ok" or not seconds > 0:
        return Cell(status if status != "ok" else "failed", reason)
    return Cell(status, reason, seconds, _number(row.get("time_ci_low_s")), _number(row.get("time_ci_high_s")), _number(row.get("extra_bytes")),
                _number(row.get("flops_per_s")) * seconds, _number(row.get("batch")) * _number(row.get("seqlen_q")), _number(row.get("peak_flops_per_s")),
                _text(row.get("peak")))
