"""What fattn.attention adds to scores, hides and drops: lengths, ALiBi, bias and its gradient, masks, dropout; on torch tensors, under its transforms."""

import pytest
import torch

import fattn
from attention_cases import SCORE_CASES, Case, names
from fattn import _operators
from torch_cases import agree, check, leaves, scores_of, supported

PLAIN = Case(batch=2, seqlen_k=40, nheads=4)


@pytest.mark.parametrize("case", **names(SCORE_CASES))
def test_case(case, device):
    (q, k, v), dout = leaves(case, device)
    scores = scores_of(case, device)
    if not (support := supported(case, device)):
        with pytest.raises(NotImplementedError) as refusal:
            fattn.attention(q, k, v, **case.options, **scores)
        assert str(refusal.value) == support.reason
        return
    o, lse = fattn.attention(q, k, v, return_lse=True, **case.options, **scores)
    check(case, "o", o)
    check(case, "lse", lse)
    with torch.no_grad():
        assert torch.equal(fattn.attention(q, k, v, **case.options, **scores), o)
    if not (support := supported(case, device, backward=True)):
        with pytest.raises(NotImplementedError) as refusal:
            o.backward(dout)
        assert str(refusal.value) == support.reason
        return
    o.backward(dout)
    for name, x in (("dq", q), ("dk", k), ("dv", v), ("dbias", scores.get("bias"))):
        if x is not None:
            check(case, name, x.grad)


def float64(nheads=2) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, n, nheads, 5, dtype=torch.float64, requires_grad=True) for n in (6, 7, 7)]


@pytest.mark.parametrize("shape", [(2, 2, 6, 7), (6, 7), (2, 1, 1, 7), (1, 2, 6, 1), (7,), ()])
def test_gradcheck_of_bias(shape):
    bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    options = {"softcap": 3.0, "mask": torch.rand(6, 7) > 0.2, "dropout_p": 0.3, "dropout_state": torch.tensor([3, 5]), "seqused_k": torch.tensor([7, 4])}
    assert torch.autograd.gradcheck(lambda q, k, v, bias: fattn.attention(q, k, v, bias=bias, backend="reference", **options), (*float64(), bias))


def test_gradient_of_the_bias_alone():
    (q, k, v), dout = leaves(PLAIN, "cpu")
    bias = torch.zeros(4, 33, 40, requires_grad=True)
    (alone,) = torch.autograd.grad(fattn.attention(q.detach(), k.detach(), v.detach(), bias=bias), bias, dout)
    (wanted,) = torch.autograd.grad(fattn.attention(q, k, v, bias=bias), bias, dout)
    assert alone.shape == bias.shape and torch.equal(alone, wanted) and alone.abs().max() > 0


def test_layouts_and_strides():
    (q, k, v), _ = leaves(PLAIN, "cpu")
    bias, mask = torch.randn(2, 4, 40, 33).mT, torch.rand(2, 4, 40, 33).mT > 0.3  # keys are not contiguous
    wanted = fattn.attention(q, k, v, bias=bias.contiguous(), mask=mask.contiguous().to(torch.uint8))
    assert torch.equal(fattn.attention(q, k, v, bias=bias, mask=mask), wanted)
    swapped = fattn.attention(*(x.transpose(1, 2) for x in (q, k, v)), bias=bias, mask=mask, layout="bhsd")
    assert torch.equal(swapped.transpose(1, 2), wanted)


def test_dropout_follows_the_generator():
    (q, k, v), dout = leaves(PLAIN, "cpu")

    def run(**options):
        torch.manual_seed(5)
        return fattn.attention(q, k, v, dropout_p=0.5, return_dropout_state=True, **options)

    o, state = run()
    assert torch.equal(run()[0], o) and state.shape == (2,)
    other = fattn.attention(q, k, v, dropout_p=0.5)
    assert not torch.equal(other, o)
    again, lse, same_state = run(return_lse=True, dropout_state=state)
    assert torch.equal(again, o) and same_state is state
    with torch.no_grad():
        assert torch.equal(lse, fattn.attention(q, k, v, return_lse=True)[1]), "lse knows nothing of dropout"
    assert fattn.attention(q, k, v, return_dropout_state=True)[1] is None
    assert torch.equal(fattn.attention(q, k, v, dropout_state=state), fattn.attention(q, k, v))
    torch.manual_seed(5)
    checkpointed = torch.utils.checkpoint.checkpoint(lambda *x: fattn.attention(*x, dropout_p=0.5), q, k, v, use_reentrant=False)
    wanted = torch.autograd.grad(o, (q, k, v), dout)
    for x, y in zip(torch.autograd.grad(checkpointed, (q, k, v), dout), wanted):
        assert torch.equal(x, y)


