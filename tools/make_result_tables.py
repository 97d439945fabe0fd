#!/usr/bin/env python3
"""Writes the speed tables into README.md and README.zh-TW.md, and the tables of the pages in docs/results, from the records there.

    make_result_tables.py           writes what stands between marks such as <!-- results --> and <!-- /results -->
    make_result_tables.py --check   exit 1 if a page says something else than a record
"""
import argparse
import json
import math
import re
import sys

import result_index
import result_options
import result_serving
import result_speed
import result_training
from result_records import PASSES, RESULTS, ROOT, grid, mean, prose

CPU_RECORD = RESULTS / "cpu-suite-quick-16-cores.json"
GPU_RECORD = RESULTS / "h100-suite.json"
ACCURACY_RECORD, VALUES_RECORD, VALUES_FP32_RECORD, VALUES_FP32_64_RECORD = (RESULTS / f"{name}.json" for name in ("accuracy", "values", "h200-values-fp32", "h200-values-fp32-64"))
GPU_LENGTHS = (512, 2048, 8192, 16384)
CPU_LENGTH = 2048
COLUMNS = [(headdim, causal) for headdim in (64, 128, 256) for causal in (False, True)]

TEXT = {
    "README.md": {
        "cpu": (
            "{cores} cores of an Intel Xeon with AVX-512 and AMX; batch 1, 8 heads, seqlen {seqlen}, by headdim: GFLOP/s of visible (query, key) pairs, and how many times as\n"
            "fast as PyTorch {torch}'s `scaled_dot_product_attention` on the same inputs, in turns, every result checked against float64 first; `?`: the intervals of\n"
            "the medians overlap.\n"
        ),
        "cpu_end": (
            "Geometric means over the whole record: {means}. One query against 8192 keys (32 heads of 8 key heads, headdim 128) reads K and V at {decode} of\n"
            "the memory's read rate. [docs/results](docs/results) has the records with their environments.\n"
        ),
        "gpu": (
            "One {gpu}, bf16, 16384 tokens, nheads * headdim = 2048, by headdim: TFLOP/s of algorithm {algorithm}, and how many times as fast as\n"
            "PyTorch's FlashAttention-2 / cuDNN backends in the same run ([record, and how it was measured](docs/results/hopper.md)). Geometric means over {cells} problems each:\n"
            "forward {fwd_flash} / {fwd_cudnn} (lowest {fwd_flash_low} / {fwd_cudnn_low}), backward {bwd_flash} / {bwd_cudnn} (lowest {bwd_flash_low} / {bwd_cudnn_low}).\n"
        ),
        "passes": {"fwd": "forward", "bwd": "backward"},
        "head": "pass",
        "error": "RMS error",
        "error_end": "\nRMS error: that of o, or the largest of dq, dk and dv, over {peer}'s on the same inputs, a geometric mean.\n",
        "fused": "FlashAttention-2's rounding",
        "join": ", ",
    },
    "README.zh-TW.md": {
        "cpu": (
            "Intel Xeon（AVX-512 與 AMX）的 {cores} 個核心；batch 1、8 個 head、seqlen {seqlen}，依 headdim 列出：\n"
            "只計算看得見的 (query, key) 配對的 GFLOP/s，以及為 PyTorch {torch} 的\n"
            "`scaled_dot_product_attention` 的幾倍快：相同輸入、輪流量測，每個結果都先以 float64 檢查；`?`：中位數的區間重疊。\n"
        ),
        "cpu_end": (
            "整份紀錄的幾何平均：{means}。\n"
            "一個 query 對 8192 個 key（32 個 head 共用 8 個 key head、headdim 128）讀取 K 與 V 的速度\n"
            "為記憶體讀取頻寬的 {decode}。\n"
            "各紀錄與其執行環境請見 [docs/results](docs/results)。\n"
        ),
        "gpu": (
            "一張 {gpu}、bf16、16384 個 token、nheads * headdim = 2048，依 headdim 列出：\n"
            "演算法 {algorithm} 的 TFLOP/s，以及在同一次執行中為 PyTorch 的 FlashAttention-2 / cuDNN 後端的幾倍快\n"
            "（[紀錄與量測方式](docs/results/hopper.md)）。各 {cells} 個問題的幾何平均：\n"
            "前向 {fwd_flash} / {fwd_cudnn}（最低 {fwd_flash_low} / {fwd_cudnn_low}）、反向 {bwd_flash} / {bwd_cudnn}（最低 {bwd_flash_low} / {bwd_cudnn_low}）。\n"
        ),
        "passes": {"fwd": "前向", "bwd": "反向"},
        "head": "方向",
        "error": "RMS 誤差",
        "error_end": "\nRMS 誤差：o 的誤差（反向為 dq、dk、dv 中最大者）除以 {peer} 在相同輸入下的誤差，取幾何平均。\n",
        "fused": "FlashAttention-2 的捨入方式",
        "join": "、",
    },
}


