"""`python -m fattn.distributed simulate`: a table of how long ring attention takes on 8 to 1024 GPUs, and what limits it."""

import argparse
import json
import pathlib
import sys
from typing import Any

from .._heads import choose_degree
from .._prepare import METHODS
from .._schedule import LAYOUTS
from .calibrate import Calibration, calibrate, errors, read_records
from .model import Constants, Shape, limit, simulated

ELEMENT = {"fp32": 4, "bf16": 2, "fp16": 2}
_BETWEEN = {"bandwidth_between": ("between_bytes", 1e9), "latency_between": ("between_latency", 1e-6)}
_INSIDE = {"bandwidth_inside": ("inside_bytes", 1e9), "latency_inside": ("inside_latency", 1e-6)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fattn.distributed simulate", description=__doc__.split(": ", 1)[1])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512, 1024], help="GPUs (8 16 ... 1024)")
    parser.add_argument("--rows", type=int, default=32768, help="positions that each rank holds (32768)")
    parser.add_argument("--nheads", type=int, default=32)
    parser.add_argument("--nheads-k", type=int, help="as many as --nheads unless given")
    parser.add_argument("--headdim", type=int, default=128)
    parser.add_argument("--dtype", choices=tuple(ELEMENT), default="bf16")
    parser.add_argument("--method", choices=METHODS, default="ring")
    parser.add_argument("--ulysses-degree", type=int, help="of method mixed; else the largest that divides --gpus-per-host and heads")
    parser.add_argument("--layout", choices=tuple(LAYOUTS), default="zigzag")
    parser.add_argument("--no-causal", action="store_true")
    parser.add_argument("--window", type=int, help="keys before its own position that a query sees")
    parser.add_argument("--gpus-per-host", type=int, default=8)
    parser.add_argument("--bandwidth-inside", type=float, help="of a host, GB/s a GPU in one direction (350)")
    parser.add_argument("--bandwidth-between", type=float, help="hosts, likewise (50)")
    parser.add_argument("--latency-inside", type=float, help="microseconds (10)")
    parser.add_argument("--latency-between", type=float, help="microseconds (20)")
    parser.add_argument("--tflops", type=float, help="of one GPU's forward pass")
    parser.add_argument("--tflops-backward", type=float, help="of its backward pass; as --tflops unless given")
    parser.add_argument("--record", help="a record of this repository's docs/results, or of `fattn bench`, that has one GPU's rates")
    parser.add_argument("--calibrate", metavar="FILE", help="records of `bench`, a line each, to take the constants from; shows the error on what was left out")
    parser.add_argument("--json", action="store_true")
    return parser


def _rates(given: argparse.Namespace) -> tuple[float, float]:
    """FLOP/s of a record's longest problem of this kind."""
    record = json.loads(pathlib.Path(given.record).read_text())
    rows = record.get("rows", []) if isinstance(record, dict) else []
    found = []
    for which in ("fwd", "bwd"):
        like = [x for x in rows if isinstance(x, dict) and x.get("provider") == "fattn" and x.get("pass") == which and x.get("headdim") == given.headdim
                and x.get("dtype") == given.dtype and x.get("causal") is (not given.no_causal) and x.get("flops_per_s")]
        if not like:
            raise ValueError(f"{given.record} has no row of fattn with pass {which}, headdim {given.headdim}, {given.dtype}, causal {not given.no_causal}; give another record, or "
                             "--tflops")
        found.append(max(like, key=lambda x: (x["seqlen_k"], x["flops_per_s"]))["flops_per_s"])
    return found[0], found[1]


def _constants(given: argparse.Namespace) -> tuple[Constants, Calibration | None]:
    if sum(x is not None for x in (given.tflops, given.record, given.calibrate)) != 1:
        raise ValueError("the rate of one GPU is to be said once: give one of --tflops, --record and --calibrate")
    links = {name: getattr(given, flag) * unit for flag, (name, unit) in (_BETWEEN | _INSIDE).items() if getattr(given, flag) is not None}
    if given.calibrate is not None:
        of_file = calibrate(read_records(given.calibrate))
        return of_file.constants._replace(**links), of_file
    forward, backward = (given.tflops * 1e12, (given.tflops_backward or given.tflops) * 1e12) if given.tflops else _rates(given)
    return Constants(forward, backward, **links), None


def _shape(given: argparse.Namespace, ranks: int) -> Shape:
    nheads_k = given.nheads_k or given.nheads
    degree = 1
    if given.method == "ulysses":
        degree = ranks
    elif given.method == "mixed":
        degree = given.ulysses_degree or choose_degree(min(ranks, given.gpus_per_host), given.nheads, nheads_k)
    if ranks % degree or given.nheads % degree or nheads_k % degree:
        raise ValueError(f"{degree} ranks exchange heads, of {ranks} ranks, {given.nheads} heads and {nheads_k} of keys; it must divide all three. --method ring takes any number")
    return Shape(ranks, given.rows, given.nheads, nheads_k, given.headdim, ELEMENT[given.dtype], not given.no_causal,
                 (-1, -1) if given.window is None else (given.window, -1), given.method, given.layout, degree, given.gpus_per_host)


def _require_positive(given: argparse.Namespace) -> None:
    for name in ("rows", "nheads", "nheads_k", "headdim", "gpus_per_host", "tflops", "tflops_backward", "ulysses_degree", *_BETWEEN, *_INSIDE):
        value = getattr(given, name)
        if value is not None and not (value > 0 or (value == 0 and name.startswith("latency"))):
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be above 0")
    if any(not 1 <= ranks <= 1024 for ranks in given.ranks):
        raise ValueError(f"--ranks is {' '.join(map(str, given.ranks))}; allowed: 1 to 1024")


def _row(shape: Shape, constants: Constants) -> dict[str, Any]:
    times, (name, gain) = simulated(shape, constants), limit(shape, constants)
    flops = times.pairs * 4 * shape.headdim * shape.nheads
    return {"ranks": shape.ranks, "ulysses_degree": shape.degree, "seqlen": shape.ranks * shape.rows, "forward_s": times.forward,
            "forward_backward_s": times.forward_backward, "forward_tflops_a_gpu": flops / times.forward / 1e12,
            "forward_backward_tflops_a_gpu": 3.5 * flops / times.forward_backward / 1e12, "forward_share": times.share(False),
            "forward_backward_share": times.share(True), "limit": name, "limit_part": gain}


def _print_table(rows: list[dict[str, Any]]) -> None:
    print(f"{'GPUs':>5} {'positions':>11} {'forward':>11} {'share':>6} {'with bwd':>11} {'share':>6}  limit")
    for row in rows:
        what = row["limit"] if row["limit"] == "computing" else f"{row['limit']} (-{100 * row['limit_part']:.0f} %)"
        print(f"{row['ranks']:>5} {row['seqlen']:>11} {1e3 * row['forward_s']:>8.2f} ms {100 * row['forward_share']:>4.0f} % "
              f"{1e3 * row['forward_backward_s']:>8.2f} ms {100 * row['forward_backward_share']:>4.0f} %  {what}")


def _print_calibration(calibration: Calibration) -> None:
    c = calibration.constants
    print(f"fitted on {len(calibration.fitted)} records: {c.forward_flops / 1e12:.4g} and {c.backward_flops / 1e12:.4g} TFLOP/s, "
          f"{c.inside_bytes / 1e9:.3g} GB/s,\n  {1e6 * c.inside_latency:.3g} us a transfer, {1e6 * c.once:.3g} us a pass")
    print("records that were left out:")
    for record, name, seconds, off in errors(calibration, calibration.left_out):
        print(f"  {record.name()}\n    {name.replace('_', ' + ')}: {1e3 * record.seconds[name]:.3f} ms measured, {1e3 * seconds:.3f} simulated, {100 * off:+.1f} %")


def main(arguments: list[str]) -> int:
    given = _parser().parse_args(arguments)
    try:
        _require_positive(given)
        constants, calibration = _constants(given)
        shapes = [_shape(given, ranks) for ranks in given.ranks]
    except (ValueError, OSError) as error:
        print(f"fattn.distributed simulate: {error}", file=sys.stderr)
        return 2
    rows = [_row(shape, constants) for shape in shapes]
    if given.json:
        left_out = [] if calibration is None else [{"record": record.name(), "pass": name, "measured_s": record.seconds[name], "simulated_s": seconds, "error": off}
                                                   for record, name, seconds, off in errors(calibration, calibration.left_out)]
        print(json.dumps({"command": "simulate", "constants": constants._asdict(), "method": given.method, "layout": given.layout, "rows_a_rank": given.rows,
                          "gpus_per_host": given.gpus_per_host, "left_out": left_out, "rows": rows}))
        return 0
    if calibration is not None:
        _print_calibration(calibration)
    _print_table(rows)
    print("Share: of one GPU's rate on as many positions. Limit: what costs most, and how\nmuch less a step of both passes would take without it.")
    return 0
