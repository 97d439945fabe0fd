"""What each rank of a call did when: `bench --timeline` writes it in Chrome's trace format. A plan has a timeline, mostly the one that records nothing."""

import contextlib
import datetime
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as distributed

from ._ranks import Ranks

TRANSFERS = ("keys", "gradients")  # what travels; each hop's have a track of their own, as those of several may be on their way
COMPUTED = ("block", "merge")
WAIT = 60.0  # seconds for other ranks' events


class Span(NamedTuple):
    name: str  # "hop", in it "wait", "block" and "merge"; "heads"; of TRANSFERS
    part: str  # "forward" or "backward"
    hop: int
    begin: Any  # a time of the clock, or a CUDA event
    end: Any


class Nothing:
    """Records nothing."""

    _no_span = contextlib.nullcontext()

    def begins(self, part: str) -> None:
        pass

    def span(self, name: str) -> contextlib.AbstractContextManager:
        return self._no_span

    def hop(self, h: int) -> contextlib.AbstractContextManager:
        return self._no_span

    def sends(self, name: str, h: int) -> None:
        """What a Transfer that begins now does with its works."""
        return None


NOTHING = Nothing()


class _Watched:
    """A work of gloo, which a thread waits for, so that its end is seen when it comes."""

    def __init__(self, work: Any, ended: Any, timeout: float) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._watch, args=(work, ended, datetime.timedelta(seconds=timeout)), daemon=True)
        self._thread.start()

    def _watch(self, work: Any, ended: Any, timeout: datetime.timedelta) -> None:
        try:
            work.wait(timeout)
            ended()
        except BaseException as error:  # whoever waits gets it
            self._error = error

    def wait(self, timeout: Any = None) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error


class Timeline(Nothing):
    """Times are of the clock on the CPU, on a GPU of CUDA events on the streams that compute and wait. Ranks count from a barrier."""

    def __init__(self, device: torch.device, timeout: float) -> None:
        self._timeout, self._part, self._hop = timeout, "", 0
        self._gpu = device if device.type == "cuda" else None
        self._spans: list[Span] = []
        self._beside = torch.cuda.Stream(device) if self._gpu else None  # waits for transfers, and for nothing else
        distributed.barrier()
        if self._gpu:
            torch.cuda.synchronize(device)
        self._zero = self._now()

    def _now(self) -> Any:
        if self._gpu is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begins(self, part: str) -> None:
        self._part, self._hop = part, 0

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        begin = self._now()
        yield
        self._spans.append(Span(name, self._part, self._hop, begin, self._now()))

    def hop(self, h: int) -> contextlib.AbstractContextManager:
        self._hop = h
        return self.span("hop")

    def sends(self, name: str, h: int) -> Any:
        begin, part, lock, left = self._now(), self._part, threading.Lock(), []

        def ended() -> None:
            with lock:
                left.pop()
                if not left:
                    self._spans.append(Span(name, part, h, begin, self._now()))

        def watch(works: list[Any]) -> list[Any]:
            left.extend(works)
            if self._gpu is None:
                return [_Watched(work, ended, self._timeout) for work in works]
            with torch.cuda.stream(self._beside):
                for work in works:
                    work.wait()
                    ended()
            return works

        return watch

    def events(self, rank: int) -> list[dict[str, Any]]:
        """Of this rank, in the order of their beginnings; times in microseconds."""
        if self._gpu:
            torch.cuda.synchronize(self._gpu)

        def at(moment: Any) -> float:
            return 1e3 * self._zero.elapsed_time(moment) if self._gpu else 1e6 * (moment - self._zero)

        tracks = {(name, h): 1 + h * len(TRANSFERS) + i for h in {s.hop for s in self._spans} for i, name in enumerate(TRANSFERS)}
        events = [{"name": s.name, "cat": s.part, "ph": "X", "ts": round(at(s.begin), 3), "dur": round(at(s.end) - at(s.begin), 3), "pid": rank, "tid": tracks.get((s.name, s.hop), 0),
                   "args": {"hop": s.hop}} for s in self._spans]
        names = {0: "computes"} | {tid: f"{name} of hop {h}" for (name, h), tid in tracks.items() if any(e["tid"] == tid for e in events)}
        of_names = [{"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}]
        of_names += [{"name": "thread_name", "ph": "M", "pid": rank, "tid": tid, "args": {"name": name}} for tid, name in sorted(names.items())]
        return of_names + sorted(events, key=lambda event: (event["ts"], -event["dur"]))


def _covered(begin: float, end: float, others: list[tuple[float, float]]) -> float:
    """How much of it passes beside others, which do not overlap each other."""
    return sum(max(0.0, min(end, b) - max(begin, a)) for a, b in others)


def overlap(events: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By pass, milliseconds: what transfers took, what of it passed beside the blocks and merges of their rank, what ranks waited. The mean of ranks."""
    found = {}
    ranks = {event["pid"] for event in events}
    for part in dict.fromkeys(event["cat"] for event in events if event["ph"] == "X"):
        sums = dict.fromkeys(("transfers", "beside", "waits"), 0.0)
        for rank in ranks:
            spans: dict[str, list[tuple[float, float]]] = {}
            for event in events:
                if event["ph"] == "X" and event["cat"] == part and event["pid"] == rank:
                    spans.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"]))
            computed = [span for name in COMPUTED for span in spans.get(name, [])]
            travelled = [span for name in TRANSFERS for span in spans.get(name, [])]
            sums["transfers"] += sum(b - a for a, b in travelled)
            sums["beside"] += sum(_covered(a, b, computed) for a, b in travelled)
            sums["waits"] += sum(b - a for a, b in spans.get("wait", []))
        found[part] = {f"{name}_ms": round(x / len(ranks) / 1e3, 4) for name, x in sums.items()}
    return found


def words_of(found: dict[str, dict[str, float]]) -> list[str]:
    """A sentence a pass."""
    said = []
    for part, x in found.items():
        if not x["transfers_ms"]:
            said.append(f"{part}: nothing travelled between hops")
            continue
        share = 100 * x["beside_ms"] / x["transfers_ms"]
        said.append(f"{part}: transfers took {x['transfers_ms']:.3f} ms a rank, of which {x['beside_ms']:.3f} ms ({share:.0f} %) passed beside blocks; ranks waited {x['waits_ms']:.3f} ms")
    return said


def trace_of(ranks: Ranks, timeline: Timeline, about: dict[str, Any]) -> dict[str, Any]:
    """Of all ranks, on each of them."""
    mine = timeline.events(ranks.rank)
    events = [event for said in ranks.exchange({"events": mine}, WAIT) for event in said["events"]]
    return {"fattn_ring_timeline": 1, "displayTimeUnit": "ms", "otherData": about | {"overlap": overlap(events)}, "traceEvents": events}