class Suite:
    """A record's rows by cell: (dtype, pass, seqlen_q, seqlen_k, headdim, causal) to {"fattn": row, the peer's algorithm: row}."""

    def __init__(self, path):
        self.record = json.loads(path.read_text(encoding="utf-8"))
        self.cells = {}
        for row in self.record["rows"]:
            if row["status"] != "ok":
                continue
            key = (row["dtype"], row["pass"], row["seqlen_q"], row["seqlen_k"], row["headdim"], row["causal"])
            self.cells.setdefault(key, {})["fattn" if row["provider"] == "fattn" else row["algorithm"]] = row

    def ratio(self, cell, peer):
        return cell[peer]["time_median_s"] / cell["fattn"]["time_median_s"]

    def ratios(self, dtype, which, peer):
        return [self.ratio(cell, peer) for key, cell in self.cells.items() if key[:2] == (dtype, which) and peer in cell and "fattn" in cell]


TENSORS = {"fwd": ("o",), "bwd": ("dq", "dk", "dv")}


def rms_errors(row, which):
    """By tensor and place the RMS error and that of FlashAttention-2's rounding; none in older records and in fp32."""
    return {(c["tensor"], c["where"]): (c["rms_error"], c["rms_peer"]) for c in row["checks"] if c["tensor"] in TENSORS[which] and c.get("rms_peer")}


def accuracy_of(cells, which, peer=None):
    """The RMS error over that of a peer in the same run, or over that of FlashAttention-2's rounding: the worst tensor's, in the mean. None: the records have none."""
    found = []
    for cell in cells:
        own = rms_errors(cell["fattn"], which)
        other = {key: errors[0] for key, errors in rms_errors(cell[peer], which).items()} if peer else {key: errors[1] for key, errors in own.items()}
        ratios = []
        for tensor in TENSORS[which]:  # places of a tensor are samples of it, of one size
            pairs = [(own[key][0], other[key]) for key in own if key[0] == tensor and other.get(key)]
            if pairs:
                ratios.append(math.sqrt(sum(a * a for a, _ in pairs) / sum(b * b for _, b in pairs)))
        if not ratios:
            return None
        found.append(max(ratios))
    return mean(found) if found else None


def with_accuracy(lines, accuracy, heads, columns, text, peer):
    """The table, with a column of errors if every line has one or may have none by its nature ("-")."""
    if not any(accuracy):
        return table(heads, columns, lines)
    marked = [line + [f"{x:.2f}" if x else "-"] for line, x in zip(lines, accuracy)]
    return table(heads, columns, marked, [text["error"]]) + text["error_end"].format(peer=peer)


def undecided(cell, peer):
    a, b = cell["fattn"], cell[peer]
    return a["time_ci_low_s"] <= b["time_ci_high_s"] and b["time_ci_low_s"] <= a["time_ci_high_s"]


def table(heads, columns, lines, tail=()):
    titles = [f"{headdim} causal" if causal else f"{headdim}" for headdim, causal in columns] + list(tail)
    rows = [heads + titles, ["--"] * (len(heads) + len(titles))] + lines
    return "\n".join("|" + "|".join(row) + "|" if row[0] == "--" else "| " + " | ".join(row) + " |" for row in rows) + "\n"


def wrapped(text, which, facts):
    """A text with its facts. English is broken between words; Chinese, which has none, is broken where the text says."""
    filled = text[which].format(**facts)
    return prose(filled) if filled.isascii() else filled


