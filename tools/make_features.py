#!/usr/bin/env python3
"""Writes docs/FEATURES.md from the library's support table, as `fattn support --json -` has it.

    make_features.py                  writes the page
    make_features.py --check          exit 1 if it is missing or differs
    make_features.py --fattn PATH     the program to ask (default: $FATTN_CLI, else build/cli/fattn)
"""
import argparse
import json
import os
import subprocess
import sys

from made_file import ROOT, write_or_check

PAGE = ROOT / "docs" / "FEATURES.md"


def page(fattn: str) -> str:
    done = subprocess.run([fattn, "support", "--json", "-"], capture_output=True, text=True, timeout=60, check=True)
    table = json.loads(done.stdout)["table"]
    ways = list(table[0]["ways"])
    short = [way.replace("algorithm ", "").replace("backend ", "").replace(" of ", ", ") for way in ways]
    lines = [
        "<!-- Made by tools/make_features.py from the library's own table; do not edit. -->",
        "# What computes which option of attention",
        "",
        "Forward and backward; decode on cuda has forward alone. Options of a column go together, but for some in v3, which v2",
        "then computes, and a few in v2: dbias with softcap; a dbias that is summed, deterministic; a bias, a mask and documents",
        "above headdim 192. An option that a column lacks is refused with a reason, never left out.",
        "`fattn support --with softcap,dropout` asks of options together. A dtype or a head dimension may narrow a column",
        "further: `fattn support` asks the library what runs on a machine. Every column has causal masks, GQA and MQA, unequal",
        "lengths of queries and keys, and the log-sum-exp. Decode is few queries against many keys; on the CPU v2 has it.",
        "[NUMERICS.md](NUMERICS.md) says what each option computes.",
        "",
        "| | " + " | ".join(short) + " |",
        "|--" * (len(ways) + 1) + "|",
    ]
    for row in table:
        lines.append("| " + row["feature"] + " | " + " | ".join("yes" if row["ways"][way] else "-" for way in ways) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is stale")
    parser.add_argument("--fattn", default=os.environ.get("FATTN_CLI", str(ROOT / "build" / "cli" / "fattn")), help="the program to ask")
    arguments = parser.parse_args()
    return write_or_check(PAGE, page(arguments.fattn), "make_features.py", arguments.check)


if __name__ == "__main__":
    sys.exit(main())
