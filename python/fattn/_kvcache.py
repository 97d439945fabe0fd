"""Decoding: new keys and values go into a cache, in place, and the queries see what is in it."""

import operator
import re
from typing import Any, NamedTuple

import torch

from . import _operators
from ._attention import attention
from ._errors import exception_of_operator
from ._operators import rows_contiguous
from ._options import is_bhsd
from ._refused import can_be_read, require_dense
from ._rotary import rotary


_OF_CACHES = re.compile(r"\b([kv])\b")
_OF_ANGLES = re.compile(r"\b(cos|sin)\b")


def _check(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None) -> None:
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v)):
        if x is None and name in ("k", "v"):
            continue
        require_dense(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name} has {x.dim()} dimensions; allowed: 4 (batch, seqlen, heads, headdim). Add a dimension of 1 where one is missing")
        if torch.is_grad_enabled() and x.requires_grad:
            raise NotImplementedError(f"{name} asks for a gradient; a cache that is written in place has none. Call with_kvcache in torch.inference_mode(), or "
                                      "fattn.attention, which has gradients")
    if (k is None) != (v is None):
        raise ValueError(f"{'k' if k is None else 'v'} is None and {'v' if k is None else 'k'} is not; give both, or neither")


def _check_new(cache: torch.Tensor, new: torch.Tensor, name: str, batch: int, source: str = "") -> None:
    """Both (batch or pages, seqlen, heads, headdim). `source`: what says the batch if the cache does not."""
    if new.shape[0] != batch or new.shape[2:] != cache.shape[2:]:
        raise ValueError(f"{name} has batch {new.shape[0]}, heads {new.shape[2]} and headdim {new.shape[3]}; expected {batch}, {cache.shape[2]} and "
                         f"{cache.shape[3]}, from {source}{name}_cache")
    if new.dtype != cache.dtype:
        raise ValueError(f"{name} is {new.dtype} but {name}_cache is {cache.dtype}; convert one of them")


def _reaches_twice(x: torch.Tensor) -> bool:
    """Whether one element has two indices, as in an expanded view. May say yes for strides that no library makes. Inside torch.compile, where sizes may be symbols,
    expanded views alone are looked for."""
    if torch.compiler.is_compiling():  # which cannot sort symbols
        return any(stride == 0 and n > 1 for stride, n in zip(x.stride(), x.shape))
    reach = 0
    for stride, n in sorted((s, n) for s, n in zip(x.stride(), x.shape) if n > 1):
        if stride <= reach:
            return True
        reach += (n - 1) * stride
    return False


