"""S_dmask: the weights, negative where dropout took them. fattn stores no weights, so they are computed again: attention of the columns of the identity."""

from typing import Any

import torch

from .. import numpy as fattn_numpy
from ._calls import attention, attention_varlen
from ._sequences import sequence_of

_COLUMNS = 128  # of the identity in a call


def _products(call: Any, k: torch.Tensor, place: torch.Tensor, seqlen_k: int) -> torch.Tensor:
    """call(v) for the columns of the identity; place: which key a row of k is, in its sequence."""
    parts = []
    for begin in range(0, seqlen_k, _COLUMNS):
        columns = torch.arange(begin, min(begin + _COLUMNS, seqlen_k), device=k.device)
        v = (place[..., None] == columns).to(k.dtype)[..., None, :]
        parts.append(call(v.expand(*k.shape[:-1], len(columns)).contiguous()))
    return torch.cat(parts, -1) if parts else call(k.new_zeros(*k.shape[:-1], 1))[..., :0]


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.detach() if x.dtype == torch.float64 else x.detach().float()


def _kept(state: torch.Tensor, dropout_p: float, batch: int, nheads: int, seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    seed, offset = state.tolist()
    return torch.from_numpy(fattn_numpy.dropout_mask(seed, offset, dropout_p, (batch, nheads, seqlen_q, seqlen_k))).bool().to(state.device)


def _results(o: torch.Tensor, lse: torch.Tensor, weights: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return o, lse, torch.where(kept, weights, -weights).to(o.dtype)


def with_weights(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """o, lse and S_dmask (batch, nheads, seqlen_q, seqlen_k); as flash_attn has it, S_dmask is empty without dropout."""
    if not dropout_p:
        o, lse = attention(q, k, v, return_lse=True, **options)
        return o, lse, o.new_empty(0)
    o, lse, state = attention(q, k, v, dropout_p=dropout_p, return_lse=True, return_dropout_state=True, **options)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        wide, keys = _wide(q), _wide(k)
        place = torch.arange(k.shape[1], device=k.device).expand(k.shape[:2])
        weights = _products(lambda x: attention(wide, keys, x, **options), keys, place, k.shape[1]).transpose(1, 2)
        return _results(o, lse, weights, _kept(state, dropout_p, *weights.shape))


def with_weights_varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, *, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
                        max_seqlen_q: int, max_seqlen_k: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same of packed sequences, S_dmask (batch, nheads, max_seqlen_q, max_seqlen_k) with zeros behind each sequence."""
    options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    if not dropout_p:
        o, lse = attention_varlen(q, k, v, return_lse=True, **options)
        return o, lse, o.new_empty(0)
    o, lse, state = attention_varlen(q, k, v, dropout_p=dropout_p, return_lse=True, return_dropout_state=True, **options)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        wide, keys = _wide(q), _wide(k)
        place = sequence_of(cu_seqlens_k, k.shape[0])[1]
        products = _products(lambda x: attention_varlen(wide, keys, x, **options), keys, place, max_seqlen_k)
        batch = len(cu_seqlens_q) - 1
        weights = products.new_zeros(batch, max_seqlen_q, *products.shape[1:])
        for b, (begin, end) in enumerate(zip(cu_seqlens_q.tolist(), cu_seqlens_q.tolist()[1:])):
            weights[b, : end - begin] = products[begin:end]
        weights = weights.transpose(1, 2)
        return _results(o, lse, weights, _kept(state, dropout_p, *weights.shape))
