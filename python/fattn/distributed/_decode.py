"""Decode over a cache whose keys are spread over ranks: each attends to its part, and one merge makes them one."""

from typing import Any

import torch
import torch.distributed as distributed

from .._attention import attention
from .._core import autocast
from .._options import flag
from ._blocks import join_sinks, merge_into
from ._compute import accumulator
from ._ranks import ranks_of


@torch.no_grad()
def decode_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Any = None, *, softmax_scale: float | None = None, softcap: float | None = None,
                     seqused_k: torch.Tensor | None = None, block_table: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
                     return_lse: bool = False, backend: str = "auto", algorithm: str = "auto") -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Queries that every rank has, on keys of which each rank has some: all queries see all keys, as the next token's does. One exchange of o and lse, whose
    size does not depend on the number of keys. Without gradients.

    Args:
        q: (batch, seqlen_q, nheads, headdim), the same on every rank.
        k, v: (batch, keys of this rank, nheads_k, headdim or headdim_v), in any order, as many as you like; with block_table a paged cache.
        group: as in `ring_attention`.
        seqused_k: (batch): how many of this rank's keys an entry has.
        block_table, softmax_scale, softcap, sinks, backend, algorithm: as in `fattn.attention`; sinks on every rank the same.

    Returns:
        o, and with `return_lse` lse, as `fattn.attention` of all keys, on every rank the same bits.
    """
    return_lse = flag("return_lse", return_lse)
    ranks = ranks_of(group)
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = autocast(q.device.type, q, k, v)
    kind = accumulator(q.dtype)
    o, lse = attention(q, k, v, softmax_scale=softmax_scale, softcap=softcap, seqused_k=seqused_k, block_table=block_table, out_dtype=kind, return_lse=True,
                       backend=backend, algorithm=algorithm)
    mine = torch.cat([o.to(kind), lse.transpose(1, 2).unsqueeze(3).to(kind)], 3)
    parts = [torch.empty_like(mine) for _ in range(ranks.count)]
    distributed.all_gather(parts, mine.contiguous(), group=ranks.group)
    whole, whole_lse = parts[0][..., :-1].contiguous(), parts[0][..., -1].transpose(1, 2).double()
    for part in parts[1:]:
        merge_into(whole, whole_lse, part[..., :-1], part[..., -1].transpose(1, 2))
    if sinks is not None:
        join_sinks(sinks, whole, whole_lse)
    return (whole.to(q.dtype), whole_lse.to(lse.dtype)) if return_lse else whole.to(q.dtype)
