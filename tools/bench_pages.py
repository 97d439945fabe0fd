#!/usr/bin/env python3
"""What a paged cache costs beside a contiguous one: `fattn bench` of the same calls with keys side by side and in pages, in turns.

    tools/bench_pages.py --device cuda --json docs/results/h200-pages.json

Calls: decode of one sequence and of many with 8192 keys each, and a prefill of 2048 queries behind 6144 keys by algorithm v2, which is what computes pages on a GPU."""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys

import compact_records

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHAPE = ["--nheads", "32", "--nheads-k", "8", "--headdim", "128", "--no-grad"]
CALLS = {
    "decode, batch 1": ["--batch", "1", "--seqlen", "1", "--seqlen-k", "8192"],
    "decode, batch 64": ["--batch", "64", "--seqlen", "1", "--seqlen-k", "8192"],
    "prefill, batch 4": ["--batch", "4", "--seqlen", "2048", "--seqlen-k", "8192", "--causal", "--algorithm", "v2"],
}


def bench(args, call: str, page_size: int) -> dict:
    """The record of one measurement; pages of 0 keys are a contiguous cache."""
    pages = ["--page-size", str(page_size)] if page_size else []
    command = [args.fattn, "bench", "--device", args.device, "--dtype", args.dtype, *CALLS[call], *SHAPE, "--max-time", str(args.seconds), *pages, "--json", "-"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip()[-300:]}")
    return json.loads(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fattn", default=str(ROOT / "build" / "cli" / "fattn"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[256, 64, 16, 1])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.2, help="of each measurement in each turn")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    rows, environment = [], None
    for call in CALLS:
        times: dict[int, list[float]] = {}
        kernels = {}
        for _ in range(args.turns):
            for page_size in [0, *args.page_sizes]:
                record = bench(args, call, page_size)
                environment = environment or record["environment"]
                row = next(row for row in record["rows"] if row["provider"] == "fattn")
                times.setdefault(page_size, []).append(row["time_median_s"])
                kernels[page_size] = row["kernel"]
        for page_size, seconds in times.items():
            over = statistics.median(seconds) / statistics.median(times[0])
            rows.append({"call": call, "page_size": page_size, "time_median_s": statistics.median(seconds), "over_contiguous": over, "kernel": kernels[page_size]})
            print(f"{call:18s} {f'pages of {page_size}' if page_size else 'contiguous':12s} {1e6 * statistics.median(seconds):10.2f} us  {over:5.3f}", flush=True)
    if args.json:
        compact_records.write(args.json, {"fattn_pages": 1, "environment": environment, "dtype": args.dtype, "turns": args.turns, "shape": SHAPE, "calls": CALLS, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