def cpu_block(text):
    suite = Suite(CPU_RECORD)
    columns = [column for column in COLUMNS if column[0] <= 128]
    lines, means, accuracy = [], [], []
    peer = next(row for row in suite.record["rows"] if row["provider"] != "fattn")
    for dtype in ("fp32", "bf16", "fp16"):
        for which in PASSES:
            found = [suite.cells[dtype, which, CPU_LENGTH, CPU_LENGTH, *column] for column in columns]
            lines.append([dtype, text["passes"][which]] + [
                f"{c['fattn']['flops_per_s'] / 1e9:.0f} ({suite.ratio(c, peer['algorithm']):.2f}{'?' if undecided(c, peer['algorithm']) else ''})" for c in found
            ])
            accuracy.append(accuracy_of(found, which))
            means.append(f"{dtype} {text['passes'][which]} {mean(suite.ratios(dtype, which, peer['algorithm'])):.2f}x")
    decode = [f"{c['fattn']['bandwidth_fraction'] * 100:.0f} % ({key[0]})" for key, c in suite.cells.items() if key[2] == 1]
    facts = {"cores": suite.record["environment"]["cpu"]["usable_threads"], "seqlen": CPU_LENGTH, "torch": ".".join(peer["version"].split(".")[:2]), "means": text["join"].join(means), "decode": text["join"].join(decode)}
    return wrapped(text, "cpu", facts) + "\n" + with_accuracy(lines, accuracy, ["dtype", text["head"]], columns, text, text["fused"]) + "\n" + wrapped(text, "cpu_end", facts)


