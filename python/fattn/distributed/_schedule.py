"""The schedule of the C ABI (fattn_ring_create) as Python's: the one place that says who holds, sends and computes what."""

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import NamedTuple

from .. import _abi
from .._abi_structs import RingBlock, RingHop, RingProblem, RingRange, RingSchedule
from .._options import choose

LAYOUTS = {"contiguous": 0, "zigzag": 1}
Ranges = tuple[tuple[int, int], ...]  # (first, count)


class Block(NamedTuple):
    """As fattn_ring_block, with where its first query and key are in their sequence in place of `q_position`."""

    q_row: int
    q_rows: int
    k_row: int
    k_rows: int
    k_position: int
    window: tuple[int, int]
    distance: int
    side: int
    merges: bool  # queries have results of an earlier block
    adds: bool  # keys have gradients of an earlier block of the hop
    sequence: int
    q_place: int
    k_place: int


class Hop(NamedTuple):
    send_to: int
    receive_from: int
    sent: Ranges
    received: Ranges
    rows_sent: int
    rows_received: int
    blocks: tuple[Block, ...]  # each a call
    groups: tuple[tuple[Block, ...], ...]  # of packed sequences, after them: blocks that one call computes

    def writes_all_keys(self, rows: int) -> bool:
        """The same of gradients of `rows` keys."""
        return not self.groups and sum(b.k_rows for b in self.blocks if not b.adds) == rows


class Schedule(NamedTuple):
    rows_q: int
    rows_k: int
    held_q: Ranges
    held_k: Ranges
    hops: tuple[Hop, ...]

    def writes_all_queries(self) -> bool:
        """Blocks that need nothing from an earlier one write every row."""
        return not any(hop.groups for hop in self.hops) and sum(b.q_rows for hop in self.hops for b in hop.blocks if not b.merges) == self.rows_q

    def begins_with_all_queries(self) -> bool:
        """The first block has every row, so that its results are the sums to merge others into."""
        first = next((block for hop in self.hops for block in hop.blocks), None)
        return first is not None and not any(hop.groups for hop in self.hops) and first.q_rows == self.rows_q


class Problem(NamedTuple):
    """What a schedule follows from, but the rank."""

    nranks: int
    layout: str
    seqlen_q: int
    seqlen_k: int
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    cu_seqlens_q: tuple[int, ...] | None = None
    cu_seqlens_k: tuple[int, ...] | None = None
    gathered: bool = False
    has_alibi: bool = False
    keep_positions: bool = False


def _described(problem: Problem, rank: int) -> RingProblem:
    to = RingProblem()
    to.layout, to.nranks, to.rank = choose("layout", problem.layout, LAYOUTS), problem.nranks, rank
    to.causal, to.gathered, to.has_alibi, to.keep_positions = problem.causal, problem.gathered, problem.has_alibi, problem.keep_positions
    to.seqlen_q, to.seqlen_k = problem.seqlen_q, problem.seqlen_k
    to.has_window = problem.window != (-1, -1)
    to.window_left, to.window_right = problem.window
    return to


def _bounds(bounds: tuple[int, ...]) -> ctypes.Array:
    return (ctypes.c_int64 * len(bounds))(*bounds)


def _take(pointer: int, kind: type, first: int, count: int) -> list:
    return ctypes.cast(pointer, ctypes.POINTER(kind))[first : first + count] if count else []


def _ranges(pointer: int, first: int, count: int) -> Ranges:
    return tuple((x.first, x.count) for x in _take(pointer, RingRange, first, count))


def _overlaps(a: int, rows: int, b: int, others: int) -> bool:
    return a < b + others and b < a + rows


