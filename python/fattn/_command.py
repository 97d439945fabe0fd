"""The command line `fattn` of the package: becomes the program that lies beside the library."""

import os
import sys

from ._abi import PACKAGE


def main() -> None:
    program = PACKAGE / "bin" / "fattn"
    os.execv(program, [str(program), *sys.argv[1:]])
