"""fattn.attention on DTensors of torch.distributed.tensor: each rank computes its shards by batch and heads, which need nothing of each other."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ._refused import is_dtensor

# Of each option that is a tensor: its dimension that is the batch, and the one that is heads; None: it has none. Numbers below 0 count from the end.
_DIMENSIONS: dict[str, tuple[int | None, int | None]] = {
    "seqused_k": (0, None),
    "alibi_slopes": (-2, -1),
    "bias": (-4, -3),
    "mask": (-4, -3),
    "document_q": (0, None),
    "document_k": (0, None),
    "sinks": (None, 0),
    "block_table": (0, None),
    "cu_seqlens_q": (None, None),
    "cu_seqlens_k": (None, None),
}
_BROADCAST = ("bias", "mask")
_HAS_HEADS_OF_ITS_OWN = ("k", "v")
_BATCH, _HEADS = "batch", "heads"


class _Call(NamedTuple):
    """Of the tensor q of a call: its mesh, and for each dimension of the mesh what q is split by there, or None."""

    q: Any
    heads: int  # the dimension
    splits: tuple[str | None, ...]


def _splits(q: Any, heads: int, packed: bool) -> tuple[str | None, ...]:
    splits: list[str | None] = []
    for i, placement in enumerate(q.placements):
        by_batch, by_heads = placement.is_shard(0) and not packed, placement.is_shard(heads)
        if not (placement.is_replicate() or by_batch or by_heads):
            allowed = f"Shard({heads}), by heads" if packed else f"Shard(0), by batch, Shard({heads}), by heads"
            raise NotImplementedError(f"q is a DTensor with the placement {placement} in dimension {i} of its mesh; allowed: {allowed}, and Replicate(). "
                                      "Give q.redistribute(placements=...)")
        splits.append(_BATCH if by_batch else _HEADS if by_heads else None)
    return tuple(splits)


def _placed(x: Any, name: str, call: _Call, batch: int | None, heads: int | None) -> torch.Tensor:
    """This rank's part of x, whose dimensions `batch` and `heads` are split as q's are; where it has none of them every rank has all, and gradients are summed."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if not is_dtensor(x):
        raise ValueError(f"{name} is a {type(x).__name__} and q a DTensor; all tensors of a call must be DTensors of one mesh: torch.distributed.tensor."
                         f"distribute_tensor({name}, q.device_mesh, [Replicate()] * q.device_mesh.ndim) makes one that every rank has")
    if x.device_mesh != call.q.device_mesh:
        raise ValueError(f"{name} is a DTensor on the mesh {x.device_mesh} and q on {call.q.device_mesh}; all tensors of a call must be on one mesh")
    dims: dict[str, int | None] = {}
    for what, dim, wanted in ((_BATCH, batch, call.q.shape[0]), (_HEADS, heads, call.q.shape[call.heads])):
        dim = dim if dim is None or dim >= 0 else dim + x.dim()
        if dim is None or dim < 0 or (name in _BROADCAST and x.shape[dim] == 1):
            continue
        # Parts of other sizes might fit together on one rank and not on another, which then waits for ever.
        if dim >= x.dim() or (x.shape[dim] != wanted and name not in _HAS_HEADS_OF_ITS_OWN) or (what == _BATCH and x.shape[dim] != wanted):
            raise ValueError(f"{name} has the shape {tuple(x.shape)} and q {tuple(call.q.shape)}; its dimension {dim} must be {wanted}, as q's {what}")
        dims[what] = dim
    placements = [Replicate() if (dim := dims.get(split)) is None else Shard(dim) for split in call.splits]
    gradients = [Partial() if split is not None and placement.is_replicate() else placement for split, placement in zip(call.splits, placements)]
    return x.redistribute(placements=placements).to_local(grad_placements=gradients)


