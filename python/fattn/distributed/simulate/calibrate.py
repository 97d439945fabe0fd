"""The constants of the model from records of `bench` on GPUs that are there; some of their shapes are left out and show its error."""

import json
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .._heads import choose_degree
from .model import BACKWARD, Constants, Shape, simulated
from .work import work_of

_ELEMENT = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
_PASSES = ("forward", "forward_backward")


class Record(NamedTuple):
    shape: Shape
    seconds: dict[str, float]
    alone: dict[str, float]

    def name(self) -> str:
        s = self.shape
        return f"{s.method} {s.layout}, {s.rows} rows, {s.nheads}/{s.nheads_k} heads of {s.headdim}"


class Calibration(NamedTuple):
    constants: Constants
    fitted: tuple[Record, ...]
    left_out: tuple[Record, ...]


def _record(row: dict[str, Any]) -> Record:
    degree = {"ulysses": row["ranks"], "mixed": row.get("ulysses_degree")}.get(row["method"], 1)
    if degree is None:
        degree = choose_degree(row["ranks"], row["nheads"], row["nheads_k"])
    shape = Shape(row["ranks"], row["rows"], row["nheads"], row["nheads_k"], row["headdim"], _ELEMENT[row["dtype"]], row["causal"], (-1, -1), row["method"], row["layout"],
                  degree, gpus_per_host=row["ranks"])
    return Record(shape, {name: row[name]["seconds"] for name in _PASSES}, {name: row[name]["seconds_alone"] for name in _PASSES})


def read_records(path: str) -> list[Record]:
    """A line of JSON for each record, a list of them, or what tools/bench_ring.py writes."""
    text = pathlib.Path(path).read_text()
    try:
        try:
            whole = json.loads(text)
            rows = whole if isinstance(whole, list) else whole["rows"] if "rows" in whole and isinstance(whole["rows"], list) else [whole]
        except json.JSONDecodeError:
            rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        records = [_record(row) for row in rows]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} has no records of fattn.distributed bench ({type(error).__name__}: {error}); give what "
                         "`torchrun --nproc-per-node 2 -m fattn.distributed bench >> FILE` wrote, a line a shape") from None
    if len({x.shape for x in records}) < 3:
        raise ValueError(f"{path} has {len({x.shape for x in records})} different shapes; a calibration needs 3 and more: some to fit, and one to show the error")
    return records


def _split(records: Sequence[Record]) -> tuple[tuple[Record, ...], tuple[Record, ...]]:
    """Every third shape is left out."""
    shapes = list(dict.fromkeys(x.shape for x in records))
    out = set(shapes[2::3])
    return tuple(x for x in records if x.shape not in out), tuple(x for x in records if x.shape in out)


def _line(work: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(a, b) of seconds = a + b * work, neither below 0, with the least relative errors."""
    weights = [1 / y for y in seconds]
    ww, wx, xx = (sum(w * w * x**power for w, x in zip(weights, work)) for power in range(3))
    wy, xy = (sum(w * w * y * x**power for w, x, y in zip(weights, work, seconds)) for power in range(2))
    determinant = ww * xx - wx * wx
    if determinant > 1e-12 * ww * xx:
        a, b = (wy * xx - wx * xy) / determinant, (ww * xy - wx * wy) / determinant
        if a >= 0 and b > 0:
            return a, b
    return 0.0, xy / xx


def _alone(records: Sequence[Record]) -> Constants:
    flops = [float(work_of(x.shape._replace(ranks=1, degree=1, method="ring", layout="contiguous").problem()).pairs.sum()) * 4 * x.shape.headdim * x.shape.nheads
             for x in records]
    call, second = _line(flops, [x.alone["forward"] for x in records])
    backward_call, backward_second = _line([BACKWARD * x for x in flops], [max(x.alone["forward_backward"] - x.alone["forward"], 1e-9) for x in records])
    return Constants(1 / second, 1 / backward_second, call, backward_call)


def _least_squares(off: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Where the sum of the squares of off(x) is least, from x on (Levenberg and Marquardt)."""
    now, damping, further = off(x), 1e-3, 0.01
    for _ in range(40):
        slopes = torch.stack([(off(x + further * axis) - now) / further for axis in torch.eye(len(x), dtype=x.dtype)], 1)
        for _ in range(8):
            step = torch.linalg.solve(slopes.T @ slopes + damping * torch.eye(len(x), dtype=x.dtype), -slopes.T @ now).clamp(-1.5, 1.5)
            tried = off(x + step)
            if tried.square().sum() < now.square().sum():
                break
            damping *= 5
        else:
            return x
        x, now, damping = x + step, tried, damping / 10
        if step.abs().max() < 1e-4:
            break
    return x


_FITTED = ("once", "merged_bytes", "inside_bytes", "inside_latency")


def calibrate(records: Sequence[Record], between: dict[str, float] | None = None) -> Calibration:
    """`between`: what is known of links between hosts."""
    fitted, left_out = _split(records)
    alone = _alone(fitted)._replace(once=1e-4, **(between or {}))

    def off(logarithms: torch.Tensor) -> torch.Tensor:
        constants = alone._replace(**dict(zip(_FITTED, logarithms.exp().tolist())))
        found = []
        for record in fitted:
            times = simulated(record.shape, constants)
            found += [math.log(getattr(times, name) / record.seconds[name]) for name in _PASSES]
        return torch.tensor(found, dtype=torch.float64)

    start = torch.tensor([getattr(alone, name) for name in _FITTED], dtype=torch.float64).log()
    return Calibration(alone._replace(**dict(zip(_FITTED, _least_squares(off, start).exp().tolist()))), fitted, left_out)


def errors(calibration: Calibration, records: Sequence[Record]) -> list[tuple[Record, str, float, float]]:
    """(record, pass, simulated seconds, by what part they are off)."""
    found = []
    for record in records:
        times = simulated(record.shape, calibration.constants)
        for name in _PASSES:
            found.append((record, name, getattr(times, name), getattr(times, name) / record.seconds[name] - 1))
    return found
