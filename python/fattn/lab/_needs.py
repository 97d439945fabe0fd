"""What the lab needs beside fattn, and what to do where it is missing."""

import importlib.util
import sys

_INSTALL = "pip install 'fattn[lab]' brings it"
_OLDEST = {"pandas": (2, 0), "matplotlib": (3, 8)}


def _require(name: str, what: str) -> None:
    wanted = ".".join(map(str, _OLDEST[name]))
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{what} needs {name} {wanted} or later, which {sys.executable} lacks ({error}); {_INSTALL}", name=name) from error
    have = tuple(int(part) if part.isdecimal() else 0 for part in module.__version__.split(".")[:2])
    if have < _OLDEST[name]:
        raise ImportError(f"{what} needs {name} {wanted} or later; {sys.executable} has {module.__version__}; {_INSTALL}", name=name)


def matplotlib() -> None:
    _require("matplotlib", "fattn.lab.figure")


def have_matplotlib() -> bool:
    """Asked without an import, for `dir`."""
    return "matplotlib" in sys.modules and sys.modules["matplotlib"] is not None or importlib.util.find_spec("matplotlib") is not None


_require("pandas", "fattn.lab")
