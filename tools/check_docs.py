#!/usr/bin/env python3
"""Runs what the README files show. Fenced blocks marked `sh` are run with bash in the root of the project, `cpp` and `c` are
complete programs that are compiled against the build and run, and of `console` every `make X` must be a target (tests/python/package
runs the `python` ones). Both languages of the README must show the same blocks, and relative links in every document must lead somewhere."""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
READMES = ("README.md", "README.zh-TW.md")
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def run(command, timeout_s=300, **options):
    """Empty if the command succeeds, else what it printed."""
    try:
        result = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                text=True, errors="replace", timeout=timeout_s, **options)
    except subprocess.TimeoutExpired:
        return f"still running after {timeout_s} s"
    return "" if result.returncode == 0 else f"{result.stdout}\nexit status {result.returncode}"


def compile_and_run(language, source, build):
    compiler, standard, suffix = ("g++", "c++20", ".cpp") if language == "cpp" else ("gcc", "c11", ".c")
    with tempfile.TemporaryDirectory() as folder:
        unit, program = Path(folder, "block" + suffix), Path(folder, "block")
        unit.write_text(source)
        library = build.resolve() / "src"
        problem = run([compiler, f"-std={standard}", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'include'}", str(unit), f"-L{library}",
                       f"-Wl,-rpath,{library}", "-lfattn", "-lm", "-o", str(program)])
        return problem or run([str(program)])


def briefly(text):
    """The commands of a block, with few samples where it measures, and a profile of a small problem: that they run is looked at. With FATTN_TEST_WHOLE=1
    (`make test-all`) as they stand."""
    if os.environ.get("FATTN_TEST_WHOLE") == "1":
        return text
    few = "--repeats 6 --min-time 0"
    text = re.sub(r"^(\S*fattn (?:bench|compare) [^#\n]*)", rf"\1 {few} ", text, flags=re.MULTILINE)
    return re.sub(r"^(\S*fattn profile [^#\n]*)", rf"\1 --batch 1 --seqlen 256 {few} ", text, flags=re.MULTILINE)


def check_block(language, text, build):
    if language == "sh":
        return run(["bash", "-euo", "pipefail", "-c", briefly(text)])
    if language in ("cpp", "c"):
        return compile_and_run(language, text, build)
    targets = re.findall(r"^\$? *make ([\w-]+)", text, re.MULTILINE)
    return "".join(run(["make", "-n", target]) for target in targets)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="build directory (default: build)")
    arguments = parser.parse_args()
    results = []  # (what, problem)

    blocks = {name: FENCE.findall((ROOT / name).read_text(encoding="utf-8")) for name in READMES}
    for language, text in blocks[READMES[0]]:
        if language in ("sh", "cpp", "c", "console"):
            results.append((f"{READMES[0]}, block of {language}:\n{text}", check_block(language, text, arguments.build)))
    if not {"sh", "cpp"} <= {language for language, _ in blocks[READMES[0]]}:
        results.append((READMES[0], "shows no sh or no cpp block"))
    same = blocks[READMES[0]] == blocks[READMES[1]]
    results.append((READMES[1], "" if same else f"its fenced blocks differ from those of {READMES[0]}"))

    for document in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("providers/*.md")]):
        text = FENCE.sub("", document.read_text(encoding="utf-8"))
        links = [link for link in LINK.findall(text) if "://" not in link and not link.startswith("mailto:")]
        broken = [link for link in links if not (document.parent / link).exists()]
        results.append((f"links of {document.relative_to(ROOT)}", f"lead nowhere: {', '.join(broken)}" if broken else ""))

    for what, problem in results:
        if problem:
            print(f"{what}\n{problem}\n")
    failed = sum(bool(problem) for _, problem in results)
    print(f"{len(results) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
