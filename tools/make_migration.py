#!/usr/bin/env python3
"""Writes the tables of docs/MIGRATION.md from the modules of fattn.compat: each argument of each function of a peer, whether it is computed, and why not.

The words are in tools/migration_notes.py; an argument without words, and words without an argument, are errors.

    make_migration.py            writes the tables, between `<!-- compat -->` and `<!-- /compat -->`
    make_migration.py --check    exit 1 if they are stale
"""
import argparse
import ast
import pathlib
import re
import sys

from made_file import ROOT, write_or_check
from migration_notes import NOTES

PAGE = ROOT / "docs/MIGRATION.md"
PEERS = ROOT / "python/fattn/compat/peers"
# Title, module, and the files whose functions it has.
TABLES = (
    ("flash_attn 2", "flash_attn", ("flash_attn/flash_attn_interface.py",)),
    ("flash_attn 3", "flash_attn_interface", ("flash_attn_interface.py",)),
    ("flash_attn 4", "flash_attn.cute", ("flash_attn/cute/interface.py",)),
    ("xFormers", "xformers.ops", ("xformers/ops/fmha/__init__.py",)),
)
# Modules beside the functions: their public names are listed.
MORE = {
    "flash_attn": ("flash_attn/bert_padding.py", "flash_attn/layers/rotary.py", "flash_attn/modules/mha.py", "flash_attn/utils/generation.py"),
    "xformers.ops": ("xformers/ops/fmha/attn_bias.py",),
}
NO_ARGUMENTS = {"get_scheduler_metadata"}  # of which nothing is looked at


def functions(path: str) -> dict[str, list[str]]:
    """The arguments of each public function."""
    tree = ast.parse((PEERS / path).read_text(encoding="utf-8"))
    return {x.name: [a.arg for a in (*x.args.posonlyargs, *x.args.args, *x.args.kwonlyargs)] for x in tree.body
            if isinstance(x, ast.FunctionDef) and not x.name.startswith("_")}


def public_names(path: str) -> tuple[list[str], list[str]]:
    """Of a module's __all__: what is there, and what is refused."""
    tree = ast.parse((PEERS / path).read_text(encoding="utf-8"))
    names = next(ast.literal_eval(x.value) for x in tree.body if isinstance(x, ast.Assign) and getattr(x.targets[0], "id", "") == "__all__")
    refused = {x.name for x in tree.body if isinstance(x, ast.ClassDef) and ast.get_docstring(x) == "Not computed."}
    return [x for x in names if x not in refused], [x for x in names if x in refused]


def code(names: list[str]) -> str:
    return ", ".join(f"`{x}`" for x in names)


def rows(module: str, paths: tuple[str, ...]) -> list[str]:
    by_function = {name: arguments for path in paths for name, arguments in functions(path).items()}
    known = {argument for name, arguments in by_function.items() if name not in NO_ARGUMENTS for argument in arguments}
    said: set[str] = set()
    made = []
    for key, (answer, words) in NOTES[module].items():
        names = re.sub(r" \(.*?\)$", "", key).split(", ")
        if not known.intersection(names):
            raise SystemExit(f"tools/migration_notes.py has {key!r} of {module}, which no function takes")
        said.update(names)
        where = [name for name, arguments in by_function.items() if name not in NO_ARGUMENTS and set(arguments).intersection(names)]
        others = [name for name in by_function if name not in where]
        of = "all" if not others else f"all but {code(others)}" if len(others) < min(3, len(where)) else code(where)
        made.append(f"| {code([x for x in names if x in known])} | {of} | {answer} | {words} |")
    if missing := known - said - {"k", "v"}:
        raise SystemExit(f"tools/migration_notes.py says nothing of {', '.join(sorted(missing))} of {module}")
    return made


def tables() -> str:
    made = []
    for title, module, paths in TABLES:
        made += [f"### {title}: `{module}`", "", "| argument | of | fattn.compat | |", "|--|--|--|--|", *rows(module, paths), ""]
        for path in MORE.get(module, ()):
            there, refused = public_names(path)
            name = path.removesuffix(".py").replace("/", ".")
            made += [f"| `{name}` | |", "|--|--|", f"| there | {code(there)} |"]
            made += [f"| refused | {code(refused)} |"] if refused else []
            made += [""]
    return "\n".join(made)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the tables are stale")
    page = PAGE.read_text(encoding="utf-8")
    made, count = re.subn(r"(?<=<!-- compat -->\n).*?(?=<!-- /compat -->)", lambda match: f"\n{tables()}\n", page, flags=re.DOTALL)
    if count != 1:
        print(f"{PAGE.relative_to(ROOT)} has no <!-- compat --> ... <!-- /compat -->", file=sys.stderr)
        return 1
    return write_or_check(PAGE, made, pathlib.Path(__file__).name, parser.parse_args().check)


if __name__ == "__main__":
    sys.exit(main())
