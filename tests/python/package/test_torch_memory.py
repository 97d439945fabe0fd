"""Want of memory: torch's own error, by its class and its words, as programs that look for the largest batch know it."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fattn
import fattn.numpy
import fattn.sdpa
from fattn._errors import exception_of_operator

ROWS = 2**36  # of which a result has 16 TiB


def vast(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*(1 if n == ROWS else n for n in shape), device=device, dtype=dtype).expand(shape)


def refused(device: str):
    if device == "cuda":
        return pytest.raises(torch.OutOfMemoryError, match="^CUDA out of memory. Tried to allocate 16384.00 GiB")
    return pytest.raises(RuntimeError, match=r"DefaultCPUAllocator: can't allocate memory: you tried to allocate \d+ bytes")


def test_forward(device):
    q = vast(device, 1, ROWS, 1, 64)
    with refused(device):
        fattn.attention(q, q[:, :4], q[:, :4])
    with refused(device):
        fattn.attention_varlen(q[0], q[0, :4], q[0, :4], cu_seqlens_q=torch.tensor([0, 1], device=device), max_seqlen_q=1, max_seqlen_k=1)
    assert fattn.attention(q[:, :4], q[:, :4], q[:, :4]).shape == (1, 4, 1, 64), "usable afterwards"


@pytest.mark.parametrize("options", [{}, {"return_lse": True}, {"bias": True}])
def test_backward(device, options):
    """What the backward pass gets of a small problem is as large as it takes: hooks of saved tensors make it so."""
    q = torch.zeros(1, 4, 1, 64, device=device, requires_grad=True)
    options = options | ({"bias": torch.zeros(4, 4, device=device, requires_grad=True)} if "bias" in options else {})
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x[:, :1].expand(1, ROWS, 1, 64) if x.shape == q.shape else x):
        o = fattn.attention(q, q, q, **options)
        o = o[0] if isinstance(o, tuple) else o
    with refused(device):
        o.sum().backward()
    fattn.attention(q, q, q).sum().backward()
    assert q.grad is not None, "usable afterwards"


def test_sdpa(device):
    q = vast(device, 1, 1, ROWS, 64, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    fattn.sdpa.activate()
    try:
        with pytest.raises(torch.OutOfMemoryError if device == "cuda" else RuntimeError, match="out of memory|can't allocate memory: you tried to allocate"):
            F.scaled_dot_product_attention(q, q[:, :, :4], q[:, :, :4])
    finally:
        fattn.sdpa.deactivate()


def test_workspace(device):
    """algorithm "standard" stores the scores."""
    q = vast(device, 1, 2**20, 1, 64)
    with pytest.raises(torch.OutOfMemoryError if device == "cuda" else RuntimeError, match="out of memory|can't allocate memory: you tried to allocate"):
        fattn.attention(q, q.expand(1, 2**20, 1, 64), q, algorithm="standard")


GIVEN = "fattn: out_of_memory: "


@pytest.mark.parametrize("again", [True, False], ids=["refused again", "there by now"])
def test_error_of_a_gpu(monkeypatch, again):
    """The class is torch's for a GPU, whether torch refuses once more or has the memory by now."""
    def storage(size, device):
        assert (size, device) == (17592186044416, "cuda:1")
        if again:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16384.00 GiB. GPU 1 has ...")

    monkeypatch.setattr(torch, "UntypedStorage", storage)
    error = exception_of_operator(RuntimeError(GIVEN + "CUDA out of memory. Tried to allocate 17592186044416 bytes on cuda:1"))
    assert type(error) is torch.OutOfMemoryError and str(error).startswith("CUDA out of memory. Tried to allocate 1")
    assert ("GPU 1 has" in str(error)) == again


def test_another_error_of_a_gpu(monkeypatch):
    """An allocation may fail for another reason, which torch tells."""
    def storage(size, device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "UntypedStorage", storage)
    error = exception_of_operator(RuntimeError(GIVEN + "CUDA out of memory. Tried to allocate 16 bytes on cuda:0"))
    assert type(error) is RuntimeError and "illegal memory access" in str(error)


def test_error_of_the_library():
    error = exception_of_operator(RuntimeError(GIVEN + "CUDA out of memory. cuda:0 (H200): no memory for 64 bytes; 3 of 9 bytes are free"))
    assert type(error) is torch.OutOfMemoryError and "3 of 9 bytes" in str(error)
    assert type(exception_of_operator(RuntimeError(GIVEN + "the workspace would exceed 2^63 - 1 bytes"))) is MemoryError


def test_operators():
    """Where no Python of ours is on the way, as in compiled code, the words are torch's."""
    q = vast("cpu", 1, ROWS, 1, 64)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator: can't allocate memory: you tried to allocate 17592186044416 bytes on cpu"):
        torch.ops.fattn.forward(q, q[:, :4], q[:, :4])


def test_numpy():
    q = np.broadcast_to(np.zeros((1, 1, 1, 64), np.float32), (1, ROWS, 1, 64))
    with pytest.raises(MemoryError, match=r"^no memory for o of 17592186044416 bytes; \d+ of \d+ bytes are free"):
        fattn.numpy.forward(q, q[:, :4], q[:, :4])
    o, lse = q[:, :4], np.zeros((1, 1, 4), np.float32)
    with pytest.raises(MemoryError, match=r"^no memory for dk of 17592186044416 bytes; \d+ of"):
        fattn.numpy.backward(o, o, q, q, o, lse)
    rows = 2**20
    with pytest.raises(MemoryError, match=r"^no memory for a workspace of \d+ bytes; \d+ of \d+ bytes are free"):
        fattn.numpy.forward(q[:, :rows], q[:, :rows], q[:, :rows], algorithm="standard")
