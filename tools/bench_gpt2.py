#!/usr/bin/env python3
"""GPT-2 of transformers (random weights) with its attention by each of eager, sdpa and fattn, as it is and compiled: seconds and memory of a training step, of a
forward pass and of a generation. A compiled generation is transformers' own: a static cache, whose steps generate() compiles. Each is a process of its own, so that
all get ready at the same time; then they take turns. Nothing is timed before it is checked:
logits and the gradient of the embedding may be at most twice as far from the model in float32 as those of eager are, plus one unit in the last place, and no
token may be generated whose logit in float32 is farther below the largest than two such errors. Dropout is that of the attention weights alone, in the training step;
what is checked has none."""

import argparse
import multiprocessing
import platform
import statistics
import time
import traceback
from pathlib import Path

import compact_records
import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

import fattn
from fattn.transformers import NAME

SIZES = {"small": {}, "medium": {"n_embd": 1024, "n_layer": 24, "n_head": 16}, "tiny": {"n_embd": 128, "n_layer": 2, "n_head": 2}}
VARIANTS = ("eager", "sdpa", NAME, "sdpa+compile", f"{NAME}+compile")
PHASES = ("step", "forward", "generate")
VOCABULARY = 50257


def model_of(size: str, seqlen: int, dropout: float, device: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": dropout}
    with device:
        model = GPT2LMHeadModel(GPT2Config(**SIZES[size], **dropouts, n_positions=max(seqlen, 1024), use_cache=False, bos_token_id=None, eos_token_id=None))
    return model.to(torch.bfloat16).eval()


class Variant:
    """A model with one attention; compiled or not."""

    def __init__(self, model: torch.nn.Module, name: str, new_tokens: int) -> None:
        attention, _, compiled = name.partition("+")
        self.model = model
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

    def results(self, tokens: torch.Tensor, phases: list[str]) -> list[torch.Tensor]:
        """Of a step the gradient of the embedding, of the others the logits."""
        results = []
        if "step" in phases:
            self.step(tokens)
            results.append(self.model.transformer.wte.weight.grad)
            self.model.zero_grad()
        if "forward" in phases or "generate" in phases:
            results.append(self.forward(tokens))
        return results


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


def measure(workers: dict[str, "Worker"], what: str, repeat: int) -> dict[str, dict]:
    """The variants in turns, so that what changes on the machine meanwhile is everyone's."""
    samples = {name: [] for name in workers}
    for turn in range(repeat + 2):  # two to warm up
        for name, worker in workers.items():
            sample = worker.ask("sample", what)
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


class Worker:
    """A process with one variant, which does what it is asked to and nothing meanwhile."""

    def __init__(self, name: str, arguments: argparse.Namespace, alone) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=serve, args=(name, arguments, other, alone), daemon=True)
        self.process.start()
        other.close()

    def answer(self):
        try:
            right, answer = self.pipe.recv()
        except EOFError:
            self.process.join()
            raise RuntimeError(f"its process ended with {self.process.exitcode}") from None
        if not right:
            raise RuntimeError(answer)
        return answer

    def ask(self, *request):
        self.pipe.send(request)
        return self.answer()


