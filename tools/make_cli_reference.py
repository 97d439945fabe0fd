#!/usr/bin/env python3
"""Writes docs/cli/*.md from what `fattn --help` and `fattn COMMAND --help` print, so that the reference is the help.

    make_cli_reference.py                  writes the pages
    make_cli_reference.py --check          exit 1 if a page is missing, differs, or has no command
    make_cli_reference.py --fattn PATH     the program to ask (default: $FATTN_CLI, else build/cli/fattn)
"""
import argparse
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "cli"


def help_of(fattn: str, *command: str) -> str:
    done = subprocess.run([fattn, *command, "--help"], capture_output=True, text=True, timeout=60, check=True, env={**os.environ, "COLUMNS": "80"})
    # CLI11's versions differ in trailing spaces and in how many empty lines they leave.
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in done.stdout.splitlines())).strip()


def commands_in(top: str) -> list[str]:
    """The commands that a help text lists; none if it lists none."""
    block = re.search(r"^Commands:\n((?:  .*\n?)+)", top, re.M)
    return re.findall(r"^  ([a-z]\w*)", block.group(1), re.M) if block else []


def page(title: str, text: str, links: str = "") -> str:
    note = "<!-- Made by tools/make_cli_reference.py from the program's own help; do not edit. -->\n"
    return f"{note}# `{title}`\n\n```text\n{text}\n```\n{links}"


def below(fattn: str, text: str, *command: str) -> str:
    """The sections of the commands that a command's help text lists, and of theirs."""
    sections = ""
    for sub in commands_in(text):
        name = (*command, sub)
        help_text = help_of(fattn, *name)
        sections += f"\n## `fattn {' '.join(name)}`\n\n```text\n{help_text}\n```\n" + below(fattn, help_text, *name)
    return sections


def pages(fattn: str) -> dict[str, str]:
    top = help_of(fattn)
    commands = commands_in(top)
    if not commands:
        raise SystemExit("`fattn --help` lists no commands; is this the right program?")
    links = "\n" + "".join(f"- [`fattn {command}`]({command}.md)\n" for command in commands)
    made = {"README.md": page("fattn", top, links)}
    for command in commands:
        text = help_of(fattn, command)
        made[f"{command}.md"] = page(f"fattn {command}", text) + below(fattn, text, command)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is stale")
    parser.add_argument("--fattn", default=os.environ.get("FATTN_CLI", str(ROOT / "build" / "cli" / "fattn")), help="the program to ask")
    arguments = parser.parse_args()
    made = pages(arguments.fattn)
    present = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    stale = sorted(name for name in made.keys() | present.keys() if made.get(name) != present.get(name))
    for name in stale:
        if arguments.check:
            print(f"docs/cli/{name} is stale; run tools/make_cli_reference.py", file=sys.stderr)
        elif name in made:
            FOLDER.mkdir(parents=True, exist_ok=True)
            (FOLDER / name).write_text(made[name], encoding="utf-8")
            print(f"wrote docs/cli/{name}")
        else:
            (FOLDER / name).unlink()
            print(f"removed docs/cli/{name}")
    return 1 if arguments.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
