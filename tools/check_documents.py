#!/usr/bin/env python3
"""Checks the shape of documents: how many lines each has at most, how long a line is at most, that files which design pages name exist, and that
START.md's tables name functions of the files beside them. `--self-test` checks the checker on made-up texts."""

import argparse
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# File or pattern, most lines (None: as many as it takes), longest line in characters outside of tables, code and links.
SHAPES = [
    ("docs/ARCHITECTURE.md", 150, 120),
    ("docs/START.md", 150, 120),
    ("docs/MASKS.md", None, 120),
    ("docs/COMPILATION.md", None, 120),
    ("docs/PYTHON.md", None, 120),
    ("docs/kernels/*.md", 200, 120),
    ("README.md", None, 120),
    ("README.zh-TW.md", None, 120),
    ("CHANGELOG.md", None, 120),
    ("AGENTS.md", None, 120),
]
# Pages about the code: each file that they name is there.
DESIGN = ["docs/ARCHITECTURE.md", "docs/START.md", "docs/MASKS.md", "docs/COMPILATION.md", "docs/PYTHON.md", "docs/kernels/*.md"]
# A page whose tables name functions behind the files that have them.
FOLLOWED = "docs/START.md"

FENCE = re.compile(r"^(```|~~~)")
CODE = re.compile(r"`([^`]+)`")
FILE = re.compile(r"^[\w.-]+(?:/[\w.-]+)+\.(?:h|hpp|cpp|c|py|txt|md|json|inc|sh)$")
NAME = re.compile(r"^[\w:-]+(?:\(\))?$")
GENERATED = re.compile(r"<!-- ([\w-]+) -->\n.*?<!-- /\1 -->", re.DOTALL)  # the programs that write these answer for them


def is_wide(character):
    return ord(character) >= 0x1100


def lines_of_prose(text):
    """(number, line) of what is neither in a fence, nor an indented block, nor a row of a table, nor a figure or a line that is a link alone."""
    text = GENERATED.sub(lambda block: "\n" * block.group().count("\n"), text)
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if FENCE.match(line.lstrip()):
            fenced = not fenced
        elif not (fenced or line.startswith(("    ", "|", "![")) or re.fullmatch(r"\s*\[[^\]]*\](\([^)]*\)|: .*)[.,]?", line)):
            yield number, line


def width(line):
    return sum(2 if is_wide(character) else 1 for character in line)


def faults_of_shape(name, text, most_lines, longest):
    faults = []
    count = len(text.splitlines())
    if most_lines is not None and count > most_lines:
        faults.append(f"{name} has {count} lines; allowed: {most_lines}. Move what is deeper to a page of its own")
    for number, line in lines_of_prose(text):
        if width(line) > longest:
            faults.append(f"{name}:{number} is {width(line)} columns wide; allowed: {longest}. Break the line")
    return faults


def files_named(text):
    return [code for code in CODE.findall(text) if FILE.match(code)]


def faults_of_files(name, text, root):
    """Names of files begin at the root of the project; beside the kernels' own folder `v3/mask.h` is short for `kernels/v3/mask.h`."""
    return [f"{name} names {file}, which is not there" for file in dict.fromkeys(files_named(text))
            if not any((root / folder / file).is_file() for folder in ("", "kernels", "src/backend/cuda", "src"))]


def faults_of_rows(name, text, root):
    """In each row of a table that names files, each name behind them is in one of them."""
    faults, rows = [], 0
    for line in text.splitlines():
        cells = line.split("|")
        if not line.startswith("| ") or len(cells) < 5:
            continue
        files = [file for file in files_named(cells[2]) if (root / file).is_file()]
        names = [code.removesuffix("()") for code in CODE.findall(cells[3]) if NAME.match(code)]
        if not files or not names:
            continue
        rows += 1
        inside = "\n".join((root / file).read_text(encoding="utf-8") for file in files)
        for code in names:
            if not re.search(rf"(?<![\w]){re.escape(code)}(?![\w])", inside):
                faults.append(f"{name} says that {code} is in {', '.join(files)}, and it is not")
    if rows == 0:
        faults.append(f"{name} has no row that names a file and a function")
    return faults


def check(root):
    """How many checks there were, and what was wrong."""
    checks, faults = 0, []

    def add(of):
        nonlocal checks
        checks += 1
        faults.extend(of)

    def documents(pattern):
        found = sorted(root.glob(pattern))
        if not found:
            add([f"{pattern} is not there"])
        return [(str(path.relative_to(root)), path.read_text(encoding="utf-8")) for path in found]

    for pattern, most_lines, longest in SHAPES:
        for name, text in documents(pattern):
            add(faults_of_shape(name, text, most_lines, longest))
    for pattern in DESIGN:
        for name, text in documents(pattern):
            add(faults_of_files(name, text, root))
    for name, text in documents(FOLLOWED):
        add(faults_of_rows(name, text, root))
    return checks, faults


def self_test():
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "src").mkdir()
        (root / "src/one.cpp").write_text("int first(int x) { return x; }\n", encoding="utf-8")
        row = "| what | `src/one.cpp` | `first()` |\n"
        wide = "x" * 121
        tests = [
            ("lines at the limit", faults_of_shape("a", "x\n" * 3, 3, 120), 0),
            ("a line too many", faults_of_shape("a", "x\n" * 4, 3, 120), 1),
            ("a line of 120", faults_of_shape("a", "x" * 120, None, 120), 0),
            ("a line of 121", faults_of_shape("a", wide, None, 120), 1),
            ("61 letters of two columns", faults_of_shape("a", "\u5b57" * 61, None, 120), 1),
            ("a wide row of a table", faults_of_shape("a", "| " + wide, None, 120), 0),
            ("wide code", faults_of_shape("a", f"```sh\n{wide}\n```\n    {wide}", None, 120), 0),
            ("a wide line behind code", faults_of_shape("a", f"```sh\n```\n{wide}", None, 120), 1),
            ("a wide line that a program made", faults_of_shape("a", f"<!-- n -->\n{wide}\n<!-- /n -->", None, 120), 0),
            ("a file that is there", faults_of_files("a", "`src/one.cpp`", root), 0),
            ("a file that is not", faults_of_files("a", "`src/two.cpp`", root), 1),
            ("a function that is there", faults_of_rows("a", row, root), 0),
            ("a function that is not", faults_of_rows("a", row.replace("first", "second"), root), 1),
            ("a part of a name", faults_of_rows("a", row.replace("first", "fir"), root), 1),
            ("no row", faults_of_rows("a", "text", root), 1),
        ]
    failed = [f"self-test: {what}: {len(faults)} faults, not {wanted}" for what, faults, wanted in tests if len(faults) != wanted]
    return len(tests), failed


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--self-test", action="store_true", help="check the checker")
    arguments = parser.parse_args()
    checks, faults = self_test() if arguments.self_test else check(ROOT)
    for fault in faults:
        print(fault)
    failed = min(len(faults), checks)
    print(f"{checks - failed} passed, {failed} failed")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
