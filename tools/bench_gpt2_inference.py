#!/usr/bin/env python3
"""GPT-2 of `fattn gpt2` beside that of transformers (sdpa; on a GPU sdpa with torch.compile and a static cache, too), the same random weights, in one run:
a token of decode at the end of a context, and prefill of whole prompts, whose last tokens have logits. `fattn gpt2 bench` gives fattn's times and the limit:
decode the weights and the cache read once at the rate of a copy, prefill its arithmetic at the peak. Times are medians; what is timed by the host ends with
a token there, as in a program that generates text.

    tools/bench_gpt2_inference.py --fattn build/cli/fattn --json out.json
    tools/bench_gpt2_inference.py --device cpu --threads 2 --dtype fp32,bf16 --runs 3 --presets gpt2 --decode 1x512 --prefill 1x512"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import compact_records
import gpt2_training_rows
import torch
import transformers
from transformers import GPT2LMHeadModel
from transformers.cache_utils import StaticCache

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STEPS = 32  # of decode, timed together, as `fattn gpt2 bench` does


def median_of(call, seconds: float, prepare=None, at_least: int = 5) -> float:
    times: list[float] = []
    while len(times) < at_least or sum(times) < seconds:
        if prepare:
            prepare()
        before = time.perf_counter()
        call()
        times.append(time.perf_counter() - before)
    return statistics.median(times)


class Decode:
    """Steps of one token each, the most likely one every time; the prompt before them is not timed."""

    def __init__(self, model, batch: int, context: int, compiled: bool) -> None:
        self.model, self.batch, device = model, batch, model.device
        self.step = torch.compile(self.one, mode="reduce-overhead", dynamic=False) if compiled else self.one
        self.cache = StaticCache(config=model.config, max_cache_len=context)
        first = context - STEPS
        self.prompt, self.prompt_places = torch.ones((batch, first), dtype=torch.long, device=device), torch.arange(first, device=device)
        self.places = [torch.tensor([first + i], device=device) for i in range(STEPS)]

    def one(self, token, place):
        logits = self.model(token, past_key_values=self.cache, cache_position=place, position_ids=place[None].expand(self.batch, 1), use_cache=True).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    def prepare(self) -> None:
        with torch.no_grad():
            self.cache.reset()
            self.model(self.prompt, past_key_values=self.cache, cache_position=self.prompt_places, use_cache=True, logits_to_keep=1)
        if self.prompt.is_cuda:
            torch.cuda.synchronize()

    def run(self) -> None:
        token = torch.ones((self.batch, 1), dtype=torch.long, device=self.prompt.device)
        with torch.no_grad():
            for place in self.places:
                torch.compiler.cudagraph_mark_step_begin()
                token = self.step(token, place).clone()
        token.tolist()


def decode(model, batch: int, context: int, compiled: bool, seconds: float) -> float:
    steps = Decode(model, batch, context, compiled)
    for _ in range(3):
        steps.prepare()
        steps.run()
    return median_of(steps.run, seconds, steps.prepare) / STEPS


def prefill(model, batch: int, context: int, compiled: bool, seconds: float) -> float:
    tokens = torch.randint(0, model.config.vocab_size, (batch, context), device=model.device)
    call = torch.compile(model, mode="reduce-overhead", dynamic=False) if compiled else model

    def run() -> None:
        with torch.no_grad():
            torch.compiler.cudagraph_mark_step_begin()
            call(tokens, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1).tolist()

    for _ in range(3):
        run()
    return median_of(run, seconds)


def theirs(arguments) -> None:
    """One case of transformers, in a process of its own: an error on the device ends what is left of one."""
    folder, dtype, what, batch, context, compiled, seconds = json.loads(arguments.one)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    model = GPT2LMHeadModel.from_pretrained(folder, dtype=DTYPES[dtype], attn_implementation="sdpa").to(arguments.device).eval()
    print(json.dumps((decode if what == "decode" else prefill)(model, batch, context, compiled, seconds)))


def ours(arguments, folder: Path, dtype: str, batch: int, context: int) -> dict:
    command = [arguments.fattn, "gpt2", "bench", str(folder), "--device", arguments.device, "--dtype", dtype, "--batch", str(batch), "--context",
               str(context), "--threads", str(arguments.threads), "--seconds", str(arguments.seconds), "--json", "-"]
    record = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {timing["pass"]: timing for timing in record["timings"]} | {"read_bytes_per_s": record["read_bytes_per_s"]}


def row_of(arguments, folder: Path, dtype: str, what: str, case: str) -> dict:
    """One pass of both, in seconds; None where transformers failed."""
    batch, context = map(int, case.split("x"))
    found = ours(arguments, folder, dtype, batch, context)
    row = {"model": folder.name, "dtype": dtype, "pass": what, "batch": batch, "context": context, "fattn": found[what]["seconds"]["median"],
           "limit": found[what]["limit_seconds"], "read_bytes_per_s": found["read_bytes_per_s"]}
    contestants = {"sdpa": False, "sdpa+compile": True} if arguments.device == "cuda" else {"sdpa": False}
    for name, compiled in contestants.items():
        case_of = json.dumps([str(folder), dtype, what, batch, context, compiled, arguments.seconds])
        one = [sys.executable, __file__, "--device", arguments.device, "--threads", str(arguments.threads), "--one", case_of]
        done = subprocess.run(one, capture_output=True, text=True)
        row[name] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
        if done.returncode != 0:
            print(f"{folder.name} {what} {case} {name}: {(done.stderr.strip() or 'no message').splitlines()[-1][:300]}", file=sys.stderr)
    times = ", ".join(f"{name} {row[name] * 1e6:.0f} us ({row[name] / row['fattn']:.2f}x)" for name in contestants if row[name])
    print(f"{folder.name} {dtype} {what} {case}: fattn {row['fattn'] * 1e6:.0f} us, {row['fattn'] / row['limit']:.2f}x of the limit; {times}", flush=True)
    return row


def write(record: dict, path: Path) -> None:
    """After every row, whole: what was measured stays where the rest is interrupted."""
    compact_records.write(path, record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fattn", default="build/cli/fattn")
    parser.add_argument("--presets", default="gpt2,gpt2-xl")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--threads", type=int, default=0, help="of the CPU, of both; 0: as many as each takes by itself")
    parser.add_argument("--dtype", default="bf16", help="bf16, fp16, fp32, several by commas")
    parser.add_argument("--runs", type=int, default=1, help="how often all of it is measured")
    parser.add_argument("--decode", default="1x512,64x512", help="batch x context, several by commas")
    parser.add_argument("--prefill", default="8x1024")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    if arguments.one:
        return theirs(arguments)
    dtypes = arguments.dtype.split(",")
    if unknown := [dtype for dtype in dtypes if dtype not in DTYPES]:
        parser.error(f"--dtype has {unknown[0]!r}; it takes {', '.join(DTYPES)}, several by commas")
    if arguments.runs < 1:
        parser.error(f"--runs is {arguments.runs}; give 1 or more")
    rows: list[dict] = []
    on = {"cpu": lambda info: info["cpu"]} if arguments.device == "cpu" else {"gpus": lambda info: info["gpu"]["devices"]}
    environment = gpt2_training_rows.environment_of(arguments.fattn, **on)
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else f"{arguments.threads or 'all'} threads of {environment['cpu']['model']}"
    record = {"environment": environment, "device": device, "torch": torch.__version__,
              "transformers": transformers.__version__, "rows": rows}
    cases = [("decode", case) for case in arguments.decode.split(",") if case] + [("prefill", case) for case in arguments.prefill.split(",") if case]
    for run, preset, dtype in itertools.product(range(1, arguments.runs + 1), arguments.presets.split(","), dtypes):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / preset
            subprocess.run([arguments.fattn, "gpt2", "init", "--preset", preset, "--dtype", dtype, "--seed", "1", str(folder)], check=True,
                           stdout=subprocess.DEVNULL)
            for what, case in cases:
                rows.append({"run": run} | row_of(arguments, folder, dtype, what, case))
                if arguments.json:
                    write(record, Path(arguments.json))


if __name__ == "__main__":
    main()
