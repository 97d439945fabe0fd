"""The fronts around fattn.attention: the gradient of lse, sinks, packed tensors, caches that grow, plans made ahead."""

import inspect

import numpy as np
import pytest
import torch

import fattn
import fattn.numpy
from attention_cases import Case
from torch_cases import agree, check, leaves, plain

PLAIN = Case(batch=2, seqlen_k=40, nheads=4)


def float64(requires_grad: bool = True) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, n, h, 5, dtype=torch.float64, requires_grad=requires_grad) for n, h in ((6, 4), (7, 2), (7, 2))]


def eager(q, k, v, sinks=None, causal=False) -> tuple[torch.Tensor, torch.Tensor]:
    """By its definition, (batch, seqlen, heads, headdim), with sinks in the denominator."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(k.shape[1] - q.shape[1] + 1), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], 3)
    weights = scores.softmax(3)[..., : k.shape[1]]
    return torch.einsum("bhij,bjhd->bihd", weights, v), scores.logsumexp(3)


def gradient_agrees(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """q k, dout v, dout o; over the keys, over the queries of two heads, or for a sink over those of two entries."""
    agree(got, wanted, 5, 5, 5, 8, 2 * 6, largest=max(1.0, float(wanted.detach().abs().max())))


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 2.0}, {"bias": True, "seqused_k": torch.tensor([7, 5])}])
def test_gradcheck_of_lse(options):
    bias = torch.randn(4, 6, 7, dtype=torch.float64, requires_grad=True)

    def f(q, k, v, bias):
        return fattn.attention(q, k, v, return_lse=True, backend="reference", **options | ({"bias": bias} if "bias" in options else {}))

    assert torch.autograd.gradcheck(f, (*float64(), bias))


def test_gradient_of_lse():
    """On backend cpu, of lse alone, of o alone where lse is there, and of both in a transform of functions."""
    q, k, v = (x.float().detach().requires_grad_() for x in float64())
    o, lse = fattn.attention(q, k, v, causal=True, return_lse=True)
    wanted_o, wanted_lse = eager(q, k, v, causal=True)
    for got, wanted in ((lse, wanted_lse), (o, wanted_o)):
        gradients = torch.autograd.grad(got.square().sum(), (q, k, v), retain_graph=True, allow_unused=True)
        for x, y, z in zip(gradients, torch.autograd.grad(wanted.square().sum(), (q, k, v), retain_graph=True, allow_unused=True), (q, k, v)):
            gradient_agrees(x, torch.zeros_like(z) if y is None else y)

    def both(f):
        return lambda *x: sum(y.square().sum() for y in f(*x))

    arguments = tuple(x.detach() for x in (q, k, v))
    got = torch.func.grad(both(lambda *x: fattn.attention(*x, causal=True, return_lse=True)), (0, 1, 2))(*arguments)
    for x, y in zip(got, torch.func.grad(both(lambda *x: eager(*x, causal=True)), (0, 1, 2))(*arguments)):
        gradient_agrees(x, y)


def test_second_derivative_of_lse_is_refused():
    q, k, v = float64()
    (dq,) = torch.autograd.grad(fattn.attention(q, k, v, return_lse=True)[1].sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        dq.sum().backward()


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_sinks(layout):
    x, sinks = float64(), torch.randn(4, dtype=torch.float64, requires_grad=True)

    def f(q, k, v, sinks):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v)) if layout == "bhsd" else (q, k, v)
        o, lse = fattn.attention(q, k, v, sinks=sinks, causal=True, return_lse=True, layout=layout, backend="reference")
        return (o.transpose(1, 2) if layout == "bhsd" else o), lse

    for got, wanted in zip(f(*x, sinks), eager(*x, sinks, causal=True)):
        agree(got, wanted, 5, 8)  # q k, over the keys and the sink
    if layout == "bshd":
        assert torch.autograd.gradcheck(f, (*x, sinks))
    sums = [sum((y * y).sum() for y in g(*x, sinks)) for g in (f, lambda *y: eager(*y, causal=True))]
    for got, wanted in zip(*(torch.autograd.grad(y, (*x, sinks)) for y in sums)):
        gradient_agrees(got, wanted)


def test_sinks_of_rows_that_see_nothing():
    """The sink has all of the weight; nothing is NaN, no gradient either."""
    q, k, v = (torch.randn(1, n, 2, 8, requires_grad=True) for n in (5, 3, 3))
    sinks = torch.randn(2, requires_grad=True)
    o, lse = fattn.attention(q, k, v, sinks=sinks, causal=True, return_lse=True)
    assert o[:, :2].abs().max() == 0 and torch.equal(lse[0, :, :2], sinks.detach()[:, None].expand(2, 2))
    for x in torch.autograd.grad(o.sum() + lse.sum(), (q, k, v, sinks)):
        assert x.isfinite().all()


WHERE_NOTHING_IS_SEEN = {
    "causal": ((1, 5, 2, 8), (1, 3, 2, 8), {"causal": True}, [0, 1]),
    "lengths of 0": ((2, 2, 2, 8), (2, 3, 2, 8), {"seqused_k": [3, 0]}, [2, 3]),
    "no keys": ((1, 2, 2, 8), (1, 0, 2, 8), {}, [0, 1]),
    "mask": ((1, 2, 2, 8), (1, 3, 2, 8), {"mask": [[True, False, True], [False] * 3]}, [1]),
    "packed": ((6, 2, 8), (5, 2, 8), {"cu_seqlens_q": [0, 2, 4], "cu_seqlens_k": [0, 3, 3], "max_seqlen_q": 2, "max_seqlen_k": 3}, [2, 3, 4, 5]),
}


@pytest.mark.parametrize("case", WHERE_NOTHING_IS_SEEN)
@pytest.mark.parametrize("of_lse", [False, True])
def test_sinks_that_are_none_where_nothing_is_seen(case, of_lse, device):
    """A sink of -inf is none: rows that see no key are 0 as without it, those that see some are as without it, gradients too."""
    shape_q, shape_k, options, empty = WHERE_NOTHING_IS_SEEN[case]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for shape in (shape_q, shape_k, shape_k))
    options = {name: torch.tensor(x, device=device, dtype=torch.bool if name == "mask" else torch.int32) if isinstance(x, list) else x for name, x in options.items()}
    sinks = torch.tensor([-torch.inf, 0.0], device=device, requires_grad=True)
    o, lse = fattn.attention(q, k, v, sinks=sinks, return_lse=True, **options)
    plain_o, plain_lse = fattn.attention(q, k, v, return_lse=True, **options)
    rows = (o.flatten(0, 1) if o.dim() == 4 else o)[empty]
    assert rows.abs().max() == 0 and torch.equal(o[..., 0, :], plain_o[..., 0, :])
    last_places = 8 * 2**-22 if device == "cuda" else 0  # there the two may be of different kernels, each with four steps (score, ex2, lg2, product) of 2^-22
    torch.testing.assert_close(lse[..., 0, :], plain_lse[..., 0, :], rtol=last_places, atol=last_places)
    assert not lse.isnan().any()
    loss, wanted = ((x[..., 0, :].float().sum() + (y[..., 0, :].masked_fill(y[..., 0, :] == -torch.inf, 0).sum() if of_lse else 0)) for x, y in ((o, lse), (plain_o, plain_lse)))
    *gradients, dsinks = torch.autograd.grad(loss + 0 * o.float().sum(), (q, k, v, sinks), retain_graph=True)
    for got, expected in zip(gradients, torch.autograd.grad(wanted, (q, k, v))):
        agree(got, expected, 3 * 8, 3, 5)  # q k, dout v, dout o; over the keys, over the queries
    assert torch.equal(dsinks, torch.zeros_like(dsinks))
    for x in torch.autograd.grad(o.float().sum() + lse.sum(), (q, k, v, sinks)):
        assert not x.isnan().any()


def test_sinks_beside_a_least_lse():
    """A bias of the least number of a dtype hides nothing: a sink of -inf takes no part of such a row."""
    x, bias = torch.randn(1, 2, 1, 8), torch.full((2, 2), torch.finfo(torch.float32).min)
    assert torch.equal(fattn.attention(x, x, x, bias=bias, sinks=torch.tensor([-torch.inf])), fattn.attention(x, x, x, bias=bias))


def test_packed(device):
    case = plain(device, causal=True)
    (q, k, v), dout = leaves(case, device)
    wanted = torch.autograd.grad(fattn.attention(q, k, v, causal=True), (q, k, v), dout)
    for swap in (False, True):
        layout, dim = ("bhsd", 1) if swap else ("bshd", 2)
        tensors = [x.detach().transpose(1, 2).contiguous() if swap else x.detach() for x in (q, k, v)]
        qkv = torch.stack(tensors, dim).requires_grad_()
        kv, alone = torch.stack(tensors[1:], dim).requires_grad_(), tensors[0].clone().requires_grad_()
        for o, inputs in ((fattn.attention_qkvpacked(qkv, causal=True, layout=layout), (qkv,)),
                          (fattn.attention_kvpacked(alone, kv, causal=True, layout=layout), (alone, kv))):
            gradients = torch.autograd.grad(o, inputs, dout.transpose(1, 2) if swap else dout)
            got = [y for x in gradients for y in (x.unbind(dim) if x.dim() == 5 else (x,))]
            check(case, "o", o.transpose(1, 2) if swap else o)
            for name, x, y in zip(("dq", "dk", "dv"), got, wanted):
                x = x.transpose(1, 2) if swap else x
                check(case, name, x)
    with pytest.raises(ValueError, match=r"^kv has the shape \(1, 3, 2, 2, 32\); allowed: \(batch, 2, heads, seqlen, headdim\)"):
        fattn.attention_kvpacked(q, torch.ones(1, 3, 2, 2, 32), layout="bhsd")
    with pytest.raises(ValueError, match=r"qkv has the shape \(2, 5, 2, 8\); allowed: \(batch, seqlen, 3, heads, headdim\)"):
        fattn.attention_qkvpacked(torch.ones(2, 5, 2, 8))
    with pytest.raises(TypeError, match="qkv is a NoneType"):
        fattn.attention_qkvpacked(None)


@pytest.mark.parametrize("lengths", [4, torch.tensor([4, 0, 6]), torch.tensor([4, 0, 6], dtype=torch.int32)])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_cache(layout, lengths):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 8), torch.randn(3, 2, 2, 8), torch.randn(3, 2, 2, 16)
    caches = [torch.full((3, 9, *x.shape[2:]), torch.nan) for x in (k, v)]
    before = [lengths] * 3 if isinstance(lengths, int) else lengths.tolist()
    for cache in caches:
        for b, n in enumerate(before):
            cache[b, :n] = torch.randn(n, *cache.shape[2:])
    wanted_caches, wanted = [cache.clone() for cache in caches], []
    for b, n in enumerate(before):
        for cache, x in zip(wanted_caches, (k, v)):
            cache[b, n : n + 2] = x[b]
        wanted.append(fattn.attention(q[b : b + 1], *(cache[b : b + 1, : n + 2] for cache in wanted_caches), causal=True, softcap=5.0))
    wanted = torch.cat(wanted)
    given = [x.transpose(1, 2).contiguous() if layout == "bhsd" else x for x in (q, *caches, k, v)]
    o, lse = fattn.with_kvcache(*given, cache_seqlens=lengths, causal=True, softcap=5.0, return_lse=True, layout=layout)
    agree(o.transpose(1, 2) if layout == "bhsd" else o, wanted, 8, 8)  # q k, over the keys
    for cache, expected in zip(given[1:3], wanted_caches):
        assert torch.equal((cache.transpose(1, 2) if layout == "bhsd" else cache).nan_to_num(9.0), expected.nan_to_num(9.0))
    assert lse.shape == (3, 4, 2)
    after = lengths + 2
    assert torch.equal(fattn.with_kvcache(*given[:3], cache_seqlens=after, causal=True, softcap=5.0, layout=layout), o), "read only"


def test_cache_of_one_sequence():
    """A length in a tensor of one element, or as a number of NumPy, is as the number."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 2, 8), torch.randn(1, 2, 2, 8)
    caches = [torch.randn(1, 9, 2, 8) for _ in range(2)]
    again = [x.clone() for x in caches]
    o = fattn.with_kvcache(q, *caches, k, v, cache_seqlens=torch.tensor([5]), causal=True)
    agree(o, fattn.with_kvcache(q, *again, k, v, cache_seqlens=5, causal=True), 8, 7)  # q k, over the keys
    for cache, other, x in zip(caches, again, (k, v)):
        assert torch.equal(cache, other) and torch.equal(cache[:, 5:7], x)
    assert torch.equal(o, fattn.with_kvcache(q, *caches, k, v, cache_seqlens=np.int64(5), causal=True))


