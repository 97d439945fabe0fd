"""fattn.attention on torch tensors: the table of cases with gradients, layouts and strides, autocast, what has no gradient, what is refused."""

import functools
import gc
import itertools
import multiprocessing
import os
import pathlib
import threading
import weakref

import numpy as np
import pytest
import torch

import fattn
import fattn.numpy
from attention_cases import CASES, Case, names
from torch_cases import agree, check, leaves, plain, supported


@pytest.mark.parametrize("case", **names(CASES))
def test_case(case, device):
    (q, k, v), dout = leaves(case, device)
    if not (support := supported(case, device)):
        with pytest.raises(NotImplementedError) as refusal:
            fattn.attention(q, k, v, **case.options)
        assert str(refusal.value) == support.reason
        return
    o, lse = fattn.attention(q, k, v, return_lse=True, **case.options)
    assert o.dtype == q.dtype and lse.dtype == (torch.float64 if case.dtype == "float64" else torch.float32)
    check(case, "o", o)
    check(case, "lse", lse)
    with torch.no_grad():
        plain = fattn.attention(q, k, v, **case.options)
    assert torch.equal(plain, o) and plain.grad_fn is None
    o.backward(dout)
    for name, x in (("dq", q), ("dk", k), ("dv", v)):
        check(case, name, x.grad)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (2, 1)}, {"softcap": 1.5, "softmax_scale": 1.0}])
def test_gradcheck(options):
    q, k, v = (torch.randn(2, n, h, 5, dtype=torch.float64, requires_grad=True) for n, h in ((6, 4), (7, 2), (7, 2)))
    assert torch.autograd.gradcheck(lambda *x: fattn.attention(*x, backend="reference", **options), (q, k, v))


def test_gradient_of_some_inputs_only(device):
    case = plain(device, causal=True)
    (q, k, v), dout = leaves(case, device)
    (dk,) = torch.autograd.grad(fattn.attention(q.detach(), k, v.detach(), causal=True), k, dout)
    check(case, "dk", dk)


def same(case: Case, o, wanted_o, gradients, wanted) -> None:
    """The same bits on the CPU, where strides change none; within the bounds on a GPU, whose kernels depend on them."""
    check(case, "o", o)
    assert o.is_cuda or torch.equal(o, wanted_o)
    for name, x, y in zip(("dq", "dk", "dv"), gradients, wanted):
        check(case, name, x)
        assert x.is_cuda or torch.equal(x, y)


def test_bhsd_packed_and_any_strides(device):
    case = plain(device, causal=True)
    (q, k, v), dout = leaves(case, device)
    o = fattn.attention(q, k, v, causal=True)
    wanted = torch.autograd.grad(o, (q, k, v), dout)
    headdim_first = [x.detach().permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0) for x in (q, k, v)]
    packed = torch.cat([q, k, v], dim=2).detach().chunk(3, dim=2)
    swapped = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for views in (headdim_first, packed, swapped):
        assert not views[0].is_contiguous()
        views = [x.requires_grad_() for x in views]
        got = fattn.attention(*views, causal=True)
        same(case, got, o, torch.autograd.grad(got, views, dout), wanted)
    bhsd = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
    got = fattn.attention(*bhsd, causal=True, layout="bhsd")
    gradients = torch.autograd.grad(got, bhsd, dout.transpose(1, 2))
    same(case, got.transpose(1, 2), o, [x.transpose(1, 2) for x in gradients], wanted)


def test_expanded_gradient(device):
    """The gradient of a sum has strides of 0."""
    (q, k, v), dout = leaves(plain(device), device)
    o = fattn.attention(q, k, v, deterministic=True)
    wanted = torch.autograd.grad(o, (q, k, v), torch.ones_like(dout), retain_graph=True)
    for x, y in zip(torch.autograd.grad(o.sum(), (q, k, v)), wanted):
        assert torch.equal(x, y)


def test_against_scaled_dot_product_attention(device):
    (q, k, v), _ = leaves(plain(device, batch=2, nheads=4, causal=True), device)
    theirs = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True)
    agree(fattn.attention(q, k, v, causal=True), theirs.transpose(1, 2), 32, 33, roundings=1)  # q k, over the keys; in 16 bits docs/NUMERICS.md


def test_second_derivative_is_refused(device):
    (q, k, v), dout = leaves(plain(device), device)
    (dq,) = torch.autograd.grad(fattn.attention(q, k, v), q, dout, create_graph=True)
    check(plain(device), "dq", dq)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        dq.sum().backward()


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("options", [{}, {"return_lse": True}, {"mask": torch.ones(4, 4, dtype=torch.bool)}, {"packed": True}])
def test_tangents_are_refused(options, requires_grad):
    """Derivatives in forward mode are not computed, nor lost without a word."""
    q = torch.randn(1, 4, 2, 8, requires_grad=requires_grad)
    f = functools.partial(fattn.attention, **options)
    if "packed" in options:
        q, f = q[0].detach().requires_grad_(requires_grad), functools.partial(fattn.attention_varlen, cu_seqlens_q=torch.tensor([0, 4]))
    with torch.autograd.forward_ad.dual_level():
        f(q, q, q)
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="forward mode"):
            f(q, dual, q)


