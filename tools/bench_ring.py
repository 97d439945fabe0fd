#!/usr/bin/env python3
"""Ring attention on several GPUs beside one: `torchrun -m fattn.distributed bench` for a list of shapes, with the package installed.

    tools/bench_ring.py --ranks 2 --json docs/results/h200-ring.json

Every shape is checked against one rank first. A share is the rate of each rank as a part of what one rank alone has with as many rows."""
import argparse
import json
import pathlib
import subprocess
import sys

import compact_records

SHAPES = {
    "32K a rank, 16 heads": ["--rows", "32768", "--nheads", "16"],
    "8K a rank, 32 / 8 heads": ["--rows", "8192", "--nheads", "32", "--nheads-k", "8"],
    "8K a rank, 32 / 8 heads, gathered": ["--rows", "8192", "--nheads", "32", "--nheads-k", "8", "--method", "all_gather"],
    "8K a rank, 32 / 8 heads, ulysses": ["--rows", "8192", "--nheads", "32", "--nheads-k", "8", "--method", "ulysses"],
}
ON_CPU = {"512 a rank, 4 / 2 heads": ["--rows", "512", "--nheads", "4", "--nheads-k", "2"]}


def bench(args: argparse.Namespace, shape: list[str]) -> dict:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks), "-m", "fattn.distributed", "bench", "--device", args.device,
               "--headdim", "128", "--seconds", str(args.seconds), *shape, *(["--no-check"] if args.no_check else [])]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    records = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not records:
        sys.exit(f"{' '.join(command)}: {done.stdout[-2000:]} {done.stderr.strip()[-2000:]}")
    return json.loads(records[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--no-check", action="store_true", help="time calls with check=False")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    rows = []
    for name, shape in (SHAPES if args.device == "cuda" else ON_CPU).items():
        record = bench(args, shape)
        rows.append({"name": name} | record)
        print(f"{name}: " + ", ".join(f"{part} {record[part]['tflops_a_rank']:.3g} TFLOP/s a rank, {100 * record[part]['share']:.1f} % of {record[part]['tflops_alone']:.3g}"
                                      for part in ("forward", "forward_backward")), flush=True)
    if args.json:
        compact_records.write(args.json, {"fattn_ring": 1, "ranks": args.ranks, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