@pytest.mark.parametrize("seqlen", [1, 3])
def test_cache_under_another_default_device(seqlen):
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, seqlen, 2, 8) for _ in range(3))
    caches, again = ([torch.zeros(3, 9, 2, 8) for _ in range(2)] for _ in range(2))
    lengths = torch.tensor([4, 0, 6])
    wanted = fattn.with_kvcache(q, *again, k, v, cache_seqlens=lengths)
    with torch.device("meta"):
        o = fattn.with_kvcache(q, *caches, k, v, cache_seqlens=lengths)
    assert torch.equal(o, wanted) and all(map(torch.equal, caches, again)) and caches[0].any()


def between() -> tuple[torch.Tensor, torch.Tensor]:
    """Views of one tensor that have no element in common."""
    return torch.zeros(2, 4, 2, 2, 8).unbind(2)


@pytest.mark.parametrize("caches", [between, lambda: torch.zeros(2, 2, 4, 2, 8).unbind(0), lambda: torch.zeros(2, 4, 2, 24).split((8, 16), 3),
                                    lambda: torch.zeros(2, 4, 4, 8).split(2, 2), lambda: torch.zeros(2, 8, 2, 8).split(4, 1)])
def test_caches_of_one_tensor(caches):
    k_cache, v_cache = caches()
    k, v = torch.ones(2, 1, 2, 8), torch.full((2, 1, 2, v_cache.shape[3]), 2.0)
    fattn.with_kvcache(torch.ones(2, 1, 2, 8), k_cache, v_cache, k, v, cache_seqlens=torch.tensor([1, 3]))
    assert k_cache.sum() == k.sum() and v_cache.sum() == v.sum()


