"""Decoding: new keys and values go into a cache, in place, and the queries see what is in it."""

import operator
from typing import Any

import torch

from ._attention import attention
from ._options import is_bhsd


def _check(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None) -> None:
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v)):
        if x is None and name in ("k", "v"):
            continue
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor")
        if x.dim() != 4:
            raise ValueError(f"{name} has {x.dim()} dimensions; allowed: 4 (batch, seqlen, heads, headdim). Add a dimension of 1 where one is missing")
        if torch.is_grad_enabled() and x.requires_grad:
            raise NotImplementedError(f"{name} asks for a gradient; a cache that is written in place has none. Call with_kvcache in torch.inference_mode(), or "
                                      "fattn.attention, which has gradients")
    if (k is None) != (v is None):
        raise ValueError(f"{'k' if k is None else 'v'} is None and {'v' if k is None else 'k'} is not; give both, or neither")


def _check_new(cache: torch.Tensor, new: torch.Tensor, name: str) -> None:
    """Both (batch, seqlen, heads, headdim)."""
    if new.shape[0] != cache.shape[0] or new.shape[2:] != cache.shape[2:]:
        raise ValueError(f"{name} has batch {new.shape[0]}, heads {new.shape[2]} and headdim {new.shape[3]}; expected {cache.shape[0]}, {cache.shape[2]} and "
                         f"{cache.shape[3]}, from {name}_cache")
    if new.dtype != cache.dtype:
        raise ValueError(f"{name} is {new.dtype} but {name}_cache is {cache.dtype}; convert one of them")


def _append(caches: list[torch.Tensor], new: list[torch.Tensor], lengths: torch.Tensor | int, known: list[int]) -> None:
    """`known`: the lengths as the host has them, one if it is that of all; empty where they are on a device, or anywhere in torch.compile."""
    seqlen_new = new[0].shape[1]
    if len(known) == 1:  # a slice costs a tenth of what indices do
        for cache, x in zip(caches, new):
            cache[:, known[0] : known[0] + seqlen_new] = x
        return
    rows = lengths.to(torch.int64)[:, None]  # the host learns nothing of them, so that a CUDA graph can hold it
    if seqlen_new != 1:
        rows = rows + torch.arange(seqlen_new, device=lengths.device)
    if lengths.is_cuda:  # one kernel for a cache
        for cache, x in zip(caches, new):
            cache.scatter_(1, rows[:, :, None, None].expand(x.shape), x)
    else:  # a thousand times as fast there as scatter_
        batch = torch.arange(lengths.shape[0])[:, None]
        for cache, x in zip(caches, new):
            cache[batch, rows] = x


def with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    cache_seqlens: int | torch.Tensor,
    layout: str = "bshd",
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
    """Writes k and v into the caches behind what is there, in place, then computes attention of q with all of it. No gradients.

    Args:
        q: (batch, seqlen_q, nheads, headdim), the new queries; with `causal` the last of them is the last token of its sequence.
        k_cache, v_cache: (batch, longest, nheads_k, headdim or headdim_v), contiguous in the last dimension; what lies behind the lengths is not looked at.
        k, v: (batch, seqlen_new, nheads_k, ...), the new keys and values, in the dtype of the caches; None: the caches are read only.
        cache_seqlens: how many keys are in the caches before the call: a number for all, or a tensor (batch) of int32 or int64, which stays as it is (add
            seqlen_new for the next call). Each plus seqlen_new must be at most `longest`; on a GPU tensors are not looked at for this, torch's own
            check of indices stops the device.
        layout: "bshd" as above, or "bhsd".
        options: those of `fattn.attention` but seqused_k: causal, softmax_scale, window, softcap, alibi_slopes, bias, mask, sinks, return_lse, ...

    Returns:
        As `fattn.attention`.

    Raises:
        As `fattn.attention`; NotImplementedError too where a tensor asks for a gradient.
    """
    _check(q, k_cache, v_cache, k, v)
    if "seqused_k" in options:
        raise TypeError("with_kvcache has no seqused_k: cache_seqlens and the length of k say how many keys there are")
    bhsd = is_bhsd(layout)
    caches = [x.transpose(1, 2) if bhsd else x for x in (k_cache, v_cache)]
    new = [] if k is None else [x.transpose(1, 2) if bhsd else x for x in (k, v)]
    if new and new[0].shape[1] != new[1].shape[1]:
        raise ValueError(f"k has {new[0].shape[1]} new tokens and v {new[1].shape[1]}; they must have the same")
    seqlen_new, longest = new[0].shape[1] if new else 0, min(x.shape[1] for x in caches)
    if isinstance(cache_seqlens, torch.Tensor):
        if cache_seqlens.dtype not in (torch.int32, torch.int64) or cache_seqlens.shape != k_cache.shape[:1]:
            raise ValueError(f"cache_seqlens is a tensor of {cache_seqlens.dtype} with the shape {tuple(cache_seqlens.shape)}; allowed: int32 or int64, "
                             f"({k_cache.shape[0]}), from k_cache's batch")
        if cache_seqlens.device != k_cache.device:
            raise ValueError(f"cache_seqlens is on {cache_seqlens.device} and k_cache on {k_cache.device}; give a number, or move it there")
        known = [] if cache_seqlens.is_cuda or torch.compiler.is_compiling() else cache_seqlens.tolist()
    else:
        if not isinstance(cache_seqlens, int):  # NumPy's, say
            try:
                cache_seqlens = operator.index(cache_seqlens)
            except TypeError:
                raise TypeError(f"cache_seqlens is a {type(cache_seqlens).__name__}; it must be an int or a torch.Tensor") from None
        known = [cache_seqlens]
    for n in known:
        if not 0 <= n <= longest - seqlen_new:
            raise ValueError(f"cache_seqlens has {n}, and {seqlen_new} keys are new; allowed: 0 to {longest - seqlen_new}, for the caches have room for {longest}")
    for cache, x, name in zip(caches, new, ("k", "v")):
        _check_new(cache, x, name)
    with torch.no_grad():
        if seqlen_new:
            _append(caches, new, cache_seqlens, known)
        if isinstance(cache_seqlens, int):
            end = cache_seqlens + seqlen_new
            k_cache, v_cache = (x[:, :, :end] if bhsd else x[:, :end] for x in (k_cache, v_cache))
        else:
            seqused_k = cache_seqlens + seqlen_new
            options["seqused_k"] = seqused_k.to(torch.int32) if seqlen_new else seqused_k  # nothing was written where it does not fit
        return attention(q, k_cache, v_cache, layout=layout, **options)
