#!/usr/bin/env python3
"""Writes the GPU's speed table into README.md and README.zh-TW.md from a record of `fattn bench --suite cuda`.

    make_gpu_table.py           writes what stands between the marks gpu-results
    make_gpu_table.py --check   exit 1 if a README says something else than the record
"""
import argparse
import json
import math
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs" / "results" / "h200-v2-suite.json"
HEADDIMS, LENGTHS, PASSES = (64, 128, 256), (512, 2048, 8192, 16384), {"fwd": "forward", "bwd": "backward"}
FLASH, CUDNN = "flash", "cudnn"  # torch's backends, as the record names their algorithm

TEXT = {
    "README.md": (
        "One {gpu}, bf16, 16384 tokens, nheads * headdim = 2048, by headdim: TFLOP/s of algorithm {algorithm}, and how many times as fast as\n"
        "PyTorch's FlashAttention-2 / cuDNN backends in the same run ([record, and how it was measured](docs/results/README.md)). Geometric means over {cells} problems each:\n"
        "forward {fwd_flash} / {fwd_cudnn} (lowest {fwd_flash_low} / {fwd_cudnn_low}), backward {bwd_flash} / {bwd_cudnn} (lowest {bwd_flash_low} / {bwd_cudnn_low}).\n"
    ),
    "README.zh-TW.md": (
        "一張 {gpu}、bf16、16384 個 token、nheads * headdim = 2048，依 headdim 列出：演算法 {algorithm} 的 TFLOP/s，以及在同一次執行中為 PyTorch 的 FlashAttention-2 / cuDNN 後端的幾倍快\n"
        "（[紀錄與量測方式](docs/results/README.md)）。各 {cells} 個問題的幾何平均：\n"
        "前向 {fwd_flash} / {fwd_cudnn}（最低 {fwd_flash_low} / {fwd_cudnn_low}）、反向 {bwd_flash} / {bwd_cudnn}（最低 {bwd_flash_low} / {bwd_cudnn_low}）。\n"
    ),
}


def cells_of(record):
    """(pass, seqlen, headdim, causal) to {"fattn": row, "flash": row, "cudnn": row}, bf16."""
    cells = {}
    for row in record["rows"]:
        if row["dtype"] != "bf16" or row["status"] != "ok":
            continue
        who = "fattn" if row["provider"] == "fattn" else row["algorithm"]
        cells.setdefault((row["pass"], row["seqlen_q"], row["headdim"], row["causal"]), {})[who] = row
    return cells


def ratio(cell, peer):
    return cell[peer]["time_median_s"] / cell["fattn"]["time_median_s"]


def facts_of(record, cells):
    own = [cell["fattn"] for cell in cells.values()]
    facts = {"gpu": record["environment"]["gpus"][0]["name"].replace("NVIDIA ", ""), "cells": len(own) // 2}
    facts["algorithm"] = ", ".join(sorted({row["algorithm"] for row in own}))
    for name in PASSES:
        for peer in (FLASH, CUDNN):
            ratios = [ratio(cell, peer) for key, cell in cells.items() if key[0] == name]
            facts[f"{name}_{peer}"] = f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}x"
            facts[f"{name}_{peer}_low"] = f"{min(ratios):.2f}x"
    return facts


def table_of(cells):
    columns = [(headdim, causal) for headdim in HEADDIMS for causal in (False, True)]
    lines = ["| pass | seqlen | " + " | ".join(f"{h} causal" if c else f"{h}" for h, c in columns) + " |", "|--" * (2 + len(columns)) + "|"]
    for name, title in PASSES.items():
        for seqlen in LENGTHS:
            found = [cells[name, seqlen, *column] for column in columns]
            figures = [f"{c['fattn']['flops_per_s'] / 1e12:.0f} ({ratio(c, FLASH):.2f} / {ratio(c, CUDNN):.2f})" for c in found]
            lines.append(f"| {title} | {seqlen} | " + " | ".join(figures) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a README is stale")
    arguments = parser.parse_args()
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    cells = cells_of(record)
    facts, table = facts_of(record, cells), table_of(cells)
    stale = []
    for name, text in TEXT.items():
        path = ROOT / name
        before = path.read_text(encoding="utf-8")
        block = f"<!-- gpu-results -->\n{text.format(**facts)}\n{table}<!-- /gpu-results -->"
        after, count = re.subn(r"<!-- gpu-results -->.*?<!-- /gpu-results -->", lambda _: block, before, flags=re.S)
        if count != 1:
            raise SystemExit(f"{name}: expected the marks gpu-results once, found them {count} times")
        if after != before:
            stale.append(name)
            if not arguments.check:
                path.write_text(after, encoding="utf-8")
    if arguments.check and stale:
        print(f"{', '.join(stale)}: the GPU table is not what {RECORD.relative_to(ROOT)} says; run tools/make_gpu_table.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
