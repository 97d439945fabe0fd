"""The index of docs/results: a row for every record, with what it is, its machine, its date and the page that shows it."""
import re

from make_report import RECORDS as REPORTED
from result_records import RESULTS, grid, link, load

# What a record does not say of itself in a few words. A record that is neither here nor one of the lab's own kinds has no row, and the tool says so.
WORDS = {
    "accuracy": "`fattn check --accuracy`: errors over those of peers; softcap and biases on one H200, 2026-11-30", "values": "`fattn check --values`, bf16 and fp16: times by the values in a call",
    "h200-values-fp32": "`fattn check --values --dtype fp32`", "h200-values-fp32-64": "the same of headdim 64, kernels since then",
    "h100-any-rows": "v2: rows of biases and masks at any address", "h100-first-call": "first calls of processes, kernel cache empty",
    "h100-v3-headdims": "v3 at five headdims in turns", "h200-decode": "decode beside PyTorch's backends", "h200-features": "v3: windows of 1024 keys, softcap 50",
    "h200-fp32-shapes": "fp32 beside PyTorch's memory-efficient backend", "h200-fp32-v3": "fp32 forward: v3 beside v2, times and errors", "gpt2-small-model": "a small GPT-2 from nothing on system texts: `tools/train_small_model.py`", "h200-gpt2": "GPT-2 of transformers by attention",
    "h200-gpt2-training": "`tools/bench_gpt2_training.py --device cuda`: [GPT2](../GPT2.md#training-on-a-gpu)",
    "h200-gpt2-medium-training": "`tools/bench_gpt2_training.py --device cuda --table`", "h200-pages": "`tools/bench_pages.py`: a paged cache beside a contiguous one",
    "h200-turns-same": "one state beside itself, in turns: what such ratios vary by", "h200-turns": "the state before routes, tensors and options were lists, and after, in turns", "cpu-turns": "the same on a CPU",
    "h200-serving": "`tools/bench_serving.py`: mixed lengths, pages, append, a shared prefix",
    "h200-gpt2-two-gpus": "`tools/bench_gpt2_training.py --device cuda --ranks 2`: [GPT2](../GPT2.md#many-gpus)",
    "cpu-gpt2-bench": "`tools/bench_gpt2_inference.py --device cpu`: [GPT2](../GPT2.md#on-a-cpu-beside-transformers)",
    "cpu-gpt2-training": "`tools/bench_gpt2_training.py`: 200 steps beside transformers: [GPT2](../GPT2.md#a-small-model)",
    "h200-ring": "`tools/bench_ring.py --ranks 2`: ring attention on two GPUs",
    "h200-ring-timeline": "`fattn.distributed bench --timeline`: what two ranks did when",
    "cpu-ring-errors": "`fattn.distributed check --errors`: ring attention's errors over those of one process",
    "h200-ring-errors": "the same on two GPUs",
    "h200-gpt2-bench": "`fattn gpt2 bench`: [GPT2](../GPT2.md#on-a-gpu)", "h200-gpt2-xl-bench": "`fattn gpt2 bench`, gpt2-xl: [GPT2](../GPT2.md#on-a-gpu)",
    "h200-gpt2-inference": "`tools/bench_gpt2_inference.py --device cuda`: [GPT2](../GPT2.md#on-a-gpu)",
    "h200-gpt2-xl-decode": "gpt2-xl, decode beside transformers: [GPT2](../GPT2.md#on-a-gpu)", "h200-packed-backward": "v3: packed sequences, backward",
    "h200-pair-features": "prices of options in v2 and v3, before they fell", "h200-python": "what a call from Python costs the host", "h200-v3-accuracy": "v3: errors over FlashAttention-2's", "h200-accuracy-v2": "`fattn check --accuracy --algorithm v2`: errors of v2 over those of peers",
    "h200-v3-more": "v3 alone: fp16, headdims, large scores", "h200-v3-sigma": "v3: time at sigma 1 and 3, before and after", "spills": "`find_spills`: what kernels spill that rules keep from being chosen", "h200_attention": "rates by turn of [h200-suite](h200-suite.json)",
}
DATES = {"h200-accuracy-v2": "2026-11-30", "accuracy": "2026-11-27", "values": "2026-11-27", "h200-values-fp32": "2026-11-28", "h200-values-fp32-64": "2026-11-28", "h200-decode": "2026-11-23", "h200-gpt2-xl-decode": "2026-11-28",
         "h200-fp32-v3": "2026-11-23", "h200-ring-timeline": "2026-11-30"}
FLAGS = ("--suite", "--only", "--preset", "--over", "--held-out", "--model", "--algorithm")  # of those that a record has, the ones that say what it is


