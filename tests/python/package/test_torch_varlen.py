"""fattn.attention_varlen: each of the packed sequences as a call of its own, with everything that a score depends on, under torch's transforms."""

import inspect

import pytest
import torch

import fattn
from attention_reference import reordered
from fattn import _operators
from torch_cases import agree

ENDS_Q, ENDS_K = [0, 5, 5, 12, 13], [0, 7, 9, 14, 20]  # one has no query, and rows behind the last belong to none
TOTAL_Q, TOTAL_K, LONGEST_Q, LONGEST_K = 15, 21, 7, 7


def packed(dtype=torch.float64, requires_grad: bool = True) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(n, h, d, dtype=dtype).requires_grad_(requires_grad) for n, h, d in ((TOTAL_Q, 4, 5), (TOTAL_K, 2, 5), (TOTAL_K, 2, 3))]


def lengths(dtype=torch.int32) -> dict:
    return {"cu_seqlens_q": torch.tensor(ENDS_Q, dtype=dtype), "cu_seqlens_k": torch.tensor(ENDS_K, dtype=dtype)}


def one_by_one(q, k, v, causal, seqused_k=None, alibi_slopes=None, bias=None, mask=None, document_q=None, document_k=None, **options):
    o, lse = q.new_zeros(TOTAL_Q, 4, 3), q.new_full((4, TOTAL_Q), -torch.inf)
    for b in range(4):
        i, j, m, n = ENDS_Q[b], ENDS_Q[b + 1], ENDS_K[b], ENDS_K[b + 1]
        extra = {} if seqused_k is None else {"seqused_k": seqused_k[b : b + 1]}
        if alibi_slopes is not None:
            extra["alibi_slopes"] = alibi_slopes[b : b + 1]
        extra |= {name: x[b : b + 1, :, : j - i, : n - m] for name, x in (("bias", bias), ("mask", mask)) if x is not None}
        if document_q is not None:
            extra |= {"document_q": document_q[None, i:j], "document_k": document_k[None, m:n]}
        part, part_lse = fattn.attention(q[None, i:j], k[None, m:n], v[None, m:n], causal=causal, return_lse=True, **extra, **options)
        o, lse = o.index_copy(0, torch.arange(i, j), part[0]), lse.index_copy(1, torch.arange(i, j), part_lse[0])
    return o, lse


def everything(dtype=torch.float64) -> dict:
    torch.manual_seed(1)
    return {"seqused_k": torch.tensor([6, 2, 5, 0], dtype=torch.int32), "alibi_slopes": torch.rand(4, 4), "mask": torch.rand(4, 1, LONGEST_Q, LONGEST_K) > 0.2,
            "bias": torch.randn(4, 4, LONGEST_Q, LONGEST_K, dtype=dtype, requires_grad=True), **documents()}


def documents() -> dict:
    """Ids that repeat in other sequences, and are not sorted."""
    return {"document_q": torch.tensor([3, 3, 8, 8, 3, 8, 3, 3, 3, 3, 8, 8, 3, 3, 3], dtype=torch.int32), "document_k": torch.arange(TOTAL_K, dtype=torch.int32) % 3 + 3}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_each_sequence_by_itself(dtype, causal, whole):
    q, k, v = packed(dtype)
    options = everything(dtype) if whole else {}
    inputs = (q, k, v, options["bias"]) if whole else (q, k, v)
    results = []
    for f in (lambda **x: fattn.attention_varlen(q, k, v, return_lse=True, **lengths(), **x), lambda **x: one_by_one(q, k, v, **x)):
        o, lse = f(causal=causal, softcap=4.0, window=(4, 2), **options)
        seen = lse.isfinite()
        loss = o.square().sum() + (lse[seen] ** 2).sum()
        results.append((o, lse, *torch.autograd.grad(loss, inputs)))
    close = reordered(str(dtype).removeprefix("torch."), 5, 3, 3, 7, 2 * 7)  # q k, dout v, dout o; over keys, over the queries of two heads
    for got, wanted in zip(*results):
        torch.testing.assert_close(got, wanted, **close)
    with torch.no_grad():
        again = fattn.attention_varlen(q, k, v, causal=causal, softcap=4.0, window=(4, 2), max_seqlen_q=7, max_seqlen_k=7, **lengths(torch.int64), **options)
    assert torch.equal(again, results[0][0])


