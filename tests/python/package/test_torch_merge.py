"""fattn.merge and fattn.cascade: results over parts of the keys become that of all of them, with gradients."""

import itertools

import pytest

torch = pytest.importorskip("torch")

import fattn  # noqa: E402
from attention_reference import EPSILON, rounded  # noqa: E402
from torch_cases import agree  # noqa: E402


def parts_of(q, k, v, sizes, **options):
    """o1, lse1, o2, lse2, ... over keys one behind the other."""
    results = [fattn.attention(q, x, y, return_lse=True, **options) for x, y in zip(k.split(sizes, 1), v.split(sizes, 1))]
    return list(itertools.chain(*results))


def tensors(device: str, dtype: torch.dtype = torch.float32, seqlen_k: int = 90) -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [torch.randn(2, n, h, 32, dtype=dtype, device=device) for n, h in ((7, 4), (seqlen_k, 2), (seqlen_k, 2))]


@pytest.mark.parametrize("sizes", [[90], [40, 50], [1, 88, 1], [10] * 9])
def test_parts(device, sizes):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = tensors(device, dtype)
    wide = {"out_dtype": torch.float32}
    wanted, wanted_lse = fattn.attention(q, k, v, return_lse=True, **wide)
    o, lse = fattn.merge(*parts_of(q, k, v, sizes, **wide))
    terms = 32, 90, len(sizes)  # q k, over the keys, over the parts
    if device == "cpu":
        agree(o, wanted, *terms)
    else:  # Weights are rounded: of n a mean's standard deviation is at most 0.7 / sqrt(n) epsilons, where scores are N(0, 1).
        torch.testing.assert_close(o, wanted, rtol=0, atol=4 * EPSILON["bfloat16"] / 90**0.5)
    agree(lse, wanted_lse, *terms, dtype=dtype, roundings=0.25)
    swapped = fattn.merge(*[x.transpose(1, 2) if x.dim() == 4 else x for x in parts_of(q, k, v, sizes, **wide)], layout="bhsd")
    packed = fattn.merge(*[x[0] for x in parts_of(q, k, v, sizes, **wide)])
    for x, y in ((swapped[0].transpose(1, 2), o), (swapped[1], lse), (packed[0], o[0]), (packed[1], lse[0])):
        agree(x, y, *terms)


def test_far_apart():
    """Differences of 1e4, and parts that saw nothing, whatever they hold."""
    o = torch.arange(4.0).reshape(1, 1, 1, 4)
    for difference in (0, 1, 100, 1e4, -1e4):
        got, lse = fattn.merge(o, torch.full((1, 1, 1), 5000.0), -o, torch.full((1, 1, 1), 5000.0 + difference))
        share = torch.sigmoid(torch.tensor(difference, dtype=torch.float64))
        torch.testing.assert_close(got.double(), o.double() * (1 - 2 * share), **rounded("float32", 3, 2, largest=3))  # each weight a difference, exp and quotient
        wanted = 5000 + torch.nn.functional.softplus(torch.full((1, 1, 1), difference, dtype=torch.float64))
        torch.testing.assert_close(lse.double(), wanted, **rounded("float32", 3, largest=0))  # the same, and a sum
    nothing = torch.full((1, 1, 1), -torch.inf)
    got, lse = fattn.merge(o, torch.zeros(1, 1, 1), torch.full_like(o, torch.nan), nothing)
    assert torch.equal(got, o) and lse.item() == 0
    got, lse = fattn.merge(o, nothing, torch.full_like(o, torch.nan), nothing)
    assert got.eq(0).all() and lse.item() == -torch.inf
    assert fattn.merge(o, torch.full((1, 1, 1), torch.nan), o, nothing)[0].isnan().all()


def test_finite_differences():
    torch.manual_seed(1)
    parts = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3) for shape in ((1, 3, 2, 4), (1, 2, 3))]
    torch.autograd.gradcheck(fattn.merge, parts)
    torch.autograd.gradgradcheck(fattn.merge, parts)


