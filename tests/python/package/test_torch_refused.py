"""What is refused: the message names what was given and the way out, and nothing is silently wrong."""

import pytest
import torch
from torch.autograd import forward_ad

import fattn
import fattn.numpy

X = torch.randn(1, 4, 2, 8)
BEGINS = torch.tensor([0, 4])


def packed(**options):
    return fattn.attention_varlen(X[0], X[0], X[0], cu_seqlens_q=BEGINS, **options)


def plain(**options):
    return fattn.attention(X, X, X, **options)


@pytest.mark.parametrize("function", [plain, packed])
@pytest.mark.parametrize(("name", "value"), [("softmax_scale", 0.5), ("softcap", 2.0), ("dropout_p", 0.25)])
def test_gradient_of_a_number(function, name, value):
    """Given as a tensor it would be taken, and its gradient lost."""
    x = torch.tensor(value, requires_grad=True)
    message = f"^{name} is a tensor that asks for a gradient or is mapped over, which is not computed; .*{name}.item"
    with pytest.raises(NotImplementedError, match=message):
        function(**{name: x})
    with pytest.raises(NotImplementedError, match=message):
        torch.func.grad(lambda x: function(**{name: x}).sum())(x.detach())
    with pytest.raises(NotImplementedError, match=message):
        torch.func.vmap(lambda x: function(**{name: x}))(x.detach().expand(2))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=message):
        function(**{name: forward_ad.make_dual(x.detach(), torch.ones(()))})
    torch.manual_seed(0)
    wanted = function(**{name: value})
    torch.manual_seed(0)
    with torch.no_grad():
        assert torch.equal(function(**{name: x}), wanted)


def test_gradient_of_softmax_scale_by_q():
    """The way out that the message names."""
    scale = torch.tensor(0.5, requires_grad=True, dtype=torch.float64)
    x = X.double()
    assert torch.autograd.gradcheck(lambda s: fattn.attention(x * s, x, x, softmax_scale=1, backend="reference"), scale)


def with_bias(x):
    return fattn.attention(X, X, X, bias=x[0, :, 0, :4])


@pytest.mark.parametrize("f", [lambda x: fattn.attention(x, x, x), lambda x: fattn.attention(X, X, x, return_lse=True)[0], with_bias,
                               lambda x: fattn.attention_varlen(x[0], x[0], x[0], cu_seqlens_q=BEGINS)])
def test_forward_mode(f):
    message = "^fattn.attention has no derivative in forward mode .*; take reverse mode"
    with pytest.raises(NotImplementedError, match=message):
        torch.func.jvp(f, (X,), (X,))
    with pytest.raises(NotImplementedError, match=message):
        torch.func.jacfwd(f)(X)
    with pytest.raises(NotImplementedError, match=message):
        torch.func.hessian(lambda x: f(x).sum())(X)
    for context in (torch.enable_grad, torch.no_grad):
        with forward_ad.dual_level(), context(), pytest.raises(NotImplementedError, match=message):
            f(forward_ad.make_dual(X, X))


def test_forward_mode_of_a_cache():
    with pytest.raises(NotImplementedError, match="^fattn.attention has no derivative in forward mode"):
        torch.func.jvp(lambda x: fattn.with_kvcache(x, X, X, cache_seqlens=4), (X,), (X,))


def test_second_derivatives():
    for hessian in (torch.autograd.functional.hessian, lambda f, x: torch.func.jacrev(torch.func.jacrev(f))(x)):
        with pytest.raises(NotImplementedError, match="^fattn.attention has no second derivative; .*SDPBackend.MATH"):
            hessian(lambda x: fattn.attention(x, x, x).sum(), X)


SPARSE = X.to_sparse()


@pytest.mark.parametrize(
    ("f", "name"),
    [
        (lambda: fattn.attention(SPARSE, X, X), "q"),
        (lambda: fattn.attention(X, SPARSE, X), "k"),
        (lambda: fattn.attention(X, X, SPARSE), "v"),
        (lambda: fattn.attention(X, X, X, mask=torch.ones(4, 4).bool().to_sparse()), "mask"),
        (lambda: fattn.attention(X, X, X, bias=torch.ones(4, 4).to_sparse()), "bias"),
        (lambda: fattn.attention(X, X, X, sinks=torch.ones(2).to_sparse()), "sinks"),
        (lambda: fattn.attention_varlen(X[0], X[0].to_sparse(), X[0], cu_seqlens_q=BEGINS), "k"),
        (lambda: fattn.attention_varlen(X[0], X[0], X[0], cu_seqlens_q=BEGINS.to_sparse()), "cu_seqlens_q"),
        (lambda: fattn.attention_qkvpacked(torch.ones(1, 4, 3, 2, 8).to_sparse()), "qkv"),
        (lambda: fattn.attention_kvpacked(X, torch.ones(1, 4, 2, 2, 8).to_sparse()), "kv"),
        (lambda: fattn.with_kvcache(X, X, SPARSE, cache_seqlens=4), "v_cache"),
        (lambda: fattn.with_kvcache(X, X, X.clone(), SPARSE, X, cache_seqlens=0), "k"),
    ],
)
def test_sparse(f, name):
    with pytest.raises(NotImplementedError, match=rf"^{name} is of torch's kind torch.sparse_coo, which fattn does not compute; .*to_dense\(\)"):
        f()