SHARED = "^(k_cache and v_cache share memory|v_cache overlaps k_cache in memory)"


@pytest.mark.parametrize("cache_seqlens", [1, torch.tensor([1, 2])])
@pytest.mark.parametrize(
    ("caches", "message"),
    [
        (lambda: (torch.zeros(1, 4, 2, 8).expand(2, 4, 2, 8), torch.zeros(2, 4, 2, 8)), "^k_cache .* one element by two indices"),
        (lambda: (torch.zeros(2, 4, 2, 8), torch.zeros(2, 4, 1, 8).expand(2, 4, 2, 8)), "^v_cache .* one element by two indices"),
        (lambda: (torch.zeros(2, 4, 2, 8), torch.zeros(999).as_strided((2, 4, 2, 8), (8, 16, 8, 1))), "^v_cache .* one element by two indices"),
        (lambda: [torch.zeros(2, 4, 2, 8)] * 2, SHARED),
        (lambda: (x := torch.zeros(2, 5, 2, 8), (x[:, :4], x[:, 1:]))[1], SHARED),
        (lambda: (x := torch.zeros(2, 4, 2, 8), (x, x.transpose(0, 1).reshape(2, 4, 2, 8).set_(x.untyped_storage(), 0, (2, 4, 2, 8), (16, 32, 8, 1))))[1], SHARED),
    ],
)
def test_cache_that_would_be_written_twice(caches, message, cache_seqlens):
    q, (k_cache, v_cache) = torch.ones(2, 1, 2, 8), caches()
    with pytest.raises(ValueError, match=message):
        fattn.with_kvcache(q, k_cache, v_cache, q, q, cache_seqlens=cache_seqlens)
    assert not k_cache.any() and not v_cache.any()
    fattn.with_kvcache(q, k_cache, v_cache, cache_seqlens=cache_seqlens)  # reading is fine


