"""fattn.attention on q, k and v that lie in one tensor, as projections make them."""

from typing import Any

import torch

from ._attention import attention
from ._options import is_bhsd
from ._refused import is_dtensor, require_dense


def _unbind(name: str, x: torch.Tensor, count: int, layout: str) -> tuple[torch.Tensor, ...]:
    dim = 1 if is_bhsd(layout) else 2
    if not is_dtensor(x):
        require_dense(name, x)
    if x.dim() != 5 or x.shape[dim] != count:
        allowed = f"(batch, {count}, heads, seqlen, headdim)" if dim == 1 else f"(batch, seqlen, {count}, heads, headdim)"
        raise ValueError(f"{name} has the shape {tuple(x.shape)}; allowed: {allowed} with layout={layout!r}")
    return x.unbind(dim)


def attention_qkvpacked(qkv: torch.Tensor, **options: Any) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
    """`fattn.attention` of three views of one tensor; nothing is copied before the call.

    Args:
        qkv: (batch, seqlen, 3, nheads, headdim); with layout="bhsd" (batch, 3, nheads, seqlen, headdim).
        options: those of `fattn.attention`.

    Returns, Raises:
        As `fattn.attention`; the gradient is one tensor of qkv's shape.
    """
    return attention(*_unbind("qkv", qkv, 3, options.get("layout", "bshd")), **options)


def attention_kvpacked(q: torch.Tensor, kv: torch.Tensor, **options: Any) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
    """`fattn.attention` of q and two views of one tensor; nothing is copied before the call.

    Args:
        q: (batch, seqlen_q, nheads, headdim), or as layout says.
        kv: (batch, seqlen_k, 2, nheads_k, headdim); with layout="bhsd" (batch, 2, nheads_k, seqlen_k, headdim).
        options: those of `fattn.attention`.

    Returns, Raises:
        As `fattn.attention`; the gradient of kv is one tensor of its shape.
    """
    return attention(q, *_unbind("kv", kv, 2, options.get("layout", "bshd")), **options)
