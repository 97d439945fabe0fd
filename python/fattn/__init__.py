"""fattn: exact attention (the FlashAttention family) for PyTorch and NumPy, on the CPU and on NVIDIA GPUs.

    o = softmax(cap(softmax_scale * q k^T) + mask) v        cap(s) = softcap tanh(s / softcap), or s

- `fattn.attention`: torch tensors, with gradients, `torch.compile` and autocast.
- `fattn.numpy`: `forward` and `backward` on NumPy arrays, DLPack tensors and buffers; needs no torch.
- `fattn.sdpa`: `torch.nn.functional.scaled_dot_product_attention` by fattn, after `fattn.sdpa.activate()`.
- `fattn.transformers`: `attn_implementation="fattn"` for the models of transformers, and a comparison with their own attention.
- `fattn.precision`: dtypes of the parts of a model, what breaks the rules about them, attention on mixed dtypes.
- `fattn.supported`: whether a problem can run here, and why not; `fattn.info`: what the library found on this machine.

Tensors are (batch, seqlen, heads, headdim), or (batch, heads, seqlen, headdim) with `layout="bhsd"`.
"""

from typing import TYPE_CHECKING, Any

from ._abi import version as _version
from ._info import info
from ._support import Support, supported

if TYPE_CHECKING:
    from ._attention import attention

__all__ = ["Support", "attention", "info", "supported"]
__version__ = _version()


def __getattr__(name: str) -> Any:
    # torch is imported when it is first needed: it takes a second, and fattn.numpy does without.
    if name == "attention":
        from ._attention import attention

        globals()["attention"] = attention
        return attention
    raise AttributeError(f"module 'fattn' has no attribute '{name}'")
