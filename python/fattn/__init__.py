"""fattn: exact attention (the FlashAttention family) for PyTorch and NumPy, on the CPU and on NVIDIA GPUs.

    o = softmax(cap(softmax_scale * q k^T) + mask) v        cap(s) = softcap tanh(s / softcap), or s

- `fattn.attention`: torch tensors, with gradients, `torch.compile` and autocast.
- `fattn.attention_varlen`: the same on sequences of unequal lengths behind each other;
  `fattn.attention_qkvpacked`, `fattn.attention_kvpacked`: the same on views of one tensor; `fattn.with_kvcache`: with a cache that grows.
- `fattn.numpy`: `forward` and `backward` on NumPy arrays, DLPack tensors and buffers; needs no torch.
- `fattn.sdpa`: `torch.nn.functional.scaled_dot_product_attention` by fattn, after `fattn.sdpa.activate()`.
- `fattn.transformers`: `attn_implementation="fattn"` for the models of transformers, and a comparison with their own attention.
- `fattn.precision`: dtypes of the parts of a model, what breaks the rules about them, attention on mixed dtypes.
- `fattn.support`: whether a problem can run here, and why not; `fattn.plan`: how; `fattn.warmup`: its kernels made ahead; `fattn.info`: what the library
  found on this machine; `fattn.set_check`: errors instead of NaN where lengths in a GPU's memory are out of range.

Tensors are (batch, seqlen, heads, headdim), or (batch, heads, seqlen, headdim) with `layout="bhsd"`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ._abi import version as _version
from ._info import info, set_check
from ._plan import Plan, plan, warmup
from ._support import Support, support

if TYPE_CHECKING:
    from ._attention import attention
    from ._kvcache import with_kvcache
    from ._packed import attention_kvpacked, attention_qkvpacked
    from ._varlen import attention_varlen

__all__ = ["Plan", "Support", "attention", "attention_kvpacked", "attention_qkvpacked", "attention_varlen", "info", "plan", "set_check", "support",
           "warmup", "with_kvcache"]
__version__ = _version()

_OF_TORCH = {"attention": "_attention", "attention_kvpacked": "_packed", "attention_qkvpacked": "_packed", "attention_varlen": "_varlen",
             "with_kvcache": "_kvcache"}


def __getattr__(name: str) -> Any:
    # torch is imported when it is first needed: it takes a second, and fattn.numpy does without.
    if name in _OF_TORCH:
        globals()[name] = value = getattr(importlib.import_module(f".{_OF_TORCH[name]}", __name__), name)
        return value
    raise AttributeError(f"module 'fattn' has no attribute '{name}'")
