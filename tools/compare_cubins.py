#!/usr/bin/env python3
"""Compares the machine code of the planned kernels (kernels/planned.txt) between two copies of the project, without a GPU: what a change of kernels
that is to change nothing has to show. Says of each kernel that differs the registers, spilled bytes and bytes of code before and after.

BEFORE and AFTER are commits of this repository or folders; AFTER is by default the working tree. `--self-test` checks the comparison on made-up
kernels.

  tools/compare_cubins.py main --full --filter v3_fwd --targets 90a"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from check_kernels import ROOT, find_nvrtc, line

HEADER = "#pragma once\n__device__ float scaled(float x) { return x * 2.0f; }\n"


def self_tests() -> list[tuple[str, str, str, str]]:
    """(name, the header after, the list after, what the output must have)"""
    listed = self_test_list("scaled(x[threadIdx.x])")
    return [
        ("same tree", HEADER, listed, r"^1 the same, of which 1 have the same sources.*\n1 passed, 0 failed$"),
        ("a comment", HEADER + "// of a header\n", listed, r"^1 the same, of which 0 have the same sources.*\n1 passed, 0 failed$"),
        ("a constant", HEADER.replace("2.0f", "3.0f"), listed, r"^different: fattn_self_test sm_90a: registers \d+, spilled bytes 0, bytes of code \d+\n(.*\n)*0 passed, 1 failed$"),
        ("a constant of the list", HEADER, self_test_list("scaled(x[threadIdx.x]) + 1"), r"^different: (.*\n)*0 passed, 1 failed$"),
        ("a kernel more", HEADER, listed + line("x[0] = 1;", targets="90a", entry="fattn_more") + "\n", r"^only after: fattn_more sm_90a\n(.*\n)*1 passed, 1 failed$"),
        ("a mistake", HEADER.replace("x *", "y *"), listed, r"^FAILED fattn_self_test sm_90a: .*\"y\" is undefined(.*\n)*0 passed, 1 failed$"),
    ]


def self_test_list(value: str) -> str:
    return line(f"x[threadIdx.x] = {value};", targets="90a", before='#include "kernels/scaled.h"\n') + "\n"


def write_tree(root: Path, header: str, listed: str) -> Path:
    (root / "kernels").mkdir(parents=True)
    (root / "kernels/scaled.h").write_text(header, encoding="utf-8")
    (root / "kernels/planned.txt").write_text(listed, encoding="utf-8")
    return root


def self_test(program: Path, environment: dict) -> tuple[int, int]:
    passed = failed = 0
    with tempfile.TemporaryDirectory() as folder:
        before = write_tree(Path(folder, "before"), HEADER, self_test_list("scaled(x[threadIdx.x])"))
        variables = {**environment, "FATTN_CACHE_DIR": folder}
        for number, (name, header, listed, expected) in enumerate(self_tests()):
            after = write_tree(Path(folder, str(number)), header, listed)
            done = subprocess.run([program, before, after], capture_output=True, text=True, env=variables, timeout=300)
            good = bool(re.search(expected, done.stdout, re.M)) and (done.returncode == 0) == (", 0 failed" in expected)
            passed, failed = passed + good, failed + (not good)
            print(f"{'ok    ' if good else 'FAILED'} self-test {name}" + ("" if good else f": status {done.returncode}\n{done.stdout}{done.stderr}"))
        done = subprocess.run([program, before, Path(folder, "gone")], capture_output=True, text=True, env=variables, timeout=300)
        good = done.returncode == 1 and "gone/kernels/planned.txt' cannot be read; give a folder" in done.stdout
        passed, failed = passed + good, failed + (not good)
        print(f"{'ok    ' if good else 'FAILED'} self-test no folder" + ("" if good else f": status {done.returncode}\n{done.stdout}{done.stderr}"))
    return passed, failed


def tree_of(name: str, under: Path) -> Path:
    """The folder of that name, or the device code of the commit of that name, written below `under`."""
    if Path(name, "kernels").is_dir():
        return Path(name).resolve()
    known = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"], capture_output=True, text=True)
    if known.returncode != 0:
        raise SystemExit(f"{name!r} is no folder with kernels/ and no commit of {ROOT}; give one of them, such as main or HEAD")
    under.mkdir()
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", known.stdout.strip(), "kernels", "src/device_abi"], capture_output=True)
    if archive.returncode != 0:
        raise SystemExit(f"{name!r} has no kernels/ and src/device_abi/; give a commit that has its device code there")
    subprocess.run(["tar", "-x", "-C", str(under)], input=archive.stdout, check=True)
    return under


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", nargs="?", metavar="BEFORE", help="a commit or a folder")
    parser.add_argument("after", nargs="?", metavar="AFTER", default=str(ROOT), help="a commit or a folder (default: the working tree)")
    parser.add_argument("--self-test", action="store_true", help="check the comparison")
    parser.add_argument("--full", action="store_true", help="the whole list, not only the common and quick parts")
    parser.add_argument("--filter", metavar="TEXT", help="kernels whose entry, architecture or description has this text")
    parser.add_argument("--targets", metavar="LIST", help="these architectures alone: 90a,80")
    parser.add_argument("--every", type=int, metavar="N", help="every N-th kernel of these, for a sample")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="kernels at once (default: all CPUs)")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="build directory (default: build)")
    parser.add_argument("--verbose", action="store_true", help="a line for every kernel")
    arguments = parser.parse_args()
    build = arguments.build.resolve()
    program = build / "tests/compare_planned"
    if not program.exists():
        print(f"{program} is not there; build it first: cmake --build {build} --target compare_planned jit_build\n0 passed, 1 failed")
        return 1
    environment = find_nvrtc(build)
    if arguments.self_test:
        passed, failed = self_test(program, environment)
        print(f"{passed} passed, {failed} failed")
        return 1 if failed else 0
    if arguments.before is None:
        parser.error("give BEFORE, a commit or a folder, such as main")
    with tempfile.TemporaryDirectory() as folder:
        command = [program, tree_of(arguments.before, Path(folder, "before")), tree_of(arguments.after, Path(folder, "after")), "-j", str(arguments.jobs)]
        command += ["--full"] * arguments.full + ["--verbose"] * arguments.verbose
        for flag in ("filter", "targets", "every"):
            value = getattr(arguments, flag)
            command += [] if value is None else [f"--{flag}", str(value)]
        # A cache of its own: twice the whole list would push out what `make test` has compiled.
        return subprocess.run(command, env={**environment, "FATTN_CACHE_DIR": str(build / "compared-kernels")}).returncode


if __name__ == "__main__":
    sys.exit(main())
