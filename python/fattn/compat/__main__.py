"""python -m fattn.compat program.py its arguments: runs a program with fattn in the place of flash_attn and xFormers."""

import os
import runpy
import sys

from fattn import compat

_USAGE = """usage: python -m fattn.compat [--replace] program.py [arguments]
       python -m fattn.compat [--replace] -m module [arguments]

Runs a program with fattn in the place of flash_attn (2, 3, 4) and xFormers.

  --replace   also where those are installed; without it they stay, and a
              warning says so
"""


def _refuse(message: str) -> None:
    print(f"fattn.compat: {message}\n\n{_USAGE}", end="", file=sys.stderr)
    raise SystemExit(2)


def main() -> None:
    arguments = sys.argv[1:]
    replace = arguments[:1] == ["--replace"]
    arguments = arguments[replace:]
    if arguments[:1] in (["-h"], ["--help"]):
        print(_USAGE, end="")
        return
    if not arguments:
        _refuse("no program is given")
    is_module = arguments[0] == "-m"
    arguments = arguments[is_module:]
    if not arguments:
        _refuse("-m has no module behind it")
    program = arguments[0]
    if not is_module and program.startswith("-"):
        _refuse(f"{program!a} is no option; allowed before the program: --replace, -m, --help")
    if not is_module and not os.path.exists(program):
        _refuse(f"there is no file {program!a}; give the path of a Python program, or -m and a module")
    compat.install(replace=replace)
    sys.argv = arguments
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(program))
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
