"""Options that are chosen by name, in every function the same."""

import operator
from collections.abc import Mapping

LAYOUTS = ("bshd", "bhsd")
Window = tuple[int | None, int | None]
ALL_KEYS = -1


# Names of dtypes in torch and NumPy; `str` of theirs, too.
_DTYPES = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float64": "fp64", "double": "fp64"}


def short_dtype(dtype: object) -> object:
    """"fp32" of "float32", torch.float32 or a dtype of NumPy; what is none stays, to be refused."""
    if isinstance(dtype, type):  # numpy.float32
        dtype = dtype.__name__
    name = str(dtype).removeprefix("torch.")
    return _DTYPES.get(name, dtype if isinstance(dtype, str) else name)


def device_and_index(device: object, index: int) -> tuple[object, int]:
    """("cuda", 1) of "cuda:1" or torch.device("cuda", 1)."""
    kind, colon, number = str(device).partition(":")
    if not colon or not number.isdecimal():
        return (device if isinstance(device, str) else str(device)), index
    if index not in (0, int(number)):
        raise ValueError(f"device is {str(device)!r} and device_index is {index}; give one of them")
    return kind, int(number)


def choose(option: str, value: str, allowed: Mapping[str, int]) -> int:
    """The value of the C ABI."""
    try:
        return allowed[value]
    except (KeyError, TypeError):
        raise ValueError(f"{option} is {value!r}; allowed: {', '.join(map(repr, allowed))}") from None


def within(name: str, value: int, bits: int) -> int:
    """ctypes cuts off what does not fit."""
    if not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise ValueError(f"{name} is {value}, which does not fit into {bits} bits")
    return value


def _limit(name: str, keys: int | None) -> int:
    if keys is None:
        return ALL_KEYS
    if not isinstance(keys, int):
        try:
            keys = operator.index(keys)
        except TypeError:
            raise TypeError(f"{name} is {keys!r}; it must be an int, or None") from None
    return within(name, keys, 64)


def window_limits(window: Window | None) -> tuple[int, int]:
    """(left, right) as the C ABI has them, -1 for no limit; the core checks the numbers."""
    if window is None:
        return ALL_KEYS, ALL_KEYS
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ValueError(f"window is {window!r}; allowed: None, or (left, right), the keys before and behind a query's own position that it sees, "
                         "-1 or None for all") from None
    return _limit("window[0]", left), _limit("window[1]", right)


def is_bhsd(layout: str) -> bool:
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; allowed: {', '.join(map(repr, LAYOUTS))}")
    return layout == "bhsd"
