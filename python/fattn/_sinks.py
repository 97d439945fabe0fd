"""Attention sinks: a logit of each head in the softmax's denominator that stands for no key. With l = lse - sink, every weight is the one without the sink
times exp(lse) / (exp(lse) + exp(sink)) = sigmoid(l), and so is o. A row that sees no key has lse = -inf and o = 0, whatever the sink: where that is -inf too,
l is no number, which must show neither in o nor in a gradient."""

import torch

from ._refused import require_dense


def join(o: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor, bhsd: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse (batch, nheads, seqlen_q), or of packed sequences (nheads, total_q), with sinks (nheads), from those without."""
    require_dense("sinks", sinks, " or None")
    if sinks.shape != lse.shape[-2:-1] or not sinks.is_floating_point():
        raise ValueError(f"sinks is a tensor of {sinks.dtype} with the shape {tuple(sinks.shape)}; allowed: floating point, ({lse.shape[-2]}), one number a head")
    sinks = sinks.to(lse.dtype)[:, None]
    empty = lse == float("-inf")
    factor = torch.sigmoid((lse - sinks).masked_fill(empty, float("-inf")))[..., None]
    o = (o * (factor if bhsd else factor.transpose(-3, -2))).to(o.dtype)
    sinks = sinks.expand_as(lse)
    return o, torch.where(empty, sinks, torch.logaddexp(lse.masked_fill(empty, 0), sinks))
