#!/usr/bin/env python3
"""Training by `fattn gpt2 train` beside transformers (torch, sdpa), each in its own process: the same start, the same batches, the same AdamW and schedule.
Losses of every step are compared, and tokens/s.

    tools/bench_gpt2_training.py --tokenizer tokenizer --text book.txt
    tools/bench_gpt2_training.py --tokenizer tokenizer --text book.txt --steps 200 --python venv/bin/python --json race.json
    tools/bench_gpt2_training.py --device cuda --steps 40 --torch --json race.json

On a GPU: 32x1024, 4x8192 and 1x32768 of a GPT-2 with random weights in bf16, on made-up text, beside the GPU's own product of matrices
(build/tests/time_matmul); with --torch beside transformers, sdpa, compiled; with --ranks N also N processes, each with a GPU. With --table each algorithm of attention at each length, in the memory given.

    tools/bench_gpt2_training.py --device cuda --table --preset gpt2-medium --batch 4 --memory-limit 24GiB --steps 10 --json table.json

The text is one long document, cut into rows, each of which sees itself alone; rows come in their order. --python is a Python with torch and transformers.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

import compact_records
import gpt2_training_rows
import gpt2_training_table

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Ids of the rows come as one .npy; the model's folder is the start that fattn has. Tokens of a row see the whole row, as there.
TORCH = '''
import json, math, sys, time
import numpy, torch
from transformers import GPT2LMHeadModel
folder, rows, o = sys.argv[1], numpy.load(sys.argv[2]), json.loads(sys.argv[3])
torch.set_num_threads(o["threads"])
model = GPT2LMHeadModel.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
model.train()
decayed = [p for p in model.parameters() if p.dim() > 1]
others = [p for p in model.parameters() if p.dim() == 1]
adam = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.0, betas=(0.9, 0.95), eps=1e-8)

def rate(step):
    if step <= o["warmup"]:
        return o["rate"] * step / o["warmup"]
    gone = (step - o["warmup"]) / max(o["steps"] - o["warmup"], 1)
    return o["rate"] * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * gone)))

losses, seconds = [], []
for step in range(1, o["steps"] + 1):
    batch = torch.from_numpy(rows[(step - 1) * o["batch"]:step * o["batch"]].astype(numpy.int64))
    begin = time.perf_counter()
    logits = model(batch[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    adam.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in adam.param_groups:
        group["lr"] = rate(step)
    adam.step()
    losses.append(loss.item())
    seconds.append(time.perf_counter() - begin)
print(json.dumps({"losses": losses, "seconds": seconds, "torch": torch.__version__}))
'''


def tokens_of(fattn: str, tokenizer: pathlib.Path, text: pathlib.Path) -> list[int]:
    done = subprocess.run([fattn, "gpt2", "encode", str(tokenizer), "--file", str(text)], check=True, stdout=subprocess.PIPE, text=True)
    return [int(word) for word in done.stdout.split()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fattn", default=str(ROOT / "build" / "cli" / "fattn"))
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokenizer", type=pathlib.Path, help="a folder")
    parser.add_argument("--text", type=pathlib.Path, help="a file: one long document")
    parser.add_argument("--preset", choices=tuple(gpt2_training_rows.SIZES), default="gpt2", help="on a GPU")
    parser.add_argument("--rows", nargs="*", default=[], metavar="BxS", help="on a GPU: some of 32x1024, 4x8192, 1x32768")
    parser.add_argument("--algorithm", choices=("auto", "standard", "v1", "v2", "v3"), default="auto", help="of attention, on a GPU")
    parser.add_argument("--table", action="store_true", help="on a GPU: each algorithm at each length")
    parser.add_argument("--seqlens", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192], help="with --table")
    parser.add_argument("--algorithms", nargs="+", default=list(gpt2_training_table.ALGORITHMS), help="with --table; others are compared with the first")
    parser.add_argument("--memory-limit", default="0", help="with --table, e.g. 24GiB")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="on N GPUs: also N processes together, their rate and their losses beside one's")
    parser.add_argument("--torch", action="store_true", help="on a GPU: transformers, too")
    parser.add_argument("--matmul", default=str(ROOT / "build" / "tests" / "time_matmul"), help="on a GPU: that program")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, help="200; on a GPU 40")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    args.steps = args.steps or (40 if args.device == "cuda" else 200)
    if args.device == "cpu" and not (args.tokenizer and args.text):
        parser.error("give --tokenizer and --text")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        if args.device == "cuda" and args.table:
            return gpt2_training_table.measure(args, folder)
        if args.device == "cuda":
            return gpt2_training_rows.measure(args, folder)
        ids = tokens_of(args.fattn, args.tokenizer, args.text)
        needed = args.steps * args.batch
        if len(ids) < needed * args.seqlen + 1:
            sys.exit(f"{args.text} has {len(ids)} tokens; {args.steps} steps need {needed * args.seqlen + 1}")
        import numpy  # only here, so that --help needs nothing

        # Row i begins where row i - 1 ends; its last target is the next row's first token.
        numpy.save(folder / "rows.npy", numpy.stack([numpy.array(ids[i * args.seqlen:(i + 1) * args.seqlen + 1], dtype=numpy.int32) for i in range(needed)]))
        run = [args.fattn, "gpt2", "tokenize", args.tokenizer, args.text, "--out", folder / "tokens"]
        subprocess.run([str(part) for part in run], check=True, stdout=subprocess.DEVNULL)
        vocabulary = 1 + max(ids)
        described = json.loads((args.tokenizer / "tokenizer.json").read_text())
        vocabulary = max(vocabulary, 1 + max(described["model"]["vocab"].values()), *(1 + token["id"] for token in described["added_tokens"]))
        (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": args.width, "n_head": args.heads, "n_layer": args.layers, "vocab_size": vocabulary,
                                                        "n_positions": args.seqlen, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}))
        subprocess.run([args.fattn, "gpt2", "init", "--config", str(folder / "config.json"), "--seed", "1", str(folder / "start")], check=True, stdout=subprocess.DEVNULL)
        warmup = max(1, args.steps // 20)
        options = {"threads": args.threads, "steps": args.steps, "batch": args.batch, "rate": args.learning_rate, "warmup": warmup}
        theirs = json.loads(subprocess.run([args.python, "-c", TORCH, str(folder / "start"), str(folder / "rows.npy"), json.dumps(options)], check=True, stdout=subprocess.PIPE, text=True).stdout)
        run = [args.fattn, "gpt2", "train", folder / "start", "--data", folder / "tokens", "--out", folder / "run", "--no-shuffle", "--seqlen", args.seqlen, "--batch", args.batch,
               "--steps", args.steps, "--learning-rate", args.learning_rate, "--warmup", warmup, "--threads", args.threads, "--every", args.steps, "--device", "cpu"]
        subprocess.run([str(part) for part in run], check=True, stdout=subprocess.DEVNULL)
        ours = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
    apart = [abs(line["loss"] - loss) for line, loss in zip(ours, theirs["losses"], strict=True)]
    tokens = args.batch * args.seqlen
    speed = [tokens / statistics.median(seconds) for seconds in ([line["seconds"] for line in ours], theirs["seconds"])]
    print(f"losses after {args.steps} steps: fattn {ours[-1]['loss']:.4f}, transformers {theirs['losses'][-1]:.4f}")
    print(f"apart at most {max(apart):.2g} in any step, {statistics.mean(apart):.2g} on average; {max(apart[:10]):.2g} in the first ten")
    print(f"fattn {speed[0]:,.0f} tokens/s, transformers {speed[1]:,.0f} (torch {theirs['torch']}): {speed[0] / speed[1]:.2f}x")
    if args.json:
        environment = gpt2_training_rows.environment_of(args.fattn, cpu=lambda info: info["cpu"])
        compact_records.write(args.json, {"fattn_gpt2_race": 1, "environment": environment,
                                         "options": {**options, "layers": args.layers, "width": args.width, "heads": args.heads, "seqlen": args.seqlen},
                                         "fattn": {"losses": [line["loss"] for line in ours], "tokens_per_s": speed[0]},
                                         "transformers": {"losses": theirs["losses"], "tokens_per_s": speed[1], "torch": theirs["torch"]},
                                         "largest_difference": max(apart)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
