#!/usr/bin/env python3
"""Compiles every public header alone, and twice in one unit: as C++17 and C++20 with g++ and clang++, fattn.h as C11 too.
No warning passes. `--self-test` checks that a header that needs another one first fails."""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Wno-sign-conversion", "-Werror", "-fsyntax-only"]


def compiles(compiler, language, standard, include, header):
    """Empty, or the compiler's messages."""
    with tempfile.NamedTemporaryFile("w", suffix=".c" if language == "c" else ".cpp") as unit:
        unit.write(f'#include "{header}"\n#include "{header}"\nint main(void) {{ return 0; }}\n')
        unit.flush()
        command = [compiler, "-x", language, f"-std={standard}", "-I", str(include), *WARNINGS, unit.name]
        try:
            result = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            return f"{compiler} is not installed"
        return "" if result.returncode == 0 else result.stderr or "failed"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--self-test", action="store_true")
    arguments = parser.parse_args()
    passed = failed = 0
    if arguments.self_test:
        with tempfile.TemporaryDirectory() as folder:
            cases = {"alone.h": ("#pragma once\nstruct A { int a; };\n", True), "needs_other.h": ("#pragma once\nstruct B { A a; };\n", False),
                     "no_guard.h": ("struct C { int c; };\n", False)}
            for name, (text, good) in cases.items():
                Path(folder, name).write_text(text)
                right = (compiles("g++", "c++", "c++20", folder, name) == "") == good
                passed, failed = passed + right, failed + (not right)
    else:
        include = Path(__file__).resolve().parent.parent / "include"
        jobs = [(compiler, "c++", standard, path) for path in sorted(include.rglob("*.h*")) for compiler in ("g++", "clang++") for standard in ("c++17", "c++20")]
        jobs += [(compiler, "c", "c11", include / "fattn/fattn.h") for compiler in ("gcc", "clang")]
        for compiler, language, standard, path in jobs:
            header = path.relative_to(include).as_posix()
            problem = compiles(compiler, language, standard, include, header)
            if problem:
                print(f"{header} ({compiler}, {standard}):\n{problem}")
            passed, failed = passed + (not problem), failed + bool(problem)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
