"""Options that are chosen by name, in every function the same."""

from collections.abc import Mapping

LAYOUTS = ("bshd", "bhsd")


def choose(option: str, value: str, allowed: Mapping[str, int]) -> int:
    """The value of the C ABI."""
    try:
        return allowed[value]
    except (KeyError, TypeError):
        raise ValueError(f"{option} is {value!r}; allowed: {', '.join(map(repr, allowed))}") from None


def is_bhsd(layout: str) -> bool:
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; allowed: {', '.join(map(repr, LAYOUTS))}")
    return layout == "bhsd"
