"""fattn.compat: programs written for flash_attn (2, 3, 4) and xFormers run on fattn as they are, on the CPU too.

    import fattn.compat
    fattn.compat.install()                 # before the program's own imports
    from flash_attn import flash_attn_func

or, without a change of the program, `python -m fattn.compat program.py its arguments`.

    install      modules of the peers' names are found from now on, and importlib.metadata has their versions
    uninstall    all is as before
    installed    the names that are fattn's now

docs/MIGRATION.md says of every argument whether it is computed. torch is imported by the peers' modules, not by this one.
"""

import importlib.util
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

from ._finder import Finder
from ._peers import PEERS, STAND_IN
from ._transformers import Patches

__all__ = ["install", "installed", "uninstall"]

_finder: Finder | None = None
_patches: Patches | None = None
_set_aside: dict[str, object] = {}  # modules of real packages that were imported before


def installed() -> tuple[str, ...]:
    """The top-level names that are fattn's now."""
    return () if _finder is None else _finder.names


def _modules_of(names: Iterable[str]) -> list[str]:
    return [module for module in sys.modules if module.partition(".")[0] in set(names)]


def _is_real(name: str) -> bool:
    """Whether the package itself is there; not its name alone, by the wheel of tools/make_compat_wheel.py."""
    try:
        spec = importlib.util.find_spec(name)  # of a module that is imported, too
    except ValueError:  # it stands in sys.modules without a spec
        return True
    return spec is not None and not (spec.origin is not None and Path(spec.origin).is_file() and STAND_IN in Path(spec.origin).read_bytes())


def install(*names: str, replace: bool = False) -> tuple[str, ...]:
    """Makes modules of other libraries' names that compute with fattn.

    Args:
        names: some of "flash_attn" (2, and 4 as flash_attn.cute), "flash_attn_interface" (3) and "xformers"; none given: all of them.
        replace: also where the library itself is installed. Without it that one stays, and a warning says so.

    Returns:
        The names that are fattn's now. A second call changes which.

    Raises:
        ValueError: there is no such name.
    """
    global _finder, _patches
    for name in names:
        if name not in PEERS:
            raise ValueError(f"{name!r} is no library that fattn.compat has; allowed: {', '.join(map(repr, PEERS))}")
    uninstall()
    real = [name for name in names or PEERS if _is_real(name)]
    if real and not replace:
        warnings.warn(f"fattn.compat: {' and '.join(real)} {'is' if len(real) == 1 else 'are'} installed and left as {'it is' if len(real) == 1 else 'they are'}; "
                      "install(replace=True) takes fattn instead", stacklevel=2)
    served = tuple(name for name in names or PEERS if replace or name not in real)
    if not served:
        return ()
    for module in _modules_of(served):
        _set_aside[module] = sys.modules.pop(module)
    _patches = Patches(served)
    _finder = Finder(served, _patches)
    sys.meta_path.insert(0, _finder)
    _patches.apply()
    return served


def uninstall() -> None:
    """Takes back what `install` did. Functions that a program has imported meanwhile stay fattn's."""
    global _finder, _patches
    if _finder is None or _patches is None:
        return
    sys.meta_path.remove(_finder)
    for module in _modules_of(_finder.names):
        del sys.modules[module]
    sys.modules.update(_set_aside)  # type: ignore[arg-type]
    _set_aside.clear()
    _patches.undo()
    _finder = _patches = None
