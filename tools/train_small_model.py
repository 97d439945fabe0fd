#!/usr/bin/env python3
"""A small GPT-2 from nothing on what the system ships: texts, tokenizer, token files, training, and held-out text in bits a byte beside gzip -9.

    tools/train_small_model.py FOLDER                     the whole, in less than 20 minutes on two cores
    tools/train_small_model.py FOLDER --steps 20          a try
    tools/train_small_model.py FOLDER --json record.json  with a record of what was found

It may be interrupted and begun again with the same FOLDER: what is done stays done, training goes on from its last checkpoint. Exit 1: the held-out text
takes more bits a byte than with gzip -9.
"""
import argparse
import gzip
import json
import math
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent


def run(*command) -> None:
    print("$", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True)


def record_of(*command) -> dict:
    print("$", *command, flush=True)
    return json.loads(subprocess.run([str(part) for part in (*command, "--json", "-")], check=True, stdout=subprocess.PIPE, text=True).stdout)


def held_out(folder: pathlib.Path, sets: list[str], most: int) -> bytes:
    """An equal part of each set's held-out files, in the order of their names."""
    text = b""
    for name in sets:
        part = b""
        for path in sorted((folder / name / "held-out").rglob("*")):
            if path.is_file() and len(part) < most // len(sets):
                part += path.read_bytes()
        text += part[: most // len(sets)].decode(errors="ignore").encode()
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--fattn", default=str(ROOT / "build" / "cli" / "fattn"))
    parser.add_argument("--sets", default="code,manuals,documents", help="of make_training_texts.py, of plain text")
    parser.add_argument("--most-mb", type=int, default=8, help="of each set")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--held-out-kb", type=int, default=300, help="of held-out text, for bits a byte")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    folder, sets = args.folder, args.sets.split(",")
    folder.mkdir(parents=True, exist_ok=True)
    texts, tokenizer, tokens, out = folder / "texts", folder / "tokenizer", folder / "tokens", folder / "run"
    if not texts.exists():
        run(sys.executable, ROOT / "tools" / "make_training_texts.py", texts, "--sets", args.sets, "--most-mb", args.most_mb)
    trained_on = [texts / name / "train" for name in sets]
    if not tokenizer.exists():
        run(args.fattn, "gpt2", "tokenizer", "train", *trained_on, "--vocab-size", args.vocab_size, "--out", tokenizer)
    if not tokens.exists():
        run(args.fattn, "gpt2", "tokenize", tokenizer, *trained_on, "--out", tokens, "--validation", 0.02)
    began = time.monotonic()
    record = record_of(args.fattn, "gpt2", "train", "--n-layer", args.layers, "--n-head", args.heads, "--n-embd", args.width, "--seqlen", args.seqlen, "--batch", args.batch,
                       "--steps", args.steps, "--learning-rate", args.learning_rate, "--every", max(1, min(250, args.steps)), "--eval-batches", 20,
                       "--threads", args.threads, "--data", tokens, "--out", out, "--resume")
    seconds = time.monotonic() - began
    model = record["run"]["checkpoint"]
    text = held_out(texts, sets, args.held_out_kb << 10)
    (folder / "held-out.txt").write_bytes(text)
    found = record_of(args.fattn, "gpt2", "eval", model, folder / "held-out.txt", "--stride", args.seqlen // 2, "--device", "cpu")
    bits = found["loss"] / math.log(2) * found["tokens"] / len(text)
    packed = 8 * len(gzip.compress(text, 9)) / len(text)
    sample = record_of(args.fattn, "gpt2", "generate", model, "The", "-n", 100, "--temperature", 0.8, "--top-p", 0.95, "--seed", 3, "--device", "cpu")["texts"][0]["text"]
    print(f"\nSample:\nThe{sample}\n")
    print(f"{record['parameters']:,} parameters, {args.steps} steps; training took {seconds:.0f} s here, {record['run']['tokens_per_s']:,.0f} tokens/s")
    print(f"held-out text of {len(text):,} bytes: {bits:.3f} bits a byte; gzip -9: {packed:.3f}")
    print("The model foretells it better than gzip -9." if bits < packed else "The model is behind gzip -9: train it longer.")
    if args.json:
        for name in ("out", "checkpoint"):
            record["run"][name] = str(pathlib.Path(record["run"][name]).relative_to(folder))
        environment = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "cpu": record_of(args.fattn, "info")["cpu"]}
        args.json.write_text(json.dumps({"fattn_small_model": 1, "environment": environment, "training": record, "seconds": seconds, "held_out_bytes": len(text),
                                         "bits_a_byte": bits, "gzip_bits_a_byte": packed, "sample": sample}, indent=2) + "\n")
    return 0 if bits < packed else 1


if __name__ == "__main__":
    sys.exit(main())
