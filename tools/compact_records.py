#!/usr/bin/env python3
"""Writes records again as files/json_text.h does, a row a line: JSON of other tools, and records of earlier versions. Values stay what they are.

    compact_records.py FILE...
    compact_records.py --check     exit 1 if a record in docs/results has more lines than that
"""
import argparse
import json
import os
import pathlib
import sys

RESULTS = pathlib.Path(__file__).resolve().parent.parent / "docs" / "results"
LONGEST_LINE = 5000


def line(value):
    return json.dumps(value, ensure_ascii=False)


def text(value, indent=0):
    """As files/json_text.cpp: members of objects and what is in arrays take a line each; arrays of no objects or arrays are one line."""
    if not isinstance(value, (dict, list)) or not value:
        return line(value)
    if isinstance(value, list) and not any(isinstance(item, (dict, list)) for item in value) and len(line(value)) <= LONGEST_LINE:
        return line(value)
    inner = " " * (indent + 2)
    if isinstance(value, dict):
        items = [f"{line(key)}: {text(item, indent + 2)}" for key, item in value.items()]
    else:
        items = [line(item) if len(line(item)) <= LONGEST_LINE else text(item, indent + 2) for item in value]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return begin + "\n" + ",\n".join(inner + item for item in items) + "\n" + " " * indent + end


def write(path, value):
    """Whole: a temporary file, then its name."""
    temporary = path.with_suffix(".new")
    temporary.write_text(text(value) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="*", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a record in docs/results has more lines than a row a line takes")
    arguments = parser.parse_args()
    if arguments.check == bool(arguments.files):
        parser.error("give the files to write again, or --check")
    if arguments.check:
        long = [path.name for path in sorted(RESULTS.glob("*.json")) if path.read_text(encoding="utf-8").count("\n") > text(json.loads(path.read_text(encoding="utf-8"))).count("\n") + 1]
        for name in long:
            print(f"docs/results/{name} has not a row a line; run tools/compact_records.py docs/results/{name}", file=sys.stderr)
        return 1 if long else 0
    for path in arguments.files:
        before = json.loads(path.read_text(encoding="utf-8"))
        if json.loads(text(before)) != before:
            raise SystemExit(f"{path}: its values would change; it was left as it is")
        write(path, before)
    return 0


if __name__ == "__main__":
    sys.exit(main())
