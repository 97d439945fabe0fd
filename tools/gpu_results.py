#!/usr/bin/env python3
"""Files the record of `fattn bench --suite cuda` under docs/results/, named by the GPU, and makes of it the list of rates by turn.

    gpu_results.py RECORD

Writes NAME-suite.json, the record as it is, and NAME_attention.json: a list of {headdim, causal, seqlen, pass, provider, run, flops_per_s, ...} with an
entry for every turn of fattn and of cuDNN through torch, which ran one after another in each. Decode is in the record only.
"""
import argparse
import json
import pathlib
import re
import sys

import compact_records

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "results"


def rates_of(record):
    environment = record["environment"]
    rates = []
    for row in record["rows"]:
        who = "fattn" if row["provider"] == "fattn" else row["algorithm"]
        if who not in ("fattn", "cudnn") or row["dtype"] != "bf16" or row["status"] != "ok" or row["seqlen_q"] != row["seqlen_k"]:
            continue
        for run, seconds in enumerate(row["time_turn_medians_s"]):
            rates.append(
                {
                    "headdim": row["headdim"],
                    "causal": row["causal"],
                    "seqlen": row["seqlen_q"],
                    "pass": row["pass"],
                    "provider": who,
                    "run": run,
                    "flops_per_s": row["flops_nominal"] / seconds,
                    "batch": row["batch"],
                    "nheads": row["nheads"],
                    "kernel": row["kernel"],
                    "version": row["version"],
                    "sm_clock_mhz": row.get("sm_clock_mhz"),
                    "power_w": row.get("power_w"),
                    "gpu": environment["gpus"][0]["name"],
                    "date": environment["date"],
                }
            )
    return rates


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("record", type=pathlib.Path)
    arguments = parser.parse_args()
    record = json.loads(arguments.record.read_text(encoding="utf-8"))
    gpus = record.get("environment", {}).get("gpus") or []
    flags = record.get("flags", [])
    if flags[:2] != ["--suite", "cuda"] or "--only" in flags or not record.get("complete") or not gpus:
        parser.error(f"{arguments.record} is not a complete record of `fattn bench --suite cuda`; make one with --json")
    name = re.sub(r"[^a-z0-9]+", "-", gpus[0]["name"].lower().replace("nvidia", "")).strip("-")
    for path, value in ((FOLDER / f"{name}-suite.json", record), (FOLDER / f"{name}_attention.json", rates_of(record))):
        compact_records.write(path, value)
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
