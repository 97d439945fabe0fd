#!/usr/bin/env python3
"""GPT-2 of transformers (random weights) with its attention by each of eager, sdpa and fattn, as it is and compiled: seconds and memory of a training step, of a
forward pass and of a generation. A compiled generation is transformers' own: a static cache, whose steps generate() compiles. Nothing is timed before it is checked:
logits and the gradient of the embedding may be at most twice as far from the model in float32 as those of eager are, plus one unit in the last place, and no
token may be generated whose logit in float32 is farther below the largest than two such errors. Dropout is that of the attention weights alone, in the training step;
what is checked has none."""

import argparse
import copy
import json
import platform
import statistics
import time
from pathlib import Path

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

import fattn
from fattn.transformers import NAME

SIZES = {"small": {}, "medium": {"n_embd": 1024, "n_layer": 24, "n_head": 16}, "tiny": {"n_embd": 128, "n_layer": 2, "n_head": 2}}
VARIANTS = ("eager", "sdpa", NAME, "sdpa+compile", f"{NAME}+compile")
PHASES = ("step", "forward", "generate")
VOCABULARY = 50257


def model_of(size: str, seqlen: int, dropout: float) -> torch.nn.Module:
    torch.manual_seed(0)
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": dropout}
    return GPT2LMHeadModel(GPT2Config(**SIZES[size], **dropouts, n_positions=max(seqlen, 1024), use_cache=False, bos_token_id=None, eos_token_id=None)).eval()


class Variant:
    """A copy of the model with one attention; compiled or not."""

    def __init__(self, model: torch.nn.Module, name: str, new_tokens: int) -> None:
        attention, _, compiled = name.partition("+")
        self.model = copy.deepcopy(model)
        self.model.set_attn_implementation(attention)
        self.call = torch.compile(self.model, dynamic=False) if compiled else self.model
        self.options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "use_cache": True, "pad_token_id": 0}
        if compiled:
            self.options["cache_implementation"] = "static"

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.call(input_ids=tokens).logits

    def step(self, tokens: torch.Tensor) -> None:
        self.model.zero_grad()
        self.call(input_ids=tokens, labels=tokens).loss.backward()

    def generate(self, tokens: torch.Tensor) -> torch.Tensor:
        """The prompt, half of the tokens, and what comes behind it."""
        with torch.no_grad():
            return self.model.generate(tokens[:, : tokens.shape[1] // 2], **self.options)

    def errors(self, tokens: torch.Tensor, exact: tuple[torch.Tensor, ...]) -> list[float]:
        """Of the logits and of the gradient of the embedding."""
        self.step(tokens)
        got = self.forward(tokens), self.model.transformer.wte.weight.grad
        return [float((x - y).abs().max()) for x, y in zip(got, exact)]  # in float32, the wider of the two


def shortfall(wide: Variant, sequences: torch.Tensor, new_tokens: int) -> float:
    """How far the float32 logits of the generated tokens are below the largest, at most."""
    logits = wide.forward(sequences)[:, -new_tokens - 1 : -1]
    return float((logits.amax(-1) - logits.gather(-1, sequences[:, -new_tokens:, None])[..., 0]).max())


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
            variant.model.zero_grad()
            sample = clock(lambda: getattr(variant, what)(tokens))
            variant.model.zero_grad()
            if turn > 1:
                samples[name].append(sample)
    return {name: summary([x for x, _ in taken], max(y for _, y in taken)) for name, taken in samples.items()}


def summary(seconds: list[float], size: int) -> dict:
    return {"median_s": statistics.median(seconds), "mean_s": statistics.fmean(seconds), "spread_s": statistics.pstdev(seconds), "least_s": min(seconds),
            "count": len(seconds), "bytes": size}


def profiled(variant: Variant, what: str, tokens: torch.Tensor) -> str:
    """Where the time of one call goes: the device's kernels, and the host's operations by their own time."""
    activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if tokens.is_cuda else [])]
    getattr(variant, what)(tokens)
    with torch.profiler.profile(activities=activities) as profile:
        getattr(variant, what)(tokens)
        if tokens.is_cuda:
            torch.cuda.synchronize()
    averages = profile.key_averages()
    device, host = (averages.table(sort_by=key, row_limit=15, max_name_column_width=90) for key in ("self_device_time_total", "self_cpu_time_total"))
    return f"{device}\n{host}"


