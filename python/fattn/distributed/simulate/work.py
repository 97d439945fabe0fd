"""What each rank computes in each hop and what it gets, read from the schedules of all ranks."""

import ctypes
import functools
from typing import NamedTuple

import torch

from ..._abi_structs import RingBlock, RingHop
from .._schedule import Problem, opened

_HOP, _BLOCK = ctypes.sizeof(RingHop) // 8, ctypes.sizeof(RingBlock) // 8  # numbers of 64 bits


class Work(NamedTuple):
    """(ranks of the ring, hops) each."""

    pairs: torch.Tensor  # of a query and a key that it sees
    calls: torch.Tensor
    query_rows: torch.Tensor  # of all calls: results that are merged
    key_rows: torch.Tensor
    received: torch.Tensor  # rows of keys


def _rows(pointer: int, count: int, words: int) -> torch.Tensor:
    if count == 0:
        return torch.zeros((0, words), dtype=torch.int64)
    memory = (ctypes.c_int64 * (count * words)).from_address(pointer)
    return torch.frombuffer(memory, dtype=torch.int64).reshape(count, words).clone()


def _column(of: type, name: str) -> int:
    return getattr(of, name).offset // 8


def _sums(first: torch.Tensor, rows: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    """Of what `first`, first + 1, ... give for so many rows, each at least 0 and at most `most`."""
    def positive(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x * (x - 1) / 2, 0)

    return positive(first + rows) - positive(first) - positive(first + rows - most) + positive(first - most)


def visible_pairs(blocks: torch.Tensor) -> torch.Tensor:
    """(blocks): their windows are aligned to the bottom right."""
    of = {name: blocks[:, _column(RingBlock, name)].double() for name in ("q_rows", "k_rows", "window_left", "window_right")}
    rows, keys, left, right = of.values()
    until = torch.where(right < 0, rows * keys, _sums(keys - rows + right + 1, rows, keys))
    return until - torch.where(left < 0, 0, _sums(keys - rows - left, rows, keys))


@functools.lru_cache(maxsize=64)
def work_of(problem: Problem) -> Work:
    n = problem.nranks
    work = Work(*(torch.zeros((n, n), dtype=torch.float64) for _ in Work._fields))
    for rank in range(n):
        with opened(problem, rank) as schedule:
            hops, blocks = _rows(schedule.hops, schedule.nhops, _HOP), _rows(schedule.blocks, schedule.nblocks, _BLOCK)
        counts = hops[:, _column(RingHop, "nblocks")]
        of_hop = torch.repeat_interleave(torch.arange(n), counts)
        for to, values in ((work.pairs, visible_pairs(blocks)), (work.calls, torch.ones(len(blocks), dtype=torch.float64)),
                           (work.query_rows, blocks[:, _column(RingBlock, "q_rows")].double()), (work.key_rows, blocks[:, _column(RingBlock, "k_rows")].double())):
            to[rank].index_add_(0, of_hop, values)
        work.received[rank] = hops[:, _column(RingHop, "rows_received")].double()
    return work
