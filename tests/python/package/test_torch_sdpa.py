"""torch.nn.functional.scaled_dot_product_attention through fattn.sdpa: what fattn takes over, what stays with torch, eager and compiled."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fattn.sdpa
from attention_reference import reordered
from fattn import _operators
from torch_cases import agree, check, leaves, plain


@pytest.fixture
def calls(monkeypatch):
    """fattn is active; the list grows with every pass that it computes."""
    seen = []
    for name in ("forward_out", "backward_out"):
        operator = getattr(_operators, name)
        monkeypatch.setattr(_operators, name, lambda *arguments, name=name, operator=operator: (seen.append(name), operator(*arguments)))
    fattn.sdpa.activate()
    yield seen
    fattn.sdpa.deactivate()


def heads_first(tensors) -> list[torch.Tensor]:
    return [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in tensors]


def flash(q, k, v, **options) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, **options)


CASES = [{}, {"causal": True}, {"softmax_scale": 0.3}, {"nheads": 4, "causal": True}, {"seqlen_k": 65}, {"batch": 2, "headdim": 64, "headdim_v": 64}]


@pytest.mark.parametrize("stored", ["bhsd", "bshd", "packed"])
@pytest.mark.parametrize("options", CASES)
def test_case(options, stored, device, calls):
    case = plain(device, **options)
    (q, k, v), dout = leaves(case, device)
    if stored == "bhsd":
        q, k, v = heads_first((q, k, v))
    elif stored == "bshd":
        q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v))
    else:  # as slices of a wider row
        q, k, v = (torch.cat([x, x], dim=3).detach().transpose(1, 2)[..., : x.shape[3]].requires_grad_() for x in (q, k, v))
    o = flash(q, k, v, is_causal=case.causal, scale=case.softmax_scale, enable_gqa=case.nheads != case.nheads_k)
    o.backward(dout.transpose(1, 2))
    assert calls == ["forward_out", "backward_out"]
    for name, x in (("o", o), ("dq", q.grad), ("dk", k.grad), ("dv", v.grad)):
        check(case, name, x.transpose(1, 2))


@pytest.mark.parametrize(("backend", "bhsd"), [("aot_eager", True), ("inductor", False)])
def test_compiled(backend, bhsd, device, calls):
    case = plain(device, batch=2, headdim=64, headdim_v=64, causal=True)
    (q, k, v), dout = leaves(case, device)
    q, k, v = heads_first((q, k, v)) if bhsd else (x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v))
    torch._dynamo.reset()
    o = torch.compile(lambda *x: flash(*x, is_causal=True), backend=backend, fullgraph=True)(q, k, v)
    o.backward(dout.transpose(1, 2))
    assert calls == ["forward_out", "backward_out"]
    for name, x in (("o", o), ("dq", q.grad), ("dk", k.grad), ("dv", v.grad)):
        check(case, name, x.transpose(1, 2))


def by_torch(q, k, v, **options) -> torch.Tensor:
    """Its own kernels; fattn is active again behind it."""
    fattn.sdpa.deactivate()
    o = F.scaled_dot_product_attention(q, k, v, **options)
    fattn.sdpa.activate()
    return o


@pytest.mark.parametrize("shape", [(33, 40), (2, 4, 33, 40), (2, 1, 1, 40)])
@pytest.mark.parametrize("kind", ["bool", "float", "gradient"])
def test_masks(kind, shape, calls):
    q, k, v = heads_first(leaves(plain("cpu", batch=2, nheads=4, nheads_k=4, seqlen_k=40), "cpu")[0])
    mask = torch.rand(shape) > 0.2 if kind == "bool" else torch.randn(shape, requires_grad=kind == "gradient")
    inputs = (q, k, v, mask) if kind == "gradient" else (q, k, v)
    got = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    gradients = torch.autograd.grad(got.square().sum(), inputs)
    assert calls == ([] if kind == "gradient" else ["forward_out", "backward_out"])
    wanted = by_torch(q, k, v, attn_mask=mask)
    agree(got, wanted, 32, 40)  # q k, over the keys
    for x, y in zip(gradients, torch.autograd.grad(wanted.square().sum(), inputs)):
        agree(x, y, 32, 32, 32, 40, 33, largest=max(1.0, float(y.detach().abs().max())))  # q k, dout v, dout o; over the keys, over the queries


def test_dropout(calls, monkeypatch):
    """Not torch's numbers, but fattn's for the same generator; compiled likewise, forward and backward the same."""
    seen = []
    original = fattn.sdpa.attention
    monkeypatch.setattr(fattn.sdpa, "attention", lambda *x, **options: (seen.append(options), original(*x, **options))[1])
    q, k, v = heads_first(leaves(plain("cpu"), "cpu")[0])
    torch.manual_seed(3)
    got = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, is_causal=True)
    torch.manual_seed(3)
    wanted = fattn.attention(q, k, v, dropout_p=0.5, causal=True, layout="bhsd")
    assert torch.equal(got, wanted) and len(seen) == 1
    for x, y in zip(torch.autograd.grad(got.sum(), (q, k, v)), torch.autograd.grad(wanted.sum(), (q, k, v))):
        assert torch.equal(x, y)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: F.scaled_dot_product_attention(*x, dropout_p=0.5), backend="aot_eager", fullgraph=True)
    ones = torch.ones_like(v).requires_grad_()
    o = compiled(torch.zeros_like(q), torch.zeros_like(k), ones)  # means of what is kept, which the gradient of ones has too
    assert len(seen) > 1 and 0.5 < o.mean().item() < 1.5 and o.std().item() > 0.05
    assert torch.autograd.grad(o.sum(), ones)[0].sum().item() == pytest.approx(o.sum().item(), rel=reordered("float32", 33, 33, 11)["rtol"])  # and 2^11 results, by halves
    with sdpa_kernel(SDPBackend.MATH):
        count = len(seen)
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        assert len(seen) == count, "flash is not allowed"


def test_what_stays_with_torch(calls):
    q, k, v = heads_first(leaves(plain("cpu", seqlen_k=40), "cpu")[0])
    got = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    got.sum().backward()
    agree(got, by_torch(q, k, v, is_causal=True), 32, 40)  # q k, over the keys
    F.scaled_dot_product_attention(*(x.detach().double() for x in (q, k, v)))
    assert calls == []


def test_activated_twice_and_taken_back(calls):
    q, k, v = heads_first(leaves(plain("cpu"), "cpu")[0])
    for times in (1, 2):
        torch.nn.attention.activate_flash_attention_impl("fattn")
        flash(q, k, v)
        assert len(calls) == times
    for _ in range(2):
        fattn.sdpa.deactivate()
        flash(q, k, v)
        assert len(calls) == 2


def test_modules_of_torch(calls):
    """MultiheadAttention and a transformer layer, in training."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x = torch.randn(2, 10, 32)
    y = layer(x)
    y.sum().backward()
    assert calls == ["forward_out", "backward_out"]
    fattn.sdpa.deactivate()
    agree(y, layer(x), 32, 8, 10, 32, 32, 64)  # four projections, q k, over the keys
