"""The ranks of a group: what they agree on before a call, and who is named when one does not answer. Over the group's key-value store, which needs no GPU and
answers while a transfer hangs."""

import datetime
import json
import time
import weakref
from typing import Any

import torch
import torch.distributed as distributed
from torch.distributed import distributed_c10d

GRACE = 2.0  # seconds for others to say that they are stuck too, after they must have noticed
_known: "weakref.WeakKeyDictionary[Any, Ranks]" = weakref.WeakKeyDictionary()


def _seconds(timeout: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=timeout)


class Ranks:
    """Of one group. Every rank makes the same calls in the same order, so that a number says which is meant."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.count = distributed.get_rank(group), distributed.get_world_size(group)
        self._store = distributed.PrefixStore("fattn", distributed_c10d._get_process_group_store(group))
        self._calls = self.phase = 0
        self._connected = False

    def peer(self, rank: int) -> int:
        """As point-to-point functions count."""
        return distributed.get_global_rank(self.group, rank)

    def name(self, rank: int) -> str:
        everywhere = self.peer(rank)
        return f"rank {rank}" if everywhere == rank else f"rank {rank} of the group (rank {everywhere} of all)"

    def names(self, ranks: list[int]) -> str:
        return " and ".join(map(self.name, ranks))

    def exchange(self, mine: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
        """What every rank says, in their order.

        Raises:
            RuntimeError: a rank did not call in time; it names that rank.
        """
        self._calls += 1
        keys = [f"call/{self._calls}/{rank}" for rank in range(self.count)]
        try:
            self._store.set(keys[self.rank], json.dumps(mine))
            try:
                self._store.wait(keys, _seconds(timeout))
            except RuntimeError:
                self._raise_absent(keys, timeout)
            said = self._store.multi_get(keys)
            if self._calls > 1:  # all have read those of the call before
                self._store.delete_key(f"call/{self._calls - 1}/{self.rank}")
        except distributed.DistNetworkError as error:
            raise self._without_store() from error
        return [json.loads(x) for x in said]

    def connect(self, device: torch.device) -> None:
        """NCCL makes its communicator in the first call, which all ranks must be in; in a hop some may have nothing to send."""
        if device.type == "cuda" and not self._connected:
            distributed.all_reduce(torch.zeros(1, device=device), group=self.group)
            self._connected = True

    def begin(self) -> None:
        """Of a forward or backward pass."""
        self.phase += 1

    def tag(self) -> int:
        """Of the transfers of a pass; a pass before it may still be under way on another rank."""
        return (self.phase & 0xFFFFFF) * 8

    def end(self) -> None:
        try:
            self._store.set(f"done/{self.rank}", str(self.phase))
        except distributed.DistNetworkError as error:
            raise self._without_store() from error

    def failed(self, peer: int, error: RuntimeError, timeout: float) -> RuntimeError:
        """`peer` did not send or take what it should have. It may wait for another one: every rank that is alive says so here, and the one that does not
        is meant."""
        deadline = time.monotonic() + timeout + GRACE
        try:
            self._store.set(f"stuck/{self.phase}/{self.rank}", str(peer))
            silent = self._silent()
            while len(silent) > 1 and time.monotonic() < deadline:
                time.sleep(0.05)
                silent = self._silent()
            blamed = silent or [peer]
            self._told(blamed, f"told/{self.phase}")
        except distributed.DistNetworkError:
            return self._without_store()
        return RuntimeError(f"{self.names(blamed)} stopped answering inside of a call of fattn.distributed that {self.name(self.rank)} is in too. The process has ended, or it "
                            f"hangs, or needs more than timeout = {timeout:g} seconds for its part; look at its log, and start all ranks again. {self.name(self.rank)} "
                            f"noticed it at {self.name(peer)}: {error}")

    def _silent(self) -> list[int]:
        """Ranks that neither are through with this pass nor say that they are stuck."""
        silent = []
        for rank in range(self.count):
            if self._store.check([f"stuck/{self.phase}/{rank}"]):
                continue
            done = f"done/{rank}"
            if not self._store.check([done]) or int(self._store.get(done)) < self.phase:
                silent.append(rank)
        return silent

    def _told(self, blamed: list[int], key: str) -> None:
        """Rank 0 of all, which mostly holds the store, raises when the others know who it was: with it the store ends."""
        self._store.set(f"{key}/{self.rank}", "")
        others = [f"{key}/{rank}" for rank in range(self.count) if rank not in blamed]
        deadline = time.monotonic() + 2 * GRACE
        while self.peer(self.rank) == 0 and not self._store.check(others) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _raise_absent(self, keys: list[str], timeout: float) -> None:
        absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        stuck = [rank for rank in absent if self._store.check([f"stuck/{self.phase}/{rank}"])]
        blamed = [rank for rank in absent if rank not in stuck] or absent
        if blamed:
            self._told(blamed, f"told/call/{self._calls}")
            raise RuntimeError(f"{self.names(blamed)} did not call fattn.distributed within timeout = {timeout:g} seconds after {self.name(self.rank)} did. Every rank of the group "
                               "must make the same calls in the same order; the process has ended, hangs, or does something else. Look at its log")

    def _without_store(self) -> RuntimeError:
        return RuntimeError(f"{self.name(self.rank)} cannot reach the store of the group, which rank 0 of all ranks holds unless another place was chosen: rank 0 or its machine "
                            "has ended. Start all ranks again")


class Part:
    """Some ranks of a group, of which this is one: they count from 0 in their order, and send through the group."""

    def __init__(self, whole: Ranks, members: tuple[int, ...]) -> None:
        self.whole, self.members = whole, members
        self.rank, self.count = members.index(whole.rank), len(members)
        self.group = whole.group

    def peer(self, rank: int) -> int:
        return self.whole.peer(self.members[rank])

    def begin(self) -> None:
        self.whole.begin()

    def tag(self) -> int:
        return self.whole.tag()

    def end(self) -> None:
        self.whole.end()

    def failed(self, peer: int, error: RuntimeError, timeout: float) -> RuntimeError:
        return self.whole.failed(self.members[peer], error, timeout)


def ranks_of(group: Any) -> Ranks:
    """Of a group, a DeviceMesh of one dimension, or of all ranks."""
    if not distributed.is_available() or not distributed.is_initialized():
        raise RuntimeError("torch.distributed is not initialized; call torch.distributed.init_process_group first, in every process")
    group = distributed.group.WORLD if group is None else group.get_group() if hasattr(group, "get_group") else group
    if group not in _known:
        if distributed.get_rank(group) < 0:
            raise ValueError("this process is no rank of group; call with a group that it belongs to")
        _known[group] = Ranks(group)
    return _known[group]


def require_agreement(ranks: Ranks, function: str, said: list[dict[str, Any]]) -> None:
    """Raises on every rank the same error, which names the first rank and field that differ from rank 0's, or what a rank found wrong."""
    for rank, theirs in enumerate(said):
        if "error" in theirs:
            raise (ValueError if theirs.get("kind") == "ValueError" else NotImplementedError if theirs.get("kind") == "NotImplementedError" else RuntimeError)(
                f"{ranks.name(rank)} called {function} wrongly: {theirs['error']}")
    for name, first in said[0].items():
        for rank, theirs in enumerate(said):
            if theirs.get(name) != first:
                raise ValueError(f"{name} is {theirs.get(name)!r} on {ranks.name(rank)} and {first!r} on {ranks.name(0)}; all ranks must call {function} with the same")
