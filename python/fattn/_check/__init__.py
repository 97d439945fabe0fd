"""`fattn check --accuracy` and `fattn check --values`: what is measured through PyTorch, on a GPU or the CPU."""

import sys
from collections.abc import Sequence


def asked_for(arguments: Sequence[str]) -> bool:
    """Whether the arguments of the command line `fattn` ask for one of them."""
    return arguments[:1] == ["check"] and any(flag in arguments for flag in ("--accuracy", "--values"))


def main(arguments: Sequence[str]) -> int:
    """Runs `fattn ARGUMENTS`; returns the exit status."""
    rest = [argument for argument in arguments[1:] if argument not in ("--accuracy", "--values")]
    try:
        if "--accuracy" in arguments:
            if "--values" in arguments:
                print("fattn: --accuracy and --values are two measurements; give one of them", file=sys.stderr)
                return 2
            from .accuracy import run
        else:
            from .values import run
    except ImportError as error:
        print(f"fattn: this measures through PyTorch, which {sys.executable} lacks ({error}); pip install torch there, or run the `fattn` of another "
              "Python (of the program: --python PATH)", file=sys.stderr)
        return 2
    return run(rest)
