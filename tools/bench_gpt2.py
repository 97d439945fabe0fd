#!/usr/bin/env python3
"""GPT-2 of transformers (random weights, no dropout) with its attention by each of eager, sdpa and fattn, as it is and compiled: seconds and memory of a training step
and of a forward pass. Nothing is timed before it is checked: logits and the gradient of the embedding may be at most twice as far from the model in float32 as those of
eager are, plus one unit in the last place."""

import argparse
import copy
import json
import statistics
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from fattn.transformers import NAME

SIZES = {"small": {}, "medium": {"n_embd": 1024, "n_layer": 24, "n_head": 16}, "tiny": {"n_embd": 128, "n_layer": 2, "n_head": 2}}
VARIANTS = ("eager", "sdpa", NAME, "sdpa+compile", f"{NAME}+compile")


def model_of(size: str, seqlen: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**SIZES[size], n_positions=max(seqlen, 1024), resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False))


class Variant:
    """A copy of the model with one attention; compiled or not."""

    def __init__(self, model: torch.nn.Module, name: str) -> None:
        attention, _, compiled = name.partition("+")
        self.model = copy.deepcopy(model)
        self.model.set_attn_implementation(attention)
        self.call = torch.compile(self.model, dynamic=False) if compiled else self.model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.call(input_ids=tokens).logits

    def step(self, tokens: torch.Tensor) -> None:
        self.model.zero_grad()
        self.call(input_ids=tokens, labels=tokens).loss.backward()

    def errors(self, tokens: torch.Tensor, exact: tuple[torch.Tensor, ...]) -> list[float]:
        """Of the logits and of the gradient of the embedding."""
        self.step(tokens)
        got = self.forward(tokens), self.model.transformer.wte.weight.grad
        return [float((x - y).abs().max()) for x, y in zip(got, exact)]  # in float32, the wider of the two


def exactly(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = Variant(copy.deepcopy(model).float(), "eager")
    wide.step(tokens)
    return wide.forward(tokens), wide.model.transformer.wte.weight.grad


class Clock:
    """Seconds of one call, from an idle device to an idle device, and the most memory of torch's allocator beyond what there was."""

    def __init__(self, on_cuda: bool) -> None:
        self.on_cuda = on_cuda

    def __call__(self, call) -> tuple[float, int]:
        if self.on_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        call()
        if not self.on_cuda:
            return time.perf_counter() - start, 0
        torch.cuda.synchronize()
        return time.perf_counter() - start, torch.cuda.max_memory_allocated() - before


def measure(variants: dict[str, Variant], what: str, tokens: torch.Tensor, repeat: int, clock: Clock) -> dict[str, dict]:
    """The variants in turns, so that what changes on the machine meanwhile is everyone's."""
    samples = {name: [] for name in variants}
    for turn in range(repeat + 2):  # two to warm up
        for name, variant in variants.items():
            sample = clock(lambda: getattr(variant, what)(tokens))
            variant.model.zero_grad()
            if turn > 1:
                samples[name].append(sample)
    return {name: {"seconds": statistics.median(x for x, _ in taken), "least": min(x for x, _ in taken), "bytes": max(y for _, y in taken)}
            for name, taken in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seqlen", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    device, on_cuda = arguments.device, arguments.device.startswith("cuda")
    dtype = torch.bfloat16
    torch.backends.cuda.matmul.allow_tf32 = False
    tokens = torch.randint(0, 50257, (arguments.batch, arguments.seqlen), generator=torch.Generator().manual_seed(0)).to(device)
    model = model_of(arguments.size, arguments.seqlen).to(device, dtype)
    print(f"GPT-2 {arguments.size}, batch {arguments.batch}, seqlen {arguments.seqlen}, {dtype}, {torch.cuda.get_device_name(device) if on_cuda else 'CPU'}, "
          f"torch {torch.__version__}", flush=True)

    exact = exactly(model, tokens)
    allowed = [2 * error + torch.finfo(dtype).eps * float(x.abs().max()) for error, x in zip(Variant(model, "eager").errors(tokens, exact), exact)]
    rows, variants = {}, {}
    for name in arguments.variants.split(","):
        start = time.perf_counter()
        variant = Variant(model, name)
        errors = variant.errors(tokens, exact)
        right = all(x <= y for x, y in zip(errors, allowed))  # NaN is not
        rows[name] = {"errors": errors, "allowed": allowed, "right": right, "ready_s": time.perf_counter() - start}
        if right:
            variants[name] = variant
        else:
            print(f"{name:>14}: WRONG, errors {errors} of {allowed} allowed; not timed", flush=True)
    del exact
    for what in ("step", "forward"):
        for name, row in measure(variants, what, tokens, arguments.repeat, Clock(on_cuda)).items():
            rows[name][what] = row
            print(f"{what:>8} {name:>14}: {row['seconds'] * 1e3:8.2f} ms (least {row['least'] * 1e3:.2f}), {row['bytes'] / 2**20:8.0f} MiB, "
                  f"{arguments.batch * arguments.seqlen / row['seconds']:.0f} tokens a second", flush=True)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"arguments": vars(arguments), "torch": torch.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
