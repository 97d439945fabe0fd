#!/usr/bin/env python3
"""Serving's figures, with the package installed: decode of sequences of mixed lengths beside equal ones, of pages beside contiguous keys, append with rotary embeddings
beside decode alone, a shared prefix by `fattn.cascade` beside plain paged decode, prefill of pages. Heads 32 on 8, headdim 128, bf16 (fp32 on a CPU).

    tools/bench_serving.py --json docs/results/h200-serving.json

Every result is compared with torch's in fp32 before it is timed. On a GPU a sample is a replay of a CUDA graph of several calls, each on a copy of its keys of its own where
one copy would stay in the L2 cache; contestants take turns, and medians count."""
import argparse
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

import torch

import compact_records
import fattn

HEADS, HEADS_K, HEADDIM = 32, 8, 128
MORE_THAN_L2 = 400 << 20
PARTS = ("mixed", "pages", "append", "cascade", "prefill")


class Keys:
    """Keys and values of a batch, contiguous or in pages in random order; `table` is None of contiguous ones."""

    def __init__(self, args, batch: int, longest: int, page_size: int = 0):
        columns = -(-longest // page_size) if page_size else 0
        shape = (batch * columns, page_size) if page_size else (batch, longest)
        self.k, self.v = (torch.randn(*shape, HEADS_K, HEADDIM, device=args.device, dtype=args.dtype) for _ in range(2))
        self.table = torch.randperm(batch * columns, device=args.device).int().view(batch, columns) if page_size else None

    def options(self) -> dict:
        return {} if self.table is None else {"block_table": self.table}

    def of(self, sequence: int, length: int) -> list[torch.Tensor]:
        """k and v of a sequence, side by side, in fp32."""
        if self.table is None:
            return [x[sequence, :length].float() for x in (self.k, self.v)]
        pages = self.table[sequence, : -(-length // self.k.shape[1])].long()
        return [x[pages].flatten(0, 1)[:length].float() for x in (self.k, self.v)]


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A sequence's o in fp32, causal: q (queries, heads, headdim), k and v (keys, heads of keys, headdim)."""
    rows = []
    for head, x in enumerate(q.float().unbind(1)):
        scores = x @ k[:, head * HEADS_K // q.shape[1]].T / math.sqrt(HEADDIM)
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(k.shape[0] - q.shape[0] + 1)
        rows.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ v[:, head * HEADS_K // q.shape[1]])
    return torch.stack(rows, 1)


def checked(name: str, q: torch.Tensor, keys_of: Callable[[int], list[torch.Tensor]], sequences) -> Callable[[torch.Tensor], None]:
    """What ends the program if o is wrong; keys_of: k and v of a sequence."""
    def check(o: torch.Tensor) -> None:
        for sequence in sequences:
            expected = reference(q[sequence], *keys_of(sequence))
            error = float((o[sequence].float() - expected).square().mean().sqrt() / expected.square().mean().sqrt())
            if not error <= 0.01:
                sys.exit(f"{name}: o of sequence {sequence} is wrong by {error:.3f} of its size (root mean square); its time does not count")
    return check


class Timed:
    """Calls to be timed in turns. On a GPU each is a graph, on a CPU a function. What is computed is checked before it is timed and, of graphs, behind it."""

    def __init__(self, args):
        self.args, self.samples, self.counts, self.kept = args, {}, {}, {}

    def add(self, name: str, calls: list[Callable[[], torch.Tensor]], check: Callable[[torch.Tensor], None]) -> None:
        """`calls`: the same call, each on its own copy of the keys; `check` is for the first."""
        check(calls[0]())
        if self.args.device == "cpu":
            self.samples[name], self.counts[name] = (lambda: [call() for call in calls]), len(calls)
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            calls[0]()
        torch.cuda.current_stream().wait_stream(side)
        graph, repeats = torch.cuda.CUDAGraph(), max(1, 8 // len(calls))
        with torch.cuda.graph(graph):
            outputs = [call() for _ in range(repeats) for call in calls]
        self.samples[name], self.counts[name] = graph.replay, len(outputs)
        self.kept[name] = (calls, outputs[0], check)  # a graph reads what the calls have, and keeps none of it

    def sample(self, name: str) -> float:
        if self.args.device == "cpu":
            start = time.perf_counter()
            self.samples[name]()
            return (time.perf_counter() - start) / self.counts[name]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.samples[name]()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / self.counts[name]

    def run(self) -> dict[str, float]:
        """Seconds of a call of each: medians of the turns."""
        times = {name: [] for name in self.samples}
        for turn in range(self.args.turns + 1):
            for name in self.samples:
                seconds = self.sample(name)
                if turn > 0:
                    times[name].append(seconds)
        for _, output, check in self.kept.values():
            check(output)
        return {name: statistics.median(x) for name, x in times.items()}


def queries(args, batch: int, seqlen: int = 1) -> torch.Tensor:
    return torch.randn(batch, seqlen, HEADS, HEADDIM, device=args.device, dtype=args.dtype)


def bytes_of(args, keys: int) -> int:
    return 2 * keys * HEADS_K * HEADDIM * args.dtype.itemsize


def copies(args, keys: int) -> int:
    return 1 if args.device == "cpu" else max(1, -(-MORE_THAN_L2 // bytes_of(args, keys)))


def mixed(args) -> list[dict]:
    """Random lengths from 1 to the longest, beside as many keys in equal shares; a cache has room for the longest."""
    rows = []
    for batch in args.batches:
        generator = torch.Generator().manual_seed(batch)
        drawn = torch.randint(1, args.longest + 1, (batch,), generator=generator)
        of_lengths = {"mixed": drawn, "equal": torch.full((batch,), round(drawn.double().mean().item()))}
        q = queries(args, batch)
        for page_size in (0, 16):
            timed, held = Timed(args), [Keys(args, batch, args.longest, page_size) for _ in range(copies(args, int(drawn.sum())))]
            for name, lengths in of_lengths.items():
                seqused_k = lengths.int().to(args.device)
                calls = [lambda keys=keys, n=seqused_k: fattn.attention(q, keys.k, keys.v, seqused_k=n, causal=True, **keys.options()) for keys in held]
                timed.add(name, calls, checked(f"{name} lengths", q, lambda b, n=lengths: held[0].of(b, int(n[b])), range(batch)))
            if page_size == 0:  # keys of a call of their own, without a list
                equal = int(of_lengths["equal"][0])
                timed.add("equal, no list", [lambda keys=keys: fattn.attention(q, keys.k[:, :equal], keys.v[:, :equal], causal=True) for keys in held],
                          checked("no list", q, lambda b: held[0].of(b, equal), range(batch)))
            seconds = timed.run()
            rates = {name: bytes_of(args, int((drawn if name == "mixed" else of_lengths["equal"]).sum())) / x for name, x in seconds.items()}
            rows += [{"part": "mixed", "batch": batch, "lengths": name, "page_size": page_size, "keys": int(drawn.sum()), "longest": int(drawn.max()), "time_median_s": x,
                      "bytes_per_s": rates[name], "of_equal": rates[name] / rates["equal"]} for name, x in seconds.items()]
            del held, timed
    return rows


def pages(args) -> list[dict]:
    rows = []
    for batch in (1, args.batches[0]):
        timed, q = Timed(args), queries(args, batch)
        for page_size in (0, 64, 16, 1):
            held = [Keys(args, batch, args.seqlen, page_size) for _ in range(copies(args, batch * args.seqlen))]
            calls = [lambda keys=keys: fattn.attention(q, keys.k, keys.v, causal=True, **keys.options()) for keys in held]
            timed.add(str(page_size), calls, checked(f"pages of {page_size}", q, lambda b, keys=held[0]: keys.of(b, args.seqlen), range(batch)))
        seconds = timed.run()
        rows += [{"part": "pages", "batch": batch, "keys": args.seqlen, "page_size": int(name), "time_median_s": x, "over_contiguous": x / seconds["0"]}
                 for name, x in seconds.items()]
    return rows


def turned(x: torch.Tensor, position: int, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embeddings of halves, in fp32."""
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos[position] - second * sin[position], second * cos[position] + first * sin[position]), -1)


def append(args) -> list[dict]:
    """A step that turns and writes a new key and value, turns the query and attends, beside attention over the same keys alone."""
    rows, angles = [], torch.outer(torch.arange(args.seqlen + 16, device=args.device), 10000 ** -(torch.arange(HEADDIM // 2, device=args.device) / (HEADDIM // 2)))
    cos, sin = angles.cos(), angles.sin()
    for batch in (1, args.batches[0]):
        for page_size in (0, 16):
            timed, q = Timed(args), queries(args, batch)
            held = [Keys(args, batch, args.seqlen + 16, page_size) for _ in range(copies(args, batch * args.seqlen))]
            new_k, new_v = torch.randn(2, batch, 1, HEADS_K, HEADDIM, device=args.device, dtype=args.dtype)
            before = torch.full((batch,), args.seqlen - 1, dtype=torch.int32, device=args.device)
            after = before + 1
            steps = [lambda keys=keys: fattn.with_kvcache(q, keys.k, keys.v, new_k, new_v, cache_seqlens=before, rotary_cos=cos, rotary_sin=sin, causal=True,
                                                          **keys.options()) for keys in held]
            alone = [lambda keys=keys: fattn.attention(q, keys.k, keys.v, seqused_k=after, causal=True, **keys.options()) for keys in held]

            def expected(sequence: int) -> list[torch.Tensor]:
                k, v = held[0].of(sequence, args.seqlen - 1)
                return [torch.cat((k, turned(new_k[sequence], args.seqlen - 1, cos, sin))), torch.cat((v, new_v[sequence].float()))]

            timed.add("append", steps, checked("append", turned(q, args.seqlen - 1, cos, sin), expected, range(batch)))
            timed.add("alone", alone, checked("alone", q, lambda b: held[0].of(b, args.seqlen), range(batch)))
            seconds = timed.run()
            rows += [{"part": "append", "batch": batch, "keys": args.seqlen, "page_size": page_size, "call": name, "time_median_s": x, "over_alone_s": x - seconds["alone"]}
                     for name, x in seconds.items()]
            del held, timed
    return rows


def cascade(args) -> list[dict]:
    """Sequences that begin with the same keys: a table that has the prefix' pages in every row, beside the prefix read once for all."""
    batch, page_size, own = args.batches[0], 16, 256
    prefix = args.prefix // page_size
    keys = Keys(args, 1, args.prefix + batch * own, page_size)
    shared, rest = keys.table[0, :prefix], keys.table[0, prefix:].view(batch, -1)
    keys.table = torch.cat((shared.expand(batch, -1), rest), 1)
    q, timed = queries(args, batch), Timed(args)
    used = torch.full((batch,), args.prefix + own, dtype=torch.int32, device=args.device)
    used_own = torch.full((batch,), own, dtype=torch.int32, device=args.device)
    k_prefix, v_prefix = (x[shared.long()].flatten(0, 1) for x in (keys.k, keys.v))
    calls = {"plain": lambda: fattn.attention(q, keys.k, keys.v, seqused_k=used, block_table=keys.table, causal=True),
             "cascade": lambda: fattn.cascade(q, k_prefix, v_prefix, keys.k, keys.v, seqused_k=used_own, block_table=rest, causal=True)}
    for name, call in calls.items():
        timed.add(name, [call], checked(name, q, lambda b: keys.of(b, args.prefix + own), range(0, batch, 7)))
    seconds = timed.run()
    return [{"part": "cascade", "batch": batch, "prefix": args.prefix, "own": own, "page_size": page_size, "call": name, "time_median_s": x, "speedup": seconds["plain"] / x}
            for name, x in seconds.items()]


def prefill(args) -> list[dict]:
    """A chunk of queries at the end of a cache."""
    batch, seqlen_q = 4, args.seqlen // 4
    timed, q = Timed(args), queries(args, batch, seqlen_q)
    for page_size in (0, 64, 16, 1):
        keys = Keys(args, batch, args.seqlen, page_size)
        for algorithm in ("auto", "v2") if page_size == 0 else ("v2",):
            def call(keys=keys, algorithm=algorithm):
                return fattn.attention(q, keys.k, keys.v, causal=True, algorithm=algorithm, **keys.options())

            timed.add(f"{page_size} {algorithm}", [call], checked(f"prefill, pages of {page_size}", q, lambda b, keys=keys: keys.of(b, args.seqlen), (0, batch - 1)))
    seconds = timed.run()
    return [{"part": "prefill", "batch": batch, "seqlen_q": seqlen_q, "keys": args.seqlen, "page_size": int(name.split()[0]), "algorithm": name.split()[1], "time_median_s": x,
             "over_contiguous": x / seconds["0 v2"]} for name, x in seconds.items()]


def shown(row: dict) -> str:
    share = next((f"{row[name]:.3f} {name.replace('_', ' ')}" for name in ("of_equal", "over_contiguous", "speedup") if name in row), "")
    if "over_alone_s" in row:
        share = f"{1e6 * row['over_alone_s']:.2f} us over decode alone"
    what = row.get("lengths") or row.get("call") or row.get("algorithm") or ""
    keys = f"pages of {row['page_size']}" if row["page_size"] else "contiguous"
    return f"{row['part']:8} batch {row['batch']:3} {keys:12} {what:15} {1e6 * row['time_median_s']:9.2f} us  {share}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 16, 8], help="of mixed lengths; the first is that of the other parts, too")
    parser.add_argument("--longest", type=int, default=16384, help="of mixed lengths")
    parser.add_argument("--seqlen", type=int, default=8192, help="keys of each sequence in pages, append and prefill")
    parser.add_argument("--prefix", type=int, default=32768, help="keys that all sequences of the cascade begin with, a multiple of 16")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    if min(*args.batches, args.longest, args.turns) < 1 or args.seqlen < 16 or args.seqlen % 16 or args.prefix % 16 or args.prefix < 16:
        parser.error("--batches, --longest and --turns are at least 1, --seqlen and --prefix multiples of 16; give such numbers")
    args.dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    torch.manual_seed(1)
    rows = []
    with torch.inference_mode():
        for part in args.parts:
            start = time.perf_counter()
            rows += (of_part := globals()[part](args))
            for row in of_part:
                print(shown(row), flush=True)
            print(f"{part}: {time.perf_counter() - start:.1f} s", flush=True)
            if args.device == "cuda":
                torch.cuda.empty_cache()
    if args.json:
        environment = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "library_version": fattn.__version__, "torch": torch.__version__}
        if args.device == "cuda":
            environment["gpus"] = [{"name": torch.cuda.get_device_name()}]
        compact_records.write(args.json, {"fattn_serving": 1, "environment": environment, "dtype": str(args.dtype).removeprefix("torch."),
                                          "heads": [HEADS, HEADS_K], "headdim": HEADDIM, "turns": args.turns, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
