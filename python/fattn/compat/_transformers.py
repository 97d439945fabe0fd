"""transformers takes FlashAttention where a distribution of its name is found and torch sees a GPU. Where the functions are fattn's a CPU will do."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ._peers import version_of

_IMPORT_UTILS, _MODELS, _LOADED = "transformers.utils.import_utils", "transformers.modeling_utils", "transformers.modeling_flash_attention_utils"
_ATTENTION = "transformers.integrations.flash_attention"
# Functions that say whether a version is there, and the module that it needs.
_AVAILABLE = {"is_flash_attn_2_available": "flash_attn", "is_flash_attn_3_available": "flash_attn_interface", "is_flash_attn_4_available": "flash_attn"}
# Methods of models that refuse it where torch sees no GPU, in one version of transformers or another.
_DISPATCH = {"_flash_attn_can_dispatch": None, "_flash_attn_2_can_dispatch": 2, "_flash_attn_3_can_dispatch": 3}  # None: the version is an argument
_CACHED = ("_package_distribution_mapping", "is_flash_attn_greater_or_equal", "is_flash_attn_greater_or_equal_2_10")


def _available(kernels_fallback_ok: bool = False) -> bool:
    return True


def _greater_or_equal(library_version: str) -> bool:
    from packaging.version import parse

    return parse(version_of("flash-attn")) >= parse(library_version)


def _dispatch(original: Callable, version: int | None, names: tuple[str, ...]) -> Callable:
    def can_dispatch(self: Any, *args: Any, **kwargs: Any) -> bool:
        asked = version if version is not None else kwargs.get("flash_attn_version", args[0] if args else None)
        served = ("flash_attn_interface" if asked == 3 else "flash_attn") in names
        if served and getattr(self, "_supports_flash_attn", False):
            return True
        return original(self, *args, **kwargs)  # which says that there is no such module, or that the model has no such attention

    return can_dispatch


def _target_dtype(original: Callable) -> Callable:
    """Of float32, which flash_attn refuses and fattn computes: transformers casts it to the dtype of a linear layer, and fails where there is none, as in GPT-2."""
    def get_target_dtype(query: Any, module: Any) -> Any:
        try:
            return original(query, module)
        except StopIteration:
            return None

    return get_target_dtype


class Patches:
    """Of the modules of transformers that are loaded, or will be."""

    modules = (_IMPORT_UTILS, _MODELS, _ATTENTION)

    def __init__(self, names: tuple[str, ...]):
        self._names = names
        self._undo: list[tuple[Any, str, Any, Any]] = []  # owner, name, what was there, what is there now

    def apply(self) -> None:
        for name in self.modules:
            if name in sys.modules:
                self.apply_to(sys.modules[name])
        self._forget()

    def apply_to(self, module: ModuleType) -> None:
        if module.__name__ == _IMPORT_UTILS:
            for name, peer in _AVAILABLE.items():
                if peer in self._names:
                    self._everywhere(module, name, _available)
            if "flash_attn" in self._names:
                self._everywhere(module, "is_flash_attn_greater_or_equal", _greater_or_equal)
        elif module.__name__ == _ATTENTION:
            if hasattr(module, "get_target_dtype") and set(self._names) - {"xformers"}:
                self._everywhere(module, "get_target_dtype", _target_dtype(module.get_target_dtype))
        elif hasattr(module, "PreTrainedModel"):
            for name, version in _DISPATCH.items():
                if (original := vars(module.PreTrainedModel).get(name)) is not None:
                    self._set(module.PreTrainedModel, name, original, _dispatch(original, version, self._names))

    def undo(self) -> None:
        swapped = {(name, id(now)): before for owner, name, before, now in self._undo if isinstance(owner, ModuleType)}
        for module in _of_transformers():  # also those that were loaded meanwhile
            for name, value in list(vars(module).items()):
                if (name, id(value)) in swapped:
                    setattr(module, name, swapped[name, id(value)])
        for owner, name, before, _ in reversed(self._undo):
            setattr(owner, name, before)
        self._undo.clear()
        self._forget()

    def _set(self, owner: Any, name: str, before: Any, now: Any) -> None:
        setattr(owner, name, now)
        self._undo.append((owner, name, before, now))

    def _everywhere(self, module: ModuleType, name: str, now: Callable) -> None:
        """Also where it was imported from there already."""
        before = getattr(module, name, None)
        if before is None:
            return
        self._set(module, name, before, now)
        for other in _of_transformers():
            if vars(other).get(name) is before:
                self._set(other, name, before, now)

    def _forget(self) -> None:
        """Answers that transformers keeps, and the functions that it has imported."""
        for name in _CACHED:
            clear = getattr(getattr(sys.modules.get(_IMPORT_UTILS), name, None), "cache_clear", None)
            if clear is not None:
                clear()
        loaded = sys.modules.get(_LOADED)
        if loaded is not None and hasattr(loaded, "_loaded_implementation"):
            loaded._loaded_implementation = None


def _of_transformers() -> list[ModuleType]:
    return [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "transformers" and isinstance(module, ModuleType)]