Q = torch.ones(2, 1, 2, 8)
CACHE = torch.zeros(2, 4, 2, 8)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((Q, CACHE, CACHE, Q, Q), {"cache_seqlens": 4}, ValueError, "^cache_seqlens has 4, and 1 keys are new; allowed: 0 to 3, for the caches have room for 4"),
        ((Q, CACHE, CACHE, Q, Q), {"cache_seqlens": torch.tensor([0, -1])}, ValueError, "^cache_seqlens has -1"),
        ((Q, CACHE, CACHE, Q, Q), {"cache_seqlens": torch.tensor([0])}, ValueError, r"^cache_seqlens is a tensor of torch.int64 with the shape \(1,\); allowed: int32"),
        ((Q, CACHE, CACHE, Q, Q), {"cache_seqlens": torch.tensor([0, 1], device="meta")}, ValueError, "^cache_seqlens is on meta and k_cache on cpu; give a number"),
        ((Q, CACHE, CACHE, Q, Q), {"cache_seqlens": 1.0}, TypeError, "^cache_seqlens is a float"),
        ((Q, CACHE, CACHE, Q), {"cache_seqlens": 1}, ValueError, "^v is None and k is not; give both"),
        ((Q, CACHE, CACHE, Q.half(), Q.half()), {"cache_seqlens": 1}, ValueError, "^k is torch.float16 but k_cache is torch.float32"),
        ((Q, CACHE.half(), CACHE), {"cache_seqlens": 1}, ValueError, "^k_cache is torch.float16 but q is torch.float32; all tensors of a call share one dtype"),
        ((Q, CACHE, CACHE.half()), {"cache_seqlens": 1}, ValueError, "^v_cache is torch.float16 but q is torch.float32"),
        ((Q[:1], CACHE, CACHE), {"cache_seqlens": 1}, ValueError, r"^k_cache has the shape \(2, 1, 2, 8\); expected \(1, 1, 2, 8\), from q's batch"),
        ((Q, CACHE, CACHE), {"cache_seqlens": 1, "seqused_q": 1}, NotImplementedError, "seqused_q is not computed"),
        ((Q, CACHE.to_sparse(), CACHE), {"cache_seqlens": 1}, NotImplementedError, "^k_cache is of torch's kind torch.sparse_coo"),
        ((Q, CACHE, CACHE, Q[:1], Q[:1]), {"cache_seqlens": 1}, ValueError, "^k has batch 1, heads 2 and headdim 8; expected 2, 2 and 8"),
        ((Q, CACHE, CACHE, Q, torch.ones(2, 2, 2, 8)), {"cache_seqlens": 1}, ValueError, "^k has 1 new tokens and v 2"),
        ((Q, CACHE[0], CACHE), {"cache_seqlens": 1}, ValueError, "^k_cache has 3 dimensions"),
        ((Q, None, CACHE), {"cache_seqlens": 1}, TypeError, "^k_cache is a NoneType"),
        ((Q.clone().requires_grad_(), CACHE, CACHE), {"cache_seqlens": 1}, NotImplementedError, "^q asks for a gradient"),
        ((Q, CACHE, CACHE), {"cache_seqlens": 1, "seqused_k": 1}, TypeError, "^with_kvcache has no seqused_k"),
        ((Q, CACHE, CACHE), {"cache_seqlens": 1, "sinks": torch.ones(3)}, ValueError, r"^sinks has the shape \(3\); expected \(2\), one number a query head"),
        ((Q, CACHE, CACHE), {"cache_seqlens": 1, "sinks": 1.0}, TypeError, "^sinks is a float"),
    ],
)
def test_cache_refuses(arguments, options, error, message):
    with pytest.raises(error, match=message):
        fattn.with_kvcache(*arguments, **options)
    assert not CACHE.any()


