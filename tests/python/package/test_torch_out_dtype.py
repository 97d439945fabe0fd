"""Outputs in fp32 of 16-bit inputs: sums that are not rounded once more, forward, backward and in every front."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import fattn  # noqa: E402
import fattn.numpy  # noqa: E402
from attention_reference import NUMPY, rounded  # noqa: E402

DTYPES = [torch.float16, torch.bfloat16]
SEQLEN_Q, SEQLEN_K = 70, 90


def inputs(dtype: torch.dtype, device: str, seqlen_q: int = SEQLEN_Q, headdim: int = 64) -> list[torch.Tensor]:
    torch.manual_seed(seqlen_q + headdim)
    q, dout = torch.randn(2, 2, seqlen_q, 4, headdim, dtype=dtype, device=device)
    k, v = torch.randn(2, 2, SEQLEN_K, 2, headdim, dtype=dtype, device=device)
    return [q, k, v, dout]


def exact(q, k, v, dout=None, **options) -> list[torch.Tensor]:
    """In fp64 by the reference, o and the gradients."""
    leaves = [x.double().cpu().requires_grad_() for x in (q, k, v)]
    o = fattn.attention(*leaves, **options)
    return [o.detach(), *torch.autograd.grad(o, leaves, dout.double().cpu())] if dout is not None else [o.detach()]


def error(x: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((x.double().cpu() - wanted).square().mean().sqrt())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seqlen_q, headdim", [(SEQLEN_Q, 64), (1, 128), (33, 40)])
def test_forward(device, dtype, seqlen_q, headdim):
    """Nothing but the last rounding is another: rounded, they are the same numbers, and by themselves they are nearer."""
    q, k, v, _ = inputs(dtype, device, seqlen_q, headdim)
    for causal in (False, True):
        wide, lse = fattn.attention(q, k, v, causal=causal, out_dtype=torch.float32, return_lse=True, algorithm="v2")
        o, usual = fattn.attention(q, k, v, causal=causal, return_lse=True, algorithm="v2")
        assert wide.dtype == torch.float32 and o.dtype == dtype
        assert torch.equal(wide.to(dtype), o) and torch.equal(lse, usual)
        (wanted,) = exact(q, k, v, causal=causal)
        assert error(wide, wanted) < error(o, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_whatever_is_chosen(device, dtype):
    q, k, v, _ = inputs(dtype, device, 256, 128)
    (wanted,) = exact(q, k, v)
    wide = fattn.attention(q, k, v, out_dtype=torch.float32)
    assert wide.dtype == torch.float32 and error(wide, wanted) < error(fattn.attention(q, k, v), wanted)
    bhsd = [x.transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(fattn.attention(*bhsd, layout="bhsd", out_dtype=torch.float32).transpose(1, 2), wide)


def test_varlen_and_pages(device):
    q, k, v, _ = inputs(torch.bfloat16, device)
    cu = torch.tensor([0, 30, 70], device=device)
    rows = [x[0] for x in (q, k[:, :SEQLEN_Q], v[:, :SEQLEN_Q])]
    wide = fattn.attention_varlen(*rows, cu_seqlens_q=cu, causal=True, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.to(torch.bfloat16), fattn.attention_varlen(*rows, cu_seqlens_q=cu, causal=True, algorithm="v2")) or device == "cuda"
    pages, table = k.reshape(18, 10, 2, 64), torch.arange(18, device=device).reshape(2, 9)
    paged = fattn.attention(q, pages, v.reshape(18, 10, 2, 64), block_table=table, out_dtype=torch.float32)
    assert paged.dtype == torch.float32 and torch.equal(paged.to(torch.bfloat16), fattn.attention(q, pages, v.reshape(18, 10, 2, 64), block_table=table))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(device, dtype):
    """By autograd they are in the dtype of what they belong to."""
    q, k, v, dout = inputs(dtype, device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = fattn.attention(*leaves, causal=True, out_dtype=torch.float32)
    got = torch.autograd.grad(o, leaves, dout.float())
    usual = torch.autograd.grad(fattn.attention(*leaves, causal=True), leaves, dout)
    assert [x.dtype for x in got] == [dtype] * 3
    for x, y, wanted in zip(got, usual, exact(q, k, v, dout, causal=True)[1:]):
        assert error(x, wanted) <= 1.1 * error(y, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("varlen", [False, True])
def test_backward_operators(device, dtype, varlen):
    """Who adds gradients up asks for them in fp32."""
    q, k, v, dout = inputs(dtype, device)
    wanted = exact(q, k, v, dout, causal=True)
    o, lse = fattn.attention(q, k, v, causal=True, return_lse=True)
    options = (None, True, False, False, -1, -1, 0.0, 0, 0, 0.0)
    if varlen:
        cu = [torch.tensor([0, n, 2 * n], dtype=torch.int32, device=device) for n in (SEQLEN_Q, SEQLEN_K)]
        flat = [x.flatten(0, 1) for x in (dout, q, k, v, o)]
        scores = [None] * len(fattn._scores.Scores._fields)
        call = lambda wide: torch.ops.fattn.backward_varlen(*flat, lse.transpose(0, 1).flatten(1), *options, wide, False, *scores, *cu, SEQLEN_Q, SEQLEN_K)  # noqa: E731
    else:
        call = lambda wide: torch.ops.fattn.backward_with_scores(dout, q, k, v, o, lse, *options, wide)  # noqa: E731
    for x, y, exactly in zip(call(True), call(False), wanted[1:]):
        x, y = x.reshape(exactly.shape), y.reshape(exactly.shape)
        assert x.dtype == torch.float32 and y.dtype == dtype
        assert error(x, exactly) < error(y, exactly)
    if not varlen:
        given = [torch.empty_like(x, dtype=torch.float32) for x in (q, k, v)]
        torch.ops.fattn.backward_out(dout, q, k, v, o, lse, *given, *options[:-1])
        for x, y in zip(given, call(True)):
            assert torch.equal(x, y) or device == "cuda"


@pytest.mark.parametrize("varlen", [False, True])
def test_attention_backward(device, varlen):
    q, k, v, dout = inputs(torch.bfloat16, device)
    options = {"causal": True}
    if varlen:
        q, k, v, dout = (x.flatten(0, 1) for x in (q, k, v, dout))
        options |= {f"cu_seqlens_{x}": torch.tensor([0, n, 2 * n], device=device) for x, n in (("q", SEQLEN_Q), ("k", SEQLEN_K))}
    o, lse = fattn.attention(q, k, v, return_lse=True, **options)
    wide = fattn.attention_backward(dout, q, k, v, o, lse, out_dtype=torch.float32, **options)
    usual = fattn.attention_backward(dout, q, k, v, o, lse, **options)
    wanted = exact(*inputs(torch.bfloat16, device), causal=True)[1:]
    for x, y, exactly in zip(wide, usual, wanted):
        assert (x.dtype, y.dtype) == (torch.float32, torch.bfloat16)
        assert error(x.reshape(exactly.shape), exactly) < error(y.reshape(exactly.shape), exactly)


def test_compile(device):
    q, k, v, dout = inputs(torch.bfloat16, device)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def step(q, k, v):
        return fattn.attention(q, k, v, causal=True, out_dtype=torch.float32) * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    o, wanted = compiled(*leaves), step(*leaves)
    assert torch.equal(o, wanted)
    for x, y in zip(torch.autograd.grad(o, leaves, dout.float()), torch.autograd.grad(wanted, leaves, dout.float())):
        assert torch.equal(x, y)
    grad = torch.func.grad(lambda q: fattn.attention(q, k.detach(), v.detach(), out_dtype=torch.float32).sum())(q.detach())
    assert grad.dtype == torch.bfloat16


def test_bad_input(device):
    q, k, v, _ = inputs(torch.bfloat16, device)
    for out_dtype in (torch.float16, torch.float64, torch.int32, "fp32"):
        with pytest.raises(ValueError, match="out_dtype is .* allowed: None, torch.bfloat16 and torch.float32"):
            fattn.attention(q, k, v, out_dtype=out_dtype)
    with pytest.raises(ValueError, match="out_dtype is torch.float16 and q torch.float32; allowed: None and torch.float32"):
        fattn.attention(q.float(), k.float(), v.float(), out_dtype=torch.float16)
    assert fattn.attention(q.float(), k.float(), v.float(), out_dtype=torch.float32).dtype == torch.float32
    o, lse = fattn.attention(q, k, v, return_lse=True)
    with pytest.raises(RuntimeError, match="dk is bf16 but dq is fp32; dq, dk and dv share one dtype"):
        torch.ops.fattn.backward_out(q, q, k, v, o, lse, q.float(), torch.empty_like(k), torch.empty_like(v))
    with pytest.raises(RuntimeError, match="o is fp32 but q is bf16; the backward pass takes o in q's dtype"):
        torch.ops.fattn.backward(q, q, k, v, o.float(), lse)


def test_numpy():
    q, k, v, dout = inputs(torch.bfloat16, "cpu")
    arrays = [x.float().numpy().astype(NUMPY["bfloat16"]) for x in (q, k, v, dout)]
    o, lse = fattn.numpy.forward(*arrays[:3], out_dtype=np.float32, return_lse=True)
    assert o.dtype == np.float32 and np.array_equal(o, fattn.attention(q, k, v, out_dtype=torch.float32).numpy())
    gradients = fattn.numpy.backward(arrays[3], *arrays[:3], o.astype(NUMPY["bfloat16"]), lse, out_dtype="float32")
    assert [x.dtype for x in gradients] == [np.float32] * 3
    for x, wanted in zip(gradients, exact(q, k, v, dout)[1:]):
        np.testing.assert_allclose(x, wanted.numpy(), **rounded("bfloat16", 3))  # P, dS and o
    with pytest.raises(ValueError, match="o is fp16 but q is bf16; allowed: q's dtype, or fp32"):
        fattn.numpy.forward(*arrays[:3], out_dtype=np.float16)


def test_support():
    shapes = [(1, 64, 4, 64)] * 3
    assert fattn.support(*shapes, dtype="bf16", out_dtype=torch.float32) and fattn.support(*shapes, dtype="bf16", out_dtype="fp32", algorithm="v1")
