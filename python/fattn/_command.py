"""The command line `fattn` of the package: becomes the program that lies beside the library, but for what measures through PyTorch."""

import os
import sys

from . import _check
from ._abi import PACKAGE


def main() -> None:
    if _check.asked_for(sys.argv[1:]):
        sys.exit(_check.main(sys.argv[1:]))
    program = PACKAGE / "bin" / "fattn"
    try:
        os.execv(program, [str(program), *sys.argv[1:]])
    except OSError as error:
        print(f"fattn: the command line '{program}' cannot be run ({error.strerror}); a wheel of fattn has it, which `pip install --force-reinstall` of the "
              "wheel, or `pip install .` in fattn's source, puts there. The Python package works without it", file=sys.stderr)
        sys.exit(2)