def test_checkpoint_and_inference_mode(device):
    (q, k, v), dout = leaves(plain(device), device)
    o = torch.utils.checkpoint.checkpoint(fattn.attention, q, k, v, use_reentrant=False)
    o.backward(dout)
    check(plain(device), "dk", k.grad)
    with torch.inference_mode():
        assert torch.equal(fattn.attention(q, k, v), o)


def test_autocast(device):
    case = plain(device, dtype="bfloat16")
    (q, k, v), dout = leaves(case, device)
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    with torch.autocast(device, dtype=torch.bfloat16):
        o = fattn.attention(wide[0], wide[1], v)  # one is in the dtype already
        if device == "cpu":
            assert fattn.attention(*(x.double() for x in (q, k, v))).dtype == torch.float64
        with pytest.raises(ValueError, match="q has the dtype int32"):
            fattn.attention(*(x.int() for x in (q, k, v)))
    assert o.dtype == torch.bfloat16
    check(case, "o", o)
    o.backward(dout)
    assert wide[0].grad.dtype == torch.float32
    check(case, "dq", wide[0].grad)
    check(case, "dv", v.grad)


@pytest.mark.parametrize("threads", [1, 2])
def test_number_of_threads_changes_no_bit(threads):
    (q, k, v), _ = leaves(Case(seqlen_q=70, seqlen_k=70, nheads=4), "cpu")
    expected = fattn.attention(q, k, v)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(fattn.attention(q, k, v), expected)
    finally:
        torch.set_num_threads(before)


def test_callers_in_several_threads(device):
    (q, k, v), _ = leaves(plain(device, seqlen_q=70, seqlen_k=70), device)
    expected = fattn.attention(q, k, v)
    results = [None] * 6
    threads = [threading.Thread(target=lambda i=i: results.__setitem__(i, fattn.attention(q, k, v))) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(result, expected) for result in results)


def test_more_problems_than_plans_are_kept():
    """Lengths come back after their plans are gone, and a mask of the same shapes is another problem."""
    random = np.random.default_rng(0)
    tensors = [random.standard_normal((3, 1, 40, 2, 8)).astype(np.float32) for _ in range(2)]
    for (q, k, v), seqlen, causal in itertools.product(tensors, (*range(1, 40), 3, 39, 7), (False, True)):
        got = fattn.attention(*(torch.from_numpy(x[:, :seqlen]) for x in (q, k, v)), causal=causal)
        assert np.array_equal(got.numpy(), fattn.numpy.forward(q[:, :seqlen], k[:, :seqlen], v[:, :seqlen], causal=causal))


def test_headdim_of_one_element():
    """torch calls any stride of it contiguous."""
    q, k, v = (torch.randn(1, 1, 2, 6).permute(0, 3, 2, 1) for _ in range(3))
    assert q.stride(-1) != 1
    assert torch.equal(fattn.attention(q, k, v), fattn.attention(*(x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))))


def _in_child(tensors, queue):
    queue.put(fattn.attention(*tensors).tolist())


def test_forked_child():
    """As the workers of a DataLoader are made."""
    tensors = [x.detach() for x in leaves(Case(), "cpu")[0]]
    expected = fattn.attention(*tensors)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(tensors, queue))
    child.start()
    got = queue.get(timeout=60)
    child.join(60)
    assert child.exitcode == 0 and got == expected.tolist()


