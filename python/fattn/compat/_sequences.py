"""Sequences as flash_attn 3 and 4 take them: packed or padded on either side, with lengths that are used; windows whose limits are negative, and chunks."""

from typing import Any

import torch

from .._rotary import sequence_of
from ._calls import PeerError, Window, attention, attention_varlen, refuse


def begins(batch: int, seqlen: int, device: torch.device) -> torch.Tensor:
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * seqlen


def _column(length: Any) -> Any:
    return length[:, None, None, None] if isinstance(length, torch.Tensor) else length


def band(device: torch.device, seqlen_q: int, seqlen_k: int, length_q: Any, length_k: Any, left: int | None, right: int | None) -> torch.Tensor:
    """The mask of a window whose limits may be negative: a query sees the keys that are -left to right away from it, aligned to the bottom right. Lengths are
    numbers or tensors (batch)."""
    distance = torch.arange(seqlen_k, device=device) - torch.arange(seqlen_q, device=device)[:, None]
    distance = distance[None, None] - (_column(length_k) - _column(length_q))
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return seen


def _chunks_of_padded(q: torch.Tensor, k: torch.Tensor, seqused_k: torch.Tensor | None, chunk: int) -> dict[str, torch.Tensor]:
    length = k.shape[1] if seqused_k is None else seqused_k[:, None]
    place = torch.arange(q.shape[1], device=q.device) + (length - q.shape[1])
    ids = torch.div(place, chunk, rounding_mode="floor").to(torch.int32).expand(q.shape[:2])
    return {"document_q": ids, "document_k": (torch.arange(k.shape[1], device=k.device, dtype=torch.int32) // chunk).expand(k.shape[:2])}


def _chunks_of_packed(q: torch.Tensor, k: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, chunk: int) -> dict[str, torch.Tensor]:
    sequence, place = sequence_of(cu_q, q.shape[0])
    place = place + (cu_k.diff() - cu_q.diff())[sequence]
    keys = sequence_of(cu_k, k.shape[0])[1]
    return {name: torch.div(x, chunk, rounding_mode="floor").to(torch.int32) for name, x in (("document_q", place), ("document_k", keys))}


def _needs_mask(window: Window | None) -> bool:
    return window is not None and any(limit is not None and limit < 0 for limit in window)


def attention_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k: torch.Tensor | None = None,
                 max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, seqused_q: torch.Tensor | None = None,
                 seqused_k: torch.Tensor | None = None, pages: torch.Tensor | None = None, causal: bool = False, window: Window | None = None, chunk: int = 0,
                 **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse in the order of q's rows. `window`: None for no limit, else the numbers as they are, also negative ones. Rows of q that are not used are 0.
    With `pages`, a table (batch, columns), k and v are (pages, page_size, nheads_k, headdim), and seqused_k has the lengths; no gradient."""
    if pages is not None:
        if seqused_k is None:
            raise PeerError("a table of pages is given and seqused_k is None; say how many keys each sequence has")
        if chunk:
            refuse("attention_chunk beside pages", "document_q and document_k of fattn.attention say it")
        options["block_table"] = pages
    if cu_seqlens_q is None and cu_seqlens_k is None and seqused_q is None:
        if _needs_mask(window):
            left, right = window
            rows_k = k.shape[1] * (1 if pages is None else pages.shape[1])
            options["mask"] = band(q.device, q.shape[1], rows_k, q.shape[1], k.shape[1] if seqused_k is None else seqused_k, left, 0 if causal else right)
            window = None
        if chunk:
            options |= _chunks_of_padded(q, k, seqused_k, chunk)
        return attention(q, k, v, causal=causal, window=window, seqused_k=seqused_k, return_lse=True, **options)

    padded = None
    if cu_seqlens_q is None:
        padded = q.shape[:2]
        cu_seqlens_q, max_seqlen_q, q = begins(*padded, q.device), padded[1], q.flatten(0, 1)
    if pages is not None:
        cu_seqlens_k = max_seqlen_k = None
    elif cu_seqlens_k is None:
        cu_seqlens_k, max_seqlen_k, k, v = begins(*k.shape[:2], k.device), k.shape[1], k.flatten(0, 1), v.flatten(0, 1)
    if pages is None and cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise PeerError(f"q has {cu_seqlens_q.shape[0] - 1} sequences and k has {cu_seqlens_k.shape[0] - 1}; they must have the same")
    rows, total = None, q.shape[0]
    if seqused_q is not None:
        sequence, place = sequence_of(cu_seqlens_q, total)
        rows = ((place < seqused_q[sequence]) & (place < cu_seqlens_q.diff()[sequence])).nonzero()[:, 0]
        q, cu_seqlens_q = q[rows], torch.nn.functional.pad(seqused_q.cumsum(0), (1, 0)).to(torch.int32)
    if _needs_mask(window):
        left, right = window
        lengths_q, lengths_k = cu_seqlens_q.diff(), cu_seqlens_k.diff() if seqused_k is None else seqused_k
        max_seqlen_q = int(lengths_q.max()) if max_seqlen_q is None else max_seqlen_q
        if pages is not None:
            rows_k = k.shape[1] * pages.shape[1]
        else:
            rows_k = max_seqlen_k = int(lengths_k.max()) if max_seqlen_k is None else max_seqlen_k
        options["mask"] = band(q.device, max_seqlen_q, rows_k, lengths_q, lengths_k, left, 0 if causal else right)
        window = None
    if chunk:
        if seqused_k is not None:
            refuse("attention_chunk beside seqused_k of packed or padded sequences", "give cu_seqlens_k of the keys that are used")
        options |= _chunks_of_packed(q, k, cu_seqlens_q, cu_seqlens_k, chunk)
    o, lse = attention_varlen(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
                              seqused_k=seqused_k, causal=causal, window=window, return_lse=True, **options)
    if rows is not None:
        o = o.new_zeros(total, *o.shape[1:]).index_copy(0, rows, o)
        lse = lse.new_full((lse.shape[0], total), -torch.inf).index_copy(1, rows, lse)
    if padded is not None:
        o, lse = o.unflatten(0, padded), lse.unflatten(1, padded).transpose(0, 1)
    return o, lse
