#!/usr/bin/env python3
"""Ring attention on several GPUs beside one, as `torchrun -m fattn.distributed bench` measures it, for a list of shapes; with the package installed.

    tools/bench_ring.py --ranks 2 --json docs/results/h200-ring.json

Every method is checked against one rank first, and so is the schedule of ring-flash-attn on the same kernels, which is timed beside ours. A share is the rate of
each rank as a part of what one rank alone has with as many rows."""
import argparse
import datetime
import json
import os
import pathlib
import subprocess
import sys

import compact_records

PEER = "ring_flash"  # tools/ring_flash_schedule.py
SHAPES = {
    "32K a rank, 16 heads": {"rows": 32768, "nheads": 16},
    "8K a rank, 32 / 8 heads": {"rows": 8192, "nheads": 32, "nheads_k": 8},
    "8K a rank, 32 / 8 heads, unchecked": {"rows": 8192, "nheads": 32, "nheads_k": 8, "check": False},
    "8K a rank, 32 / 8 heads, gathered": {"rows": 8192, "nheads": 32, "nheads_k": 8, "method": "all_gather"},
    "8K a rank, 32 / 8 heads, ulysses": {"rows": 8192, "nheads": 32, "nheads_k": 8, "method": "ulysses"},
    "32K a rank, 16 heads, the schedule of ring-flash-attn": {"rows": 32768, "nheads": 16, "method": PEER},
    "8K a rank, 32 / 8 heads, the schedule of ring-flash-attn": {"rows": 8192, "nheads": 32, "nheads_k": 8, "method": PEER},
    "512K a rank, 8 heads": {"rows": 2**19, "nheads": 8},
}
ON_CPU = {"512 a rank, 4 / 2 heads": {"rows": 512, "nheads": 4, "nheads_k": 2},
          "512 a rank, 4 / 2 heads, the schedule of ring-flash-attn": {"rows": 512, "nheads": 4, "nheads_k": 2, "method": PEER}}
HEADDIM = 128


def as_rank(args: argparse.Namespace) -> int:
    """One of the ranks: checks every method once, times the shapes; rank 0 prints a line of JSON each."""
    import torch
    import torch.distributed as distributed
    from fattn.distributed._bench import TOLERANCE, bench, largest_error
    from ring_flash_schedule import ring_flash_attention

    cuda = args.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if cuda else "gloo")
    dtype = torch.bfloat16 if cuda else torch.float32
    shapes = SHAPES if cuda else ON_CPU
    for method in dict.fromkeys(shape.get("method", "ring") for shape in shapes.values()):
        if method == PEER:
            errors = largest_error(910 * distributed.get_world_size(), 8, 8, HEADDIM, dtype, device, ring_flash_attention, causal=True)
        else:
            errors = largest_error(910 * distributed.get_world_size() + 1, 8, 8, HEADDIM, dtype, device, method=method, causal=True)
        if not all(error <= TOLERANCE[dtype] for error in errors.values()):
            print(f"method {method} is wrong: {errors}", file=sys.stderr)
            return 1
    for name, shape in shapes.items():
        options = {"method": "ring", "check": True} | shape
        record = bench(options["rows"], options["nheads"], options.get("nheads_k", options["nheads"]), HEADDIM, dtype, device, True, options["method"], "zigzag",
                       options["check"], args.seconds, function=ring_flash_attention if options["method"] == PEER else None)
        if distributed.get_rank() == 0:
            print(json.dumps({"name": name} | record), flush=True)
    distributed.barrier()
    distributed.destroy_process_group()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank:
        return as_rank(args)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks), __file__, "--device", args.device,
               "--seconds", str(args.seconds), "--as-rank"]
    rows, begun = [], datetime.date.today().isoformat()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as ranks:
        for line in ranks.stdout:
            if not line.startswith("{"):
                continue
            record = json.loads(line)
            rows.append(record)
            print(f"{record['name']}: " + ", ".join(f"{part} {record[part]['tflops_a_rank']:.3g} TFLOP/s a rank, {100 * record[part]['share']:.1f} % of {record[part]['tflops_alone']:.3g}"
                                                    for part in ("forward", "forward_backward")), flush=True)
            if args.json:  # what is measured is kept, whatever comes after
                compact_records.write(args.json, {"fattn_ring": 1, "date": begun, "ranks": args.ranks, "rows": rows})
    return ranks.returncode


if __name__ == "__main__":
    sys.exit(main())