NESTED = torch.nested.nested_tensor([X[0]])


@pytest.mark.parametrize(
    ("f", "name"),
    [
        (lambda: plain(mask=NESTED), "mask"),
        (lambda: plain(bias=NESTED), "bias"),
        (lambda: packed(cu_seqlens_k=NESTED), "cu_seqlens_k"),
        (lambda: fattn.with_kvcache(X, NESTED, X, cache_seqlens=4), "k_cache"),
        (lambda: fattn.with_kvcache(X, X, X, cache_seqlens=NESTED), "cache_seqlens"),
        (lambda: fattn.merge(NESTED, X[..., 0]), "o1"),
        (lambda: fattn.rotary(NESTED, X[0, 0], X[0, 0]), "x"),
        (lambda: fattn.cascade(X, X[0], X[0], NESTED, X), "k"),
        (lambda: fattn.weights(NESTED, X, rows=[0]), "q"),
    ],
)
def test_nested(f, name):
    """Those whose layout is strided have no sizes that one could ask for."""
    with pytest.raises(NotImplementedError, match=f"^{name} is of torch's kind NestedTensor, which fattn does not compute; .*fattn.attention_varlen"):
        f()


@pytest.mark.parametrize("function", [plain, packed])
@pytest.mark.parametrize("name", ["softmax_scale", "softcap", "dropout_p"])
def test_tensors_that_are_no_number(function, name):
    with pytest.raises(ValueError, match=rf"^{name} is a tensor with the shape \(2,\); allowed: a number, or a tensor of one"):
        function(**{name: torch.ones(2)})


def test_lengths_of_pages_that_no_tensor_holds():
    caches = torch.zeros(2, 3, 4, 2, 8)
    for number in (-1, 2**31):
        with pytest.raises(ValueError, match=f"cache_seqlens is {number}; allowed: 0 to 2147483647"):
            fattn.with_kvcache(X, *caches, cache_seqlens=number, block_table=torch.tensor([[0, 1]]))
    with pytest.raises(TypeError, match="cache_seqlens is a float; it must be an int or a torch.Tensor"):
        fattn.with_kvcache(X, *caches, cache_seqlens=1.5, block_table=torch.tensor([[0, 1]]))


@pytest.mark.parametrize("f", [lambda x: fattn.attention(X, x, X), lambda x: fattn.attention(x, X, X), lambda x: fattn.attention(X, X, X, mask=x[0, :, 0, :4].bool()),
                               lambda x: fattn.attention_varlen(X[0], X[0], x[0], cu_seqlens_q=BEGINS),
                               lambda x: fattn.attention(X, X, x.requires_grad_()).sum().backward()])
def test_meta_beside_others(f):
    """torch has only shapes computed then: the result would be memory that nothing was written to."""
    with pytest.raises(ValueError, match="is on (meta|cpu) and q on (meta|cpu); all tensors of a call must be on one device"):
        f(X.to("meta"))


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("window_size", (1, 1), r"window=\(left, right\) is meant"),
        ("is_causal", True, "causal is meant"),
        ("attn_mask", None, r"mask \(bool, True: seen\) or bias"),
        ("dropout", 0.1, "dropout_p is meant"),
        ("scale", 1.0, "softmax_scale is meant"),
        ("enable_gqa", True, "nothing needs to be said"),
        ("return_attn_probs", True, "return_lse is meant"),
        ("s_aux", None, "sinks is meant"),
        ("page_table", None, "block_table is meant"),
        ("num_splits", 1, "nothing needs to be said: the library plans it"),
        ("softmax_scal", 1.0, "did you mean 'softmax_scale'?"),
        ("zzz", 1, "allowed: .*causal"),
    ],
)
def test_names_of_other_libraries(name, value, meant):
    q = X.numpy()
    shape = X.shape
    for function, call in (
        ("attention", lambda o: plain(**o)),
        ("attention_varlen", lambda o: packed(**o)),
        ("attention", lambda o: fattn.attention_qkvpacked(torch.ones(1, 4, 3, 2, 8), **o)),
        ("attention", lambda o: fattn.attention_kvpacked(X, torch.ones(1, 4, 2, 2, 8), **o)),
        ("attention", lambda o: fattn.with_kvcache(X, X, X, cache_seqlens=4, **o)),
        ("numpy.forward", lambda o: fattn.numpy.forward(q, q, q, **o)),
        ("numpy.backward", lambda o: fattn.numpy.backward(q, q, q, q, q, q, **o)),
        ("support", lambda o: fattn.support(shape, shape, **o)),
        ("plan", lambda o: fattn.plan(shape, shape, **o)),
        ("plan", lambda o: fattn.warmup(shape, shape, **o)),
    ):
        with pytest.raises(TypeError, match=f"^fattn.{function} has no option '{name}'[:;] {meant}"):
            call({name: value})


def test_seqused_q():
    for function in (plain, packed):
        with pytest.raises(NotImplementedError, match="seqused_q is not computed: .*cu_seqlens_q"):
            function(seqused_q=torch.ones(1, dtype=torch.int32))