def gpu_block(text):
    suite = Suite(GPU_RECORD)
    suite.cells = {key: cell for key, cell in suite.cells.items() if key[2] == key[3]}  # decode is no part of the means
    own = [cell["fattn"] for key, cell in suite.cells.items() if key[0] == "bf16"]
    facts = {"gpu": suite.record["environment"]["gpus"][0]["name"].replace("NVIDIA ", ""), "cells": len(own) // 2}
    facts["algorithm"] = ", ".join(sorted({row["algorithm"] for row in own}))
    for which in PASSES:
        for peer in ("flash", "cudnn"):
            ratios = suite.ratios("bf16", which, peer)
            facts[f"{which}_{peer}"] = f"{mean(ratios):.2f}x"
            facts[f"{which}_{peer}_low"] = f"{min(ratios):.2f}x"
    lines, accuracy = [], []
    for which in PASSES:
        for n in GPU_LENGTHS:
            found = [suite.cells["bf16", which, n, n, *column] for column in COLUMNS]
            lines.append([text["passes"][which], str(n)] + [
                f"{c['fattn']['flops_per_s'] / 1e12:.0f} ({suite.ratio(c, 'flash'):.2f} / {suite.ratio(c, 'cudnn'):.2f})" for c in found
            ])
            accuracy.append(accuracy_of(found, which, "flash"))
    return wrapped(text, "gpu", facts) + "\n" + with_accuracy(lines, accuracy, [text["head"], "seqlen"], COLUMNS, text, "FlashAttention-2")


def worst(rows):
    """The largest ratios; a null is one that is no number."""
    def largest(key):
        return max((math.inf if row[key] is None else row[key] for row in rows), default=0)

    return f"{largest('rms_ratio'):.2f} / {largest('max_ratio'):.2f}" if rows else "-"


def accuracy_block():
    """The worst ratios that goals hold for: of o by dtype, headdim and sigma, of all tensors by option."""
    if not ACCURACY_RECORD.exists():
        return ""
    rows = json.loads(ACCURACY_RECORD.read_text(encoding="utf-8"))
    judged = [row for row in rows if row["goal"] != "none"]
    sigmas = sorted({row["sigma"] for row in judged})
    lines = [[f"{dtype}, {headdim}"] + [worst([r for r in judged if (r["dtype"], r["headdim"], r["sigma"], r["tensor"]) == (dtype, headdim, sigma, "o")]) for sigma in sigmas]
             for dtype, headdim in dict.fromkeys((row["dtype"], row["headdim"]) for row in judged)]
    options = [[option] + [worst([r for r in judged if (r["option"], r["tensor"]) == (option, tensor)]) for tensor in ("o", "dq", "dk", "dv")]
               for option in dict.fromkeys(row["option"] for row in judged)]
    missed = [row["tensor"] for row in judged if row["goal"] == "missed"]
    of_tensors = ", ".join(f"{tensor} {missed.count(tensor)}" for tensor in dict.fromkeys(missed))
    peers = ", ".join(f"{peer} {mean([r['rms_ratio'] for r in rows if r['peer'] == peer and r['tensor'] == 'o' and r['rms_ratio']]):.2f}" for peer in dict.fromkeys(row["peer"] for row in rows))
    first = judged[0]
    return (prose(f"[accuracy.json](accuracy.json), `fattn check --accuracy` on {', '.join(dict.fromkeys(row['device'] for row in judged))}, fattn {first['fattn']}, torch {first['torch']}: RMS error and largest error over the peer's, "
                  f"the worst of what each field stands for, against FlashAttention-2 where torch has it, else against an emulation of its rounding. {len(judged)} ratios, {len(missed)} of them "
                  f"miss a goal ({of_tensors}). RMS error of o over each peer's, geometric means: {peers}. By sigma, of o:") + "\n" + grid(["dtype, headdim"] + [f"sigma {sigma:g}" for sigma in sigmas], lines)
            + "\nBy option, over all sigmas:\n\n" + grid(["option", "o", "dq", "dk", "dv"], options))


def values_block(record, key):
    """The largest ratios, forward and backward, by algorithm and what the field `key` says: the option, or the values (apart where they are hidden)."""
    if not record.exists():
        return ""
    rows = json.loads(record.read_text(encoding="utf-8"))
    algorithms = list(dict.fromkeys(row["algorithm"] for row in rows))

    def name(row):
        hidden = key == "values" and row["where"].startswith("hidden")
        return row[key] + (", hidden" if hidden else "")

    def largest(what, algorithm):
        of = [[row["ratio"] for row in rows if (name(row), row["algorithm"], row["pass"]) == (what, algorithm, which)] for which in PASSES]
        return " / ".join(f"{max(ratios):.2f}" for ratios in of if ratios) or "-"

    lines = [[what] + [largest(what, algorithm) for algorithm in algorithms] for what in dict.fromkeys(map(name, rows))]
    changed = sum(row["same_bits"] is False for row in rows)
    first = rows[0]
    return prose(f"[{record.name}]({record.name}), `fattn check --values` on {first['device']}, fattn {first['fattn']}, torch {first['torch']}: the largest time over that of the same call on "
                 f"random values, forward / backward, of {len(rows)} calls; in {changed} of them values that are hidden change a bit:") + "\n" + grid([key] + algorithms, lines)


def result_pages():
    """By page of docs/results its marks with what stands between them, without the index."""
    pages = {**result_speed.blocks(), **result_options.blocks(), **result_training.blocks()}
    pages["decode"] |= result_serving.blocks()
    pages["accuracy"] = {"accuracy": accuracy_block(), "values": values_block(VALUES_RECORD, "option"), "values-fp32": values_block(VALUES_FP32_RECORD, "values"),
                         "values-fp32-64": values_block(VALUES_FP32_64_RECORD, "values")}
    return pages


def put(path, marked):
    """The page with each block between its marks, which must be there once."""
    text = path.read_text(encoding="utf-8")
    for mark, content in marked.items():
        block = f"<!-- {mark} -->\n{content}<!-- /{mark} -->"
        text, count = re.subn(f"<!-- {mark} -->.*?<!-- /{mark} -->", lambda _, block=block: block, text, flags=re.S)
        if count != 1:
            raise SystemExit(f"{path.relative_to(ROOT)}: expected the marks {mark} once, found them {count} times")
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is stale")
    arguments = parser.parse_args()
    blocks = {ROOT / name: {"results": cpu_block(text), "gpu-results": gpu_block(text)} for name, text in TEXT.items()}
    blocks |= {RESULTS / f"{name}.md": marked for name, marked in result_pages().items()}
    blocks[RESULTS / "records.md"] = None  # the last: the index says which pages show a record
    stale = []
    for path, marked in blocks.items():
        text = put(path, marked or {"records": result_index.index()})
        if text != path.read_text(encoding="utf-8"):
            stale.append(str(path.relative_to(ROOT)))
            if not arguments.check:
                path.write_text(text, encoding="utf-8")
    if arguments.check and stale:
        print(f"{', '.join(stale)}: a table is not what the records say; run tools/make_result_tables.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
