"""Training a GPT-2 on a GPU with each algorithm of attention at each length: what bench_gpt2_training.py --device cuda --table does.
A row says the time of a forward pass (`fattn gpt2 compare`), of a whole step (`fattn gpt2 train`), tokens/s and memory, or why there is none.
The backward pass and the update of the weights are what a step takes beyond a forward pass."""
import json
import pathlib
import statistics
import subprocess

import gpt2_training_rows as rows_of

ALGORITHMS = ("standard", "v1", "v2", "v3", "auto")


def reason_of(text: str) -> str:
    """The sentence that says what is missing, without the command's name."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("fattn:")]
    return (said or lines or ["no reason was given"])[-1].removeprefix("fattn:").strip()[:240]


def forward_times(args, model: pathlib.Path, seqlen: int) -> dict:
    """Seconds of a forward pass by algorithm, without logits; what does not run is missing. Where one fails, each is asked for alone."""

    def ask(algorithms) -> dict | None:
        command = [args.fattn, "gpt2", "compare", model, "--batch", args.batch, "--seqlen", seqlen, "--dtype", "bf16", "--algorithm", ",".join(algorithms), "--device", "cuda", "--json", "-"]
        done = subprocess.run([str(part) for part in command], check=False, capture_output=True, text=True)
        if done.returncode != 0:
            return None
        return {row["algorithm"]: row["seconds"]["median"] for row in json.loads(done.stdout)["cases"][0]["algorithms"] if "seconds" in row}

    found = ask(args.algorithms)
    if found is None:
        found = {}
        for algorithm in args.algorithms:
            found |= ask([algorithm]) or {}
    return found


def train(args, model: pathlib.Path, folder: pathlib.Path, seqlen: int, algorithm: str) -> dict:
    out = folder / f"run-{seqlen}-{algorithm}"
    record = folder / f"record-{seqlen}-{algorithm}.json"
    command = [args.fattn, "gpt2", "train", model, "--data", folder / "tokens", "--out", out, "--seqlen", seqlen, "--batch", args.batch, "--steps", args.steps,
               "--learning-rate", "1e-4", "--every", 10 * args.steps, "--eval-every", 10 * args.steps, "--eval-batches", 1, "--dtype", "bf16", "--algorithm", algorithm,
               "--memory-limit", args.memory_limit, "--device", "cuda", "--json", record]
    done = subprocess.run([str(part) for part in command], check=False, capture_output=True, text=True)
    found = {"seqlen": seqlen, "algorithm": algorithm}
    if done.returncode != 0:
        return {**found, "refused": reason_of(done.stderr)}
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    said = json.loads(record.read_text())
    step = statistics.median(line["seconds"] for line in lines[5:])
    for path in sorted(out.rglob("*.safetensors")):  # a model and its moments for each row: gigabytes
        path.unlink()
    return {**found, "step_seconds": step, "tokens_per_s": args.batch * seqlen / step, "memory_bytes": said["memory_bytes"], "memory_measured": said["run"]["memory_measured"],
            "loss_last": said["run"]["loss_last"]}


def print_row(row: dict, base: dict | None) -> None:
    if "refused" in row:
        print(f"{row['seqlen']:6d}  {row['algorithm']:9s} {row['refused']}", flush=True)
        return
    times = f" {base['step_seconds'] / row['step_seconds']:5.2f}x" if base and "step_seconds" in base else ""
    forward = f"{1e3 * row['forward_seconds']:8.1f} ms forward," if row.get("forward_seconds") else f"{'':20s}"
    print(f"{row['seqlen']:6d}  {row['algorithm']:9s} {forward} {1e3 * row['step_seconds']:8.1f} ms a step, {row['tokens_per_s']:9,.0f} tokens/s, "
          f"{row['memory_bytes'] / 2**30:6.2f} GiB{times}", flush=True)


def measure(args, folder: pathlib.Path) -> int:
    rows_of.require_steps(args)
    layers, heads, width = rows_of.SIZES[args.preset]
    longest = max(args.seqlens)
    rows_of.make_text(folder / "text.txt", int(1.3 * args.batch * longest * (args.steps + 4)))
    rows_of.run([args.fattn, "gpt2", "tokenizer", "train", folder / "text.txt", "--vocab-size", 50257, "--out", folder / "tokenizer"])
    rows_of.run([args.fattn, "gpt2", "tokenize", folder / "tokenizer", folder / "text.txt", "--out", folder / "tokens"])
    config = folder / "config.json"
    config.write_text(json.dumps({"model_type": "gpt2", "n_embd": width, "n_head": heads, "n_layer": layers, "vocab_size": 50257, "n_positions": longest,
                                  "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}))
    model = folder / "start"
    rows_of.run([args.fattn, "gpt2", "init", "--config", config, "--seed", 1, "--dtype", "bf16", model])
    rows = []
    for seqlen in args.seqlens:
        forward = forward_times(args, model, seqlen)
        base = None
        for algorithm in args.algorithms:
            row = train(args, model, folder, seqlen, algorithm)
            row["forward_seconds"] = forward.get(algorithm)
            base = base or row
            print_row(row, base)
            rows.append(row)
            rows_of.write_record(args, rows, "fattn_gpt2_training_table", {"batch": args.batch, "memory_limit": args.memory_limit, "steps": args.steps})
    return 0
