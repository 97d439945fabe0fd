"""Asks the library whether it computes a problem here, without tensors."""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

from . import _abi
from ._shapes import of_shapes, takes_shapes


class Support(NamedTuple):
    """True where the problem can run; `reason` says why not where it cannot. `str` of it says both."""

    supported: bool
    reason: str

    def __bool__(self) -> bool:
        return self.supported

    def __str__(self) -> str:
        return "supported" if self.supported else f"not supported: {self.reason}"


@takes_shapes
def support(q: Sequence[int], k: Sequence[int], v: Sequence[int] | None = None, **options: Any) -> Support:
    """Whether attention on contiguous tensors of these shapes can run on this machine.

    Args:
        q, k, v: shapes, (batch, seqlen_q, nheads, headdim), (batch, seqlen_k, nheads_k, headdim), (batch, seqlen_k, nheads_k, headdim_v);
            that of v is k's unless given.
        dtype: "fp32", "fp16", "bf16", "fp64", or as torch and NumPy call them ("bfloat16", torch.bfloat16).
        device, device_index: "cpu", or "cuda" and which one; also "cuda:1", or a torch.device.
        backward: asks for the backward pass instead of the forward pass.
        causal, softmax_scale, window, softcap, dropout_p, batch_invariant, deterministic, backend, algorithm, layout: as in `fattn.attention`.
        out_dtype: of o, named as dtype is; the backward pass does not look at it.
        num_threads: as in `fattn.plan`; the answer does not depend on it.
        seqused_k, alibi_slopes, sinks, documents: whether there are such tensors (documents: document_q and document_k).
        packed: (batch, max_seqlen_q, max_seqlen_k) asks for packed sequences as `fattn.attention_varlen` takes them: q, k and v are (total, heads, headdim).
        bias, mask: their shapes, (batch or 1, nheads or 1, seqlen_q or 1, seqlen_k); `backward` asks for the gradient of the bias too.
        block_table: its shape, (batch, columns), with k and v of the shapes of a paged cache; queries alone may be `packed` then.

    Returns:
        A `Support`, true or false, with the library's reason.

    Raises:
        TypeError: q, k or v is no shape.
        ValueError: no configuration accepts the problem (nheads is no multiple of nheads_k, an unknown name, ...).
    """
    problem = of_shapes(q, k, v, function="fattn.support", **options)
    reason = ctypes.create_string_buffer(1024)
    status = _abi.library.fattn_supported(problem, reason, len(reason))
    text = reason.value.decode(errors="replace")
    if _abi.library.fattn_status_name(status) != b"unsupported":
        _abi.check(status)
    return Support(status == 0, text)
