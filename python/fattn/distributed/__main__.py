"""`torchrun --nproc-per-node N -m fattn.distributed check|bench`: whether ranks compute what one does, and how fast. JSON on the output of rank 0.
`python -m fattn.distributed simulate`: how fast on GPUs that are not there."""

import argparse
import json
import os
import pathlib
import sys

import torch
import torch.distributed as distributed

from .._check.terminal import require_writable, write_whole
from . import _errors
from ._bench import TOLERANCE, bench, largest_error, timeline
from ._prepare import METHODS
from ._schedule import LAYOUTS
from ._timeline import words_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fattn.distributed", description=__doc__)
    parser.add_argument("command", choices=("check", "bench"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, nargs="+", help="positions that each rank holds (bench: 32768 on a GPU, 1024 on the CPU, or several numbers, a record each; "
                        "check: 910)")
    parser.add_argument("--nheads", type=int, default=8)
    parser.add_argument("--nheads-k", type=int, help="as many as --nheads unless given")
    parser.add_argument("--headdim", type=int, default=128)
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="bf16 on a GPU, fp32 on the CPU")
    parser.add_argument("--method", choices=METHODS, default="ring")
    parser.add_argument("--ulysses-degree", type=int, help="of method mixed")
    parser.add_argument("--layout", choices=tuple(LAYOUTS), default="zigzag")
    parser.add_argument("--no-causal", action="store_true")
    parser.add_argument("--no-check", action="store_true", help="time calls with check=False")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--timeline", type=pathlib.Path, metavar="FILE.json", help="of bench: what each rank did when, of the first of --rows, as a trace that Perfetto opens")
    parser.add_argument("--errors", type=pathlib.Path, metavar="FILE.json", help="of check: errors of o, dq, dk and dv over those of one process, each against float64, of all dtypes unless "
                        f"--dtype is given, of {_errors.ROWS} positions a rank unless --rows is")
    given = parser.parse_args()
    if given.rows is not None and (min(given.rows) < 1 or (given.command == "check" and len(given.rows) > 1)):
        parser.error(f"--rows is {' '.join(map(str, given.rows))}; allowed: numbers of at least 1, of check one")
    for flag, file, command in (("--timeline", given.timeline, "bench"), ("--errors", given.errors, "check")):
        if file is not None and given.command != command:
            parser.error(f"{flag} is given with {given.command}; allowed: with {command}")
        if file is not None and os.environ.get("RANK", "0") == "0":  # which writes it
            require_writable(str(file), flag)
    return given


def _timeline(given: argparse.Namespace, rows: int, dtype: torch.dtype, device: torch.device) -> None:
    trace = timeline(rows, given.nheads, given.nheads_k or given.nheads, given.headdim, dtype, device, not given.no_causal, given.method, given.layout, given.ulysses_degree)
    if distributed.get_rank() == 0:
        write_whole(str(given.timeline), json.dumps(trace) + "\n")
        for said in words_of(trace["otherData"]["overlap"]):
            print(said, file=sys.stderr, flush=True)


def _methods(given: argparse.Namespace) -> tuple[str, ...]:
    """Those that these heads have."""
    n = distributed.get_world_size()
    return tuple(method for method in METHODS if method != "ulysses" or not (given.nheads % n or (given.nheads_k or given.nheads) % n))


def _check_errors(given: argparse.Namespace, device: torch.device) -> int:
    record = _errors.record_of(given.rows[0] if given.rows else _errors.ROWS, given.nheads, given.nheads_k or given.nheads, given.headdim,
                               (DTYPES[given.dtype],) if given.dtype else _errors.DTYPES, device, _methods(given))
    if distributed.get_rank() == 0:
        write_whole(str(given.errors), _errors.text_of(record))
        for said in _errors.words_of(record):
            print(said, file=sys.stderr, flush=True)
    return _errors.failed(record)


def _check(given: argparse.Namespace, dtype: torch.dtype, device: torch.device) -> dict:
    """All methods and layouts, at a length that ranks do not divide."""
    seqlen = (given.rows[0] if given.rows and given.command == "check" else 910) * distributed.get_world_size() + 1
    nheads_k = given.nheads_k or given.nheads
    problems, failed = [], 0
    dropout = {"causal": True, "dropout_p": 0.25, "dropout_state": torch.tensor([3, 5], device=device)}
    for method in _methods(given):
        for layout in LAYOUTS:
            for name, options in (("all", {}), ("causal", {"causal": True}), ("window", {"causal": True, "window": (100, 0)}), ("dropout", dropout)):
                errors = largest_error(seqlen, given.nheads, nheads_k, given.headdim, dtype, device, method=method, layout=layout, **options)
                good = all(error <= TOLERANCE[dtype] for error in errors.values())
                failed += not good
                problems.append({"method": method, "layout": layout, "mask": name, "seqlen": seqlen, "errors": errors, "passed": good})
    return {"command": "check", "ranks": distributed.get_world_size(), "dtype": str(dtype).removeprefix("torch."), "problems": problems, "failed": failed}


def main() -> int:
    if sys.argv[1:2] == ["simulate"]:
        from .simulate.command import main as simulate

        return simulate(sys.argv[2:])
    given = _arguments()
    if "RANK" not in os.environ:
        print("fattn.distributed: start it by torchrun --nproc-per-node N -m fattn.distributed ..., which makes the ranks", file=sys.stderr)
        return 2
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if given.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    dtype = DTYPES[given.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    records = [_check(given, dtype, device)]
    failed = records[0]["failed"]
    if given.errors is not None:
        failed += _check_errors(given, device)
    if given.command == "bench" and not failed:
        sizes = given.rows or [32768 if device.type == "cuda" else 1024]
        if given.timeline is not None:
            _timeline(given, sizes[0], dtype, device)
        checked = {"command": "bench", "checked": len(records[0]["problems"])}
        records = (checked | bench(rows, given.nheads, given.nheads_k or given.nheads, given.headdim, dtype, device, not given.no_causal, given.method, given.layout,
                                   not given.no_check, given.seconds, given.ulysses_degree)
                   for rows in sizes)
    for record in records:
        if distributed.get_rank() == 0:
            print(json.dumps(record), flush=True)
    distributed.barrier()
    distributed.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
