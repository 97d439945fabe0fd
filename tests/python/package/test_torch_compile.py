"""fattn.attention under torch.compile, torch.export and torch.func, and the operators under torch's own check of them."""

import pytest
import torch
import torch._dynamo.testing

import fattn
from fattn import _operators

torch._dynamo.config.cache_size_limit = 64


def inputs(requires_grad=True, seqlen=9, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(2, n, h, 16, dtype=dtype).requires_grad_(requires_grad) for n, h in ((seqlen, 4), (seqlen + 2, 2), (seqlen + 2, 2))]


def causal(q, k, v):
    return fattn.attention(q, k, v, causal=True)


def test_opcheck():
    q, k, v = inputs(False)
    swapped = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    bhsd = [x.transpose(1, 2) for x in (q, k, v)]
    for options in ((), (0.25, True, False, False, 4, -1, 20.0, 0, 0)):
        torch.library.opcheck(_operators.forward, (q, k, v, *options))
        torch.library.opcheck(_operators.forward, (*swapped, *options))
        o, lse = _operators.forward(q, k, v, *options)
        torch.library.opcheck(_operators.backward, (o, q, k, v, o, lse, *options))
    options = (None, True, False, True)
    torch.library.opcheck(_operators.forward, (*bhsd, *options))
    o, lse = _operators.forward(*bhsd, *options)
    torch.library.opcheck(_operators.backward, (o, *bhsd, o, lse, *options))
    torch.library.opcheck(_operators.forward_out, (*bhsd, o.clone(), lse.clone(), *options))
    torch.library.opcheck(_operators.backward_out, (o, *bhsd, o, lse, *(torch.empty_like(x) for x in bhsd), *options))


@pytest.mark.parametrize(("backend", "layout"), [("eager", "bshd"), ("aot_eager", "bhsd"), ("inductor", "bshd")])
def test_compile_without_a_break(backend, layout):
    def loss(q, k, v):
        if layout == "bhsd":
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        o, lse = fattn.attention(q, k, v, causal=True, return_lse=True, layout=layout)
        return (o * o).sum() + lse.sum(), lse

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    leaves, again = inputs(), inputs()
    expected, lse = loss(*leaves)
    expected.backward()
    got, lse_again = compiled(*again)
    got.backward()
    torch.testing.assert_close(got, expected)
    assert torch.equal(lse_again, lse)
    for x, y in zip(again, leaves):
        torch.testing.assert_close(x.grad, y.grad)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*again)[0], expected)


@pytest.mark.parametrize("case", ["q is k", "documents", "packed"])
def test_compile_with_a_tensor_given_twice(case):
    """torch.compile takes none twice for an autograd.Function."""
    ids = torch.tensor([0, 3, 9], dtype=torch.int32)

    def call(x):
        if case == "packed":
            return fattn.attention_varlen(x[0], x[0], x[0], cu_seqlens_q=ids, cu_seqlens_k=ids, max_seqlen_q=6, max_seqlen_k=6)
        numbers = {"document_q": torch.searchsorted(ids, torch.arange(9), right=True, out_int32=True).expand(2, 9)} if case == "documents" else {}
        return fattn.attention(x, x, x, causal=True, **numbers)

    torch._dynamo.reset()
    leaf = inputs()[0]
    wanted = torch.autograd.grad(call(leaf).square().sum(), leaf)[0]
    got = torch.autograd.grad(torch.compile(call, fullgraph=True, backend="aot_eager")(leaf).square().sum(), leaf)[0]
    torch.testing.assert_close(got, wanted)


def test_dynamic_lengths_compile_once():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(causal, fullgraph=True, dynamic=True, backend=counter)
    for seqlen in (9, 12, 17, 33):
        x = inputs(seqlen=seqlen)
        o = compiled(*x)
        torch.testing.assert_close(o, causal(*x))
        o.sum().backward()
    assert counter.frame_count == 1


def test_compile_says_what_is_wrong():
    torch._dynamo.reset()
    q, k, v = inputs(False)
    with pytest.raises(Exception, match="k has the shape"):
        torch.compile(causal, backend="eager")(q, k[..., :8], v)


def test_export():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return causal(q, k, v)

    x = inputs(False)
    exported = torch.export.export(Model(), tuple(x))
    assert [str(node.target) for node in exported.graph.nodes].count("fattn.forward.default") == 1
    assert torch.equal(exported.module()(*x), causal(*x))


def test_meta_and_fake_tensors():
    q, k, v = (x.to("meta") for x in inputs(False))
    assert causal(q, k, v).shape == q.shape
    with torch._subclasses.FakeTensorMode() as mode:
        o, lse = fattn.attention(*(mode.from_tensor(torch.empty(x.shape)) for x in (q, k, v)), return_lse=True)
    assert o.shape == q.shape and lse.shape == (2, 4, 9)


def test_func_grad():
    x = inputs()
    expected = torch.autograd.grad(causal(*x).square().sum(), x)
    got = torch.func.grad(lambda *x: causal(*x).square().sum(), argnums=(0, 1, 2))(*(y.detach() for y in x))
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b)
    with pytest.raises(Exception, match="no second derivative"):
        torch.func.grad(lambda q: torch.func.grad(lambda q: causal(q, *x[1:]).sum())(q).sum())(x[0].detach())


@pytest.mark.parametrize("return_lse", [False, True])
def test_tensors_that_outlive_a_transform(return_lse):
    """Taken out of a function that torch.func differentiated, they are what they stood for, and differentiable as that is."""
    x, kept = inputs(), []

    def f(*y):
        kept.extend(y)
        return causal(*y).sum()

    torch.func.grad(f)(*x)
    o = fattn.attention(*kept, causal=True, return_lse=return_lse)
    got = torch.autograd.grad((o[0] if return_lse else o).square().sum(), x)
    for a, b in zip(got, torch.autograd.grad(causal(*x).square().sum(), x)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (2, 0, None), (None, 1, 1)])
def test_vmap(in_dims):
    torch.manual_seed(0)
    stacked = []
    for x, dim in zip(inputs(False), in_dims):
        stacked.append(x if dim is None else torch.randn(*x.shape[:dim], 3, *x.shape[dim:]))
    single = [[x if dim is None else x.select(dim, i) for x, dim in zip(stacked, in_dims)] for i in range(3)]
    torch.testing.assert_close(torch.vmap(causal, in_dims)(*stacked), torch.stack([causal(*x) for x in single]))
    gradient = torch.func.grad(lambda *x: causal(*x).square().sum(), argnums=(0, 1, 2))
    for got, expected in zip(torch.vmap(gradient, in_dims)(*stacked), zip(*(gradient(*x) for x in single))):
        torch.testing.assert_close(got, torch.stack(expected))
