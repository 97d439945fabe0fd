"""Which rows are whose: a tensor of all positions to each rank's rows, and back."""

from typing import Any

import torch
import torch.distributed as distributed

from .._refused import require_dense
from ._ranks import ranks_of
from ._schedule import LAYOUTS, Ranges, held
from .._options import choose


def _rows(x: torch.Tensor, dim: int, ranges: Ranges) -> torch.Tensor:
    parts = [x.narrow(dim, first, count) for first, count in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)


def _dimension(x: Any, dim: int) -> int:
    require_dense("x", x)
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim is {dim} and x has {x.dim()} dimensions; allowed: the dimension of positions, {-x.dim()} to {x.dim() - 1}")
    return dim % x.dim()


def shard(x: torch.Tensor, dim: int = 1, group: Any = None, layout: str = "zigzag") -> torch.Tensor:
    """This rank's rows of what every rank has whole: tokens, labels, ids of documents, q, k and v. Differentiable; nothing is sent.

    Args:
        x: any tensor, the same on every rank.
        dim: the dimension of positions, of any length.
        group, layout: as in `ring_attention`.
    """
    dim = _dimension(x, dim)
    choose("layout", layout, LAYOUTS)
    ranks = ranks_of(group)
    return _rows(x, dim, held(ranks.count, layout, x.shape[dim], ranks.rank))


def positions(seqlen: int, group: Any = None, layout: str = "zigzag", cu_seqlens: Any = None, device: Any = None) -> torch.Tensor:
    """(rows), int64: where this rank's rows are among `seqlen` positions, for rotary and learned embeddings; with cu_seqlens within their packed sequence."""
    choose("layout", layout, LAYOUTS)
    ranks = ranks_of(group)
    all_of_them = torch.arange(seqlen, device=device)
    if cu_seqlens is not None:
        begins = torch.as_tensor(cu_seqlens, device=device, dtype=torch.int64).contiguous()
        all_of_them = all_of_them - begins[torch.searchsorted(begins, all_of_them, right=True) - 1]
    return _rows(all_of_them, 0, held(ranks.count, layout, seqlen, ranks.rank))


def unshard(x: torch.Tensor, dim: int = 1, group: Any = None, layout: str = "zigzag") -> torch.Tensor:
    """All positions, on every rank, of what `shard` gave each. Without gradients: a loss is computed of each rank's rows, and summed over ranks.

    Args:
        x: this rank's rows, of the same dtype and shape on all ranks but for `dim`.
        dim, group, layout: as in `shard`.

    Raises:
        NotImplementedError: x asks for a gradient.
    """
    dim = _dimension(x, dim)
    choose("layout", layout, LAYOUTS)
    if x.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError("x asks for a gradient, which unshard has not; compute the loss of each rank's rows, or call it with x.detach()")
    ranks = ranks_of(group)
    rows = torch.tensor([x.shape[dim]], device=x.device)
    counts = [torch.empty_like(rows) for _ in range(ranks.count)]
    distributed.all_gather(counts, rows, group=ranks.group)
    counts = [int(n) for n in counts]
    length = sum(counts)
    most = max(counts)
    mine = x.movedim(dim, 0)
    padded = mine.new_zeros((most, *mine.shape[1:]))
    padded[: mine.shape[0]] = mine
    parts = [torch.empty_like(padded) for _ in counts]
    distributed.all_gather(parts, padded, group=ranks.group)
    whole = mine.new_empty((length, *mine.shape[1:]))
    for rank, (part, count) in enumerate(zip(parts, counts)):
        at, ranges = 0, held(ranks.count, layout, length, rank)
        if sum(n for _, n in ranges) != count:
            raise ValueError(f"x has {count} rows on {ranks.name(rank)}; of {length} positions over {ranks.count} ranks it holds {sum(n for _, n in ranges)} in layout "
                             f"{layout!r}. unshard takes what shard gives, with the same layout")
        for first, n in ranges:
            whole[first : first + n] = part[at : at + n]
            at += n
    return whole.movedim(0, dim)