def test_gradients_of_rows_without_keys():
    """No NaN comes back, and nothing to a part that saw nothing."""
    o1, o2 = torch.randn(2, 1, 3, 2, 4, requires_grad=True).unbind()
    lse1, lse2 = torch.randn(2, 1, 2, 3).unbind()
    lse1[..., 0] = lse2[..., :2] = -torch.inf
    lse1.requires_grad_(), lse2.requires_grad_()
    o, lse = fattn.merge(o1, lse1, o2, lse2)
    grads = torch.autograd.grad(o.square().sum() + lse[..., 1:].sum(), (o1, lse1, o2, lse2))
    assert all(x.isfinite().all() for x in grads)
    assert grads[2][:, :2].eq(0).all() and grads[0][:, 0].eq(0).all() and grads[3][..., :2].eq(0).all()


def test_gradient_of_attention_in_parts():
    q, k, v = (x.requires_grad_() for x in tensors("cpu"))
    dout = torch.randn_like(q)
    wanted = torch.autograd.grad(fattn.attention(q, k, v), (q, k, v), dout)
    got = torch.autograd.grad(fattn.merge(*parts_of(q, k, v, [30, 25, 35]))[0], (q, k, v), dout)
    for x, y in zip(got, wanted):
        agree(x, y, 32, 32, 32, 90, 2 * 7, 3)  # q k, dout v, dout o; over the keys, over the queries of two heads, over the parts


def test_dtypes_and_compile():
    q, k, v = tensors("cpu", torch.bfloat16)
    parts = parts_of(q, k, v, [40, 50])
    assert fattn.merge(*parts)[0].dtype == torch.bfloat16
    assert fattn.merge(*parts, out_dtype=torch.float32)[0].dtype == torch.float32
    assert fattn.merge(*parts_of(q, k, v, [40, 50], out_dtype=torch.float32))[0].dtype == torch.float32
    compiled = torch.compile(fattn.merge, fullgraph=True, backend="aot_eager")
    for x, y in zip(compiled(*parts), fattn.merge(*parts)):
        assert torch.equal(x, y)


def test_bad_input():
    o, lse = torch.zeros(1, 3, 2, 4), torch.zeros(1, 2, 3)
    for parts, error, message in (((), TypeError, "got 0 tensors"), ((o,), TypeError, "got 1 tensors; allowed: o1, lse1, o2, lse2"),
                                  ((o, lse, o), TypeError, "got 3"), ((o, lse, 1, lse), TypeError, "o2 is a int"),
                                  ((o, lse, o.int(), lse), ValueError, "o2 is a tensor of torch.int32"), ((o[0, 0], lse), ValueError, "o1 has 2 dimensions"),
                                  ((o, lse.mT), ValueError, r"lse1 has the shape \(1, 3, 2\); expected \(1, 2, 3\), from o1"),
                                  ((o, lse, o[..., :3], lse), ValueError, r"o2 has the shape \(1, 3, 2, 3\); expected \(1, 3, 2, 4\)"),
                                  ((o, lse, o.to("meta"), lse), ValueError, "o2 is on meta and o1 on cpu")):
        with pytest.raises(error, match=message):
            fattn.merge(*parts)
    for dtype in (torch.int32, torch.float8_e4m3fn, "cpu", torch.device("cpu"), o):
        with pytest.raises(ValueError, match=r"out_dtype is [^;]*; allowed: None, torch.float32, torch.float16"):
            fattn.merge(o, lse, out_dtype=dtype)


# Cascade.


def sequences(device: str, dtype: torch.dtype, seqlen_q: int) -> dict:
    torch.manual_seed(seqlen_q)
    q = torch.randn(3, seqlen_q, 4, 64, dtype=dtype, device=device)
    k_prefix, v_prefix = torch.randn(2, 70, 2, 64, dtype=dtype, device=device)
    k, v = torch.randn(2, 3, 40, 2, 64, dtype=dtype, device=device)
    return {"q": q, "k_prefix": k_prefix, "v_prefix": v_prefix, "k": k, "v": v}