def _own_heads(call: _Call, nheads_k: int, dim: int) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Where heads of q are split so that those of k cannot be, as several ranks have query heads of one: what takes this rank's key heads from all of them, in
    dimension `dim`. None: k is split as q is."""
    shards, nheads = math.prod([call.q.device_mesh.size(i) for i, split in enumerate(call.splits) if split == _HEADS]), call.q.shape[call.heads]
    if nheads_k == 0 or nheads % nheads_k:
        raise ValueError(f"q has {nheads} heads and k {nheads_k}; nheads must be a multiple of nheads_k")
    if shards == 1 or nheads == nheads_k or (nheads % shards == 0 and nheads_k % shards == 0):
        return None
    first, count = 0, nheads
    for i, split in enumerate(call.splits):  # as DTensor splits: in equal parts, rounded up, the last ones smaller
        if split == _HEADS:
            part = -(-count // call.q.device_mesh.size(i))
            begin = min(part * call.q.device_mesh.get_local_rank(i), count)
            first, count = first + begin, min(part, count - begin)
    group = nheads // nheads_k
    wanted = [head // group for head in range(first, first + count)]
    different = wanted[-1] - wanted[0] + 1 if wanted else 0
    if wanted == [wanted[0] + i * different // count for i in range(count)] and different and count % different == 0:
        return lambda x: x.narrow(dim, wanted[0], different)
    return lambda x: x.index_select(dim, torch.tensor(wanted, dtype=torch.int64, device=x.device))


def _made(local: torch.Tensor, call: _Call, shape: Sequence[int], batch: int | None, heads: int, swapped: bool) -> Any:
    """A result as a DTensor. `swapped`: it has heads before seqlen, but lies in memory as without."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    dims = [{_BATCH: batch, _HEADS: heads}.get(split) for split in call.splits]
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    whole = {}
    if any([shape[dim] % call.q.device_mesh.size() for dim in dims if dim is not None]):  # parts of unequal size: torch cannot tell from one of them
        like = torch.empty([shape[0], shape[2], shape[1], shape[3]], device="meta").transpose(1, 2) if swapped else torch.empty(shape, device="meta")
        whole = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(local, call.q.device_mesh, placements, run_check=False, **whole)


def on_shards(function: Callable, q: Any, k: Any, v: Any, *, packed: bool, layout: str = "bshd", return_lse: bool = False, return_dropout_state: bool = False,
              dropout_p: float = 0, **options: Any) -> Any:
    """`function`, fattn.attention or attention_varlen, of this rank's parts of DTensors; its results as DTensors, split as q is."""
    if dropout_p:
        raise NotImplementedError(f"dropout_p is {dropout_p} and q is a DTensor; the random numbers of a part are not those of the whole. Call fattn on each rank's part, "
                                  "x.to_local(), with a dropout_state of its own, or leave dropout out")
    heads = 1 if packed or layout == "bhsd" else 2
    if q.dim() != (3 if packed else 4):
        raise ValueError(f"q has {q.dim()} dimensions; allowed: {'3 (total, heads, headdim)' if packed else '4 (batch, seqlen, heads, headdim)'}")
    call = _Call(q, heads, _splits(q, heads, packed))
    if is_dtensor(k) and is_dtensor(v) and k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"k has the shape {tuple(k.shape)} and v {tuple(v.shape)}; allowed: the same but for headdim")
    paged = options.get("block_table") is not None
    heads_k = 2 if packed and paged else heads
    own = _own_heads(call, k.shape[heads_k], heads_k) if is_dtensor(k) and k.dim() > heads_k else None
    parts = [_placed(x, name, call, None if packed or paged else 0, None if own else heads_k) for name, x in (("k", k), ("v", v))]
    if own:
        parts = [own(x) for x in parts]
    for name, x in options.items():
        if name in _DIMENSIONS and x is not None:
            options[name] = _placed(x, name, call, *_DIMENSIONS[name])
    if not packed:
        options["layout"] = layout
    o, lse = function(_placed(q, "q", call, None if packed else 0, heads), *parts, return_lse=True, **options)
    o = _made(o, call, (*q.shape[:-1], v.shape[-1]), None if packed else 0, heads, layout == "bhsd" and not packed)
    if return_lse:
        seqlen = 0 if packed else 2 if layout == "bhsd" else 1
        shape = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[heads], q.shape[seqlen])
        lse = _made(lse, call, shape, None if packed else 0, 0 if packed else 1, False)
    state = (None,) if return_dropout_state else ()
    results = (o, *((lse,) if return_lse else ()), *state)
    return results if len(results) > 1 else o
