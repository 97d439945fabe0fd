"""flash_attn, computed by fattn: the import name alone, without a call of fattn.compat.install(). tools/make_compat_wheel.py makes a wheel of it."""

import importlib.metadata as _metadata

_REAL = ("flash-attn", "flash-attn-4")


def _require_alone() -> None:
    """Both distributions have the folder flash_attn: the one that was installed last has replaced files of the other."""
    for name in _REAL:
        try:
            distribution = _metadata.distribution(name)
        except _metadata.PackageNotFoundError:
            continue
        if (distribution.read_text("INSTALLER") or "").strip() != "fattn.compat":  # which says so where install() was called
            raise ImportError(f"{name} {distribution.version} and flash-attn-fattn are both installed, in one folder, where the files of one have replaced those of the "
                              f"other. Uninstall both and install one: pip uninstall {name} flash-attn-fattn. Beside {name}, fattn.compat.install(replace=True) "
                              "takes fattn without this wheel")


_require_alone()

try:
    from fattn.compat._peers import FOLDER as _folder
except ModuleNotFoundError as _error:
    if (_error.name or "").partition(".")[0] != "fattn":
        raise
    raise ImportError("flash_attn is here by flash-attn-fattn, which needs fattn with fattn.compat; it is not installed: pip install fattn") from _error

__path__ = [str(_folder / "flash_attn")]  # the modules below are those that fattn.compat.install() has found
from fattn.compat._peers import version_of as _version_of  # noqa: E402
from flash_attn import flash_attn_interface as _functions  # noqa: E402

__all__ = list(_functions.__all__)
globals().update({name: getattr(_functions, name) for name in __all__})
__version__ = _version_of("flash-attn")
