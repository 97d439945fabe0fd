"""`check --errors`: what several ranks' results are off float64's, beside what one process's are."""

import datetime
import functools
import json
import math
from typing import Any

import torch
import torch.distributed as distributed

from .._attention import attention
from .._info import info
from ._front import ring_attention
from ._schedule import LAYOUTS
from ._shard import shard

NAMES = ("o", "dq", "dk", "dv")
GOAL = 1.25  # of the ratio of root mean squares
ROWS = 256  # of a rank: float64 is computed by the reference, which is slow
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _results(function: Any, tensors: list[torch.Tensor], dout: torch.Tensor, options: dict[str, Any]) -> list[torch.Tensor]:
    q, k, v = (x.detach().clone().requires_grad_() for x in tensors)
    o = function(q, k, v, **options)
    o.backward(dout)
    return [o.detach(), q.grad, k.grad, v.grad]


def _ratio(ring: float, alone: float) -> float:
    return ring / alone if alone else 1.0 if ring == 0 else float("inf")


def errors_of(tensors: list[torch.Tensor], dout: torch.Tensor, options: dict[str, Any], methods: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Of q, k and v of all ranks and each (method, layout): by tensor the root mean square and the largest error of all ranks, of one process, and their ratios."""
    device = dout.device
    state = options.get("dropout_state")
    exact = _results(attention, [x.double().cpu() for x in tensors], dout.double().cpu(), options | ({} if state is None else {"dropout_state": state.cpu()}))
    one = _results(attention, tensors, dout, options)
    found = []
    for method, layout in methods:
        mine = _results(ring_attention, [shard(x, 1, layout=layout) for x in tensors], shard(dout, 1, layout=layout), options | {"method": method, "layout": layout})
        row: dict[str, Any] = {"method": method, "layout": layout}
        for name, got, usual, wanted in zip(NAMES, mine, one, exact):
            wanted = shard(wanted, 1, layout=layout)
            differences = [(x.double().cpu() - wanted).flatten() for x in (got, shard(usual, 1, layout=layout))]
            squares = torch.stack([x.square().sum() for x in differences] + [torch.tensor(float(wanted.numel()), dtype=torch.float64)]).to(device)
            most = torch.stack([torch.cat([x.abs(), x.new_zeros(1)]).max() for x in differences]).to(device)
            distributed.all_reduce(squares)
            distributed.all_reduce(most, distributed.ReduceOp.MAX)
            (ring, alone, count), (largest, largest_alone) = squares.tolist(), most.tolist()
            numbers = {"rms": (ring / count) ** 0.5, "rms_one": (alone / count) ** 0.5, "rms_ratio": _ratio(ring, alone) ** 0.5, "largest": largest,
                       "largest_one": largest_alone, "largest_ratio": _ratio(largest, largest_alone)}
            row[name] = {key: float(f"{x:.4g}") if math.isfinite(x) else None for key, x in numbers.items()}
        found.append(row)
    return found


def record_of(rows: int, nheads: int, nheads_k: int, headdim: int, dtypes: tuple[torch.dtype, ...], device: torch.device, methods: tuple[str, ...]) -> dict[str, Any]:
    """Every method and layout under every mask, at a length that ranks do not divide."""
    seqlen = rows * distributed.get_world_size() + 1
    dropout = {"causal": True, "dropout_p": 0.25, "dropout_state": torch.tensor([3, 5], device=device)}
    found = []
    for dtype in dtypes:
        torch.manual_seed(0)
        tensors = [torch.randn(1, seqlen, heads, headdim, device=device).to(dtype) for heads in (nheads, nheads_k, nheads_k)]
        dout = torch.randn(1, seqlen, nheads, headdim, device=device).to(dtype)
        for mask, options in (("none", {}), ("causal", {"causal": True}), ("window", {"causal": True, "window": (100, 0)}), ("dropout", dropout)):
            rows_of_mask = errors_of(tensors, dout, options, [(method, layout) for method in methods for layout in LAYOUTS])
            found += [{"mask": mask, "dtype": str(dtype).removeprefix("torch.")} | row for row in rows_of_mask]
    return {"fattn_ring_errors": 1, "date": datetime.date.today().isoformat(), "ranks": distributed.get_world_size(), "seqlen": seqlen, "nheads": nheads, "nheads_k": nheads_k,
            "headdim": headdim, "device": device.type, "torch": torch.__version__, "environment": _environment(device), "rows": found}


def _environment(device: torch.device) -> dict[str, Any]:
    cpu = info()["cpu"]
    machine = {"cpu": {"model": cpu["model"], "usable_threads": cpu["usable_threads"], "isa_default": cpu["isa"]}}
    return machine | ({"gpus": [{"name": torch.cuda.get_device_name(device)}]} if device.type == "cuda" else {})


def text_of(record: dict[str, Any]) -> str:
    """JSON, a row a line."""
    dumps = functools.partial(json.dumps, allow_nan=False)
    head = "".join(f"  {dumps(key)}: {dumps(value)},\n" for key, value in record.items() if key != "rows")
    return "{\n" + head + '  "rows": [\n' + ",\n".join("    " + dumps(row) for row in record["rows"]) + "\n  ]\n}\n"


def _beyond_none(ratio: float | None) -> float:
    """None stands in a record for what is no number, or has nothing to be divided by."""
    return math.inf if ratio is None else ratio


def failed(record: dict[str, Any]) -> int:
    """How many rows are above the goal."""
    return sum(not all(_beyond_none(row[name]["rms_ratio"]) <= GOAL for name in NAMES) for row in record["rows"])


def words_of(record: dict[str, Any]) -> list[str]:
    """A line a dtype: the greatest ratios, and where they are."""
    said = []
    for dtype in dict.fromkeys(row["dtype"] for row in record["rows"]):
        parts = []
        for kind, words in (("rms_ratio", "root mean square"), ("largest_ratio", "largest")):
            ratio, name, row = max(((_beyond_none(row[name][kind]), name, row) for row in record["rows"] if row["dtype"] == dtype for name in NAMES), key=lambda x: x[0])
            parts.append(f"{words} {ratio:.2f} ({name}, {row['method']}, {row['layout']}, {row['mask']})")
        said.append(f"{dtype}: errors over those of one process, at most: " + ", ".join(parts) + f"; the goal of root mean squares is {GOAL}")
    return said
