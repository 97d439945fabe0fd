"""tokens/s of training a GPT-2 on a GPU, beside the GPU's own product of matrices and beside transformers: what bench_gpt2_training.py --device cuda does."""
import functools
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time

import compact_records

# Sequences, tokens of each, and what llm.c reaches there on one H200 in tokens/s a TFLOP/s of a bf16 product 8192^3 (124M parameters, bf16).
ROWS = ((32, 1024, 659), (4, 8192, 394), (1, 32768, 167))
SIZES = {"gpt2": (12, 12, 768), "gpt2-medium": (24, 16, 1024), "gpt2-large": (36, 20, 1280), "gpt2-xl": (48, 25, 1600)}

TORCH = '''
import json, sys, time
import torch
from transformers import GPT2Config, GPT2LMHeadModel
o = json.loads(sys.argv[1])
torch.manual_seed(1)
torch.backends.cuda.matmul.allow_tf32 = True
config = GPT2Config(n_layer=o["layers"], n_head=o["heads"], n_embd=o["width"], n_positions=o["seqlen"], vocab_size=50257, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
model = GPT2LMHeadModel._from_config(config, attn_implementation="sdpa").cuda().train()
adam = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
ids = torch.randint(0, 50257, (o["batch"], o["seqlen"] + 1), device="cuda")

def loss_of(ids):
    logits = model(ids[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

compiled = torch.compile(loss_of)
seconds = []
for step in range(o["steps"]):
    torch.cuda.synchronize()
    begin = time.perf_counter()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = compiled(ids)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    adam.step()
    adam.zero_grad(set_to_none=True)
    loss.item()
    seconds.append(time.perf_counter() - begin)
print(json.dumps({"seconds": seconds, "memory": torch.cuda.max_memory_allocated(), "torch": torch.__version__}))
'''


def run(command, **more):
    return subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True, **more).stdout


def make_text(path: pathlib.Path, words: int) -> None:
    """Words as often as those of a language are: the nth one n times less often than the first."""
    numbers = random.Random(1)
    vocabulary = ["".join(numbers.choices("abcdefghijklmnopqrstuvwxyz", k=numbers.randint(2, 9))) for _ in range(48000)]
    weights = [1 / (n + 3) for n in range(len(vocabulary))]
    path.write_text(" ".join(numbers.choices(vocabulary, weights, k=words)) + "\n")


def median_rate(seconds, tokens: int) -> float:
    """Of the steps behind the first five, in which graphs are made and kernels loaded."""
    return tokens / statistics.median(seconds[5:])


@functools.cache
def information(fattn: str) -> dict:
    return json.loads(run([fattn, "info", "--json", "-"]))


def environment_of(fattn: str, **parts) -> dict:
    """Of a record: the date, the version, and parts of what `fattn info` says."""
    info = information(fattn)
    return {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "library_version": info["version"], **{name: of(info) for name, of in parts.items()}}


def require_steps(args) -> None:
    if args.steps < 8:
        sys.exit(f"--steps {args.steps}: the first five are not counted; give at least 8")


def write_record(args, rows: list, kind: str, more: dict) -> None:
    if not args.json:
        return
    environment = environment_of(args.fattn, gpus=lambda info: info["gpu"]["devices"])
    compact_records.write(args.json, {kind: 1, "environment": environment, "preset": args.preset, "dtype": "bf16", **more, "rows": rows})


def train(args, folder: pathlib.Path, name: str, sequences: int, seqlen: int, ranks: int = 1, accumulate: int = 1) -> tuple:
    """The log's lines and the record of a training by `ranks` processes, each with a GPU of its own; `name` is that of its folder."""
    record = folder / f"{name}-record.json"
    command = [args.fattn, "gpt2", "train", folder / f"{sequences}x{seqlen}-start", "--data", folder / "tokens", "--out", folder / f"{name}-run", "--seqlen", seqlen,
               "--batch", sequences, "--accumulate", accumulate, "--steps", args.steps, "--learning-rate", "1e-4", "--every", 10 * args.steps,
               "--eval-every", 10 * args.steps, "--eval-batches", 1, "--dtype", "bf16", "--algorithm", args.algorithm, "--device", "cuda", "--json", record]
    if ranks == 1:
        run(command)
    else:
        command += ["--rendezvous", folder / f"{name}-meet"]
        processes = [subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL, env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)})
                     for rank in range(ranks)]
        ended = [process.wait() for process in processes]
        if any(ended):
            sys.exit(f"{name}: the {ranks} processes ended with {ended}")
    return [json.loads(line) for line in (folder / f"{name}-run" / "log.jsonl").read_text().splitlines()], json.loads(record.read_text())


def measure_ranks(args, folder: pathlib.Path, sequences: int, seqlen: int, before: list) -> dict:
    """tokens/s of several GPUs, of what as many alone would do, before and after; and how far losses are from those of one GPU that accumulates the same
    batches. `before` are the seconds of one alone."""
    name = f"{sequences}x{seqlen}"
    together, _ = train(args, folder, f"{name}-{args.ranks}-ranks", sequences, seqlen, ranks=args.ranks, accumulate=args.ranks)
    again, _ = train(args, folder, f"{name}-again", sequences, seqlen)
    alone = sequences * seqlen / statistics.median(before[5:] + [line["seconds"] for line in again][5:])
    one, _ = train(args, folder, f"{name}-accumulated", sequences, seqlen, accumulate=args.ranks)
    rate = median_rate([line["seconds"] for line in together], args.ranks * sequences * seqlen)
    apart = [abs(a["loss"] - b["loss"]) for a, b in zip(together, one, strict=True)]
    return {"ranks": args.ranks, "tokens_per_s": rate, "alone_tokens_per_s": alone, "efficiency": rate / (args.ranks * alone), "largest_difference_of_losses": max(apart), "first_difference_of_losses": apart[0],
            "accumulated_tokens_per_s": median_rate([line["seconds"] for line in one], args.ranks * sequences * seqlen)}


