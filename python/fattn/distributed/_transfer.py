"""Sending and receiving rows between ranks: started at once, waited for later, with the peer named when it fails."""

import datetime
from collections.abc import Callable, Sequence

import torch
import torch.distributed as distributed

from ._ranks import Ranks
from ._schedule import Ranges


def rows_of(x: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    """Those rows (dimension 1), side by side."""
    parts = [x[:, first : first + count] for first, count in ranges]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).contiguous()


def add_rows(x: torch.Tensor, ranges: Ranges, parts: torch.Tensor) -> None:
    """Adds `parts`, the rows of the ranges side by side."""
    at = 0
    for first, count in ranges:
        x[:, first : first + count] += parts[:, at : at + count]
        at += count


def put_rows(x: torch.Tensor, ranges: Ranges, parts: torch.Tensor) -> None:
    at = 0
    for first, count in ranges:
        x[:, first : first + count] = parts[:, at : at + count]
        at += count


class Transfer:
    """Tensors on their way to one peer and from another. Those that have no elements do not travel, which both sides know from the schedule."""

    def __init__(self, ranks: Ranks, timeout: float, send_to: int, sent: Sequence[torch.Tensor], receive_from: int, received: Sequence[torch.Tensor],
                 tag: int, watch: Callable[[list], list] | None = None) -> None:
        self.ranks, self.timeout = ranks, timeout
        self.received = received
        self._alive = sent  # until they are sent
        self._on_cpu = all(x.device.type == "cpu" for x in (*sent, *received))
        operations, self._peers = [], []
        for function, rank, tensors in ((distributed.isend, send_to, sent), (distributed.irecv, receive_from, received)):
            for i, x in enumerate(tensors):
                if x.numel():
                    operations.append(distributed.P2POp(function, x, ranks.peer(rank), ranks.group, tag + i))
                    self._peers.append(rank)
        try:
            self._works = distributed.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:
            raise ranks.failed(receive_from, error, timeout) from error
        if watch is not None and self._works:
            self._works = watch(self._works)

    def wait(self) -> None:
        """On a GPU its stream waits, not this thread."""
        for i, work in enumerate(self._works):
            try:
                if self._on_cpu:
                    work.wait(datetime.timedelta(seconds=self.timeout))
                else:
                    work.wait()
            except RuntimeError as error:
                raise self.ranks.failed(self._peers[min(i, len(self._peers) - 1)], error, self.timeout) from error
        self._works, self._alive = [], ()