def _blocks(found: list, before: list[Block], problem: Problem) -> list[Block]:
    """Of a hop, behind those of the hops before."""
    begins_q, begins_k = problem.cu_seqlens_q or (0,), problem.cu_seqlens_k or (0,)
    blocks: list[Block] = []
    for b in found:
        merges = any(_overlaps(b.q_row, b.q_rows, x.q_row, x.q_rows) for x in (*before, *blocks))
        adds = any(_overlaps(b.k_row, b.k_rows, x.k_row, x.k_rows) for x in blocks)
        blocks.append(Block(b.q_row, b.q_rows, b.k_row, b.k_rows, b.k_position, (b.window_left, b.window_right), b.distance, b.side, merges, adds,
                            b.sequence, b.q_position - begins_q[b.sequence], b.k_position - begins_k[b.sequence]))
    return blocks


def _grouped(blocks: list[Block]) -> tuple[tuple[Block, ...], tuple[tuple[Block, ...], ...]]:
    """Blocks of one window, whose rows are in no other of the group, are packed sequences of one call; those that remain alone."""
    groups: list[list[Block]] = []
    open_groups: dict[tuple[int, int], list[Block]] = {}
    for block in blocks:
        group = open_groups.get(block.window)
        if block.side != 0:
            groups.append([block])
        elif group and group[-1].q_row + group[-1].q_rows <= block.q_row and group[-1].k_row + group[-1].k_rows <= block.k_row:
            group.append(block)
        else:
            groups.append([block])
            open_groups[block.window] = groups[-1]
    return tuple(x[0] for x in groups if len(x) == 1), tuple(tuple(x) for x in groups if len(x) > 1)


def _read(schedule: RingSchedule, problem: Problem) -> Schedule:
    packed = problem.cu_seqlens_q is not None and not problem.keep_positions  # else every block is a call
    hops, sent, received, blocks = [], 0, 0, []
    for hop in _take(schedule.hops, RingHop, 0, schedule.nhops):
        mine = _blocks(_take(schedule.blocks, RingBlock, len(blocks), hop.nblocks), blocks, problem)
        alone, groups = _grouped(mine) if packed else (tuple(mine), ())
        hops.append(Hop(hop.send_to, hop.receive_from, _ranges(schedule.sent, sent, hop.nsent), _ranges(schedule.received, received, hop.nreceived),
                        hop.rows_sent, hop.rows_received, alone, groups))
        sent, received, blocks = sent + hop.nsent, received + hop.nreceived, blocks + mine
    return Schedule(schedule.rows_q, schedule.rows_k, _ranges(schedule.held_q, 0, schedule.nheld_q), _ranges(schedule.held_k, 0, schedule.nheld_k), tuple(hops))


@contextlib.contextmanager
def opened(problem: Problem, rank: int) -> Iterator[RingSchedule]:
    """The schedule as the C ABI has it, whose memory lives until then."""
    described = _described(problem, rank)
    if problem.cu_seqlens_q is not None and problem.cu_seqlens_k is not None:
        q, k = _bounds(problem.cu_seqlens_q), _bounds(problem.cu_seqlens_k)  # live until the call is over
        described.nsequences = len(problem.cu_seqlens_q) - 1
        described.cu_seqlens_q, described.cu_seqlens_k = ctypes.addressof(q), ctypes.addressof(k)
    ring = ctypes.c_void_p()
    _abi.check(_abi.library.fattn_ring_create(ctypes.byref(described), ctypes.byref(ring)))
    try:
        schedule = RingSchedule()
        _abi.check(_abi.library.fattn_ring_query(ring, ctypes.byref(schedule)))
        yield schedule
    finally:
        _abi.library.fattn_ring_destroy(ring)


@functools.lru_cache(maxsize=256)
def schedule_of(problem: Problem, rank: int) -> Schedule:
    with opened(problem, rank) as schedule:
        return _read(schedule, problem)


def held(nranks: int, layout: str, length: int, rank: int) -> Ranges:
    """The positions of a rank's rows, in the order of the rows."""
    return schedule_of(Problem(nranks, layout, length, 0), rank).held_q
