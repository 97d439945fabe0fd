#!/usr/bin/env python3
"""Writes into the rules on registers (src/backend/cuda/tiles) the bytes that docs/results/spills.json has of them, which build/tests/find_spills found.

    make_spills.py
    make_spills.py --check     exit 1 if a rule says other bytes, or has none in the record, or the record has a rule that is gone
"""
import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TILES = ROOT / "src/backend/cuda/tiles"
RECORD = ROOT / "docs/results/spills.json"
FAMILIES = {"v2_common.h": ["v2 forward", "v2 backward"], "v2_forward.h": ["v2 forward"], "v2_backward.h": ["v2 backward"],
            "v3_forward_rules.h": ["v3 forward"], "v3_backward.h": ["v3 backward"]}
RULE = re.compile(r'(?=\{\.name = ")')  # where one begins
NAME = re.compile(r'\{\.name = "([^"]*)"')
BYTES = re.compile(r"\.bytes = \{[^}]*\}")


def bytes_of(rows):
    spilled = [row for row in rows if row["spill"] > 0]
    if not spilled:
        return ".bytes = {}"
    return f".bytes = {{{min(row['least_bytes'] for row in spilled)}, {max(row['most_bytes'] for row in spilled)}}}"


def renewed(text, families, record, used):
    """The text with the record's bytes, and what is wrong with it."""
    parts, faults = RULE.split(text), []
    for index, part in enumerate(parts):
        name = NAME.match(part)
        if not name or not BYTES.search(part):  # rows for speed have no bytes
            continue
        rows = [record.get((family, name[1])) for family in families]
        if None in rows:
            faults.append(f"'{name[1]}' of {' and '.join(families)} is not in {RECORD.name}; run build/tests/find_spills --json docs/results/spills.json")
            continue
        used.update((family, name[1]) for family in families)
        parts[index] = BYTES.sub(bytes_of(rows), part, count=1)
    return "".join(parts), faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if something is out of date")
    arguments = parser.parse_args()
    record = {(row["family"], row["rule"]): row for row in json.loads(RECORD.read_text(encoding="utf-8"))["rules"]}
    used, faults = set(), []
    for file, families in FAMILIES.items():
        path = TILES / file
        text = path.read_text(encoding="utf-8")
        new, wrong = renewed(text, families, record, used)
        faults += wrong
        if new != text and arguments.check:
            faults.append(f"{path.relative_to(ROOT)} says other bytes than {RECORD.name}; run tools/make_spills.py")
        elif new != text:
            path.write_text(new, encoding="utf-8")
    faults += [f"{RECORD.name} has '{name}' of {family}, which no table has" for family, name in record if (family, name) not in used]
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
