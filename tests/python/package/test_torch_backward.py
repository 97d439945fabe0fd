"""fattn.attention_backward and attention_varlen_backward: the bits that autograd gives, errors, torch.compile and torch.func."""

import itertools

import pytest
import torch

import fattn
from attention_cases import CASES, SCORE_CASES, names
from torch_cases import agree, check, leaves, scores_of, supported

SOME = CASES[::7] + SCORE_CASES[:12]
CU_Q, CU_K = torch.tensor([0, 5, 5, 19], dtype=torch.int32), torch.tensor([0, 9, 12, 30], dtype=torch.int32)
PACKED = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "max_seqlen_q": 14, "max_seqlen_k": 18}


def inputs(*leading: int, seqlen_q: int = 9, seqlen_k: int = 11, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*leading, n, h, d, dtype=dtype).requires_grad_() for n, h, d in ((seqlen_q, 4, 16), (seqlen_k, 2, 16), (seqlen_k, 2, 24))]


@pytest.mark.parametrize("case", **names(SOME))
def test_bits_of_autograd(case, device):
    (q, k, v), dout = leaves(case, device)
    scores = scores_of(case, device)
    if not supported(case, device, backward=True, deterministic=True):
        pytest.skip("not computed by this device")
    o, lse = fattn.attention(q, k, v, return_lse=True, deterministic=True, **case.options, **scores)
    wants = "bias" in scores
    wanted = torch.autograd.grad(o, (q, k, v, scores["bias"]) if wants else (q, k, v), dout)
    with torch.no_grad():
        got = fattn.attention_backward(dout, q, k, v, o, lse, deterministic=True, return_dbias=wants, **case.options, **scores)
    assert len(got) == len(wanted) and all(torch.equal(x, y) and x.dtype == y.dtype and x.grad_fn is None for x, y in zip(got, wanted))
    for name, x in zip(("dq", "dk", "dv", "dbias"), got):
        check(case, name, x)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_bias_sinks_and_lse(layout):
    q, k, v = (x if layout == "bshd" else x.detach().transpose(1, 2).requires_grad_() for x in inputs(2))
    bias, sinks = torch.randn(4, 9, 1, dtype=torch.bfloat16, requires_grad=True), torch.randn(4, dtype=torch.float64, requires_grad=True)
    options = {"bias": bias, "sinks": sinks, "causal": True, "layout": layout, "softcap": 4.0, "window": (6, 0)}
    o, lse = fattn.attention(q, k, v, return_lse=True, **options)
    dout, dlse = torch.randn_like(o), torch.randn_like(lse)
    wanted = torch.autograd.grad((o, lse), (q, k, v, bias, sinks), (dout, dlse))
    with torch.no_grad():
        got = fattn.attention_backward(dout, q, k, v, o, lse, dlse=dlse, return_dbias=True, return_dsinks=True, **options)
        alone = fattn.attention_backward(dout, q, k, v, o, lse, dlse=dlse, return_dsinks=True, **options)
        neither = fattn.attention_backward(dout, q, k, v, o, lse, dlse=dlse, **options)
    assert [(x.shape, x.dtype) for x in got] == [(x.shape, x.dtype) for x in (q, k, v, bias, sinks)]
    assert all(torch.equal(x, y) for x, y in zip(got, wanted))
    assert len(alone) == 4 and torch.equal(alone[3], wanted[4]) and len(neither) == 3 and torch.equal(neither[0], wanted[0])


@pytest.mark.parametrize("more", [{}, {"causal": True, "dropout_p": 0.25}, {"window": (3, 2), "sinks": torch.randn(4, requires_grad=True)},
                                  {"bias": torch.randn(4, 14, 18, requires_grad=True)}, {"seqused_k": torch.tensor([9, 3, 11])}])
