"""Numbers as figures write them: "1.5 ms", "64 KiB", "250 G", "4x", "14 %"."""

import math

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_RATES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_BYTES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))


def _digits(value: float, digits: int) -> str:
    """At most so many digits that count, without zeros behind the point."""
    if value == 0:
        return "0"
    text = f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _scaled(value: float, units: tuple, digits: int) -> str:
    for size, name in units:
        if abs(value) >= size * (1 - 1e-9):
            break
    return f"{_digits(value / size, digits)} {name}".rstrip()


def plain(value: float, digits: int = 6) -> str:
    return _digits(value, digits) if math.isfinite(value) else "-"


def seconds(value: float, digits: int = 3) -> str:
    return "-" if not math.isfinite(value) else "0" if value == 0 else _scaled(value, _TIMES, digits)


def nbytes(value: float, digits: int = 3) -> str:
    return "-" if not math.isfinite(value) else "0" if value == 0 else _scaled(value, _BYTES, digits)


def rate(value: float, digits: int = 3) -> str:
    return "-" if not math.isfinite(value) else "0" if value == 0 else _scaled(value, _RATES, digits)


def times(value: float, digits: int = 3) -> str:
    return f"{_digits(value, digits)}x" if math.isfinite(value) else "-"


def share(value: float, digits: int = 3) -> str:
    return f"{_digits(100 * value, digits)} %" if math.isfinite(value) else "-"
