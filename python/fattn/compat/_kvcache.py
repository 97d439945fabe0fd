"""Decoding with a cache as flash_attn 2 and 3 take it: rotary embeddings, new keys written in place, caches found by index, padding on the left."""

from typing import Any

import torch

from .. import _kvcache
from .._refused import can_be_read
from ._calls import PeerError, Window, attention_varlen, detached, peer_error, refuse
from ._rotary import rotate_at
from ._sequences import attention_of, begins as begins_of, sequence_of


_FIRST, _TOGETHER = 1, 2  # FATTN_QUERIES_... of include/fattn/fattn.h: all queries stand with the first new key where nothing says their order


def _as_tensor(length: int | torch.Tensor, batch: int, device: torch.device) -> torch.Tensor:
    return length if isinstance(length, torch.Tensor) else torch.full((batch,), length, dtype=torch.int32, device=device)


def _turned(q: torch.Tensor, k: torch.Tensor, angles: _kvcache.Angles, first: torch.Tensor, by_place: bool, cu_seqlens_q: torch.Tensor | None,
            cu_seqlens_k_new: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """By operations of torch. `first`: (batch), the position of the first new key. Without a causal mask or a window all queries stand there."""
    cos, sin, interleaved = angles

    def positions(x: torch.Tensor, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
        if cu_seqlens is None:
            return first[:, None] + torch.arange(x.shape[1], device=x.device)
        sequence, place = sequence_of(cu_seqlens, x.shape[0])
        return first[sequence] + place

    at = positions(q, cu_seqlens_q)
    if not by_place:
        at = first[:, None].expand(at.shape) if cu_seqlens_q is None else first[sequence_of(cu_seqlens_q, q.shape[0])[0]]
    return rotate_at(q, cos, sin, at.long(), interleaved), rotate_at(k, cos, sin, positions(k, cu_seqlens_k_new).long(), interleaved)


def _on_host(x: torch.Tensor) -> bool:
    """Whether there are numbers that can be looked at."""
    return can_be_read(x) and x.numel() > 0


def _append(caches: list[torch.Tensor], new: list[torch.Tensor], lengths: torch.Tensor, entries: torch.Tensor | None, pages: torch.Tensor | None,
            cu_seqlens_new: torch.Tensor | None) -> torch.Tensor:
    """Writes behind what is there, by operations of torch, and returns the new lengths. `entries`: (batch), which of the caches is each sequence's; or `pages`,
    the table of its pages."""
    if cu_seqlens_new is None:
        sequence = torch.arange(lengths.shape[0], device=lengths.device)[:, None]
        rows, added = lengths.long()[:, None] + torch.arange(new[0].shape[1], device=lengths.device), new[0].shape[1]
    else:
        sequence, place = sequence_of(cu_seqlens_new, new[0].shape[0])
        rows, added = lengths.long()[sequence] + place, cu_seqlens_new.diff()
    for cache, x in zip(caches, new):
        if pages is None:
            cache[entries.long()[sequence], rows] = x
        else:
            size = cache.shape[1]
            cache[pages[sequence, rows // size].long(), rows % size] = x
    return (lengths + added).to(torch.int32)


def _at_once(q: torch.Tensor, caches: list[torch.Tensor], new: list[torch.Tensor], lengths: torch.Tensor, angles: _kvcache.Angles | None, by_place: bool,
             first: torch.Tensor | None, cu_seqlens: tuple[torch.Tensor | None, torch.Tensor | None], entries: torch.Tensor | None,
             pages: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """In one launch or pass: the queries, turned, and the new lengths. `cu_seqlens` of q and of what is new."""
    of_q, of_new = (None if x is None else x.to(torch.int32) for x in cu_seqlens)
    positions, of_q = (None, None) if angles is None else (first, of_q)
    try:
        return _kvcache.append_at_once(q, caches, new, lengths, pages, angles, _FIRST if by_place else _TOGETHER, positions, entries, of_q, of_new)
    except ValueError as error:
        raise peer_error(error) from None


def _in_a_row(x: torch.Tensor) -> bool:
    """Whether its first two dimensions can be one without a copy."""
    return x.shape[0] <= 1 or x.stride(0) == x.shape[1] * x.stride(1)


def with_kvcache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, *,
                 cache_seqlens: int | torch.Tensor | None, cache_batch_idx: torch.Tensor | None = None, cache_leftpad: torch.Tensor | None = None,
                 rotary_cos: torch.Tensor | None = None, rotary_sin: torch.Tensor | None = None, rotary_interleaved: bool = True,
                 rotary_seqlens: torch.Tensor | None = None, cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k_new: torch.Tensor | None = None,
                 max_seqlen_q: int | None = None, pages: torch.Tensor | None = None, causal: bool = False, window: Window | None = None, chunk: int = 0,
                 **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse. No gradient. With `pages`, a table (batch, columns), the caches are (pages, page_size, nheads_k, headdim)."""
    if chunk:
        refuse("attention_chunk beside a cache", "document_q and document_k of fattn.attention say it, with seqused_k")
    if pages is not None and (cache_batch_idx is not None or cache_leftpad is not None):
        raise PeerError("a table of pages is given beside cache_batch_idx or cache_leftpad; index the table, and leave pages of padding out of it")
    with torch.no_grad():
        q, k_cache, v_cache, k, v = detached(q, k_cache, v_cache, k, v)
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        if (k is None) != (v is None):
            raise PeerError("one of k and v is None; give both, or neither")
        if cache_seqlens is None:
            if k is not None:
                raise PeerError("k is given and cache_seqlens is None; say how many keys are in the cache before")
            cache_seqlens = k_cache.shape[1] * (1 if pages is None else pages.shape[1])
        by_place = causal or window is not None
        at_once = k is not None and k.numel() > 0 and not torch.compiler.is_compiling()
        angles = None
        if rotary_cos is not None:
            if k is None:
                raise PeerError("rotary_cos is given and k is None; rotary embeddings are applied where new keys go into the cache: give k and v, or turn q before the "
                                "call")
            if rotary_sin is None:
                raise PeerError("rotary_cos is given and rotary_sin is None; give both")
            angles = _kvcache.Angles(rotary_cos, rotary_sin, rotary_interleaved)
            if not at_once:
                first = _as_tensor(cache_seqlens if rotary_seqlens is None else rotary_seqlens, batch, q.device)
                q, k = _turned(q, k, angles, first, by_place, cu_seqlens_q, cu_seqlens_k_new)
        for name, cache, x in (("k", k_cache, k), ("v", v_cache, v)):
            if x is not None and x.dtype != cache.dtype:
                raise PeerError(f"{name} is {x.dtype} but {name}_cache is {cache.dtype}; convert one of them")
        if pages is None and cache_batch_idx is None:  # sequence b has entry b
            k_cache, v_cache = k_cache[:batch], v_cache[:batch]
        if cache_batch_idx is not None and _on_host(cache_batch_idx) and not 0 <= int(cache_batch_idx.min()) <= int(cache_batch_idx.max()) < k_cache.shape[0]:
            raise PeerError(f"cache_batch_idx has {cache_batch_idx.tolist()}; allowed: 0 to {k_cache.shape[0] - 1}, the entries of k_cache")
        if at_once:
            q, cache_seqlens = _at_once(q, [k_cache, v_cache], [k, v], _as_tensor(cache_seqlens, batch, q.device), angles, by_place, rotary_seqlens,
                                        (cu_seqlens_q, cu_seqlens_k_new), cache_batch_idx, pages)
            k = v = None
        if pages is None and cache_batch_idx is None and cache_leftpad is None and cu_seqlens_q is None and cu_seqlens_k_new is None:
            return _kvcache.with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=cache_seqlens, causal=causal, window=window, return_lse=True,
                                         **options)
        lengths = _as_tensor(cache_seqlens, batch, q.device)
        if pages is not None:
            if k is not None:
                lengths = _append([k_cache, v_cache], [k, v], lengths, None, pages, cu_seqlens_k_new)
            return attention_of(q, k_cache, v_cache, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, seqused_k=lengths, pages=pages, causal=causal,
                                window=window, **options)
        entries = torch.arange(batch, device=q.device) if cache_batch_idx is None else cache_batch_idx
        if k is not None:
            lengths = _append([k_cache, v_cache], [k, v], lengths, entries, None, cu_seqlens_k_new)
        if not (_in_a_row(k_cache) and _in_a_row(v_cache)):
            k_cache, v_cache, entries = k_cache[entries.long()], v_cache[entries.long()], torch.arange(batch, device=q.device)
        longest = k_cache.shape[1]
        begins, used = entries.long() * longest, lengths
        if cache_leftpad is not None:
            begins, used = begins + cache_leftpad, lengths - cache_leftpad
        padded = None
        if cu_seqlens_q is None:
            padded = q.shape[:2]
            cu_seqlens_q, max_seqlen_q, q = begins_of(*padded, q.device), padded[1], q.flatten(0, 1)
        # Where each sequence begins, in any order; the last number is not looked at.
        begins = torch.cat((begins, begins.new_full((1,), k_cache.shape[0] * longest)))
        o, lse = attention_varlen(q, k_cache.flatten(0, 1), v_cache.flatten(0, 1), cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=begins, max_seqlen_q=max_seqlen_q,
                                  max_seqlen_k=longest, seqused_k=used, causal=causal, window=window, return_lse=True, **options)
        return (o, lse) if padded is None else (o.unflatten(0, padded), lse.unflatten(1, padded).transpose(0, 1))