def test_packed(more):
    q, k, v = inputs(seqlen_q=19, seqlen_k=30)
    o, lse, state = fattn.attention_varlen(q, k, v, return_lse=True, return_dropout_state=True, **PACKED, **more)
    asked = [name for name in ("bias", "sinks") if name in more]
    dout = torch.randn_like(o)
    wanted = torch.autograd.grad(o, (q, k, v, *(more[name] for name in asked)), dout)
    options = PACKED | more | {"dropout_state": state} | {f"return_d{name}": True for name in asked}
    with torch.no_grad():
        for call in (fattn.attention_varlen_backward, fattn.attention_backward):
            got = call(dout, q, k, v, o, lse, **options)
            assert len(got) == len(wanted) and all(torch.equal(x, y) for x, y in zip(got, wanted))
        lengths = {name: x for name, x in options.items() if not name.startswith("max_seqlen")}
        if "bias" not in more:
            assert torch.equal(fattn.attention_varlen_backward(dout, q, k, v, o, lse, **lengths)[1], wanted[1])


def test_parts_of_the_keys():
    """o and lse of all keys, from two calls on half of them each: each half's gradients are the whole's."""
    q, k, v = inputs(2, seqlen_k=12, dtype=torch.float64)
    dout = torch.randn(2, 9, 4, 24, dtype=torch.float64)
    whole = torch.autograd.grad(fattn.attention(q, k, v, backend="reference"), (q, k, v), dout)
    with torch.no_grad():
        halves = [(k[:, :6], v[:, :6]), (k[:, 6:], v[:, 6:])]
        parts = [fattn.attention(q, *half, return_lse=True, backend="reference") for half in halves]
        lse = torch.logsumexp(torch.stack([lse for _, lse in parts]), 0)
        o = sum(o * (part - lse).exp().transpose(1, 2)[..., None] for o, part in parts)
        got = [fattn.attention_backward(dout, q, *half, o, lse, backend="reference") for half in halves]
    terms = 16, 24, 24, 12, 2 * 9  # q k, dout v, dout o; over the keys, over the queries of two heads
    agree(got[0][0] + got[1][0], whole[0], *terms)
    for i in (1, 2):
        agree(torch.cat([x[i] for x in got], 1), whole[i], *terms)