def _reached(delta: int, dims: list[tuple[int, int, int]]) -> bool:
    """Whether elements at this distance belong to both of two tensors: dims (stride, elements of the one, of the other), the largest stride first."""
    if not dims:
        return delta == 0
    stride, n, m = dims[0]
    return any(-m < i < n and _reached(delta - i * stride, dims[1:]) for i in (delta // stride, delta // stride + 1))


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Of two caches that reach nothing twice. Views of one tensor that lie between each other share none."""
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    begins = [x.storage_offset() * x.element_size() for x in (a, b)]
    ends = [begin + x.element_size() * (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride()))) for begin, x in zip(begins, (a, b))]
    if 0 in (a.numel(), b.numel()) or ends[0] <= begins[1] or ends[1] <= begins[0]:
        return False
    if a.dtype != b.dtype or any(s != t for s, t, n, m in zip(a.stride(), b.stride(), a.shape, b.shape) if n > 1 and m > 1):
        return True
    dims = sorted(((s if n > 1 else t, n, m) for s, t, n, m in zip(a.stride(), b.stride(), a.shape, b.shape) if n > 1 or m > 1), reverse=True)
    return _reached(b.storage_offset() - a.storage_offset(), dims)


def _have_memory(*tensors: torch.Tensor) -> bool:
    return not torch.compiler.is_compiling() and all(x.is_cuda or can_be_read(x) for x in tensors)


def _require_own_memory(k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if _reaches_twice(x):
            raise ValueError(f"{name} with the shape {tuple(x.shape)} and the strides {x.stride()} reaches one element by two indices (an expanded view?), which "
                             "would be written over each other; give a tensor of its own memory, .contiguous()")
    if _have_memory(k_cache, v_cache) and _share_memory(k_cache, v_cache):
        raise ValueError("k_cache and v_cache share memory, which would be written over each other; give two tensors")


def _append(caches: list[torch.Tensor], new: list[torch.Tensor], lengths: torch.Tensor | int) -> None:
    """By operations of torch, which torch.compile makes kernels of. The host learns nothing of lengths in a tensor."""
    seqlen_new = new[0].shape[1]
    if isinstance(lengths, int):
        for cache, x in zip(caches, new):
            cache[:, lengths : lengths + seqlen_new] = x
        return
    rows = lengths.to(torch.int64)[:, None]
    if seqlen_new != 1:
        rows = rows + torch.arange(seqlen_new, device=lengths.device)
    if lengths.is_cuda:  # one kernel for a cache
        for cache, x in zip(caches, new):
            cache.scatter_(1, rows[:, :, None, None].expand(x.shape), x)
    else:  # a thousand times as fast there as scatter_
        batch = torch.arange(lengths.shape[0], device=lengths.device)[:, None]
        for cache, x in zip(caches, new):
            cache[batch, rows] = x


def _append_to_pages(caches: list[torch.Tensor], new: list[torch.Tensor], lengths: torch.Tensor, table: torch.Tensor) -> None:
    """Likewise, to the pages that the table (batch, columns) says."""
    size = caches[0].shape[1]
    rows = lengths.to(torch.int64)[:, None] + torch.arange(new[0].shape[1], device=lengths.device)
    pages = table.to(torch.int64).gather(1, rows // size)
    # An index below 0 counts from the end: it would write over another sequence's page. One behind the last page is an error on every device.
    pages = pages.masked_fill(pages < 0, max(len(x) for x in caches))
    for cache, x in zip(caches, new):
        cache[pages, rows % size] = x


class Angles(NamedTuple):
    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool


def append_at_once(q: torch.Tensor | None, caches: list[torch.Tensor], new: list[torch.Tensor], cache_seqlens: int | torch.Tensor, table: torch.Tensor | None,
                   angles: Angles | None, *more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch on a GPU, one pass on a CPU: the queries, which turn with the new keys, and the lengths afterwards, if cache_seqlens is a tensor. All tensors
    (batch, seqlen, heads, headdim). `more`: as the operator has them behind `interleaved`."""
    wide = new[0].dtype == torch.float64
    allowed = (torch.float64,) if wide else (torch.float32, torch.float16, torch.bfloat16)
    cos, sin = (None, None) if angles is None else (rows_contiguous(x if x.dtype in allowed else x.double() if wide else x.float()) for x in angles[:2])
    number, lengths = (0, cache_seqlens) if isinstance(cache_seqlens, torch.Tensor) else (cache_seqlens, None)
    queries = None if angles is None or q is None else rows_contiguous(q)
    try:
        turned, used = _operators.append_at_once(*map(rows_contiguous, new), *caches, number, lengths, table, queries, cos, sin,
                                                 angles is not None and angles.interleaved, *more)
    except RuntimeError as error:
        raised = exception_of_operator(error)
        raise type(raised)(_OF_ANGLES.sub(r"rotary_\1", str(raised)).replace("cache_seqlen is", "cache_seqlens is")) from None
    return q if queries is None else turned, used


def _turn_and_append(q: torch.Tensor, caches: list[torch.Tensor], new: list[torch.Tensor], cache_seqlens: int | torch.Tensor, table: torch.Tensor | None,
                     angles: Angles | None, bhsd: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """append_at_once with q in its layout."""
    turned, used = append_at_once(q.transpose(1, 2) if bhsd else q, caches, new, cache_seqlens, table, angles)
    return turned.transpose(1, 2) if bhsd else turned, used


def _of_pages(q: torch.Tensor, caches: list[torch.Tensor], new: list[torch.Tensor], cache_seqlens: int | torch.Tensor, angles: Angles | None, at_once: bool,
              layout: str, options: dict[str, Any]) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
    """Of a paged cache; `caches` and `new` as (pages or batch, rows, heads, headdim). `angles` where all is done `at_once`."""
    table = options["block_table"]
    if not isinstance(cache_seqlens, torch.Tensor):
        if not 0 <= cache_seqlens < 2**31:
            raise ValueError(f"cache_seqlens is {cache_seqlens}; allowed: 0 to {2**31 - 1}, how many keys each sequence has")
        cache_seqlens = torch.full(q.shape[:1], cache_seqlens, dtype=torch.int32, device=q.device)
    if new and new[0].shape[1]:
        if not isinstance(table, torch.Tensor) or table.dim() != 2 or table.dtype not in (torch.int32, torch.int64) or len(table) != len(q):
            what = f"a tensor of {table.dtype} with the shape {tuple(table.shape)}" if isinstance(table, torch.Tensor) else f"a {type(table).__name__}"
            raise ValueError(f"block_table is {what}; allowed: a tensor of int32 or int64, (batch, columns) with batch {len(q)}, from q")
        if cache_seqlens.shape != q.shape[:1] or cache_seqlens.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"cache_seqlens is a tensor of {cache_seqlens.dtype} with the shape {tuple(cache_seqlens.shape)}; allowed: int32 or int64, ({len(q)}), "
                             "from q's batch")
        for name, cache, x in zip("kv", caches, new):
            _check_new(cache, x, name, len(q), "q and ")
            for what, t in (("cache_seqlens", cache_seqlens), ("block_table", table), (name, x)):
                if t.device != cache.device:
                    raise ValueError(f"{what} is on {t.device} and {name}_cache on {cache.device}; move it there")
        if not 0 < caches[0].shape[1] == caches[1].shape[1]:
            raise ValueError(f"k_cache has pages of {caches[0].shape[1]} keys and v_cache of {caches[1].shape[1]}; they must have the same, at least 1")
        with torch.no_grad():
            if at_once:  # which looks at the memory of its outputs itself
                pages = min(len(x) for x in caches)
                own = [x if len(x) == pages else x[:pages] for x in caches]
                q, cache_seqlens = _turn_and_append(q, own, new, cache_seqlens, table, angles, is_bhsd(layout))
            else:
                _require_own_memory(*caches)
                _append_to_pages(caches, new, cache_seqlens, table)
                cache_seqlens = (cache_seqlens + new[0].shape[1]).to(torch.int32)
    k_cache, v_cache = (x.transpose(1, 2) for x in caches) if is_bhsd(layout) else caches
    try:
        return attention(q, k_cache, v_cache, layout=layout, seqused_k=cache_seqlens, **options)
    except (ValueError, NotImplementedError) as error:
        raise type(error)(_OF_CACHES.sub(r"\1_cache", str(error)).replace("seqused_k", "cache_seqlens")) from None


def _turned(q: torch.Tensor, new: list[torch.Tensor], angles: Angles, cache_seqlens: int | torch.Tensor, bhsd: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """By operations of torch. `new` as (batch, seqlen_new, nheads_k, headdim)."""
    cos, sin, interleaved = angles
    queries = q.transpose(1, 2) if bhsd else q
    seqlen_new = new[0].shape[1] if new else 0
    with torch.no_grad():
        try:
            queries = rotary(queries, cos, sin, interleaved=interleaved, offsets=cache_seqlens + (seqlen_new - queries.shape[1]))
            if new:
                new = [rotary(new[0], cos, sin, interleaved=interleaved, offsets=cache_seqlens), new[1]]
        except ValueError as error:
            raise ValueError(f"rotary_cos: {str(error).replace('offsets', 'cache_seqlens')}") from None
    return queries.transpose(1, 2) if bhsd else queries, new


def with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    cache_seqlens: int | torch.Tensor,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    rotary_interleaved: bool = False,
    layout: str = "bshd",
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
    """Writes k and v into the caches behind what is there, in place, then computes attention of q with all of it. No gradients.

    Args:
        q: (batch, seqlen_q, nheads, headdim), the new queries; with `causal` the last of them is the last token of its sequence.
        k_cache, v_cache: (batch, longest, nheads_k, headdim or headdim_v), contiguous in the last dimension; what lies behind the lengths is not looked at.
        k, v: (batch, seqlen_new, nheads_k, ...), the new keys and values, in the dtype of the caches; None: the caches are read only.
        cache_seqlens: how many keys are in the caches before the call: a number for all, or a tensor (batch) of int32 or int64, which stays as it is (add
            seqlen_new for the next call). Each plus seqlen_new must be at most `longest`; on a GPU tensors are not looked at for this, but nothing is written
            where there is no room, and o of the sequence is NaN (in torch.compile torch's own check of indices stops the device).
        rotary_cos, rotary_sin, rotary_interleaved: turn q and k on the way, as `fattn.rotary` does: a new key by its place in the cache, the last query by
            that of the last key. The caches have turned keys then.
        layout: "bshd" as above, or "bhsd".
        options: those of `fattn.attention` but seqused_k: causal, softmax_scale, window, softcap, alibi_slopes, bias, mask, sinks, return_lse, ...;
            with block_table, (batch, columns), the caches are (pages, page_size, nheads_k, ...), and new keys are written to the pages that it says. No two may
            have one place: where the host knows the table that is an error.

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
    if isinstance(cache_seqlens, torch.Tensor):
        require_dense("cache_seqlens", cache_seqlens)
    elif not isinstance(cache_seqlens, int):  # NumPy's, say
        try:
            cache_seqlens = operator.index(cache_seqlens)
        except TypeError:
            raise TypeError(f"cache_seqlens is a {type(cache_seqlens).__name__}; it must be an int or a torch.Tensor") from None
    angles = None
    if rotary_cos is not None or rotary_sin is not None:
        if rotary_cos is None or rotary_sin is None:
            raise ValueError(f"rotary_{'cos' if rotary_cos is None else 'sin'} is None, and the other is not; give both")
        for name, x in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
            require_dense(name, x)
        angles = Angles(rotary_cos, rotary_sin, rotary_interleaved)
    sliced = angles is None and options.get("block_table") is None and isinstance(cache_seqlens, int) and not k_cache.is_cuda  # a copy each, which costs less
    at_once = len(new) > 0 and new[0].shape[1] > 0 and not sliced and not torch.compiler.is_compiling()
    if angles is not None and not at_once:
        q, new = _turned(q, new, angles, cache_seqlens, bhsd)
    if options.get("block_table") is not None:
        return _of_pages(q, caches, new, cache_seqlens, angles, at_once, layout, options)
    seqlen_new, longest = new[0].shape[1] if new else 0, min(x.shape[1] for x in caches)
    if isinstance(cache_seqlens, torch.Tensor):
        if cache_seqlens.dtype not in (torch.int32, torch.int64) or cache_seqlens.shape != k_cache.shape[:1]:
            raise ValueError(f"cache_seqlens is a tensor of {cache_seqlens.dtype} with the shape {tuple(cache_seqlens.shape)}; allowed: int32 or int64, "
                             f"({k_cache.shape[0]}), from k_cache's batch")
        if cache_seqlens.device != k_cache.device:
            raise ValueError(f"cache_seqlens is on {cache_seqlens.device} and k_cache on {k_cache.device}; give a number, or move it there")
        known = cache_seqlens.tolist() if can_be_read(cache_seqlens) else []
    else:
        known = [cache_seqlens]
    for n in known:
        if not 0 <= n <= longest - seqlen_new:
            raise ValueError(f"cache_seqlens has {n}, and {seqlen_new} keys are new; allowed: 0 to {longest - seqlen_new}, for the caches have room for {longest}")
    for cache, x, name in zip(caches, new, ("k", "v")):
        _check_new(cache, x, name, len(cache))
    if not torch.is_autocast_enabled("cuda" if q.is_cuda else "cpu"):
        for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
            if x.dtype != q.dtype:
                raise ValueError(f"{name} is {x.dtype} but q is {q.dtype}; all tensors of a call share one dtype. Convert q, or keep the caches in its dtype")
    with torch.no_grad():
        used = None
        if at_once:  # which looks at the memory of its outputs itself
            if caches[0].shape[1] != caches[1].shape[1]:
                caches = [x[:, :longest] for x in caches]
            q, used = _turn_and_append(q, caches, new, cache_seqlens, None, angles, bhsd)
        elif seqlen_new:
            _require_own_memory(*caches)
            _append(caches, new, cache_seqlens)
        if isinstance(cache_seqlens, int):
            end = cache_seqlens + seqlen_new
            k_cache, v_cache = (x[:, :, :end] if bhsd else x[:, :end] for x in (k_cache, v_cache))
        else:
            options["seqused_k"] = used if at_once else (cache_seqlens + seqlen_new).to(torch.int32) if seqlen_new else cache_seqlens
        try:
            return attention(q, k_cache, v_cache, layout=layout, **options)
        except (ValueError, NotImplementedError) as error:  # which name what attention takes for the caches
            raise type(error)(_OF_CACHES.sub(r"\1_cache", str(error)).replace("seqused_k", "cache_seqlens")) from None