def test_attention_takes_them_too():
    """Every option reaches fattn.attention_varlen, as it is and compiled."""
    q, k, v = packed(torch.float32)
    torch.manual_seed(3)
    options = everything(torch.float32) | {"softcap": 4.0, "window": (4, 2), "causal": True, "softmax_scale": 0.3, "sinks": torch.randn(4), "dropout_p": 0.25,
                                           "dropout_state": torch.tensor([3, 5]), "return_lse": True, "return_dropout_state": True, "deterministic": True,
                                           "backend": "cpu", "algorithm": "v2", "out_dtype": torch.float32, "batch_invariant": True, "max_seqlen_q": LONGEST_Q, "max_seqlen_k": LONGEST_K, **lengths()}
    taken = inspect.signature(fattn.attention).parameters
    assert set(inspect.signature(fattn.attention_varlen).parameters) == set(taken) - {"layout", "unknown"}
    assert set(options) == set(taken) - {"layout", "q", "k", "v", "unknown", "block_table"}  # test_torch_pages.py has that
    wanted = fattn.attention_varlen(q, k, v, **options)
    for f in (fattn.attention, torch.compile(fattn.attention, backend="aot_eager", fullgraph=True)):
        for x, y in zip(f(q, k, v, **options), wanted, strict=True):
            assert torch.equal(x, y)
    with pytest.raises(ValueError, match="^cu_seqlens_q is None and others of packed sequences are given"):
        fattn.attention(q, k, v, max_seqlen_q=3)
    with pytest.raises(ValueError, match="^layout is 'bhsd' and cu_seqlens_q is given"):
        fattn.attention(q, k, v, layout="bhsd", **lengths())


def test_dropout_and_sinks():
    q, k, v = packed()
    torch.manual_seed(2)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    o, lse, state = fattn.attention_varlen(q, k, v, dropout_p=0.3, sinks=sinks, return_lse=True, return_dropout_state=True, **lengths())
    again = fattn.attention_varlen(q, k, v, dropout_p=0.3, dropout_state=state, sinks=sinks, **lengths())
    assert torch.equal(o, again) and not torch.equal(o, fattn.attention_varlen(q, k, v, sinks=sinks, **lengths()))
    for b, (i, j, m, n) in enumerate(zip(ENDS_Q, ENDS_Q[1:], ENDS_K, ENDS_K[1:])):
        shifted = state + torch.tensor([0, 4 * b])  # the numbers of batch entry b
        alone = fattn.attention(q[None, i:j], k[None, m:n], v[None, m:n], dropout_p=0.3, dropout_state=shifted, sinks=sinks)
        torch.testing.assert_close(o[i:j], alone[0], **reordered("float64", 5, 7))
    assert all(x.abs().max() > 0 for x in torch.autograd.grad(o.sum(), (q, k, v, sinks)))


def test_opcheck():
    q, k, v = packed(torch.float32, False)
    options = everything(torch.float32)
    scores = (options["seqused_k"], options["alibi_slopes"], options["bias"].detach(), options["mask"], torch.tensor([1, 2]), *documents().values(), torch.ones(4), None, None, None)
    arguments = (None, True, False, False, -1, -1, 0.0, 0, 0, 0.25, False, False, *scores, *lengths().values(), LONGEST_Q, LONGEST_K)
    torch.library.opcheck(_operators.forward_varlen, (q, k, v, *arguments))
    o, lse = _operators.forward_varlen(q, k, v, *arguments)
    torch.library.opcheck(_operators.backward_varlen, (o, q, k, v, o, lse, *arguments))
    for wanted in ((True, True), (False, True), (True, False)):
        torch.library.opcheck(_operators.backward_varlen_with_more, (o, q, k, v, o, lse, *arguments, torch.zeros_like(lse), *wanted))


