"""The command line `fattn` of the package: becomes the program that lies beside the library, but for what measures through PyTorch."""

import os
import sys
from pathlib import Path

from . import _check
from ._abi import PACKAGE


def _lacking(path: Path, why: str) -> str:
    return (f"the command line '{path}' cannot be run ({why}); a wheel of fattn has it, which `pip install --force-reinstall` of the wheel, or `pip install .` in "
            "fattn's source, puts there. The rest of the Python package works without it")


def program() -> Path:
    """The command line as a file.

    Raises:
        FileNotFoundError: the package has none that can be run; the message says how to get it.
    """
    path = PACKAGE / "bin" / "fattn"
    if not os.access(path, os.X_OK):
        raise FileNotFoundError(_lacking(path, "it is no program" if path.exists() else "it is not there"))
    return path


def main() -> None:
    if _check.asked_for(sys.argv[1:]):
        sys.exit(_check.main(sys.argv[1:]))
    path = PACKAGE / "bin" / "fattn"
    try:
        os.execv(path, [str(path), *sys.argv[1:]])
    except OSError as error:
        print(f"fattn: {_lacking(path, error.strerror)}", file=sys.stderr)
        sys.exit(2)
