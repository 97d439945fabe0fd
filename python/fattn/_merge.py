"""fattn.merge: results over disjoint keys become that of all of them. Each counts by its share of the sum of exponentials, which its lse says."""

from collections.abc import Sequence

import torch

from . import _merge_shapes
from ._options import is_bhsd
from ._refused import require_dense


_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def merge_rows(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """outs (..., headdim), lses (...) in the order of their rows. In fp32 (fp64 where something is); by operations of torch, which differentiate o and lse. A part
    that saw no key for a row (lse -inf) adds nothing to it, whatever it holds."""
    parts = torch.stack([_wide(x) for x in lses])
    top = parts.detach().amax(0)
    weights = (parts - top.masked_fill(top == -torch.inf, 0)).exp()
    total = weights.sum(0)
    empty = total == 0  # a row that no part sees: 1 in its place keeps NaN out of gradients
    divisor = total.masked_fill(empty, 1)
    lse = (top.masked_fill(empty, 0) + divisor.log()).masked_fill(empty, -torch.inf)
    o = 0
    for out, weight, part in zip(outs, weights / divisor, parts):
        o = o + _wide(out).masked_fill((part == -torch.inf)[..., None], 0) * weight[..., None]
    return o, lse


def _check(parts: Sequence[torch.Tensor], bhsd: bool) -> None:
    _merge_shapes.check_number("fattn.merge", len(parts))
    for i, x in enumerate(parts):
        name = _merge_shapes.name_of(i)
        require_dense(name, x)
        if x.dtype not in _DTYPES:
            raise ValueError(f"{name} is a tensor of {x.dtype}; allowed: {', '.join(map(str, _DTYPES))}")
        if x.device != parts[0].device:
            raise ValueError(f"{name} is on {x.device} and o1 on {parts[0].device}; all tensors of a call must be on one device")
    _merge_shapes.check_shapes([tuple(x.shape) for x in parts], bhsd)


def merge(*parts: torch.Tensor, out_dtype: torch.dtype | None = None, layout: str = "bshd") -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over all keys from attention over parts of them, as `fattn.attention(..., return_lse=True)` returns it for each part: o = sum(exp(lse_i - lse) o_i)
    with lse = log(sum(exp(lse_i))). Computed in fp32; differentiable in every o and lse.

    Args:
        parts: o1, lse1, o2, lse2, ... of any number of parts: o (batch, seqlen_q, nheads, headdim_v) and lse (batch, nheads, seqlen_q), or of packed sequences
            (total_q, nheads, headdim_v) and (nheads, total_q). A row of a part whose lse is -inf saw no key there, and counts nothing. Parts in fp32
            (`out_dtype=torch.float32` of `fattn.attention`) are not rounded before they are added.
        out_dtype: of the result's o; None: that of the parts.
        layout: "bshd" as above, or "bhsd": heads before seqlen in o.

    Returns:
        (o, lse); a row that no part sees has o = 0 and lse = -inf. lse is float32 (float64 where a part has it).

    Raises:
        TypeError: the number of tensors is odd, or one is none.
        ValueError: shapes, dtypes or devices do not fit together.
    """
    bhsd = is_bhsd(layout)
    _check(parts, bhsd)
    if out_dtype is not None and not (isinstance(out_dtype, torch.dtype) and out_dtype in _DTYPES):
        raise ValueError(f"out_dtype is {out_dtype!r}; allowed: None, {', '.join(map(str, _DTYPES))}")
    outs, lses = parts[::2], parts[1::2]
    o, lse = merge_rows(outs, lses if bhsd else [x.transpose(-1, -2) for x in lses])
    dtype = out_dtype
    if dtype is None:
        dtype = outs[0].dtype
        for x in outs[1:]:
            dtype = torch.promote_types(dtype, x.dtype)
    return o.to(dtype), lse if bhsd else lse.transpose(-1, -2)
