"""fattn: exact attention (the FlashAttention family) for PyTorch and NumPy,
on the CPU and on NVIDIA GPUs.

    o = softmax(cap(softmax_scale * q k^T) + mask) v
    cap(s) = softcap tanh(s / softcap), or s

Tensors are (batch, seqlen, heads, headdim), or with layout="bhsd"
(batch, heads, seqlen, headdim). help(fattn.NAME) has the options of each.

Attention on torch tensors, with gradients, in torch.compile and autocast:
    attention             q, k and v of one length each
    attention_varlen      sequences of unequal lengths behind each other
    attention_qkvpacked, attention_kvpacked
                          the same on views of one tensor
    with_kvcache          decoding with a cache that grows
    attention_backward, attention_varlen_backward
                          the backward pass by itself, from o and lse
    rotary                rotary position embeddings
    merge                 results over parts of the keys to one
    cascade               sequences that begin with the same keys
    weights, largest_logits
                          what a query looks at; scores that grow

A model as it is, without a change of its code:
    doctor                which layers run fattn, which not and why, and
                          what the model would gain
    sdpa.activate         F.scaled_dot_product_attention by fattn
    transformers          attn_implementation="fattn" after the import;
                          transformers.compare shows time, memory and errors
    compat.install        programs written for flash_attn and xFormers, as
                          they are
    distributed           sequences spread over several processes: ring
                          attention
    precision             which part computes in which dtype, and what
                          16 bits spoil

Without torch:
    numpy.forward, numpy.backward
                          NumPy arrays, DLPack tensors and buffers

What runs here:
    support               whether a problem can run, and why not
    plan                  how it would run
    warmup                its GPU kernels, compiled ahead
    info                  what was found on this machine; it prints itself
    set_check             errors in place of NaN where lengths in a GPU's
                          memory are out of range

What was measured:
    lab                   records as pandas frames, figures by matplotlib,
                          and `fattn sweep` as a function

On the command line, `fattn` or `python -m fattn`.
"""

from typing import TYPE_CHECKING, Any

from ._abi import version as _version
from ._info import info, set_check
from ._plan import Plan, plan, warmup
from ._support import Support, support

if TYPE_CHECKING:
    from ._attention import attention
    from ._backward import attention_backward, attention_varlen_backward
    from ._cascade import cascade
    from ._doctor import doctor
    from ._kvcache import with_kvcache
    from ._merge import merge
    from ._packed import attention_kvpacked, attention_qkvpacked
    from ._rotary import rotary
    from ._varlen import attention_varlen
    from ._weights import largest_logits, weights

__all__ = ["Plan", "Support", "attention", "attention_backward", "attention_kvpacked", "attention_qkvpacked", "attention_varlen", "attention_varlen_backward",
           "cascade", "doctor", "info", "largest_logits", "merge", "plan", "rotary", "set_check", "support", "warmup", "weights", "with_kvcache"]
__version__ = _version()

_OF_TORCH = {"attention": "_attention", "attention_backward": "_backward", "attention_kvpacked": "_packed", "attention_qkvpacked": "_packed",
             "attention_varlen": "_varlen", "attention_varlen_backward": "_backward", "cascade": "_cascade", "doctor": "_doctor", "largest_logits": "_weights",
             "merge": "_merge", "rotary": "_rotary", "weights": "_weights", "with_kvcache": "_kvcache"}


def __getattr__(name: str) -> Any:
    # torch is imported when it is first needed: it takes a second, and fattn.numpy does without.
    from ._names import find

    value = find(name, _OF_TORCH)
    if name in _OF_TORCH:  # modules are there by themselves once they are imported
        globals()[name] = value
    return value


def __dir__() -> list[str]:
    from ._names import there

    return there(__all__, _OF_TORCH)
