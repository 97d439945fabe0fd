"""The time of a pass on all ranks: hop by hop, transfers beside computing, each link taken by one transfer after the other."""

from typing import NamedTuple

import torch

from .._schedule import Problem
from .work import Work, work_of


class Constants(NamedTuple):
    """Of one GPU and its links. Seconds, and what a second does."""

    forward_flops: float
    backward_flops: float
    call: float = 10e-6  # what a call of the forward pass takes beside its FLOPs
    backward_call: float = 30e-6
    once: float = 0.0  # of a pass: what ranks agree on, and what its host does
    merged_bytes: float = 1e12  # of results in fp32, merged in a second
    inside_bytes: float = 350e9  # a second, one direction, a GPU
    inside_latency: float = 10e-6
    between_bytes: float = 50e9
    between_latency: float = 20e-6


class Shape(NamedTuple):
    ranks: int
    rows: int  # that each rank holds
    nheads: int
    nheads_k: int
    headdim: int
    element: int = 2  # bytes of q, k and v
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    method: str = "ring"
    layout: str = "zigzag"
    degree: int = 1  # ranks that exchange heads
    gpus_per_host: int = 8

    def problem(self) -> Problem:
        """Of the ring."""
        seqlen = self.ranks * self.rows
        return Problem(self.ranks // self.degree, self.layout, seqlen, seqlen, self.causal, self.window, gathered=self.method == "all_gather")


class Times(NamedTuple):
    forward: float
    forward_backward: float
    alone_forward: float  # of one GPU with the rows that each rank holds
    alone_forward_backward: float
    pairs: float  # that a rank sees, in the mean
    alone_pairs: float

    def share(self, both: bool) -> float:
        """The rate of each GPU as a part of one GPU's."""
        alone, together = (self.alone_forward_backward, self.forward_backward) if both else (self.alone_forward, self.forward)
        return self.pairs / together / (self.alone_pairs / alone)


BACKWARD = 2.5  # times the FLOPs of the forward pass


class _Ring:
    """All ranks: number g * degree + u is rank g of the u-th ring."""

    def __init__(self, shape: Shape, constants: Constants, balanced: bool) -> None:
        self.shape, self.constants = shape, constants
        work = work_of(shape.problem())
        if balanced:
            work = Work(*(x.mean(0, keepdim=True).expand_as(x) for x in work))
        self.work = Work(*(x.repeat_interleave(shape.degree, 0) for x in work))
        self.ranks = torch.arange(shape.ranks)
        self.nheads, self.nheads_k = shape.nheads / shape.degree, shape.nheads_k / shape.degree
        self.flops = self.work.pairs * 4 * shape.headdim * self.nheads
        self.rows_of_ring = self.shape.rows * shape.degree

    def far(self, peers: torch.Tensor) -> torch.Tensor:
        return self.ranks // self.shape.gpus_per_host != peers // self.shape.gpus_per_host

    def seconds_of(self, peers: torch.Tensor, sent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(how long the link is taken, latency) of bytes to or from peers."""
        far, c = self.far(peers), self.constants
        taken = sent / torch.where(far, c.between_bytes, c.inside_bytes)
        return taken, torch.where(sent > 0, torch.where(far, c.between_latency, c.inside_latency), 0.0)

    def sender(self, hop: int) -> torch.Tensor:
        return (self.ranks - hop * self.shape.degree) % self.shape.ranks

    def exchanged(self, elements: float) -> torch.Tensor:
        """Seconds in which each rank gives all others of its group their part of so many bytes of its rows."""
        degree, total, latency = self.shape.degree, torch.zeros(self.shape.ranks, dtype=torch.float64), torch.zeros(self.shape.ranks, dtype=torch.float64)
        first = self.ranks // degree * degree
        for away in range(1, degree):
            taken, late = self.seconds_of(first + (self.ranks - first + away) % degree, torch.full((self.shape.ranks,), elements / degree, dtype=torch.float64))
            total, latency = total + taken, torch.maximum(latency, late)
        return total + latency

    def key_bytes(self, element: int) -> torch.Tensor:
        return self.work.received * self.nheads_k * 2 * self.shape.headdim * element


class _Links:
    """When each rank's outgoing and incoming link is free."""

    def __init__(self, ring: _Ring) -> None:
        self.ring = ring
        self.out, self.into = (torch.zeros(ring.shape.ranks, dtype=torch.float64) for _ in range(2))

    def arrival(self, peers: torch.Tensor, ready: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
        """At each rank, of what its peer sends when both are ready. Each rank is the peer of one."""
        taken, latency = self.ring.seconds_of(peers, sent)
        begin = torch.maximum(torch.maximum(ready, ready[peers]), torch.maximum(self.out[peers], self.into))
        end = torch.where(sent > 0, begin + taken, 0.0)
        self.into = torch.maximum(self.into, end)
        self.out = self.out.index_put((peers,), torch.maximum(self.out[peers], end))
        return end + latency


def _forward(ring: _Ring) -> torch.Tensor:
    """When each rank is done."""
    c, shape, work = ring.constants, ring.shape, ring.work
    begin = torch.full((shape.ranks,), c.once, dtype=torch.float64)
    begin = begin + ring.exchanged(shape.rows * shape.headdim * shape.element * (shape.nheads + 2 * shape.nheads_k))
    seconds = ring.flops / c.forward_flops + work.calls * c.call + work.query_rows * ring.nheads * shape.headdim * 4 / c.merged_bytes
    end = _hops(ring, begin, seconds, None)
    return end + ring.exchanged(shape.rows * shape.nheads * (shape.headdim * shape.element + 4))


def _backward(ring: _Ring) -> torch.Tensor:
    c, shape, work = ring.constants, ring.shape, ring.work
    begin = torch.full((shape.ranks,), c.once, dtype=torch.float64) + ring.exchanged(shape.rows * shape.nheads * (shape.headdim * shape.element + 4))
    merged = (work.query_rows * ring.nheads + 2 * work.key_rows * ring.nheads_k) * shape.headdim * 4
    seconds = BACKWARD * ring.flops / c.backward_flops + work.calls * c.backward_call + merged / c.merged_bytes
    end = _hops(ring, begin, seconds, ring.key_bytes(4))
    return end + ring.exchanged(shape.rows * shape.headdim * shape.element * (shape.nheads + 2 * shape.nheads_k))


def _all_at_once(ring: _Ring, keys: torch.Tensor) -> torch.Tensor:
    """Seconds in which each rank gets keys of all others, and sends its own: what its links are taken for."""
    into, out, latest = (torch.zeros(ring.shape.ranks, dtype=torch.float64) for _ in range(3))
    for hop in range(1, keys.shape[1]):
        peers = ring.sender(hop)
        taken, latency = ring.seconds_of(peers, keys[:, hop])
        into, latest = into + taken, torch.maximum(latest, latency)
        out = out.index_add(0, peers, taken)
    return torch.maximum(into, out) + latest


def _hops(ring: _Ring, begin: torch.Tensor, seconds: torch.Tensor, gradients: torch.Tensor | None) -> torch.Tensor:
    """Keys of the next hop travel while one is computed; gathered, all at once before. Gradients of keys go back to where those came from."""
    links, keys, hops = _Links(ring), ring.key_bytes(ring.shape.element), ring.work.pairs.shape[1]
    if ring.shape.method == "all_gather":
        end = begin.max() + _all_at_once(ring, keys) + seconds.sum(1)
        return end if gradients is None else end.max() + _all_at_once(ring, gradients)  # the way back takes as long
    end, returned = begin, torch.zeros_like(begin)
    for hop in range(hops):
        following = links.arrival(ring.sender(hop + 1), begin, keys[:, hop + 1]) if hop + 1 < hops else None
        end = begin + seconds[:, hop]
        if gradients is not None and hop > 0:
            back = links.arrival(ring.sender(-hop), end, gradients[:, hop][ring.sender(-hop)])
            end = torch.maximum(end, returned)  # of the hop before
            returned = back
        begin = end if following is None else torch.maximum(end, following)
    return torch.maximum(end, returned)


def _alone(shape: Shape) -> Shape:
    return shape._replace(ranks=1, degree=1, method="ring", layout="contiguous")


def simulated(shape: Shape, constants: Constants, balanced: bool = False) -> Times:
    ring, alone = _Ring(shape, constants, balanced), work_of(_alone(shape).problem())
    forward, backward = (float(function(ring).max()) for function in (_forward, _backward))
    pairs = float(alone.pairs.sum())
    flops = pairs * 4 * shape.headdim * shape.nheads
    alone_forward = constants.call + flops / constants.forward_flops
    alone_backward = constants.backward_call + BACKWARD * flops / constants.backward_flops
    return Times(forward, forward + backward, alone_forward, alone_forward + alone_backward, float(ring.work.pairs.sum()) / shape.ranks / shape.degree, pairs)


_LIMITS = {
    "links inside": {"inside_bytes": float("inf")},
    "links between": {"between_bytes": float("inf")},
    "latency": {"inside_latency": 0.0, "between_latency": 0.0},
    "calls": {"call": 0.0, "backward_call": 0.0, "once": 0.0},
    "merging": {"merged_bytes": float("inf")},
}


def limit(shape: Shape, constants: Constants) -> tuple[str, float]:
    """Without what a call of both passes would take the least time, and by what part less; ("computing", 0.0) if nothing takes two hundredths."""
    now = simulated(shape, constants).forward_backward
    without = {name: simulated(shape, constants._replace(**free)).forward_backward for name, free in _LIMITS.items()}
    without["unequal work"] = simulated(shape, constants, True).forward_backward
    name = min(without, key=lambda x: without[x])
    gain = 1 - without[name] / now
    return (name, gain) if gain >= 0.02 else ("computing", 0.0)
