"""fattn.attention on CUDA tensors: what the CPU has not. The table of cases runs there in test_torch_attention.py."""

import pytest
import torch

import fattn
from torch_cases import check, leaves, plain

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
CASE = plain("cuda", batch=2, seqlen_q=130, seqlen_k=130, nheads=4, headdim=64, headdim_v=64, causal=True)


def detached() -> list[torch.Tensor]:
    return [x.detach() for x in leaves(CASE, "cuda")[0]]


def test_current_stream():
    """The inputs are written by a stream that is busy; on another stream the result would be made of zeros."""
    q, k, v = detached()
    fattn.attention(q, k, v, causal=True)
    late = [torch.zeros_like(x) for x in (q, k, v)]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for x, y in zip(late, (q, k, v)):
            x.copy_(y)
        o = fattn.attention(*late, causal=True)
    stream.synchronize()
    check(CASE, "o", o)


def test_graph_of_both_passes():
    leaf, dout = leaves(CASE, "cuda")
    fixed = [torch.zeros_like(x).requires_grad_() for x in leaf]
    fixed_dout = torch.zeros_like(dout)

    def step():
        o = fattn.attention(*fixed, causal=True)
        return o, *torch.autograd.grad(o, fixed, fixed_dout)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    with torch.no_grad():
        for x, y in zip((*fixed, fixed_dout), (*leaf, dout)):
            x.copy_(y)
    for _ in range(2):
        graph.replay()
        for name, x in zip(("o", "dq", "dk", "dv"), outputs):
            check(CASE, name, x)


def test_memory_is_what_the_results_take():
    q, k, v = detached()
    fattn.attention(q, k, v)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    o, lse = fattn.attention(q, k, v, return_lse=True)
    results = o.nbytes + lse.nbytes
    assert results <= torch.cuda.memory_allocated() - before <= results + 1024
    assert torch.cuda.max_memory_allocated() - before <= results + 1024, "the forward pass needs no workspace"


def test_addresses_that_are_not_aligned():
    case = plain("cuda", causal=True)
    (q, k, v), dout = leaves(case, "cuda")
    shifted = [torch.cat([x.detach().new_zeros(1), x.detach().flatten()])[1:].view(x.shape).requires_grad_() for x in (q, k, v)]
    assert all(x.data_ptr() % 16 for x in shifted)
    o = fattn.attention(*shifted, causal=True)
    check(case, "o", o)
    for name, x in zip(("dq", "dk", "dv"), torch.autograd.grad(o, shifted, dout)):
        check(case, name, x)


def test_deterministic_mode_of_torch():
    leaf, dout = leaves(plain("cuda", batch=4, seqlen_q=512, seqlen_k=512, headdim=64, headdim_v=64), "cuda")

    def gradients():
        return torch.autograd.grad(fattn.attention(*leaf), leaf, dout)

    torch.use_deterministic_algorithms(True)
    try:
        first = gradients()
        for _ in range(5):
            assert all(torch.equal(x, y) for x, y in zip(first, gradients()))
    finally:
        torch.use_deterministic_algorithms(False)


def test_autocast_to_float16():
    case = plain("cuda", dtype="float16")
    (q, k, v), dout = leaves(case, "cuda")
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    with torch.autocast("cuda"):
        o = fattn.attention(*wide)
    assert o.dtype == torch.float16
    o.backward(dout)
    check(case, "o", o)
    check(case, "dq", wide[0].grad)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_without_a_break(backend):
    leaf, dout = leaves(CASE, "cuda")
    torch._dynamo.reset()
    o = torch.compile(lambda *x: fattn.attention(*x, causal=True), fullgraph=True, backend=backend)(*leaf)
    o.backward(dout)
    check(CASE, "o", o)
    for name, x in zip(("dq", "dk", "dv"), leaf):
        check(CASE, name, x.grad)


def test_every_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("torch sees one CUDA device")
    here = fattn.attention(*detached(), causal=True)
    there = fattn.attention(*(x.to("cuda:1") for x in detached()), causal=True)
    assert there.device.index == 1 and torch.cuda.current_device() == 0 and torch.equal(there.cpu(), here.cpu())


def test_refused():
    q, k, v = detached()
    with pytest.raises(ValueError, match="^k is on the CPU but q is on CUDA device 0"):
        fattn.attention(q, k.cpu(), v)
    with pytest.raises(NotImplementedError, match="fp32"):
        fattn.attention(q.float(), k.float(), v.float())
    with pytest.raises(NotImplementedError, match="headdim"):
        fattn.attention(*(x.repeat(1, 1, 1, 5) for x in (q, k, v)))
    check(CASE, "o", fattn.attention(q, k, v, causal=True))