def test_strides_autocast_and_deterministic():
    q, k, v = inputs(2)
    with torch.autocast("cpu", torch.bfloat16):
        o, lse = fattn.attention(q, k, v, return_lse=True)
        wanted = torch.autograd.grad(o, (q, k, v), torch.ones_like(o))
        with torch.no_grad():
            got = fattn.attention_backward(torch.ones(()).expand_as(o), q, k, v, o, lse)
            packed = fattn.attention_varlen_backward(torch.ones_like(o[0]), q[0], k[0], v[0], o[0], lse[0], **PACKED | {"cu_seqlens_q": torch.tensor([0, 9]),
                                                     "cu_seqlens_k": torch.tensor([0, 11])})
    assert o.dtype == torch.bfloat16 and all(x.dtype == torch.float32 and torch.equal(x, y) for x, y in zip(got, wanted))
    assert packed[0].dtype == torch.float32
    o, lse = fattn.attention(q, k, v, return_lse=True)
    try:
        torch.use_deterministic_algorithms(True)
        with torch.no_grad():
            again = fattn.attention_backward(torch.ones(()).expand_as(o), q, k, v, o, lse.transpose(0, 2).contiguous().transpose(0, 2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for x, y in zip(again, torch.autograd.grad(o.sum(), (q, k, v))))


def test_compile_and_func():
    q, k, v = inputs(2)
    o, lse = (x.detach() for x in fattn.attention(q, k, v, causal=True, return_lse=True))
    dout = torch.randn_like(o)

    def backward(dout, q, k, v, o, lse):
        return fattn.attention_backward(dout, q, k, v, o, lse, causal=True)

    with torch.no_grad():
        wanted = backward(dout, q, k, v, o, lse)
        torch._dynamo.reset()
        for x, y in zip(torch.compile(backward, fullgraph=True, backend="aot_eager")(dout, q, k, v, o, lse), wanted):
            assert torch.equal(x, y)
    stacked = [torch.stack([x.detach()] * 3) for x in (dout, q, k, v, o, lse)]
    for x, y in zip(torch.vmap(backward)(*stacked), wanted):
        assert all(torch.equal(part, y) for part in x)


def test_no_second_derivative():
    q, k, v = inputs(2)
    o, lse = fattn.attention(q, k, v, return_lse=True)
    dq, *_ = fattn.attention_backward(torch.ones_like(o), q, k, v, o, lse)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        dq.sum().backward()


X, LSE, CU = torch.ones(1, 4, 2, 8), torch.zeros(1, 2, 4), torch.tensor([0, 4])


def dense(**given):
    call = {"dout": X, "q": X, "k": X, "v": X, "o": X, "lse": LSE} | given
    return fattn.attention_backward(**call)


def packed(**given):
    call = {"dout": X[0], "q": X[0], "k": X[0], "v": X[0], "o": X[0], "lse": LSE[0], "cu_seqlens_q": CU} | given
    return fattn.attention_varlen_backward(**call)


@pytest.mark.parametrize(("name", "call"), [*itertools.product(("dout", "q", "k", "v", "o", "lse", "dlse"), (dense, packed))])
def test_each_tensor_is_checked(name, call):
    with pytest.raises(TypeError, match=f"^{name} is a list; it must be a torch.Tensor"):
        call(**{name: [1.0]})
    dimensions = (4 if call is dense else 3) - ("lse" in name)
    with pytest.raises(ValueError, match=f"^{name} has 1 dimensions; allowed: {dimensions} "):
        call(**{name: torch.ones(3)})
    with pytest.raises(ValueError, match=f"{name}.*shape|{name} .*nheads|heads|headdim"):
        call(**{name: torch.ones(7, 7, 7, 7)[(0,) * (4 - dimensions)]})
    with pytest.raises(NotImplementedError, match=f"^{name} is of torch's kind torch.sparse_coo"):
        call(**{name: X[(0,) * (4 - dimensions)].to_sparse()})


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"return_dbias": True}, ValueError, "^return_dbias asks for the gradient of bias, and bias is absent"),
        ({"return_dsinks": True}, ValueError, "^return_dsinks asks for the gradient of sinks"),
        ({"dropout_p": 0.1}, ValueError, "^dropout_p is 0.1 and dropout_state is None; .*return_dropout_state=True"),
        ({"block_table": torch.zeros(1, 1, dtype=torch.int32)}, NotImplementedError, "block_table is given; a paged cache has no gradient"),
        ({"window_size": (1, 1)}, TypeError, r"has no option 'window_size': window=\(left, right\) is meant"),
        ({"dlses": X}, TypeError, "has no option 'dlses'; did you mean 'dlse'"),
        ({"softmax_scale": torch.ones((), requires_grad=True)}, NotImplementedError, "^softmax_scale is a tensor that asks for a gradient"),
        ({"backend": "gpu"}, ValueError, "^backend is 'gpu'; allowed"),
        ({"window": 3}, ValueError, "^window is 3; allowed"),
    ],
)
def test_refused(given, error, message):
    for call in (dense, packed):
        with pytest.raises(error, match=message):
            call(**given)


def test_refused_dense_alone():
    with pytest.raises(ValueError, match="^layout is 'sbhd'; allowed"):
        dense(layout="sbhd")
    with pytest.raises(ValueError, match="^layout is 'bhsd' and cu_seqlens_q is given"):
        dense(layout="bhsd", cu_seqlens_q=CU)
    with pytest.raises(ValueError, match="^cu_seqlens_q is None and others"):
        dense(max_seqlen_q=4)
    with pytest.raises(ValueError, match="dtype"):
        dense(dout=X.double())
    with pytest.raises(TypeError, match="cu_seqlens_q"):
        fattn.attention_varlen_backward(X[0], X[0], X[0], X[0], X[0], LSE[0])
