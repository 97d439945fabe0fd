"""Times ring attention on the ranks that are running, beside one rank's attention of as many tokens; and checks it before."""

import inspect
import statistics
import time
from typing import Any

import torch
import torch.distributed as distributed

from .._attention import attention
from ._call import Attention
from ._front import ring_attention
from ._prepare import TIMEOUT, given_of, prepared
from ._ranks import ranks_of
from ._shard import shard
from ._timeline import Timeline, trace_of
from ._transfer import Transfer

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def _leaves(shape: tuple[int, ...], nheads_k: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    batch, rows, nheads, headdim = shape
    return [torch.randn(batch, rows, heads, headdim, device=device).to(dtype).requires_grad_() for heads in (nheads, nheads_k, nheads_k)]


def largest_error(seqlen: int, nheads: int, nheads_k: int, headdim: int, dtype: torch.dtype, device: torch.device, function: Any = None, **options: Any) -> dict[str, float]:
    """Of o and the gradients, against attention of the whole sequence in this process; relative to the largest element. The largest of all ranks. `function`: of
    q, k and v, what ranks compute in place of ring_attention with these options."""
    torch.manual_seed(0)
    whole = _leaves((1, seqlen, nheads, headdim), nheads_k, dtype, device)
    dout = torch.randn(1, seqlen, nheads, headdim, device=device).to(dtype)
    alike = {name: options[name] for name in ("causal", "window", "dropout_p", "dropout_state") if name in options}
    o = attention(*whole, **alike)
    o.backward(dout)
    layout, group = options.get("layout", "zigzag"), options.get("group")
    mine = [shard(x.detach(), 1, group, layout).requires_grad_() for x in whole]
    part = ring_attention(*mine, **options) if function is None else function(*mine)
    part.backward(shard(dout, 1, group, layout))
    errors = {}
    for name, got, wanted in zip(("o", "dq", "dk", "dv"), (part, *(x.grad for x in mine)), (o, *(x.grad for x in whole))):
        difference = (got.detach().float() - shard(wanted.detach(), 1, group, layout).float()).abs()
        error = (difference.max() if difference.numel() else difference.new_zeros(())) / wanted.detach().float().abs().max()
        distributed.all_reduce(error, distributed.ReduceOp.MAX, group=group)
        errors[name] = float(error)
    return errors


def _seconds(call: Any, device: torch.device, seconds: float) -> list[float]:
    """Of each run, without the first two. All ranks run as often."""
    def once() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    once()
    runs = torch.tensor([min(max(5, int(seconds / max(once(), 1e-6))), 200)], device=device)
    distributed.all_reduce(runs, distributed.ReduceOp.MIN)
    return [once() for _ in range(int(runs))]


def _slowest(times: list[float], device: torch.device) -> float:
    """The median of runs, each as long as its slowest rank."""
    every = torch.tensor(times, dtype=torch.float64, device=device)
    distributed.all_reduce(every, distributed.ReduceOp.MAX)
    return statistics.median(every.tolist())


def _transfer_seconds(k: torch.Tensor, v: torch.Tensor, device: torch.device, seconds: float) -> float:
    """Of one hop alone: k and v to the next rank, and those of the one before; of one rank 0."""
    ranks = ranks_of(None)
    if ranks.count == 1:
        return 0.0
    received = [torch.empty_like(k), torch.empty_like(v)]

    def hop() -> None:
        ranks.begin()
        Transfer(ranks, 60.0, (ranks.rank + 1) % ranks.count, [k.detach(), v.detach()], (ranks.rank - 1) % ranks.count, received, ranks.tag()).wait()
        ranks.end()

    return _slowest(_seconds(hop, device, seconds), device)


def _about(mine: list[torch.Tensor], causal: bool, method: str, layout: str, ulysses_degree: int | None) -> dict[str, Any]:
    """What was measured, and where."""
    q, k, _ = mine
    return {"ranks": distributed.get_world_size(), "rows": q.shape[1], "nheads": q.shape[2], "nheads_k": k.shape[2], "headdim": q.shape[3], "dtype": str(q.dtype).removeprefix("torch."),
            "causal": causal, "method": method, "layout": layout, "ulysses_degree": ulysses_degree, "device": torch.cuda.get_device_name() if q.is_cuda else "cpu", "torch": torch.__version__}


def bench(rows: int, nheads: int, nheads_k: int, headdim: int, dtype: torch.dtype, device: torch.device, causal: bool, method: str, layout: str, check: bool,
          seconds: float, ulysses_degree: int | None = None, function: Any = None) -> dict[str, Any]:
    """A record: FLOP/s a rank of the ring, of one rank alone with as many tokens as it holds here, and what part the one is of the other; beside it what the
    agreement of a call and the transfer of a hop take by themselves. `function`: of q, k and v, what is timed in place of ring_attention."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    n = distributed.get_world_size()
    options = {"causal": causal, "method": method, "layout": layout, "check": check} | ({} if check else {"seqlen_q": n * rows}) | {"ulysses_degree": ulysses_degree}
    mine = _leaves((1, rows, nheads, headdim), nheads_k, dtype, device)
    dout = torch.randn(1, rows, nheads, headdim, device=device).to(dtype)
    record = _about(mine, causal, method, layout, ulysses_degree) | {"check": check}

    def both(function: Any, **given: Any) -> None:
        function(*mine, **given).backward(dout)

    def forward(function: Any, **given: Any) -> None:
        with torch.no_grad():
            function(*mine, **given)

    for name, run, passes in (("forward", forward, 1.0), ("forward_backward", both, 3.5)):
        flops = passes * 4 * nheads * headdim * (0.5 if causal else 1.0)
        alone = _slowest(_seconds(lambda: run(attention, causal=causal), device, seconds), device)
        together = _slowest(_seconds(lambda: run(ring_attention, **options) if function is None else run(function), device, seconds), device)
        record[name] = {"seconds_alone": alone, "seconds": together, "tflops_alone": flops * rows**2 / alone / 1e12,
                        "tflops_a_rank": flops * (n * rows) ** 2 / n / together / 1e12}
        record[name]["share"] = record[name]["tflops_a_rank"] / record[name]["tflops_alone"]
    if device.type == "cuda":
        record["peak_bytes"] = torch.cuda.max_memory_allocated()
    record["exchange_seconds"] = _slowest(_seconds(lambda: ranks_of(None).exchange({"bench": rows}, 60.0), device, seconds / 4), device)
    record["transfer_seconds"] = _transfer_seconds(mine[1], mine[2], device, seconds / 4)
    return record


def timeline(rows: int, nheads: int, nheads_k: int, headdim: int, dtype: torch.dtype, device: torch.device, causal: bool, method: str, layout: str,
             ulysses_degree: int | None = None) -> dict[str, Any]:
    """What ranks did when, in one forward and backward pass after two others."""
    ranks = ranks_of(None)
    mine = _leaves((1, rows, nheads, headdim), nheads_k, dtype, device)
    dout = torch.randn(1, rows, nheads, headdim, device=device).to(dtype)
    options = {"causal": causal, "method": method, "layout": layout, "ulysses_degree": ulysses_degree}
    for _ in range(2):
        ring_attention(*mine, **options).backward(dout)
    arguments = dict.fromkeys(inspect.signature(given_of).parameters) | dict(zip("qkv", mine)) | options | {"dropout_p": 0.0, "backend": "auto", "algorithm": "auto"}
    given, _, call = prepared(ranks, arguments, TIMEOUT, True, True, None, None)
    seen = Timeline(device, TIMEOUT)
    o, _ = Attention.apply(call._replace(plan=call.plan._replace(timeline=seen)), *given.tensors)
    o.backward(dout)
    return trace_of(ranks, seen, _about(mine, causal, method, layout, ulysses_degree))