def environment(device: str) -> dict:
    on_cuda = device.startswith("cuda")
    return {"device": torch.cuda.get_device_name(device) if on_cuda else platform.processor() or platform.machine(), "python": platform.python_version(),
            "torch": torch.__version__, "cuda": torch.version.cuda if on_cuda else None, "transformers": transformers.__version__, "fattn": fattn.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seqlen", type=int, default=1024, help="of step and forward; a generation has half of it as its prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.0, help="of the attention weights, in the training step (GPT-2's own is 0.1)")
    parser.add_argument("--repeat", type=int, default=20, help="samples; of generations a quarter")
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--profile", metavar="FOLDER", help="writes there where the time of a call of each variant goes")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    device, on_cuda = arguments.device, arguments.device.startswith("cuda")
    phases, new_tokens = arguments.phases.split(","), arguments.new_tokens
    dtype = torch.bfloat16
    torch.backends.cuda.matmul.allow_tf32 = False
    tokens = torch.randint(0, VOCABULARY, (arguments.batch, arguments.seqlen), generator=torch.Generator().manual_seed(0)).to(device)
    model = model_of(arguments.size, arguments.seqlen, arguments.dropout).to(device, dtype)
    about = environment(device)
    print(f"GPT-2 {arguments.size}, batch {arguments.batch}, seqlen {arguments.seqlen}, {dtype}, dropout {arguments.dropout}, {about['device']}, "
          f"torch {about['torch']}", flush=True)

    wide = Variant(copy.deepcopy(model).float(), "eager", new_tokens)
    wide.step(tokens)
    exact = wide.forward(tokens), wide.model.transformer.wte.weight.grad
    allowed = [2 * error + torch.finfo(dtype).eps * float(x.abs().max()) for error, x in zip(Variant(model, "eager", new_tokens).errors(tokens, exact), exact)]
    rows, variants = {}, {}
    for name in arguments.variants.split(","):
        start = time.perf_counter()
        variant, limits = Variant(model, name, new_tokens), [*allowed, 2 * allowed[0]]
        try:
            errors = variant.errors(tokens, exact)
            if "generate" in phases:
                errors.append(shortfall(wide, variant.generate(tokens), new_tokens))
        except Exception as error:  # of one contestant; the others are measured all the same
            rows[name] = {"failed": f"{type(error).__name__}: {error}"}
            print(f"{name:>14}: FAILED, {rows[name]['failed'][:1000]}", flush=True)
            continue
        right = all(x <= y for x, y in zip(errors, limits))  # NaN is not
        rows[name] = {"errors": errors, "allowed": limits[: len(errors)], "right": right, "ready_s": time.perf_counter() - start}
        if right:
            variants[name] = variant
            variant.model.train(arguments.dropout > 0)
        else:
            print(f"{name:>14}: WRONG, errors {errors} of {limits} allowed; not timed", flush=True)
    del exact, wide
    for what in phases:
        count = new_tokens if what == "generate" else arguments.seqlen
        if what != "step":
            for variant in variants.values():
                variant.model.eval()
        for name, row in measure(variants, what, tokens, max(3, arguments.repeat // 4) if what == "generate" else arguments.repeat, Clock(on_cuda)).items():
            rows[name][what] = row | {"tokens_per_s": arguments.batch * count / row["median_s"]}
            print(f"{what:>8} {name:>14}: {row['median_s'] * 1e3:8.2f} ms (mean {row['mean_s'] * 1e3:.2f}, spread {row['spread_s'] * 1e3:.2f}, least "
                  f"{row['least_s'] * 1e3:.2f}), {row['bytes'] / 2**20:8.0f} MiB, {rows[name][what]['tokens_per_s']:.0f} tokens a second", flush=True)
        if arguments.profile and what != "generate":
            Path(arguments.profile).mkdir(parents=True, exist_ok=True)
            for name, variant in variants.items():
                (Path(arguments.profile) / f"{arguments.size}-{what}-dropout{arguments.dropout}-{name}.txt").write_text(profiled(variant, what, tokens), encoding="utf-8")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"environment": about, "arguments": vars(arguments), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
