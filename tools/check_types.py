#!/usr/bin/env python3
"""Checks that a qualified name is one type: no two files of a program define a struct, class, union or enum of the same name in named namespaces, or an
alias that means something else there. A program with two is none, and linkers keep whichever they like. Files of tests, torch and providers are
programs of their own beside the rest. `--self-test` checks the checker on made-up trees."""

import argparse
import re
import sys
import tempfile
from pathlib import Path

SHARED = ("include", "src", "measure", "testing", "lab", "cli")  # linked together
ALONE = ("tests", "torch", "examples")  # each source is a program of its own with these, and with headers beside it
SOURCES = {".h", ".hpp", ".c", ".cpp"}

SKIPPED = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*', re.DOTALL | re.MULTILINE)
NAMESPACE = re.compile(r"(?:^|\s)(?:inline\s+)?namespace(?:\s+([\w:\s]+?))?\s*$")
TYPE = re.compile(r"(?:^|[\s>])(?:struct|class|union|enum(?:\s+(?:class|struct))?)\s+(?:alignas\s*\([^)]*\)\s*|\[\[[^\]]*\]\]\s*|[A-Z][A-Z_]+\s+)*"
                  r"(\w+)(?:\s+final)?(?:\s*:(?!:)[^;]*)?\s*$")
ALIAS = re.compile(r"(?:^|\s)using\s+(\w+)\s*=\s*(.+)$", re.DOTALL)
TEMPLATE = re.compile(r"\btemplate\s*<")


def definitions(text):
    """(qualified name, what an alias means or None) of all in named namespaces. A name in capitals is a macro, a namespace for each instruction set."""
    found = []
    scopes = []  # ("namespace" or "type", name) or ("other", None)
    head = ""  # what came since the last ; { or }
    parentheses = 0
    for piece in re.split(r"([{}();])", SKIPPED.sub(lambda match: '""' if match.group(0)[0] in "R\"'" else " ", text)):
        if piece == "(" or piece == ")":
            parentheses += 1 if piece == "(" else -1
        elif piece in ("{", "}", ";") and not (piece == ";" and parentheses > 0):
            if piece == "{":
                namespace, kind = NAMESPACE.search(head), TYPE.search(head)
                named = all(scope[0] != "other" for scope in scopes)
                if namespace:
                    name = re.sub(r"\s", "", namespace.group(1) or "")
                    scopes.append(("namespace", name) if name and not name.isupper() else ("other", None))
                elif re.search(r'\bextern\s*""\s*$', head):
                    scopes.append(("namespace", None))
                elif kind and parentheses == 0:
                    if named:
                        found.append(("::".join([scope[1] for scope in scopes if scope[1]] + [kind.group(1)]), None))
                    scopes.append(("type", kind.group(1)))
                else:
                    scopes.append(("other", None))
            elif piece == "}":
                if scopes:
                    scopes.pop()
            elif all(scope[0] == "namespace" for scope in scopes):
                alias = ALIAS.search(head)
                if alias and not TEMPLATE.search(head):
                    found.append(("::".join([scope[1] for scope in scopes if scope[1]] + [alias.group(1)]), re.sub(r"\s+", " ", alias.group(2)).strip()))
            if parentheses == 0 or piece != ";":
                head = ""
            continue
        head += piece
    return found


def files_under(root, folder):
    return sorted(path for path in (root / folder).rglob("*") if path.suffix in SOURCES) if (root / folder).is_dir() else []


def collisions(root):
    """Lines that say which name is two types, and the number of types that were looked at."""
    lines, types = [], {}  # name: [(file, meaning)]
    count = 0

    def look(path, known):
        nonlocal count
        own = definitions(path.read_text(errors="replace"))
        count += len(own)
        for name, meaning in own:
            for other, other_meaning in [place for table in (types, known) for place in table.get(name, [])]:
                same_alias = meaning is not None and meaning == other_meaning
                if other != path and not same_alias:
                    lines.append(f"{name} is defined in {other.relative_to(root)} and in {path.relative_to(root)}")
        return own

    def add(table, path, own):
        for name, meaning in own:
            table.setdefault(name, []).append((path, meaning))

    for folder in SHARED:
        for path in files_under(root, folder):
            add(types, path, look(path, {}))
    for folder in ALONE:
        beside = {}
        paths = files_under(root, folder)
        for path in sorted(paths, key=lambda one: one.suffix == ".cpp"):
            own = look(path, beside)
            if path.suffix != ".cpp":
                add(beside, path, own)
    return sorted(set(lines)), count


CASES = {
    "two structs": ({"lab/a.h": "namespace fattn::lab { struct Part { int a; }; }", "lab/b.cpp": "namespace fattn { namespace lab {\nclass Part final : public Base<int> {};\n}}"}, 1),
    "two enums, one behind a function": ({"cli/a.h": "namespace n { inline int f(int x) { return x; }\nenum class E : int { kA }; }", "lab/b.h": "namespace n { enum E { kB }; }"}, 1),
    "a member of a type": ({"lab/a.h": "namespace n { struct A { struct B {}; }; }", "lab/b.h": "namespace n { struct A; struct C { struct B {}; }; }"}, 0),
    "a file that has none": ({"lab/a.cpp": "namespace n { namespace { struct A {}; } }", "lab/b.cpp": "namespace n { struct A {}; }", "lab/c.cpp": "namespace { struct A {}; }"}, 0),
    "inside of functions": ({"lab/a.cpp": "namespace n { void f() { struct A {}; } }", "lab/b.cpp": "namespace n { void g() { struct A {}; } }"}, 0),
    "an alias and a struct": ({"lab/a.h": "namespace n { using A = int; }", "lab/b.h": "namespace n { struct A {}; }"}, 1),
    "aliases": ({"lab/a.h": "namespace n { using A = int; using B = int; }", "lab/b.h": "namespace n { using A = int; using B = long; }"}, 1),
    "no definitions": ({"lab/a.h": "namespace n { struct A; struct A* f(); struct stat info {}; template <> struct X<int> {}; }",
                        "lab/b.h": "namespace n { struct A {}; // struct B {}\n const char* s = \"struct B {\"; } #if 0\n", "lab/c.h": "namespace n { struct B {}; struct info {}; struct X {}; }"}, 0),
    "tests are programs of their own": ({"tests/a.cpp": "namespace n { struct A {}; }", "tests/b.cpp": "namespace n { struct A {}; }"}, 0),
    "but not without the library": ({"src/a.h": "namespace n { struct A {}; }", "tests/b.cpp": "namespace n { struct A {}; }"}, 1),
    "nor without their headers": ({"tests/a.h": "namespace n { struct A {}; }", "tests/b.cpp": "namespace n { struct A {}; }"}, 1),
    "a namespace for each instruction set": ({"src/a.h": "namespace n { namespace ISA { struct A {}; } }", "src/b.h": "namespace n { namespace ISA { struct A {}; } }"}, 0),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--self-test", action="store_true")
    if parser.parse_args().self_test:
        passed = failed = 0
        for what, (files, wanted) in CASES.items():
            with tempfile.TemporaryDirectory() as folder:
                for name, text in files.items():
                    path = Path(folder, name)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(text)
                lines, _ = collisions(Path(folder))
            if len(lines) != wanted:
                print(f"{what}: {wanted} wanted, found {lines}")
            passed, failed = passed + (len(lines) == wanted), failed + (len(lines) != wanted)
    else:
        lines, count = collisions(Path(__file__).resolve().parent.parent)
        print("\n".join(lines))
        passed, failed = count - len(lines), len(lines)
        if count < 500:
            print(f"only {count} types were found")
            failed += 1
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
