#!/usr/bin/env python3
"""Makes docs/report and docs/report/zh-TW from the records in docs/results by `fattn report`: pages, Markdown, figures (two of which the READMEs show).

    make_report.py           writes them
    make_report.py --check   exit 1 if they are not what the records and the command give

FATTN_CLI names the command; build/cli/fattn otherwise.
"""
import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
REPORT = ROOT / "docs" / "report"
# The latest of each kind on each machine: with older records of the same problems, means would mix versions.
RECORDS = [*(f"h100-sweep-{preset}" for preset in ("headline", "gpt2-medium", "seqlen", "batch", "heads", "embed")), "h100-suite", "h100-memory", "h100-when",
           "h100-calibration", "h200-predict", "h200-prices", "cpu-suite-2-cores-zen4", "cpu-prices-2-cores-zen5", "cpu-sweep-2-cores-zen5", "cpu-sweep-seqlen-2-cores", "cpu-when", "cpu-predict", "accuracy",
           "values"]
LANGUAGES = {"en": "", "zh-TW": "zh-TW"}


def make(folder: pathlib.Path) -> set[pathlib.Path]:
    """The report in all languages in a folder; which files it has, by their paths there."""
    command = os.environ.get("FATTN_CLI", str(ROOT / "build" / "cli" / "fattn"))
    if not pathlib.Path(command).exists():
        sys.exit(f"make_report.py: '{command}' does not exist; build the command line, or say in FATTN_CLI where it is")
    records = [f"docs/results/{name}.json" for name in RECORDS]
    for language, below in LANGUAGES.items():
        subprocess.run([command, "report", "--lang", language, "--from", *records, "--out", folder / below], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a file is stale")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        made = make(folder)
        there = {path.relative_to(REPORT) for path in REPORT.rglob("*") if path.is_file()}
        stale = sorted(path for path in made | there if path not in made or path not in there or (folder / path).read_bytes() != (REPORT / path).read_bytes())
        for path in stale:
            if check:
                print(f"docs/report/{path} is stale; run tools/make_report.py")
            elif path in made:
                (REPORT / path).parent.mkdir(parents=True, exist_ok=True)
                (REPORT / path).write_bytes((folder / path).read_bytes())
            else:
                (REPORT / path).unlink()
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
