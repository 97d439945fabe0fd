"""The options of attention: the one list of their names and defaults, and what their values mean, in every function the same."""

import inspect
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from ._unknown import unknown_options

LAYOUTS = ("bshd", "bhsd")
Window = tuple[int | None, int | None]
ALL_KEYS = -1


class Options(NamedTuple):
    """As the fronts take them; `fattn.attention` says what each is. Tensors are torch's or NumPy's. Its signature repeats the list, because every call of a
    small problem would pay a microsecond for a tuple that most need not."""

    causal: bool = False
    softmax_scale: float | None = None
    window: Window | None = None
    softcap: float | None = None
    seqused_k: Any = None
    alibi_slopes: Any = None
    bias: Any = None
    mask: Any = None
    dropout_p: float = 0
    dropout_state: Any = None
    document_q: Any = None
    document_k: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    sinks: Any = None
    block_table: Any = None
    out_dtype: Any = None
    batch_invariant: bool = False
    deterministic: bool | None = None
    backend: str = "auto"
    algorithm: str = "auto"


def names_of_options(but: Collection[str] = ()) -> dict[str, Any]:
    """And their defaults."""
    return {name: default for name, default in Options._field_defaults.items() if name not in but}


def takes_options(names: Mapping[str, Any]) -> Callable:
    """For a function that has these of `Options` as **options: its signature says them, before its own keywords."""
    def decorate(function: Callable) -> Callable:
        signature = inspect.signature(function)
        own = [x for x in signature.parameters.values() if x.kind is not x.VAR_KEYWORD]
        place = next((i for i, x in enumerate(own) if x.kind is x.KEYWORD_ONLY), len(own))
        options = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Options.__annotations__[name])
                   for name, default in names.items()]
        function.__signature__ = signature.replace(parameters=own[:place] + options + own[place:])
        return function

    return decorate


def taken(function: str, names: Collection[str], own: Collection[str], given: Mapping[str, Any]) -> Options:
    """`given` of a function that takes options of these names, and keywords of its `own`, which an error says too."""
    for name in given:
        if name not in names:
            raise unknown_options(function, [x for x in given if x not in names], [*names, *own])
    return Options(**given)


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


def number(name: str, value: Any) -> float:
    """ctypes would not say which option is none."""
    if not isinstance(value, (str, bytes)):
        try:
            return float(value)
        except OverflowError:  # of an int
            raise ValueError(f"{name} is a number beyond fp64's greatest, 1.8e308; give a smaller one") from None
        except (TypeError, ValueError, RuntimeError):  # of arrays and tensors, too
            pass
    raise TypeError(f"{name} is a {type(value).__name__}; it must be a number")


def flag(name: str, value: Any) -> bool:
    """Text, 1.5 and NaN would be true, whatever was meant. 0 and 1 are as good as False and True, NumPy's too; a torch.SymBool stays what it is."""
    if isinstance(value, bool) or type(value).__name__ == "SymBool":
        return value
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, int) and value in (0, 1):
        return value == 1
    what = repr(value) if value is None or isinstance(value, (int, float)) else f"a {type(value).__name__}"
    raise TypeError(f"{name} is {what}; it must be True or False")


def flags(**given: Any) -> list[Any]:
    """Of these options; `deterministic` may be None."""
    return [None if value is None and name == "deterministic" else flag(name, value) for name, value in given.items()]


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
