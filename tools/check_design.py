#!/usr/bin/env python3
"""Checks pages about the code against the code: files, functions and types that they name are there, and START.md's tables name functions of the files
beside them. `--self-test` checks the checker on made-up texts."""

import argparse
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Pages about the code: each file, function and type that they name is there.
DESIGN = ["docs/ARCHITECTURE.md", "docs/START.md", "docs/MASKS.md", "docs/COMPILATION.md", "docs/PYTHON.md", "docs/kernels/*.md"]
SOURCES = ["include", "src", "kernels", "testing", "measure", "lab", "files", "gpt2", "cli", "torch", "python", "providers", "tests", "tools", "cmake"]
# A page whose tables name functions behind the files that have them.
FOLLOWED = "docs/START.md"

CODE = re.compile(r"`([^`]+)`")
FILE = re.compile(r"^[\w.-]+(?:/[\w.-]+)+\.(?:h|hpp|cpp|c|py|txt|md|json|inc|sh)$")
NAME = re.compile(r"^[\w:-]+(?:\(\))?$")
WORD = re.compile(r"\w+")


def files_named(text):
    return [code for code in CODE.findall(text) if FILE.match(code)]


def faults_of_files(name, text, root):
    return [f"{name} names {file}, which is not there" for file in dict.fromkeys(files_named(text)) if not (root / file).is_file()]


def words_of(root):
    """All words of the code."""
    words = set()
    for folder in SOURCES:
        for path in (root / folder).rglob("*"):
            if path.suffix in (".h", ".hpp", ".cpp", ".c", ".py", ".txt", ".inc", ".sh", ".cmake") and path.name != "planned.txt":
                words.update(WORD.findall(path.read_text(encoding="utf-8")))
    return words


def faults_of_names(name, text, words):
    """Of `Head::seen` or `fattn.doctor` the last part counts."""
    names = [re.split(r"::|\.", code.removesuffix("()"))[-1] for code in CODE.findall(text) if re.fullmatch(r"[A-Za-z_][\w.:]*(?:\(\))?", code)]
    return [f"{name} names {of}, which no source has" for of in dict.fromkeys(names) if of not in words]


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
    """For each check what was wrong."""
    checks = []
    add = checks.append

    def documents(pattern):
        found = sorted(root.glob(pattern))
        if not found:
            add([f"{pattern} is not there"])
        return [(str(path.relative_to(root)), path.read_text(encoding="utf-8")) for path in found]

    words = words_of(root)
    for pattern in DESIGN:
        for name, text in documents(pattern):
            add(faults_of_files(name, text, root))
            add(faults_of_names(name, text, words))
    for name, text in documents(FOLLOWED):
        add(faults_of_rows(name, text, root))
    return checks


def self_test():
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "src").mkdir()
        (root / "src/one.cpp").write_text("int first(int x) { return x; }\n", encoding="utf-8")
        row = "| what | `src/one.cpp` | `first()` |\n"
        tests = [
            ("a file that is there", faults_of_files("a", "`src/one.cpp`", root), 0),
            ("a file that is not", faults_of_files("a", "`src/two.cpp`", root), 1),
            ("a name that is there", faults_of_names("a", "`first()`, `Any::first`", words_of(root)), 0),
            ("a name that is not", faults_of_names("a", "`second`", words_of(root)), 1),
            ("a function that is there", faults_of_rows("a", row, root), 0),
            ("a function that is not", faults_of_rows("a", row.replace("first", "second"), root), 1),
            ("a part of a name", faults_of_rows("a", row.replace("first", "fir"), root), 1),
            ("no row", faults_of_rows("a", "text", root), 1),
        ]
    return [[] if len(faults) == wanted else [f"self-test: {what}: {len(faults)} faults, not {wanted}"] for what, faults, wanted in tests]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--self-test", action="store_true", help="check the checker")
    arguments = parser.parse_args()
    checks = self_test() if arguments.self_test else check(ROOT)
    for faults in checks:
        for fault in faults:
            print(fault)
    failed = sum(bool(faults) for faults in checks)
    print(f"{len(checks) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
