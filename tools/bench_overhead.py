#!/usr/bin/env python3
"""What a call of fattn.attention costs the host beside its arithmetic: tiny problems, with and without gradients, beside torch's own attention and operators of Python that
compute nothing. Microseconds a call, the median of several rounds, in turns; on a GPU the calls are only submitted inside the clock, and waited for behind it."""

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F

import fattn
from fattn import compat

compat.install("flash_attn", replace=True)
from flash_attn import flash_attn_func  # noqa: E402, fattn's, whatever else is installed

compat.uninstall()


@torch.library.custom_op("fattn_bench::empty", mutates_args=())
def empty(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("fattn_bench::empty_backward", mutates_args=())
def empty_backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


empty.register_autograd(lambda ctx, dout: empty_backward(dout, *ctx.saved_tensors), setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


def contestants(causal: bool) -> dict:
    """Each on (batch, seqlen, heads, headdim)."""
    return {
        "fattn.attention": lambda q, k, v: fattn.attention(q, k, v, causal=causal),
        "flash_attn_func of fattn.compat": lambda q, k, v: flash_attn_func(q, k, v, causal=causal),
        "scaled_dot_product_attention": lambda q, k, v: F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal),
        "an empty custom_op": empty,
        "torch.empty_like": lambda q, k, v: torch.empty_like(q),
    }


def in_turns(calls: dict, wait, seconds: float, rounds: int) -> dict[str, float]:
    """Of each the median of the rounds, which all take turns in; a round is as many calls as take a share of the seconds, and begins with an idle device."""
    counts, results = {}, {name: [] for name in calls}
    for name, call in calls.items():
        for _ in range(20):
            call()
        wait()
        start = time.perf_counter()
        call()
        wait()
        counts[name] = max(10, min(500, int(seconds / rounds / max(time.perf_counter() - start, 1e-6))))
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            wait()
            start = time.perf_counter()
            for _ in range(counts[name]):
                call()
            results[name].append((time.perf_counter() - start) / counts[name])
            wait()
    return {name: statistics.median(x) * 1e6 for name, x in results.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=1.0, help="of measuring, for each number (default: 1)")
    parser.add_argument("--rounds", type=int, default=21, help="that the contestants take turns in (default: 21)")
    parser.add_argument("--json", metavar="FILE", help="writes the numbers there, too")
    arguments = parser.parse_args()
    device, on_cuda = arguments.device, arguments.device.startswith("cuda")
    wait = torch.cuda.synchronize if on_cuda else lambda: None
    torch.set_num_threads(1)
    shape, dtype = ((1, 16, 2, 64), torch.bfloat16) if on_cuda else ((1, 1, 1, 8), torch.float32)
    print(f"{shape} {dtype} on {torch.cuda.get_device_name(device) if on_cuda else 'the CPU'}, torch {torch.__version__}, fattn {fattn.__version__}; microseconds a call")
    phases: dict[str, dict] = {"forward": {}, "forward, gradients asked for": {}, "forward and backward": {}, "backward": {}}
    for name, function in contestants(causal=True).items():
        plain = [torch.randn(shape, device=device, dtype=dtype) for _ in range(3)]
        leaves = [x.clone().requires_grad_() for x in plain]
        phases["forward"][name] = lambda function=function, plain=plain: function(*plain)
        if name != "torch.empty_like":
            o = function(*leaves)
            dout = torch.randn_like(o)
            phases["forward, gradients asked for"][name] = lambda function=function, leaves=leaves: function(*leaves)
            phases["forward and backward"][name] = lambda function=function, leaves=leaves, dout=dout: torch.autograd.grad(function(*leaves), leaves, dout)
            phases["backward"][name] = lambda o=o, leaves=leaves, dout=dout: torch.autograd.grad(o, leaves, dout, retain_graph=True)
        if on_cuda:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                function(*plain)
            phases.setdefault("forward, replayed from a graph", {})[name] = graph.replay
    numbers: dict[str, dict] = {}
    for what, calls in phases.items():
        for name, value in in_turns(calls, wait, arguments.seconds, arguments.rounds).items():
            numbers.setdefault(name, {})[what] = value
    for name, row in numbers.items():
        print(f"{name:>30}: " + "; ".join(f"{what} {value:.1f}" for what, value in row.items()), flush=True)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"shape": shape, "dtype": str(dtype), "device": torch.cuda.get_device_name(device) if on_cuda else device, "torch": torch.__version__, "microseconds": numbers}, file, indent=1)


if __name__ == "__main__":
    main()
