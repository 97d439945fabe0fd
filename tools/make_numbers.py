#!/usr/bin/env python3
"""Writes the numbers of README.md and README.zh-TW.md that the programs know: how many cases there are and how large the library is.

A number stands between `<!-- NAME -->` and `<!-- /NAME -->`:
    cases       cases of `fattn check --list`, in each dtype
    dtypes      dtypes of that list
    library_mb  libfattn.so without debugging symbols, in whole MB, rounded up

    make_numbers.py            writes both files
    make_numbers.py --check    exit 1 if a number is missing or stale
    make_numbers.py --build D  the build to ask (default: build)
"""
import argparse
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = ("README.md", "README.zh-TW.md")


def numbers(build: pathlib.Path) -> dict[str, str]:
    listed = subprocess.run([build / "cli/fattn", "check", "--list"], capture_output=True, text=True, timeout=60, check=True).stdout.split()
    by_dtype: dict[str, int] = {}
    for name in listed:
        dtype = name.split("-")[0]
        by_dtype[dtype] = by_dtype.get(dtype, 0) + 1
    if len(set(by_dtype.values())) != 1:
        raise SystemExit(f"the dtypes have different numbers of cases: {by_dtype}; say so in the READMEs and here")
    with tempfile.TemporaryDirectory() as folder:
        stripped = pathlib.Path(folder, "libfattn.so")
        subprocess.run(["strip", "-o", stripped, build / "src/libfattn.so"], check=True)
        megabytes = -(-stripped.stat().st_size // 1_000_000)
    return {"cases": f"{len(listed) // len(by_dtype):,}", "dtypes": str(len(by_dtype)), "library_mb": str(megabytes)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a number is missing or stale")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build", help="the build to ask (default: build)")
    arguments = parser.parse_args()
    known, missing, stale = numbers(arguments.build.resolve()), [], []
    for name in PAGES:
        page = ROOT / name
        text = made = page.read_text(encoding="utf-8")
        for what, number in known.items():
            made, count = re.subn(f"(<!-- {what} -->).*?(<!-- /{what} -->)", rf"\g<1>{number}\g<2>", made)
            if count == 0:
                missing.append(f"{name} has no <!-- {what} --> ... <!-- /{what} -->")
        if made != text:
            stale.append(f"{name} is stale; run tools/make_numbers.py")
            if not arguments.check:
                page.write_text(made, encoding="utf-8")
                print(f"wrote {name}")
    problems = missing + (stale if arguments.check else [])
    if problems:
        print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