def measure_row(args, folder: pathlib.Path, sequences: int, seqlen: int) -> dict:
    layers, heads, width = SIZES[args.preset]
    name = f"{sequences}x{seqlen}"
    config = folder / f"{name}.json"
    config.write_text(json.dumps({"model_type": "gpt2", "n_embd": width, "n_head": heads, "n_layer": layers, "vocab_size": 50257, "n_positions": seqlen,
                                  "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}))
    run([args.fattn, "gpt2", "init", "--config", config, "--seed", 1, folder / f"{name}-start"])
    lines, trained = train(args, folder, name, sequences, seqlen)
    rate = median_rate([line["seconds"] for line in lines], sequences * seqlen)
    found = {"batch": sequences, "seqlen": seqlen, "steps": args.steps, "algorithm": args.algorithm, "tokens_per_s": rate, "memory_bytes": trained["memory_bytes"],
             "memory_measured": trained["run"]["memory_measured"], "mfu": None, "loss_last": trained["run"]["loss_last"]}
    if trained["run"]["peak_flops_per_s"]:
        found["mfu"] = rate * trained["run"]["flops_per_token"] / trained["run"]["peak_flops_per_s"]
    if args.ranks > 1:
        found["together"] = measure_ranks(args, folder, sequences, seqlen, [line["seconds"] for line in lines])
    if args.torch:
        options = {"layers": layers, "heads": heads, "width": width, "batch": sequences, "seqlen": seqlen, "steps": args.steps}
        done = subprocess.run([args.python, "-c", TORCH, json.dumps(options)], check=False, capture_output=True, text=True)
        if done.returncode == 0:
            theirs = json.loads(done.stdout.splitlines()[-1])
            found["transformers"] = {"tokens_per_s": median_rate(theirs["seconds"], sequences * seqlen), "memory": theirs["memory"], "torch": theirs["torch"]}
        else:
            found["transformers"] = {"error": done.stderr.strip().splitlines()[-1][:200] if done.stderr.strip() else f"status {done.returncode}"}
    return found


def measure(args, folder: pathlib.Path) -> int:
    wanted = [row for row in ROWS if not args.rows or f"{row[0]}x{row[1]}" in args.rows]
    if not wanted:
        sys.exit(f"--rows {' '.join(args.rows)}: allowed: " + " ".join(f"{sequences}x{seqlen}" for sequences, seqlen, _ in ROWS))
    require_steps(args)
    make_text(folder / "text.txt", int(1.3 * 32768 * (args.steps + 8) * args.ranks))
    run([args.fattn, "gpt2", "tokenizer", "train", folder / "text.txt", "--vocab-size", 50257, "--out", folder / "tokenizer"])
    run([args.fattn, "gpt2", "tokenize", folder / "tokenizer", folder / "text.txt", "--out", folder / "tokens"])
    product = json.loads(run([args.matmul]))["flops_per_s"]
    print(f"a product of bf16, 8192^3: {product * 1e-12:,.0f} TFLOP/s")
    rows = []
    for sequences, seqlen, anchor in wanted:
        found = measure_row(args, folder, sequences, seqlen)
        found["tokens_per_s_per_tflops"] = found["tokens_per_s"] / (product * 1e-12)
        found["llm_c"] = anchor if args.preset == "gpt2" else None
        line = f"{args.preset} {sequences}x{seqlen}: {found['tokens_per_s']:,.0f} tokens/s, {found['tokens_per_s_per_tflops']:,.0f} a TFLOP/s"
        if found["llm_c"]:
            line += f" ({found['tokens_per_s_per_tflops'] / anchor:.2f} of llm.c)"
        if found["mfu"]:
            line += f", MFU {100 * found['mfu']:.0f} %"
        line += f", memory {found['memory_bytes'] / 2**30:.2f} GiB"
        theirs = found.get("transformers", {})
        if "tokens_per_s" in theirs:
            line += f"; transformers, compiled: {theirs['tokens_per_s']:,.0f} tokens/s, {theirs['memory'] / 2**30:.2f} GiB: {found['tokens_per_s'] / theirs['tokens_per_s']:.2f}x"
        elif theirs:
            line += f"; transformers: {theirs['error']}"
        if "together" in found:
            together = found["together"]
            line += (f"\n  {args.ranks} GPUs: {together['tokens_per_s']:,.0f} tokens/s, {100 * together['efficiency']:.1f} % of {args.ranks} alone; losses at most "
                     f"{together['largest_difference_of_losses']:.2g} from one GPU that accumulates ({together['first_difference_of_losses']:.2g} in the first step)")
        print(line, flush=True)
        rows.append(found)
    write_record(args, rows, "fattn_gpt2_training", {"matmul_flops_per_s": product})
    return 0