def whole(x: dict, lengths: list[int], **options) -> tuple[torch.Tensor, torch.Tensor]:
    results = []
    for b, n in enumerate(lengths):
        k, v = (torch.cat((prefix, own[b, :n]))[None] for prefix, own in ((x["k_prefix"], x["k"]), (x["v_prefix"], x["v"])))
        results.append(fattn.attention(x["q"][b : b + 1], k, v, return_lse=True, **options))
    return torch.cat([o for o, _ in results]), torch.cat([lse for _, lse in results])


@pytest.mark.parametrize("seqlen_q", [1, 5])
@pytest.mark.parametrize("causal", [False, True])
def test_cascade(device, causal, seqlen_q):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = sequences(device, dtype, seqlen_q)
    lengths, terms = [40, 17, 5], (64, 110, 2)  # q k, over the keys, over the parts
    for options in ({}, {"softmax_scale": 0.3, "softcap": 4.0}, {"sinks": torch.ones(4, device=device)}):
        wanted = whole(x, lengths, causal=causal, **options)
        used = torch.tensor(lengths, device=device)
        got = fattn.cascade(**x, causal=causal, seqused_k=used, return_lse=True, **options)
        for a, b in zip(got, wanted):
            agree(a, b, *terms, dtype=dtype, roundings=2 if a.dim() == 4 else 0.25)
        table = torch.randperm(12, device=device).reshape(3, 4)
        pages = {}
        for name in "kv":
            pages[name] = torch.empty(12, 10, 2, 64, dtype=dtype, device=device)
            pages[name][table.flatten()] = x[name].reshape(12, 10, 2, 64)
        paged = fattn.cascade(**x | pages, causal=causal, seqused_k=used, block_table=table, **options)
        agree(paged, wanted[0], *terms)
        cu = torch.arange(4, dtype=torch.int32, device=device) * seqlen_q
        packed = fattn.cascade(**x | pages | {"q": x["q"].flatten(0, 1)}, causal=causal, seqused_k=used, block_table=table, cu_seqlens_q=cu,
                               max_seqlen_q=seqlen_q, **options)
        agree(packed.unflatten(0, (3, seqlen_q)), wanted[0], *terms)


def test_cascade_has_gradients():
    x = {name: t.requires_grad_() for name, t in sequences("cpu", torch.float32, 5).items()}
    dout = torch.randn(3, 5, 4, 64)
    got = torch.autograd.grad(fattn.cascade(**x, causal=True), list(x.values()), dout)
    wanted = torch.autograd.grad(whole(x, [40] * 3, causal=True)[0], list(x.values()), dout)
    for a, b in zip(got, wanted):
        agree(a, b, 64, 64, 64, 110, 3 * 2 * 5, 2)  # q k, dout v, dout o; over the keys, over the queries of two heads and three entries, over the parts


def test_cascade_refuses():
    x = sequences("cpu", torch.float32, 5)
    for name, value in (("window", (3, 0)), ("bias", torch.zeros(1)), ("dropout_p", 0.5), ("alibi_slopes", torch.ones(4))):
        with pytest.raises(TypeError, match=f"fattn.cascade.*{name}"):
            fattn.cascade(**x, **{name: value})
    with pytest.raises(ValueError, match="k_prefix has 4 dimensions; allowed: 3"):
        fattn.cascade(**x | {"k_prefix": x["k"]})
    with pytest.raises(ValueError, match="k_prefix has 69 keys and v_prefix 70"):
        fattn.cascade(**x | {"k_prefix": x["k_prefix"][1:]})
    with pytest.raises(ValueError, match="a sequence has 4 keys behind the prefix, and q has 5 queries"):
        fattn.cascade(**x, causal=True, seqused_k=torch.tensor([40, 4, 40]))
    with pytest.raises(ValueError, match="q has 3 dimensions"):
        fattn.cascade(**x | {"q": x["q"][0]})
    for name in ("k", "v"):
        with pytest.raises(TypeError, match=f"^{name} is a NoneType; it must be a torch.Tensor"):
            fattn.cascade(**x | {name: None}, causal=True)
        with pytest.raises(ValueError, match=f"^{name} has 3 dimensions; allowed: 4"):
            fattn.cascade(**x | {name: x[name][0]}, causal=True)
