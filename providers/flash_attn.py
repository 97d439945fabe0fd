#!/usr/bin/env python3
"""Provider flash-attn: the packages of FlashAttention, as many of them as are installed: 4 (flash_attn.cute), 3 (flash_attn_interface), 2 (flash_attn)."""

import importlib
import importlib.metadata
import sys

from _provider import Provider, Refusal, main

MODULES = {"4": "flash_attn.cute", "3": "flash_attn_interface", "2": "flash_attn"}  # the newest first
PACKAGES = {"4": "flash-attn-4", "3": "flash-attn-3", "2": "flash-attn"}


def version_of(library, package):
    """The package's, because the module of FlashAttention 4 calls itself 0.0.0."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return getattr(library, "__version__", "unknown")


class FlashAttention(Provider):
    name = "flash-attn"
    runs_on = ("cuda",)

    def load(self):
        self.functions, reasons, versions = {}, [], []
        for variant, module in MODULES.items():
            try:
                library = importlib.import_module(module)
                self.functions[variant] = library.flash_attn_func
                versions.append(f"{variant}: {version_of(library, PACKAGES[variant])}")
            except Exception as error:  # pylint: disable=broad-except  # a build for another torch or CUDA fails in many ways
                reasons.append(f"{module}: {error}")
        if not self.functions:
            raise Refusal("unavailable", f"{sys.executable} has none of the packages of FlashAttention; install flash-attn, or name another Python with --python. "
                          + "; ".join(reasons)[:400], "no module named flash_attn")
        self.compiles = "4" in self.functions  # written in CuTe's Python, compiled at the first call
        return ", ".join(versions)

    def variants(self):
        return {"cuda": list(self.functions)}

    def accept(self, p):
        if p["dtype"] not in ("bf16", "fp16"):
            raise Refusal("unsupported", f"FlashAttention computes bf16 and fp16, not {p['dtype']}")
        if p["variant"] == "2" and p["headdim"] != p["headdim_v"]:
            raise Refusal("unsupported", f"FlashAttention 2 has one head dimension for k and v; they have {p['headdim']} and {p['headdim_v']}")

    def forward(self):
        p, t = self.problem, self.tensors
        # The causal mask is aligned to the bottom right in all of them.
        result = self.functions[p["variant"]](t["q"], t["k"], t["v"], softmax_scale=p["softmax_scale"], causal=p["causal"])
        return result[0] if isinstance(result, tuple) else result  # some give the log-sum-exp, too


if __name__ == "__main__":
    main(FlashAttention())
