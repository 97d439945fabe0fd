"""Which shapes fattn.merge and fattn.numpy.merge take."""

from collections.abc import Sequence


def name_of(i: int) -> str:
    """Of the parts o1, lse1, o2, lse2, ..."""
    return f"{'lse' if i % 2 else 'o'}{i // 2 + 1}"


def check_number(function: str, number: int) -> None:
    if number < 2 or number % 2:
        raise TypeError(f"{function} got {number} tensors; allowed: o1, lse1, o2, lse2, ..., an o and an lse of each part")


def check_shapes(shapes: Sequence[tuple[int, ...]], bhsd: bool) -> None:
    o = shapes[0]
    if len(o) not in (3, 4) or (bhsd and len(o) != 4):
        raise ValueError(f"o1 has {len(o)} dimensions; allowed: 4 (batch, seqlen, nheads, headdim), or 3 (total, nheads, headdim) of packed sequences")
    rows = o[:-1] if bhsd else (*o[:-3], o[-2], o[-3])
    for i, shape in enumerate(shapes):
        wanted = rows if i % 2 else o
        if shape != wanted:
            raise ValueError(f"{name_of(i)} has the shape {shape}; expected {wanted}, from o1")