def test_compiled_and_transformed():
    def f(q, k, v):
        return fattn.attention_varlen(q, k, v, causal=True, max_seqlen_q=LONGEST_Q, max_seqlen_k=LONGEST_K, **lengths())

    torch._dynamo.reset()
    x, again = packed(torch.float32), packed(torch.float32)
    wanted, got = f(*x), torch.compile(f, fullgraph=True, backend="aot_eager")(*again)
    assert torch.equal(got, wanted)
    gradients = torch.autograd.grad(wanted.square().sum(), x)
    for y, z in zip(torch.autograd.grad(got.square().sum(), again), gradients):
        assert torch.equal(y, z)
    functional = torch.func.grad(lambda *x: f(*x).square().sum(), (0, 1, 2))(*(y.detach() for y in x))
    for y, z in zip(functional, gradients):
        assert torch.equal(y, z)
    (dq,) = torch.autograd.grad(f(*x).sum(), x[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        dq.sum().backward()


Q = torch.ones(6, 2, 8)


@pytest.mark.parametrize(
    ("q", "options", "error", "message"),
    [
        (Q[None], {}, ValueError, r"^q has 4 dimensions; allowed: 3 \(total, heads, headdim\)"),
        (Q.numpy(), {}, TypeError, "^q is a ndarray"),
        (Q, {"cu_seqlens_q": [0, 6]}, TypeError, "^cu_seqlens_q is a list"),
        (Q, {"cu_seqlens_q": torch.tensor(6)}, ValueError, r"^cu_seqlens_q has the shape \(\); allowed: \(batch \+ 1\)"),
        (Q, {"cu_seqlens_q": torch.tensor([0, 7])}, ValueError, "^cu_seqlens_q"),
        (Q, {"cu_seqlens_q": torch.tensor([0, 4, 2, 6])}, ValueError, "^cu_seqlens_q"),
        (Q, {"cu_seqlens_q": torch.tensor([0.0, 6.0])}, ValueError, "^cu_seqlens_q has the dtype float32; allowed: int32"),
        (Q, {"max_seqlen_q": 3}, ValueError, "max_seqlen_q"),
        (Q, {"algorithm": "standard"}, NotImplementedError, "^algorithm standard of backend cpu does not compute"),
    ],
)
def test_refused(q, options, error, message):
    with pytest.raises(error, match=message):
        fattn.attention_varlen(q, Q, Q, **{"cu_seqlens_q": torch.tensor([0, 2, 6])} | options)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.filterwarnings("error")  # torch warns where it has to batch by itself
def test_vmap(with_bias):
    torch.manual_seed(0)
    q, v, k = torch.randn(3, 9, 2, 8), torch.randn(3, 9, 2, 8), torch.randn(9, 2, 8)
    bias = torch.randn(3, 5, 5)

    def f(q, k, v, bias):
        cu_seqlens = torch.tensor([0, 4, 9], dtype=torch.int32)
        return fattn.attention_varlen(q, k, v, cu_seqlens_q=cu_seqlens, max_seqlen_q=5, max_seqlen_k=5, bias=bias if with_bias else None)

    dims = (0, None, 0, 0)
    singles = [(q[i], k, v[i], bias[i]) for i in range(3)]
    agree(torch.vmap(f, dims)(q, k, v, bias), torch.stack([f(*x) for x in singles]), 8, 5)  # q k, over the keys
    gradient = torch.func.grad(lambda *x: f(*x).square().sum(), (0, 1, 2, 3) if with_bias else (0, 1, 2))
    for got, expected in zip(torch.vmap(gradient, dims)(q, k, v, bias), zip(*(gradient(*x) for x in singles))):
        agree(got, torch.stack(expected), 3 * 8, 5, 5)  # q k, dout v, dout o; over the keys, over the queries


# The keys of the sequences of ENDS_K in another order, with gaps; the last number is nobody's.
SCATTERED, PLACES = [26, 16, 3, 32], 40


def scattered(k: torch.Tensor, used: list[int]) -> torch.Tensor:
    """As `k`, what is used of each sequence where SCATTERED says, NaN elsewhere."""
    x = torch.full((PLACES, *k.shape[1:]), torch.nan, dtype=k.dtype)
    for b, n in enumerate(used):
        x[SCATTERED[b] : SCATTERED[b] + n] = k.detach()[ENDS_K[b] : ENDS_K[b] + n]
    return x.requires_grad_()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_keys_in_any_order(dtype, causal):
    """With seqused_k only the beginnings of cu_seqlens_k are read, and the longest is that of the used; as flash_attn."""
    q, k, v = packed(dtype)
    used = [6, 2, 5, 0]
    options = {"seqused_k": torch.tensor(used), "causal": causal, "return_lse": True, "window": (4, 2), "bias": everything(dtype)["bias"]}
    wanted = fattn.attention_varlen(q, k, v, **lengths(), **options)
    a, b = scattered(k, used), scattered(v, used)
    got = fattn.attention_varlen(q, a, b, cu_seqlens_q=torch.tensor(ENDS_Q), cu_seqlens_k=torch.tensor([*SCATTERED, -5]), **options)
    assert all(map(torch.equal, got, wanted))
    dk, dv = torch.autograd.grad(got[0].float().square().sum(), (a, b))
    for x, y in zip((dk, dv), torch.autograd.grad(wanted[0].float().square().sum(), (k, v))):
        rest = torch.ones(PLACES, dtype=torch.bool)
        for i, n in enumerate(used):
            assert torch.equal(x[SCATTERED[i] : SCATTERED[i] + n], y[ENDS_K[i] : ENDS_K[i] + n])
            rest[SCATTERED[i] : SCATTERED[i] + n] = False
        assert rest.any() and not x[rest].any(), "keys that no sequence uses"


def test_most_used_keys_are_the_longest():
    q, k, v = (torch.randn(n, 2, 8) for n in (6, 512, 512))
    begins, used = torch.tensor([0, 256, 512]), torch.tensor([200, 253])
    ends = torch.tensor([0, 2, 6])
    o = fattn.attention_varlen(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=begins, max_seqlen_q=4, max_seqlen_k=253, seqused_k=used)
    parts = [fattn.attention(q[None, i:j], k[None, m : m + n], v[None, m : m + n])[0] for i, j, m, n in ((0, 2, 0, 200), (2, 6, 256, 253))]
    agree(o, torch.cat(parts), 8, 253)  # q k, over the keys
    assert torch.equal(fattn.attention_varlen(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=begins, seqused_k=used), o)
    with pytest.raises(ValueError, match=r"seqused_k\[1\] is 253; allowed: 0 to max_seqlen_k, 252"):
        fattn.attention_varlen(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=begins, max_seqlen_q=4, max_seqlen_k=252, seqused_k=used)
    with pytest.raises(ValueError, match=r"cu_seqlens_k\[0\] is 513; allowed: 0 to total_k, 512, with seqused_k in any order"):
        fattn.attention_varlen(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=torch.tensor([513, 0, 0]), seqused_k=used)
    with pytest.raises(ValueError, match=r"seqused_k\[0\] is 200; allowed: 0 to 199, the rows of k from cu_seqlens_k\[0\] on"):
        fattn.attention_varlen(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=torch.tensor([313, 0, 0]), seqused_k=used)


def test_shared_keys():
    """Several sequences may have the same keys, but no gradients of them."""
    q, k, v = (torch.randn(n, 2, 8, requires_grad=True) for n in (6, 9, 9))
    options = {"cu_seqlens_q": torch.tensor([0, 2, 6]), "cu_seqlens_k": torch.tensor([1, 3, 0]), "seqused_k": torch.tensor([5, 6])}
    o = fattn.attention_varlen(q, k, v, **options)
    agree(o[2:], fattn.attention(q[None, 2:], k[None, 3:], v[None, 3:])[0], 8, 6)  # q k, over the keys
    with pytest.raises(ValueError, match="^sequences 0 and 1 use the same keys"):
        o.sum().backward()
