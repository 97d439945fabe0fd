"""Ranks exchange heads for rows (Ulysses, Jacobs et al. 2023), so that each has some heads of the rows of all, and back."""

import functools
from typing import NamedTuple

import torch

from ._ranks import Part
from ._schedule import held
from ._transfer import Transfer


class _Way(NamedTuple):
    """Rows of the ranks that exchange, how many each has, and where they are among those of all of them."""

    rows: tuple[int, ...]
    places: torch.Tensor


@functools.lru_cache(maxsize=8)  # each has a number a row, in the memory of its device
def _way(nranks: int, layout: str, length: int, members: tuple[int, ...], device: torch.device) -> _Way:
    """What several ranks of `nranks` hold together is what one of fewer ranks holds, in the order of positions."""
    ranges = [held(nranks, layout, length, rank) for rank in members]
    positions = torch.cat([torch.arange(first, first + count) for of_rank in ranges for first, count in of_rank] or [torch.arange(0)])
    places = torch.empty_like(positions)
    places[positions.argsort()] = torch.arange(len(positions))
    return _Way(tuple(sum(count for _, count in x) for x in ranges), places.to(device))


class Heads:
    """The exchange among the ranks of `part`."""

    def __init__(self, part: Part, layout: str, lengths: tuple[int, int], nheads: int, timeout: float, device: torch.device) -> None:
        self.part, self.timeout = part, timeout
        self._ways = [_way(part.whole.count, layout, length, part.members, device) for length in lengths]
        self.each = nheads // part.count  # query heads of a rank
        self.mine = slice(part.rank * self.each, (part.rank + 1) * self.each)
        self._tag = 0

    def begin(self) -> None:
        """Of the exchanges of a pass. Transfers of its ring have other tags."""
        self.part.begin()
        self._tag = self.part.tag()

    def end(self) -> None:
        self.part.end()

    def _exchange(self, parts: list[torch.Tensor], received: list[torch.Tensor]) -> None:
        """parts[r] goes to rank r, received[r] comes from it."""
        rank, count, tag = self.part.rank, self.part.count, self._tag
        self._tag += 1  # a phase has room for eight
        received[rank].copy_(parts[rank])
        transfers = []
        for away in range(1, count):
            to, come = (rank + away) % count, (rank - away) % count
            transfers.append(Transfer(self.part, self.timeout, to, [parts[to]], come, [received[come]], tag))
        for transfer in transfers:
            transfer.wait()

    def to_heads(self, x: torch.Tensor, of_keys: bool = False) -> torch.Tensor:
        """(batch, rows, heads, d) of this rank's rows to (batch, rows of all, heads / ranks, d)."""
        way, n = self._ways[of_keys], self.part.count
        each = x.shape[2] // n
        received = [x.new_empty((x.shape[0], rows, each, x.shape[3])) for rows in way.rows]
        self._exchange([x[:, :, r * each : (r + 1) * each].contiguous() for r in range(n)], received)
        whole = x.new_empty((x.shape[0], sum(way.rows), each, x.shape[3]))
        whole[:, way.places] = torch.cat(received, 1)
        return whole

    def to_rows(self, x: torch.Tensor, of_keys: bool = False) -> torch.Tensor:
        """The way back."""
        way = self._ways[of_keys]
        received = [x.new_empty((x.shape[0], way.rows[self.part.rank], *x.shape[2:])) for _ in way.rows]
        self._exchange([part.contiguous() for part in x[:, way.places].split(way.rows, 1)], received)
        return torch.cat(received, 2)

    def lse_to_heads(self, lse: torch.Tensor) -> torch.Tensor:
        """(batch, nheads, rows)"""
        return self.to_heads(lse.transpose(1, 2).unsqueeze(3)).squeeze(3).transpose(1, 2)

    def lse_to_rows(self, lse: torch.Tensor) -> torch.Tensor:
        return self.to_rows(lse.transpose(1, 2).unsqueeze(3)).squeeze(3).transpose(1, 2)

    def of_rows(self, x: torch.Tensor, of_keys: bool = False) -> torch.Tensor:
        """(batch, rows), which all heads share: every rank gets that of all rows."""
        return self.to_heads(x[:, :, None, None].expand(*x.shape, self.part.count, 1), of_keys)[:, :, 0, 0]


    def pairs_to_heads(self, x: torch.Tensor | None, rows: int) -> torch.Tensor | None:
        """(batch or 1, nheads or 1, this rank's rows or 1, keys) to (batch or 1, heads of this rank or 1, rows of all, keys)."""
        if x is None:
            return None
        spread = x.expand(-1, self.part.count if x.shape[1] == 1 else -1, rows, -1)
        return self.to_heads(spread.transpose(1, 2)).transpose(1, 2)

    def pairs_to_rows(self, x: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
        """A gradient on its way back: what heads, or rows, share is summed over them."""
        return self.to_rows(x.transpose(1, 2)).transpose(1, 2).sum_to_size(size)


def require_heads(method: str, degree: int, nheads: int, nheads_k: int) -> None:
    for name, heads in (("nheads", nheads), ("nheads_k", nheads_k)):
        if heads % degree:
            said = f"{degree} ranks exchange heads" if method == "ulysses" else f"ulysses_degree is {degree}"
            raise ValueError(f"{name} is {heads} and {said}; method={method!r} gives each of them as many heads, so that it must be a multiple. "
                             "A smaller ulysses_degree of method=\"mixed\", or method=\"ring\", which takes any number")


def choose_degree(nranks: int, nheads: int, nheads_k: int) -> int:
    """The most ranks that can exchange heads: the largest number that divides all three."""
    return max(d for d in range(1, nranks + 1) if nranks % d == 0 and nheads % d == 0 and nheads_k % d == 0)
