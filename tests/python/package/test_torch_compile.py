"""fattn.attention under torch.compile, torch.export and torch.func, and the operators under torch's own check of them."""

import pytest
import torch
import torch._dynamo.testing

import fattn
from fattn import _operators, compat
from torch_cases import agree

compat.install("flash_attn")
try:
    from flash_attn import flash_attn_func
finally:
    compat.uninstall()

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
    agree(got, expected, 11)  # sums of 2^10 numbers and a few, by halves, or in the compiler's order; what attention gives is the same
    assert torch.equal(lse_again, lse)
    for x, y in zip(again, leaves):
        assert torch.equal(x.grad, y.grad)
    with torch.no_grad():
        agree(compiled(*again)[0], expected, 11)


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
    agree(got, wanted, 3)  # three gradients are added, in the compiler's order


def test_dynamic_lengths_compile_once():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(causal, fullgraph=True, dynamic=True, backend=counter)
    for seqlen in (9, 12, 17, 33):
        x = inputs(seqlen=seqlen)
        o = compiled(*x)
        assert torch.equal(o, causal(*x))
        o.sum().backward()
    assert counter.frame_count == 1


BEGINS = torch.tensor([0, 4, 9], dtype=torch.int32)
CHANGING = {
    "window": lambda q, k, v, n: fattn.attention(q, k, v, causal=True, window=(n, 0)),
    "both limits": lambda q, k, v, n: fattn.attention(q, k, v, window=(n, n + 2), seqused_k=torch.tensor([8, 11])),
    "packed": lambda q, k, v, n: fattn.attention_varlen(q[0], k[0, :9], v[0, :9], cu_seqlens_q=BEGINS, max_seqlen_q=5, max_seqlen_k=5, window=(n, None)),
    "flash_attn": lambda q, k, v, n: flash_attn_func(q, k, v, window_size=(n, n)),
    "softmax_scale": lambda q, k, v, n: fattn.attention(q, k, v, softmax_scale=0.05 * n),
    "softcap": lambda q, k, v, n: fattn.attention(q, k, v, softcap=0.3 * n, softmax_scale=0.7, alibi_slopes=torch.ones(4)),
    "both numbers, packed": lambda q, k, v, n: fattn.attention_varlen(q[0], k[0, :9], v[0, :9], cu_seqlens_q=BEGINS, max_seqlen_q=5, max_seqlen_k=5,
                                                                     softmax_scale=0.1 * n, softcap=n + 0.5),
}


@pytest.mark.parametrize("what", CHANGING)
def test_numbers_that_change_compile_twice(what, request):
    """The second time torch has a symbol for the number. 20 of them, with gradients; and the same, with no recompilation, behind it."""
    if what == "flash_attn":
        request.addfinalizer(compat.uninstall)
        compat.install("flash_attn")  # torch 2.11 imports the module of a function by its name
    whole = what in ("window", "both limits", "packed", "flash_attn")
    old = torch.__version__ < "2.12"  # compiles a product of a float that changes anew for each value
    f, x = CHANGING[what], inputs(dtype=torch.float64)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(f, fullgraph=True, backend=counter)
    for n in range(2, 22):
        n = n if whole else 0.5 * n
        o, wanted = compiled(*x, n), f(*x, n)
        assert torch.equal(o, wanted), n
        for a, b in zip(torch.autograd.grad(o.square().sum(), x), torch.autograd.grad(wanted.square().sum(), x)):
            assert torch.equal(a, b), n
    assert counter.frame_count <= 2 or (old and not whole)


def test_a_number_that_changes_by_inductor():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(lambda q, k, v, n, scale: fattn.attention(q, k, v, window=(n, 0), softmax_scale=scale), fullgraph=True, backend=counter)
    x = inputs(False)
    for n in range(2, 8):
        assert torch.equal(compiled(*x, n, 0.1 * n), fattn.attention(*x, window=(n, 0), softmax_scale=0.1 * n))
    assert counter.frame_count <= 2


def test_a_constant_is_no_tensor_of_a_graph():
    """It would keep a graph from being one of CUDA."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    torch.compile(lambda *x: fattn.attention(*x, softmax_scale=0.3, softcap=2.0), fullgraph=True, backend=counter)(*inputs(False))
    targets = [node.target for node in counter.graphs[0].graph.nodes if node.op == "call_function"]
    assert [x for x in targets if "fattn" in str(x)] == [_operators.forward] and torch.ones not in targets


@pytest.mark.parametrize("x", [torch.ones(1, dtype=torch.float64), torch.ones(()), torch.ones((), dtype=torch.int64)])
def test_numbers_of_operators(x):
    """What the front makes of a symbol is checked all the same."""
    q, k, v = inputs(False)
    for name in _operators.NUMBERS:
        with pytest.raises(RuntimeError, match=f"{name} is a tensor of another kind; allowed: 0 dimensions, float64, on the CPU"):
            _operators.forward_with_scores(q, k, v, **{name: x})


def test_opcheck_with_numbers():
    q, k, v = inputs(False)
    numbers = {"softmax_scale_at": torch.tensor(0.3, dtype=torch.float64), "softcap_at": torch.tensor(2.0, dtype=torch.float64)}
    torch.library.opcheck(_operators.forward_with_scores, (q, k, v), numbers)
    assert torch.equal(_operators.forward_with_scores(q, k, v, **numbers)[0], fattn.attention(q, k, v, softmax_scale=0.3, softcap=2.0))


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
        assert torch.equal(a, b)
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
    agree(torch.vmap(causal, in_dims)(*stacked), torch.stack([causal(*x) for x in single]), 16, 11)  # q k, over the keys
    gradient = torch.func.grad(lambda *x: causal(*x).square().sum(), argnums=(0, 1, 2))
    for got, expected in zip(torch.vmap(gradient, in_dims)(*stacked), zip(*(gradient(*x) for x in single))):
        agree(got, torch.stack(expected), 3 * 16, 11, 2 * 9)  # q k, dout v, dout o; over the keys, over the queries of two heads


def test_cache_and_length_of_any_size():
    """Compiled once, with symbols for sizes and strides, which cannot be sorted."""
    torch.manual_seed(0)
    step = torch.compile(lambda x, caches, n: fattn.with_kvcache(x, *caches, x, x, cache_seqlens=n, causal=True), fullgraph=True, backend="aot_eager", dynamic=True)
    x = torch.randn(1, 3, 2, 8)
    for longest, n in ((20, 0), (20, 3), (31, 6)):
        compiled, eager = torch.zeros(2, 1, longest, 2, 8), torch.zeros(2, 1, longest, 2, 8)
        agree(step(x, compiled, n), fattn.with_kvcache(x, *eager, x, x, cache_seqlens=n, causal=True), 8, 9)  # q k, over the keys
        assert torch.equal(compiled, eager)
    with pytest.raises(Exception, match="reaches one element by two indices"):
        step(x, torch.zeros(2, 1, 20, 1, 8).expand(2, 1, 20, 2, 8), 0)