def test_documents_of_keys_are_those_of_queries():
    """Unless they are given; any strides between batch entries; what a document sees is what it would see alone."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 8, 2, 16) for _ in range(3))
    ids = torch.tensor([4, 4, 4, 2, 2, 2, 2, 2], dtype=torch.int32)
    o = fattn.attention(q, k, v, causal=True, document_q=ids.expand(2, 8))
    assert torch.equal(o, fattn.attention(q, k, v, causal=True, document_q=ids.repeat(2, 1), document_k=ids.repeat(2, 1)))
    for rows in (slice(0, 3), slice(3, 8)):
        agree(o[:, rows], fattn.attention(q[:, rows], k[:, rows], v[:, rows], causal=True), 16, 8)  # q k, over the keys


def test_mean_of_dropout():
    """Of 100 states: each weight is kept with its probability, and the mean is what it is without."""
    q, v = torch.zeros(1, 64, 4, 8), torch.ones(1, 64, 4, 8)
    outputs = torch.stack([fattn.attention(q, q, v, dropout_p=0.25) for _ in range(100)])
    assert abs(outputs.mean().item() - 1) < 5 * (0.25 / 0.75 / outputs[..., 0].numel() / 64) ** 0.5


def test_autocast_keeps_the_bias():
    (q, k, v), _ = leaves(PLAIN, "cpu")
    bias = torch.randn(33, 40, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = fattn.attention(q, k, v, bias=bias)
    assert o.dtype == torch.bfloat16
    o.float().sum().backward()
    assert bias.grad.dtype == torch.float32 and q.grad.dtype == torch.float32
    assert torch.equal(o, fattn.attention(*(x.bfloat16() for x in (q, k, v)), bias=bias))


def documents() -> dict[str, torch.Tensor]:
    ids = torch.tensor([0, 0, 0, 5, 5, 5, 5, 7, 7, 7, 7], dtype=torch.int32)
    return {"document_q": torch.stack([ids[2:], ids[:9]]), "document_k": ids.expand(2, 11)}


def everything(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {"seqused_k": torch.tensor([11, 6], dtype=torch.int32), "alibi_slopes": torch.rand(4), "bias": torch.randn(1, 4, 9, 11),
            "mask": torch.rand(2, 1, 9, 11) > 0.2, "dropout_state": torch.tensor([1, 2]), **documents()}


TERMS = 3 * 16, 11, 2 * 9  # of small(): q k, dout v, dout o; over the keys, over the queries of two heads


def small(requires_grad: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, n, h, 16).requires_grad_(requires_grad) for n, h in ((9, 4), (11, 2), (11, 2))]


def test_opcheck():
    q, k, v = small()
    arguments = (None, True, False, False, -1, -1, 0.0, 0, 0, 0.25, False, False, *everything().values(), torch.ones(4), None, None, None)
    torch.library.opcheck(_operators.forward_with_scores, (q, k, v, *arguments))
    o, lse = _operators.forward_with_scores(q, k, v, *arguments)
    torch.library.opcheck(_operators.backward_with_scores, (o, q, k, v, o, lse, *arguments))
    for wanted in ((True, True), (False, True), (True, False)):
        torch.library.opcheck(_operators.backward_with_more, (o, q, k, v, o, lse, *arguments, None, *wanted))
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    torch.library.opcheck(_operators.forward_out, (q, k, v, o.clone(), lse.clone(), *arguments))
    torch.library.opcheck(_operators.backward_out, (o, q, k, v, o, lse, *gradients, *arguments))


def test_compiled_and_exported():
    options = everything()
    bias, state = options.pop("bias"), options.pop("dropout_state")

    class Model(torch.nn.Module):
        def forward(self, q, k, v, bias):
            return fattn.attention(q, k, v, bias=bias, causal=True, dropout_p=0.25, dropout_state=state, **options)

    torch._dynamo.reset()
    leaves, again = [[*small(True), bias.clone().requires_grad_()] for _ in range(2)]
    expected = Model()(*leaves)
    expected.square().sum().backward()
    got = torch.compile(Model(), fullgraph=True, backend="aot_eager")(*again)
    got.square().sum().backward()
    assert torch.equal(got, expected)
    for x, y in zip(again, leaves):
        assert torch.equal(x.grad, y.grad)
    with torch.no_grad():
        exported = torch.export.export(Model(), tuple(leaves))
        assert torch.equal(exported.module()(*leaves), expected)


def test_dropout_compiled_without_a_state():
    """Forward and backward see the same numbers, and another call others."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: fattn.attention(*x, dropout_p=0.5, return_dropout_state=True), fullgraph=True, backend="inductor")
    x = small(True)
    o, state = compiled(*x)
    assert not torch.equal(compiled(*x)[1], state)
    wanted = fattn.attention(*x, dropout_p=0.5, dropout_state=state)
    assert torch.equal(o, wanted)
    for got, expected in zip(torch.autograd.grad(o.sum(), x), torch.autograd.grad(wanted.sum(), x)):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("options", [{}, {"bias": torch.zeros(1)}, {"return_lse": True}])
def test_vmap_over_no_entries(options):
    q, k, v = small()
    shape = torch.vmap(lambda x: fattn.attention(x, k, v, **options))(torch.stack([q] * 2)[:0])
    assert (shape[0] if "return_lse" in options else shape).shape == (0, *q.shape[:3], v.shape[3])


