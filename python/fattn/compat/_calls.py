"""What the modules of all peers share: their type of errors, their windows, and what is refused."""

from typing import Any, NoReturn

import torch

from .._attention import attention
from .._varlen import attention_varlen

__all__ = ["PeerError", "attention", "attention_varlen", "detached", "peer_error", "refuse", "refuse_given", "window_of"]

Window = tuple[int | None, int | None]


class PeerError(RuntimeError, ValueError):
    """Input that does not fit together: the peers raise RuntimeError, fattn ValueError."""


def peer_error(error: ValueError, **names: str) -> PeerError:
    """With fattn's names of options as the peer has them."""
    text = str(error)
    for ours, theirs in {"window": "window_size", **names}.items():
        if text.startswith((f"{ours} ", f"{ours}[")):
            text = theirs + text[len(ours) :]
    return PeerError(text)


def refuse(what: str, why: str) -> NoReturn:
    raise NotImplementedError(f"{what} is not computed by fattn: {why}")


def refuse_given(why: str, **given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            refuse(name, why)


EIGHT_BITS = "dtypes of 8 bits are not read; convert q, k and v to 16 bits and leave it out"
TWO_QUERIES = "a second product of queries and values (MLA) is not added to scores; concatenate qv to q, and v to k"


def window_of(window_size: Window) -> Window | None:
    """Of flash_attn 2 and 3, where every negative number is no limit: None, as `attention_of` takes a negative one for a limit on the other side."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise PeerError(f"window_size is {window_size!r}; allowed: (left, right), -1 for no limit") from None
    left, right = None if left is None or left < 0 else left, None if right is None or right < 0 else right
    return None if left is right is None else (left, right)


def detached(*tensors: Any) -> list[Any]:
    return [x.detach() if isinstance(x, torch.Tensor) else x for x in tensors]
