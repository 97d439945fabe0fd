#!/usr/bin/env python3
"""Compiles the planned kernels (kernels/planned.txt) for every architecture that NVRTC knows, without a GPU, and fails on spills, local
memory, what ptxas gave up (C75xx) and registers over budget. Unchanged kernels are not compiled again (BUILD/kernel-cache).

NVRTC is FATTN_NVRTC, else one that the library finds, else the package nvidia-cuda-nvrtc, installed into BUILD/venv.
`--self-test` checks that kernels with each of these faults are found out."""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# 58 MB. One version, so that a new compiler does not fail the tests of old code by itself. Of 13.5 one thing is known: it spills 20 bytes in the forward
# kernel of level 80 for headdim 128, causal, unaligned, on sm_100.
PACKAGE = "nvidia-cuda-nvrtc==13.0.*"

REGISTERS_64 = ("float a[64]; for (int i = 0; i < 64; ++i) a[i] = x[i * 128 + threadIdx.x]; "
                "for (int j = 0; j < n; ++j) for (int i = 0; i < 64; ++i) a[i] = a[i] * a[(i + 1) % 64] + 1; "
                "for (int i = 0; i < 64; ++i) x[i * 128 + threadIdx.x] = a[i];")
LOCAL_ARRAY = "float a[64] = {}; for (int i = 0; i < n; ++i) a[i % 64] += x[i]; x[threadIdx.x] = a[n % 64];"
WGMMA = ('asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 '
         '{%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1, 0, 0; }" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), '
         '"+f"(d[6]), "+f"(d[7]) : "l"(1ll * n), "l"(2ll * n));')
SERIALISED = ("float d[8]; for (int i = 0; i < 8; ++i) d[i] = x[i * 128 + threadIdx.x]; for (int j = 0; j < n; ++j) { "
              f'asm volatile("wgmma.fence.sync.aligned;"); {WGMMA} asm volatile("wgmma.commit_group.sync.aligned;"); d[3] += 1.0f; }} '
              'asm volatile("wgmma.wait_group.sync.aligned 0;"); for (int i = 0; i < 8; ++i) x[i * 128 + threadIdx.x] = d[i];')


def line(body, budget=255, targets="80", entry="fattn_self_test", threads=128, before=""):
    source = f'{before}extern "C" __global__ void __launch_bounds__({threads}) {entry}(float* x, int n) {{ {body} }}\n'
    return f"quick {budget} {targets} {entry} " + source.replace("\\", "\\\\").replace("\n", "\\n")


# (name, the list, what the output must have)
SELF_TESTS = [
    ("good", line("x[threadIdx.x] *= 2;", targets="75,80,86,89,90a,100,120"), r"^[4-7] passed, 0 failed$"),
    ("spills", line(REGISTERS_64, threads=1024), r"spills \d+ \+ \d+ bytes"),
    ("local memory", line(LOCAL_ARRAY), r"256 bytes of local memory"),
    ("over budget", line(REGISTERS_64, budget=40), r"\d+ registers, budget 40"),
    ("serialised", line(SERIALISED, targets="90a"), r"ptxas gave something up"),
    ("compile error", line("x[0] = unknown;"), r'identifier "unknown" is undefined'),
    ("unknown header", line("", before='#include "kernels/gone.h"\n'), r"kernels/gone.h"),
    ("bad line", "quick 1", r"planned.txt, line 1"),
    ("nothing", "# nothing\n", r"there is nothing to compile"),
    ("unknown architecture", line("", targets="999"), r"not looked at: sm_999"),
]


def find_nvrtc(build: Path) -> dict:
    """The environment in which the library finds NVRTC."""
    probe = build / "tests/jit_build"
    if subprocess.run([probe, "--architectures"], stdout=subprocess.DEVNULL).returncode == 0:
        return dict(os.environ)
    if os.environ.get("FATTN_NVRTC"):
        raise SystemExit(f"FATTN_NVRTC is '{os.environ['FATTN_NVRTC']}', which cannot be used; `fattn info` says why")
    venv = build / "venv"
    if not (venv / "bin/python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(venv / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--timeout", "20", "--retries", "2"]
    if subprocess.run([*pip, PACKAGE], timeout=600).returncode != 0:
        raise SystemExit(f"pip could not install {PACKAGE}: it needs a network or a local package index (PIP_INDEX_URL, PIP_FIND_LINKS)")
    found = sorted(venv.glob("lib/python3*/site-packages/nvidia/*/lib/libnvrtc.so.1[0-9]"))
    if not found:
        raise SystemExit(f"{PACKAGE} is installed in {venv}, but there is no libnvrtc.so in it")
    return {**os.environ, "FATTN_NVRTC": str(found[-1])}


def self_test(program: Path, environment: dict) -> tuple[int, int]:
    passed = failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, text, expected in SELF_TESTS:
            path = Path(folder, "list.txt")
            path.write_text(text + "\n")
            variables = {**environment, "FATTN_CACHE_DIR": folder}
            done = subprocess.run([program, "--list", path], capture_output=True, text=True, env=variables, timeout=300)
            good = bool(re.search(expected, done.stdout, re.M)) and (done.returncode == 0) == (name == "good")
            passed, failed = passed + good, failed + (not good)
            print(f"{'ok    ' if good else 'FAILED'} self-test {name}" + ("" if good else f": status {done.returncode}\n{done.stdout}{done.stderr}"))
    return passed, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--self-test", action="store_true", help="check the check")
    parser.add_argument("--full", action="store_true", help="the whole list, not only the common and quick parts")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="kernels at once (default: all CPUs)")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="build directory (default: build)")
    parser.add_argument("--verbose", action="store_true", help="a line for every kernel")
    parser.add_argument("--print-nvrtc", action="store_true", help="print the path of NVRTC and do nothing else")
    arguments = parser.parse_args()
    build = arguments.build.resolve()
    program = build / "tests/compile_planned"
    if not program.exists():
        print(f"{program} is not there; build it first\n0 passed, 1 failed")
        return 1
    environment = find_nvrtc(build)
    if arguments.print_nvrtc:
        done = subprocess.run([build / "tests/jit_build", "--architectures"], env=environment, capture_output=True, text=True, check=True)
        print(done.stdout.split()[0])
        return 0
    if arguments.self_test:
        passed, failed = self_test(program, environment)
        print(f"{passed} passed, {failed} failed")
        return 1 if failed else 0
    command = [program, "--list", ROOT / "kernels/planned.txt", "--operations", "-j", str(arguments.jobs)] + ["--full"] * arguments.full + ["--verbose"] * arguments.verbose
    return subprocess.run(command, env={**environment, "FATTN_CACHE_DIR": str(build / "kernel-cache")}).returncode


if __name__ == "__main__":
    sys.exit(main())