Q = torch.ones(1, 4, 2, 8)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((Q, Q[..., :4], Q), {}, ValueError, r"^k has the shape \(1, 4, 2, 4\); expected \(1, 4, 2, 8\), from q's batch and headdim$"),
        ((Q, Q.half(), Q), {}, ValueError, "^k is fp16 but q is fp32"),
        ((Q.int(), Q.int(), Q.int()), {}, ValueError, "^q has the dtype int32; allowed: float32"),
        ((Q.to(torch.int8), Q, Q), {}, ValueError, "^q has a dtype that is not allowed; allowed: float32"),
        ((Q[0], Q, Q), {}, ValueError, r"^q has 3 dimensions; allowed: 4 \(batch, seqlen, heads, headdim\)"),
        ((Q, Q, Q[..., 0]), {"layout": "bhsd"}, ValueError, "^v has 3 dimensions"),
        ((Q[..., :0],) * 3, {}, ValueError, "^headdim of q is 0; allowed: 1 to 576"),
        ((Q.numpy(), Q, Q), {}, TypeError, "^q is a ndarray; it must be a torch.Tensor"),
        ((Q, None, Q), {}, TypeError, "^k is a NoneType"),
        ((Q, Q, Q), {"window": (-2, 0)}, ValueError, "^window_left is -2; allowed: -1"),
        ((Q, Q, Q), {"window": (0, 2**63)}, ValueError, r"^window\[1\] is 9223372036854775808, which does not fit into 64 bits"),
        ((Q, Q, Q), {"window": 4}, ValueError, r"^window is 4; allowed: None, or \(left, right\)"),
        ((Q, Q, Q), {"window": (1.5, 0)}, TypeError, r"^window\[0\] is 1.5; it must be an int, or None$"),
        ((Q, Q, Q), {"causal": "no"}, TypeError, "^causal is a str; it must be True or False$"),
        ((Q, Q, Q), {"softmax_scale": "1"}, TypeError, "^softmax_scale is of the type str; it must be of the type float$"),
        ((torch.nested.nested_tensor([Q[0], Q[0, :2]], layout=torch.jagged), Q, Q), {}, NotImplementedError, "NestedTensor.*fattn.attention_varlen"),
        ((Q, Q, Q), {"softcap": -1.0}, ValueError, "^softcap is -1; allowed: 0"),
        ((Q, Q, Q), {"window": (1, 0), "algorithm": "standard"}, NotImplementedError, "^algorithm standard of backend cpu does not compute a sliding"),
        ((Q, Q, Q), {"softmax_scale": float("inf")}, ValueError, "^softmax_scale is inf; it must be finite"),
        ((Q, Q, Q), {"layout": "bsh"}, ValueError, "^layout is 'bsh'; allowed: 'bshd', 'bhsd'"),
        ((Q, Q, Q), {"backend": "gpu"}, ValueError, "^backend is 'gpu'; allowed: 'auto'"),
        ((Q, Q, Q), {"backend": "cuda"}, NotImplementedError, "cuda"),
        ((Q, Q, Q), {"algorithm": "v3"}, NotImplementedError, "v3"),
        ((Q.double(),) * 3, {"backend": "cpu"}, NotImplementedError, "fp64"),
    ],
)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_refused(arguments, options, error, message, requires_grad):
    if requires_grad:
        arguments = [x.clone().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in arguments]
    with pytest.raises(error, match=message):
        fattn.attention(*arguments, **options)
    assert fattn.attention(Q, Q, Q).shape == Q.shape


def run_and_forget(make_v) -> list[weakref.ref]:
    """Forward and backward on memory of NumPy, and what tells whether torch still holds it."""
    q, k, v = np.ones((1, 4096, 1, 8), np.float32), np.ones((1, 1, 1, 8), np.float32), make_v()
    tensors = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    try:
        fattn.attention(*tensors).sum().backward()
    except ValueError:
        pass
    return [weakref.ref(x) for x in (q, k, v)]


@pytest.mark.parametrize("seqlen_k", [1, 2])  # 2: refused
def test_inputs_are_given_back(seqlen_k):
    references = run_and_forget(lambda: np.ones((1, seqlen_k, 1, 256), np.float32))
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_outputs_are_given_back():
    def resident() -> int:
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def run(times):
        for _ in range(times):
            run_and_forget(lambda: np.ones((1, 1, 1, 256), np.float32))  # o has 4 MiB

    run(5)
    before = resident()
    run(100)
    assert resident() - before < 100 << 20


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "seqused_k"])
def test_memory_that_is_gone(name):
    """A storage that was made smaller under a tensor, as FSDP does with what it gathers again, is not read behind its end."""
    shape = {"bias": (1, 1, 4, 4), "seqused_k": (1,)}.get(name, (1, 4, 2, 8))
    tensors = {other: torch.randn(1, 4, 2, 8) for other in "qkv"} | {name: torch.full(shape, 4, dtype=torch.int32) if name == "seqused_k" else torch.randn(shape)}
    storage = tensors[name].untyped_storage()
    for size in (0, storage.nbytes() - 1):
        storage.resize_(size)
        with pytest.raises(ValueError, match=f"^{name} reaches to byte .* of a storage of {size} bytes"):
            fattn.attention(**tensors)


def test_what_changes_between_the_passes():
    """Is noticed where torch notices it; memory that is gone by fattn."""
    def passes(change):
        x, k = torch.randn(1, 4, 2, 8, requires_grad=True), torch.randn(1, 4, 2, 8)
        o = fattn.attention(x * 1, k, k)
        change(k)
        o.sum().backward()

    for change in (lambda k: k.add_(1), lambda k: k.resize_(1, 2, 2, 8)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            passes(change)
    with pytest.raises(ValueError, match="^k reaches to byte 256 of a storage of 0 bytes"):
        passes(lambda k: k.untyped_storage().resize_(0))


def test_inputs_that_overlap():
    """Keys that are the queries, and rows that share memory."""
    rows = torch.randn(40, dtype=torch.float64).as_strided((1, 4, 2, 8), (0, 2, 4, 1))
    for q, k, v in ((rows, rows, rows), (rows, rows[:, 1:], rows[:, :3])):
        got = fattn.attention(q, k, v)
        assert torch.equal(got, fattn.attention(q.clone(), k.clone(), v.clone()))
