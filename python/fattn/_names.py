"""The names of the package: those that are imported when they are first asked for, those that `dir` shows, and which one is meant by others."""

import importlib
import sys
from collections.abc import Collection, Mapping
from typing import Any

_TORCH = {"torch": (2, 10)}
# The modules, and what each needs.
MODULES: dict[str, dict[str, tuple[int, ...]]] = {
    "compat": {},
    "distributed": _TORCH,
    "lab": {"pandas": (2,)},
    "numpy": {"numpy": ()},
    "precision": _TORCH,
    "sdpa": _TORCH,
    "transformers": _TORCH | {"transformers": (5,)},
}
_MEANT = {
    "flash_attn_func": "fattn.attention is meant",
    "flash_attn_qkvpacked_func": "fattn.attention_qkvpacked is meant",
    "flash_attn_kvpacked_func": "fattn.attention_kvpacked is meant",
    "flash_attn_varlen_func": "fattn.attention_varlen is meant",
    "flash_attn_with_kvcache": "fattn.with_kvcache is meant",
    "flash_attention": "fattn.attention is meant",
    "memory_efficient_attention": "fattn.attention is meant",
    "flex_attention": "fattn.attention is meant, with bias, mask, document_q, window or softcap",
    "scaled_dot_product_attention": 'fattn.attention(..., layout="bhsd") is meant, or fattn.sdpa.activate(), after which torch\'s own runs fattn',
    "activate": "fattn.sdpa.activate is meant",
    "deactivate": "fattn.sdpa.deactivate is meant",
    "compare": "fattn.transformers.compare is meant",
    "ring_attention": "fattn.distributed.ring_attention is meant",
    "forward": "fattn.numpy.forward is meant, or fattn.attention for torch tensors",
    "backward": "fattn.attention_backward is meant, fattn.numpy.backward for arrays, or o.backward() of what fattn.attention returns",
    "version": "fattn.__version__ is meant",
}


def find(name: str, of_torch: Mapping[str, str]) -> Any:
    """`fattn.name`, of those that are not there from the start.

    Raises:
        ImportError: what it needs is not installed.
        AttributeError: there is no such name.
    """
    if name in of_torch:
        return getattr(importlib.import_module(f".{of_torch[name]}", __package__), name)
    if name in MODULES:
        return importlib.import_module(f".{name}", __package__)
    meant = f": {_MEANT[name]}" if name in _MEANT else ""
    raise AttributeError(f"module 'fattn' has no attribute '{name}'{meant}")


def _installed(needs: Mapping[str, tuple[int, ...]]) -> bool:
    """Asked without an import: `help` and tab completion look at every name that `dir` has, and would end with the ImportError of one."""
    from importlib.metadata import PackageNotFoundError, version

    for package, minimum in needs.items():
        if sys.modules.get(package, package) is None:
            return False
        try:
            parts = version(package).split(".")[: len(minimum)]
        except PackageNotFoundError:
            return False
        if tuple(int(x) if x.isdecimal() else 0 for x in parts) < minimum:
            return False
    return True


def there(names: Collection[str], of_torch: Mapping[str, str]) -> list[str]:
    """What `dir(fattn)` shows: what can be used here."""
    modules = [name for name, needs in MODULES.items() if _installed(needs)]
    functions = [name for name in names if name not in of_torch]
    if _installed(_TORCH):
        functions += of_torch
    return sorted({*functions, *modules, "__version__", "__doc__", "__file__", "__name__", "__all__"})
