"""Partial results over disjoint keys to one: each weighted by its share of the sum of exponentials."""

import torch


def combined(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """outs (parts, ..., headdim), lses (parts, ...). A row that no part sees has o = 0 and lse = -inf."""
    outs, lses = outs.float() if outs.dtype != torch.float64 else outs, lses.float() if lses.dtype != torch.float64 else lses
    lse = lses.logsumexp(0)
    # -inf beside -inf would be NaN, in the gradient too.
    shares = (lses - lse.masked_fill(lse == -torch.inf, 0)).exp()
    return (outs.masked_fill((lses == -torch.inf)[..., None], 0) * shares[..., None]).sum(0), lse
