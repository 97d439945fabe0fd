"""How time grows with what is swept: a line through the logarithms by least squares, and the interval of its slope."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import pandas as pd

from ._cells import Cells

_FEWEST = 3  # with fewer points a line has no error that could be told from it


class PowerLaw(NamedTuple):
    """y = factor * x^exponent, with the exponent's 95 % interval."""

    factor: float
    exponent: float
    low: float
    high: float
    points: int


def _within(t: float, degrees: int) -> float:
    """The probability that |T| < t, by the finite series for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for i in range(2 + odd, degrees + 1, 2):  # of as many terms as there are pairs of degrees
        total += term
        term *= cosine * cosine * (i - 1) / i
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def student_t(degrees: int) -> float:
    """Half the width of a 95 % interval, in standard errors."""
    low, high = 0.0, 20.0  # 12.7 of one degree of freedom is the largest
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < 0.95 else (low, middle)
    return (low + high) / 2


def fit_power_law(points: Iterable[tuple[float, float]]) -> PowerLaw | None:
    """None if fewer than three different x have a y. Both are above 0; other points are left out."""
    logs = [(math.log(x), math.log(y)) for x, y in points if math.isfinite(x) and math.isfinite(y) and x > 0 and y > 0]
    if len({x for x, _ in logs}) < _FEWEST:
        return None
    n = len(logs)
    mean_x, mean_y = (math.fsum(point[i] for point in logs) / n for i in (0, 1))
    square = math.fsum((x - mean_x) ** 2 for x, _ in logs)
    exponent = math.fsum((x - mean_x) * (y - mean_y) for x, y in logs) / square
    off = math.fsum((y - mean_y - exponent * (x - mean_x)) ** 2 for x, y in logs)
    half = student_t(n - 2) * math.sqrt(off / (n - 2) / square)
    return PowerLaw(math.exp(mean_y - exponent * mean_x), exponent, exponent - half, exponent + half, n)


def growth_of(cells: Cells, contestant: str, pass_: str) -> tuple[PowerLaw | None, str]:
    """The law, or the reason why there is none."""
    points = [(float(value), cell.seconds) for value in cells.values if (cell := cells.cell(value, contestant, pass_)) and cell.ok]
    law = fit_power_law(points)
    return law, "" if law else f"{len(points)} value{' was' if len(points) == 1 else 's were'} measured; {_FEWEST} are needed"


def growth(source: object, *, over: str | None = None) -> pd.DataFrame:
    """Fits time = factor * value^exponent for every contestant and pass.

    Args:
        source: a frame of measurements, or what `read` takes.
        over: what grows, as of `figure`; not needed for a sweep.

    Returns:
        A frame with `contestant`, `pass`, `points`, `factor` (seconds at value 1), `exponent`, and `exponent_low` and `exponent_high`, the ends of its
        95 % interval (of the fit: by Student's t). Without a fit these are missing, and `reason` says why.

    Raises:
        ValueError: rows are missing, ambiguous, or of different problems; the message says which.
    """
    cells = Cells(source, over=over)
    rows = []
    for pass_ in cells.passes:
        for contestant in cells.contestants:
            law, reason = growth_of(cells, contestant, pass_)
            rows.append({"contestant": contestant, "pass": pass_, "points": law.points if law else None, "factor": law.factor if law else None,
                         "exponent": law.exponent if law else None, "exponent_low": law.low if law else None, "exponent_high": law.high if law else None,
                         "reason": reason or None})
    frame = pd.DataFrame(rows)
    return frame.astype({"points": "Int64", "factor": "float64", "exponent": "float64", "exponent_low": "float64", "exponent_high": "float64"})