@pytest.mark.parametrize("batched", ["q", "bias", "lengths", "state", "documents"])
def test_func_grad_and_vmap(batched):
    q, k, v = small()
    options = everything()

    def stack(x):
        return torch.stack([x, x.flip(0), x.roll(1, 0)])

    names = {"q": "", "bias": "bias", "lengths": "seqused_k", "state": "dropout_state", "documents": "document_q"}
    if batched == "lengths":  # alone: folded into the batch
        options = {"seqused_k": options["seqused_k"]}
    if batched == "documents":
        options = documents()
    given = options.pop(names[batched]) if names[batched] else None
    dropout_p = 0.25 if "dropout_state" in options or batched == "state" else 0.0

    def f(q, k, v, x):
        extra = {} if x is None else {names[batched]: x}
        return fattn.attention(q, k, v, causal=True, dropout_p=dropout_p, **options, **extra)

    several = stack(q), k, v, None if given is None else stack(given)
    dims = (0, None, None, None if given is None else 0)
    singles = [(several[0][i], k, v, None if given is None else several[3][i]) for i in range(3)]
    agree(torch.vmap(f, dims)(*several), torch.stack([f(*x) for x in singles]), *TERMS)
    argnums = (0, 1, 2, 3) if batched == "bias" else (0, 1, 2)
    gradient = torch.func.grad(lambda *x: f(*x).square().sum(), argnums=argnums)
    for got, expected in zip(torch.vmap(gradient, dims)(*several), zip(*(gradient(*x) for x in singles))):
        agree(got, torch.stack(expected), *TERMS)


Q = torch.ones(1, 4, 2, 8)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bias": Q.numpy()}, TypeError, "^bias is a ndarray; it must be a torch.Tensor or None"),
        ({"bias": torch.ones(4, 5)}, ValueError, r"^bias has the shape \(1, 1, 4, 5\); expected \(batch or 1, nheads or 1, seqlen_q or 1, seqlen_k\)"),
        ({"bias": torch.ones(1, 1, 1, 4, 4)}, ValueError, "^bias has 5 dimensions; allowed: up to 4"),
        ({"bias": torch.ones(4, 4, dtype=torch.int64)}, ValueError, "^bias has the dtype int64; allowed: float32"),
        ({"bias": torch.ones(4, 4, dtype=torch.float64)}, ValueError, "^bias is a tensor of torch.float64; allowed: torch.float32 and q's dtype"),
        ({"dropout_p": "0.1"}, TypeError, "^p_dropout is of the type str; it must be of the type float"),
        ({"mask": torch.ones(4, 4)}, ValueError, "^mask has the dtype float32; allowed: bool, uint8. Numbers that are added to the scores are a bias"),
        ({"seqused_k": torch.tensor([5])}, ValueError, r"^seqused_k\[0\] is 5; allowed: 0 to seqlen_k, 4"),
        ({"seqused_k": torch.tensor([2**40])}, ValueError, r"^seqused_k\[0\] is 2147483647; allowed: 0 to seqlen_k, 4"),
        ({"seqused_k": torch.tensor([1, 2])}, ValueError, r"^seqused_k has the shape \(2\)"),
        ({"seqused_k": torch.tensor([1.0])}, ValueError, "^seqused_k has the dtype float32; allowed: int32"),
        ({"alibi_slopes": torch.ones(3)}, ValueError, r"^alibi_slopes has the shape \(3\)"),
        ({"alibi_slopes": torch.ones(2, requires_grad=True)}, NotImplementedError, "^alibi_slopes asks for a gradient, which is not computed; detach it"),
        ({"document_q": torch.zeros(1, 4, dtype=torch.int64)}, ValueError, r"^document_q is a tensor of torch.int64; allowed: torch.int32. Convert it with"),
        ({"document_k": torch.zeros(1, 4, dtype=torch.int32)}, ValueError, "^document_q is absent, and document_k is not; give the ids of queries and of keys"),
        ({"document_q": torch.zeros(4, dtype=torch.int32)}, ValueError, r"^document_q has 1 dimensions; allowed: 2 \(batch, seqlen\)"),
        ({"document_q": torch.zeros(1, 5, dtype=torch.int32)}, ValueError, r"^document_q has the shape \(1, 5\); expected \(1, 4\)"),
        ({"document_q": [0, 0, 0, 0]}, TypeError, "^document_q is a list; it must be a torch.Tensor or None"),
        ({"dropout_p": 1.0}, ValueError, "^p_dropout is 1; allowed: 0"),
        ({"dropout_p": -0.5}, ValueError, "^p_dropout is -0.5"),
        ({"dropout_p": 0.5, "dropout_state": torch.ones(2)}, ValueError, "^dropout_state has the dtype float32; allowed: int64"),
        ({"dropout_p": 0.5, "dropout_state": torch.ones(3, dtype=torch.int64)}, ValueError, r"^dropout_state has the shape \(3\)"),
        ({"mask": torch.ones(4, 4, dtype=torch.bool), "algorithm": "standard"}, NotImplementedError, "^algorithm standard of backend cpu does not compute a mask"),
    ],
)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_refused(options, error, message, requires_grad):
    with pytest.raises(error, match=message):
        fattn.attention(Q.clone().requires_grad_(requires_grad), Q, Q, **options)