def distances(got: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
    return [float((x - y).abs().max()) for x, y in zip(got, exact)]  # in float32, the wider of the two


def ready(name: str, arguments: argparse.Namespace, tokens: torch.Tensor, alone) -> tuple[Variant, dict]:
    """The variant, checked, and what was found."""
    new_tokens, phases = arguments.new_tokens, arguments.phases.split(",")

    def model() -> torch.nn.Module:
        return model_of(arguments.size, arguments.seqlen, arguments.dropout, tokens.device)

    start = time.perf_counter()
    with alone:  # standard attention in float32 needs much memory
        wide = Variant(model().float(), "eager", new_tokens)
        exact = wide.results(tokens, phases)
        allowed = [2 * error + torch.finfo(torch.bfloat16).eps * float(x.abs().max())
                   for error, x in zip(distances(Variant(model(), "eager", new_tokens).results(tokens, phases), exact), exact)]
        if tokens.is_cuda:
            torch.cuda.empty_cache()
    variant, errors, limits = Variant(model(), name, new_tokens), [], []
    if "step" in phases or "forward" in phases:  # a generation's own step is compiled, no more
        checked = [what for what in phases if what != "generate"]
        errors, limits = distances(variant.results(tokens, checked), exact), allowed
    if "generate" in phases:
        errors.append(shortfall(wide, variant.generate(tokens), new_tokens))
        limits = [*limits, 2 * allowed[-1]]
    right = all(x <= y for x, y in zip(errors, limits))  # NaN is not
    return variant, {"errors": errors, "allowed": limits, "right": right, "ready_s": time.perf_counter() - start}


def serve(name: str, arguments: argparse.Namespace, pipe, alone) -> None:
    """What a worker's process does: answers (True, result) or (False, what went wrong)."""
    try:
        torch.backends.cuda.matmul.allow_tf32 = False
        tokens = torch.randint(0, VOCABULARY, (arguments.batch, arguments.seqlen), generator=torch.Generator().manual_seed(0)).to(arguments.device)
        variant, found = ready(name, arguments, tokens, alone)
        variant.model.zero_grad()
        if tokens.is_cuda:
            torch.cuda.empty_cache()
        pipe.send((True, found))
        clock = Clock(tokens.is_cuda)
        while True:
            request, what = pipe.recv()
            variant.model.train(what == "step" and arguments.dropout > 0)
            variant.model.zero_grad()
            call = lambda: getattr(variant, what)(tokens)  # noqa: E731
            if what != "generate":  # the device was another's
                call()
                variant.model.zero_grad()
            pipe.send((True, profiled(variant, what, tokens) if request == "profile" else clock(call)))
            variant.model.zero_grad()
    except EOFError:
        pass
    except Exception as error:  # of one contestant; the others are measured all the same
        traceback.print_exc()
        pipe.send((False, f"{type(error).__name__}: {error}"))


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
    phases = arguments.phases.split(",")
    about = environment(arguments.device)
    print(f"GPT-2 {arguments.size}, batch {arguments.batch}, seqlen {arguments.seqlen}, bfloat16, dropout {arguments.dropout}, {about['device']}, "
          f"torch {about['torch']}", flush=True)

    alone = multiprocessing.get_context("spawn").Lock()
    names = arguments.variants.split(",")
    workers = {name: Worker(name, arguments, alone) for name in sorted(names, key=lambda name: "+" not in name)}  # what takes longest first
    rows = {}
    for name in names:
        try:
            rows[name] = workers[name].answer()
        except RuntimeError as error:
            rows[name] = {"failed": str(error)}
        if not rows[name].get("right"):
            print(f"{name:>14}: {'FAILED' if 'failed' in rows[name] else 'WRONG, not timed'}, {str(rows[name])[:1000]}", flush=True)
    workers = {name: workers[name] for name in names if rows[name].get("right")}
    print("; ".join(f"{name} ready after {rows[name]['ready_s']:.0f} s" for name in workers), flush=True)
    for what in phases:
        count = arguments.new_tokens if what == "generate" else arguments.seqlen
        for name, row in measure(workers, what, max(3, arguments.repeat // 4) if what == "generate" else arguments.repeat).items():
            rows[name][what] = row | {"tokens_per_s": arguments.batch * count / row["median_s"]}
            print(f"{what:>8} {name:>14}: {row['median_s'] * 1e3:8.2f} ms (mean {row['mean_s'] * 1e3:.2f}, spread {row['spread_s'] * 1e3:.2f}, least "
                  f"{row['least_s'] * 1e3:.2f}), {row['bytes'] / 2**20:8.0f} MiB, {rows[name][what]['tokens_per_s']:.0f} tokens a second", flush=True)
        if arguments.profile and what != "generate":
            Path(arguments.profile).mkdir(parents=True, exist_ok=True)
            for name, worker in workers.items():
                (Path(arguments.profile) / f"{arguments.size}-{what}-dropout{arguments.dropout}-{name}.txt").write_text(worker.ask("profile", what), encoding="utf-8")
        if arguments.json:
            compact_records.write(Path(arguments.json), {"environment": about, "arguments": vars(arguments), "rows": rows})


if __name__ == "__main__":
    main()