def test_cache_compiled():
    torch._dynamo.reset()
    caches, again = (torch.zeros(2, 2, 9, 2, 8) for _ in range(2))
    step = torch.compile(lambda q, k, v, lengths, *x: fattn.with_kvcache(q, *x, k, v, cache_seqlens=lengths, causal=True), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for i in range(3):
            q, k, v, lengths = *torch.randn(3, 2, 1, 2, 8), torch.tensor([i, 2 * i])
            assert torch.equal(step(q, k, v, lengths, *caches), fattn.with_kvcache(q, *again, k, v, cache_seqlens=lengths, causal=True))
    assert torch.equal(caches, again)


def test_every_front_has_the_options():
    """fattn.attention repeats the one list of them, which the others take from it."""
    from fattn._options import Options
    from fattn._scores import GIVEN

    fronts = {front: inspect.signature(front).parameters for front in (fattn.attention, fattn.attention_varlen, fattn.numpy.forward, fattn.numpy.backward, fattn.plan)}
    own = ["return_lse", "return_dropout_state", "layout", "unknown"]
    assert [name for name in fronts[fattn.attention] if name not in own] == ["q", "k", "v", *Options._fields]
    for name, default in Options._field_defaults.items():
        for front, parameters in fronts.items():
            if name in parameters and (front, name) != (fattn.attention_varlen, "cu_seqlens_q"):
                assert parameters[name].default == default and parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
    assert set(GIVEN) <= set(Options._fields)
    assert inspect.signature(fattn.support).parameters == fronts[fattn.plan]