def command_of(record):
    """The command in as few words as say which it was."""
    flags, shown = record.get("flags", []), []
    for index, flag in enumerate(flags):
        if flag in FLAGS and index + 1 < len(flags) and flags[index + 1] != "auto":
            shown += [flag, str(flags[index + 1])]
        elif flag in ("--quick", "--when"):
            shown.append(flag)
    if record.get("command") == "sweep" and "--preset" in shown:
        shown = shown[:2]
    names = {"fattn_predict": "predict", "fattn_calibration": "calibrate", "fattn_memory": "memory", "fattn_advice": "advise"}
    kind = next(iter(record))
    command = {"suite": "bench"}.get(record.get("command"), record.get("command"))
    return f"`{' '.join(['fattn', names.get(kind, command), *shown])}`"


def compared(record):
    row = record["rows"][0]
    who = dict.fromkeys(r["algorithm"] if r["provider"] in ("fattn", "torch-sdpa") else r["provider"] for r in record["rows"])
    return f"`fattn compare`, {row['batch']} x {row['seqlen_q']}, {row['nheads']} heads of {row['headdim']}{', causal' if row['causal'] else ''}, {row['dtype']}: {', '.join(who)}"


def what_of(name, record):
    if name in WORDS:
        return WORDS[name]
    if not isinstance(record, dict):
        return None
    if record.get("command", "").startswith("tune_"):
        return f"`{record['command']}`: the search for tiles"
    if "fattn_record" in record and record["command"] == "compare":
        return compared(record)
    return command_of(record) if next(iter(record)).startswith("fattn_") else None


def machine_of(name, record):
    first = record[0] if isinstance(record, list) else record
    environment = first.get("environment", {})
    if "nvrtc" in first:
        return f"NVRTC {first['nvrtc']}"
    if "fattn_small_model" in first:
        cpu = environment["cpu"]
        return f"{cpu['usable_threads']} cores, {cpu['model'].replace('(R)', '').replace(' Processor', '')}, {cpu['isa_default']}"
    if name.startswith("cpu"):
        rows = [row for row in record.get("rows", []) if row.get("threads")] or [{}]
        threads = rows[0].get("threads") or environment["cpu"]["usable_threads"]
        model = environment["cpu"]["model"].replace("(R)", "").replace(" Processor", "")
        isas = {row["isa"] for row in rows if row.get("isa")} or {record.get("held_out", {}).get("machine", {}).get("instruction set", environment["cpu"]["isa_default"])}
        return f"{threads} cores, {model}, {', '.join(sorted(isas))}"
    gpus = environment.get("gpus")
    if "fattn_ring_timeline" in first:
        return f"{first['otherData']['ranks']} {first['otherData']['device'].removeprefix('NVIDIA ')}"
    if "fattn_ring" in first:
        return f"{first['ranks']} {first['rows'][0]['device'].removeprefix('NVIDIA ')}"
    gpu = gpus[0]["name"] if gpus else environment.get("gpu") or first.get("device_name") or first.get("gpu") or first.get("device") or record["records"][0]["environment"]["gpus"][0]["name"]
    return re.sub(r"NVIDIA | 80GB HBM3", "", gpu)


def date_of(name, record):
    first = record[0] if isinstance(record, list) else record
    problems = [problem["date"][:10] for problem in first.get("problems", []) if isinstance(problem, dict) and problem.get("date")]
    found = DATES.get(name) or first.get("environment", {}).get("date") or first.get("date") or max(problems, default="")
    return found[:10]


def pages_of(name):
    """The pages that have a link to the record, beside those that list all; the report, if it is made from it."""
    found = [path for path in sorted(RESULTS.glob("*.md")) if path.name not in ("README.md", "records.md", "LOG.md") and f"]({name}.json)" in path.read_text(encoding="utf-8")]
    report = ["[report](../report/report.md)"] if name in REPORTED else []
    return ", ".join([f"[{path.stem}]({path.name})" for path in found] + report)


def index():
    lines = []
    for path in sorted(RESULTS.glob("*.json")):
        record = load(path.stem)
        what = what_of(path.stem, record)
        if what is None:
            raise SystemExit(f"docs/results/{path.name}: what it is stands nowhere; give it a few words in tools/result_index.py")
        if isinstance(record, dict) and record.get("complete") is False:
            what += ", ended early"
        lines.append([link(path.stem, path.stem), what, machine_of(path.stem, record), date_of(path.stem, record), pages_of(path.stem)])
    return grid(["record", "what", "machine", "date", "page"], lines)
