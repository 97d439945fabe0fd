"""The finder in sys.meta_path: modules of the peers' names, and their versions for importlib.metadata."""

import importlib.metadata
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from ._peers import FOLDER, PEERS, Distribution
from ._transformers import Patches


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


class _Metadata(importlib.metadata.Distribution):
    """What importlib.metadata says of a peer."""

    def __init__(self, distribution: Distribution, module: str):
        self._texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {distribution.name}\nVersion: {distribution.version}\nSummary: Stands for it: fattn.compat of fattn\n",
            "top_level.txt": f"{module}\n",
            "INSTALLER": "fattn.compat\n",
        }

    def read_text(self, filename):
        return self._texts.get(filename)

    def locate_file(self, path):
        return FOLDER / path


class Finder(importlib.metadata.DistributionFinder):
    def __init__(self, names: tuple[str, ...], patches: Patches):
        self.names = names
        self._patches = patches

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if path is None:
            return PathFinder.find_spec(fullname, [str(FOLDER)]) if fullname in self.names else None
        return self._patched(fullname, path, target) if fullname in self._patches.modules else None

    def _patched(self, fullname: str, path: Sequence[str], target: ModuleType | None) -> ModuleSpec | None:
        """The module as others find it, changed as soon as it has been executed."""
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                execute = spec.loader.exec_module

                def exec_module(module: ModuleType) -> None:
                    execute(module)
                    self._patches.apply_to(module)

                spec.loader.exec_module = exec_module  # type: ignore[method-assign]
                return spec
        return None

    def find_distributions(self, context=importlib.metadata.DistributionFinder.Context()) -> Iterator[importlib.metadata.Distribution]:
        for module in self.names:
            for distribution in PEERS[module]:
                if context.name is None or _normal(context.name) == distribution.name:
                    yield _Metadata(distribution, module)
