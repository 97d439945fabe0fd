"""fattn.attention on CUDA tensors: what the CPU has not. The table of cases runs there in test_torch_attention.py."""

import contextlib
import time

import pytest
import torch

import fattn
from torch_cases import agree, check, leaves, plain

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


@contextlib.contextmanager
def captured_after(step):
    """A graph of what is called inside, once `step` has been called on another stream, where nothing is captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        yield graph


def test_graph_of_both_passes():
    leaf, dout = leaves(CASE, "cuda")
    fixed = [torch.zeros_like(x).requires_grad_() for x in leaf]
    fixed_dout = torch.zeros_like(dout)

    def step():
        o = fattn.attention(*fixed, causal=True)
        return o, *torch.autograd.grad(o, fixed, fixed_dout)

    with captured_after(step) as graph:
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


def test_memory_of_the_backward_pass_is_what_the_plan_says():
    """Results and workspace, each rounded up by torch's allocator to 512 bytes."""
    case = plain("cuda", batch=2, seqlen_q=515, seqlen_k=515, nheads=4, headdim=64, headdim_v=64)
    leaf, dout = leaves(case, "cuda")
    for deterministic in (False, True):
        o = fattn.attention(*leaf, deterministic=deterministic)
        held = torch.cuda.memory_allocated()
        torch.autograd.grad(o, leaf, dout, retain_graph=True)
        for _ in range(1000):  # torch's thread of the backward pass may let go of them a moment later
            if torch.cuda.memory_allocated() <= held:
                break
            time.sleep(0.001)
        shapes = [x.shape for x in leaf]
        planned = fattn.plan(*shapes, dtype="bf16", device="cuda", backward=True, deterministic=deterministic).workspace_bytes
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients = torch.autograd.grad(o, leaf, dout, retain_graph=True)
        results = sum(x.nbytes for x in gradients)
        assert results + planned <= torch.cuda.max_memory_allocated() - before <= results + planned + 4 * 512
        del gradients


ENDS_Q, ENDS_K = [0, 65, 65, 300, 301], [0, 70, 90, 325, 400]  # one has no query, and rows behind the last belong to none


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": (40, 0), "softcap": 20.0}, {"documents": True}])
def test_packed_sequences(options, backward):
    """Each as a call of its own with the keys that it sees; or what the library says."""
    options = dict(options)
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(n, h, 64, device="cuda", dtype=torch.bfloat16) for n, h in ((310, 4), (410, 2), (410, 2), (310, 4)))
    leaf = [x.requires_grad_(backward) for x in (q, k, v)]
    lengths = {"cu_seqlens_q": torch.tensor(ENDS_Q, device="cuda"), "cu_seqlens_k": torch.tensor(ENDS_K, device="cuda")}
    support = fattn.support(q.shape, k.shape, dtype="bf16", device="cuda", packed=(4, 235, 235), backward=backward, **options)
    documents = options.pop("documents", False)
    ids = {f"document_{x}": (torch.arange(n, device="cuda") // 50).to(torch.int32) for x, n in (("q", 310), ("k", 410))} if documents else {}

    def results():
        o = fattn.attention_varlen(*leaf, **lengths, **options, **ids)
        return (o, *torch.autograd.grad(o, leaf, dout)) if backward else (o,)

    if not support:
        with pytest.raises(NotImplementedError) as refusal:
            results()
        assert str(refusal.value) == support.reason
        return
    wanted = [torch.zeros_like(x) for x in ((q, q, k, v) if backward else (q,))]
    for i, j, m, n in zip(ENDS_Q, ENDS_Q[1:], ENDS_K, ENDS_K[1:]):
        one = [x.detach()[None, begin:end].float().cpu().requires_grad_() for x, begin, end in ((q, i, j), (k, m, n), (v, m, n))]
        here = {name: x[None, begin:end].cpu() for (name, x), (begin, end) in zip(ids.items(), ((i, j), (m, n)))}
        o = fattn.attention(*one, **options, **here)
        wanted[0][i:j] = o.detach()[0]
        if backward and j > i:
            for x, y, (begin, end) in zip(wanted[1:], torch.autograd.grad(o, one, dout[None, i:j].float().cpu()), ((i, j), (m, n), (m, n))):
                x[begin:end] = y[0]
    for i, (x, y) in enumerate(zip(results(), wanted)):
        agree(x, y, roundings=4 if i else 2)


LONGEST = 200


def decoding() -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """New q, k and v of a step, caches with the keys before, and how many these are, for each sequence another number."""
    if not (support := fattn.support((3, 1, 4, 64), (3, LONGEST, 2, 64), dtype="bf16", device="cuda", causal=True, seqused_k=True)):
        pytest.skip(support.reason)
    torch.manual_seed(0)
    new = [torch.randn(3, 1, h, 64, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2)]
    caches = [torch.randn(3, LONGEST, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    return new, caches, torch.tensor([150, 0, 37], device="cuda", dtype=torch.int32)


def step_of_each(new, caches, lengths) -> torch.Tensor:
    """What with_kvcache does, one sequence after the other, with lengths that the host knows."""
    q, k, v = new
    parts = []
    for b, n in enumerate(lengths.tolist()):
        for cache, x in zip(caches, (k, v)):
            cache[b, n] = x[b, 0]
        parts.append(fattn.attention(q[b : b + 1], *(cache[b : b + 1, : n + 1] for cache in caches), causal=True))
    return torch.cat(parts)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_cache_asks_nothing_of_the_device(layout, dtype):
    (q, k, v), caches, lengths = decoding()
    wanted_caches = [x.clone() for x in caches]
    wanted = step_of_each((q, k, v), wanted_caches, lengths)
    given = [x.transpose(1, 2).contiguous() if layout == "bhsd" else x for x in (q, *caches, k, v)]
    lengths = lengths.to(dtype)
    with torch.no_grad():
        fattn.with_kvcache(*(x.clone() for x in given), cache_seqlens=lengths, causal=True, layout=layout)  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            o = fattn.with_kvcache(*given, cache_seqlens=lengths, causal=True, layout=layout)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    agree(o.transpose(1, 2) if layout == "bhsd" else o, wanted, roundings=1)  # docs/NUMERICS.md
    for cache, expected in zip(given[1:3], wanted_caches):
        assert torch.equal(cache.transpose(1, 2) if layout == "bhsd" else cache, expected)


def test_graph_of_a_step_with_a_cache():
    """Replayed with other queries, keys and lengths, which only the device knows."""
    (q, k, v), caches, lengths = decoding()
    fixed = [torch.zeros_like(x) for x in (q, k, v)]

    def step():
        return fattn.with_kvcache(fixed[0], *caches, *fixed[1:], cache_seqlens=lengths, causal=True)

    kept = [x.clone() for x in caches]
    with torch.no_grad():
        with captured_after(step) as graph:
            o = step()
            lengths += 1
        for cache, x in zip(caches, kept):
            cache.copy_(x)
        at_first, wanted_caches = lengths.clone(), [x.clone() for x in kept]
        for i in range(3):
            new = [torch.randn_like(x) for x in (q, k, v)]
            for x, y in zip(fixed, new):
                x.copy_(y)
            graph.replay()
            agree(o, step_of_each(new, wanted_caches, at_first + i), roundings=1)  # docs/NUMERICS.md
        assert all(torch.equal(x, y) for x, y in zip(caches, wanted_caches)) and torch.equal(lengths, at_first + 3)


def draws(n: int, batch: int, pages: int, columns: int, page_size: int):
    """Lengths, some of them 0 and full, and pages of a cache, some of which sequences share."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(n):
        lengths = torch.randint(0, columns * page_size + 1, (batch,), generator=generator, dtype=torch.int32)
        odd = torch.rand(batch, generator=generator)
        lengths[odd < 0.15] = 0  # a place of the batch that nobody has
        lengths[odd > 0.9] = columns * page_size
        yield lengths, torch.randint(pages, (batch, columns), generator=generator, dtype=torch.int32)


@pytest.mark.parametrize("page_size", [1, 16, 48])
@pytest.mark.parametrize("seqlen_q, causal", [(1, True), (1, False), (3, True), (96, True)])
def test_a_graph_at_any_lengths_and_pages(seqlen_q, causal, page_size):
    """One graph, replayed with 200 draws of lengths and pages, gives the bits of a call of its own. Rows beyond a length's keys see nothing."""
    batch, pages, columns = 6, 96, 1024 // page_size
    k_cache, v_cache = torch.randn(2, pages, page_size, 2, 64, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(batch, seqlen_q, 8, 64, device="cuda", dtype=torch.bfloat16)
    lengths, table = torch.zeros(batch, dtype=torch.int32, device="cuda"), torch.zeros(batch, columns, dtype=torch.int32, device="cuda")

    def step():
        return fattn.attention(q, k_cache, v_cache, seqused_k=lengths, block_table=table, causal=causal)

    with torch.no_grad():
        with captured_after(step) as graph:
            o = step()
        for new_lengths, new_table in draws(200 if seqlen_q == 1 else 50, batch, pages, columns, page_size):
            q.normal_()
            lengths.copy_(new_lengths)
            table.copy_(new_table)
            graph.replay()
            assert torch.equal(o, step()) and not o.isnan().any()
            assert not o[lengths == 0].any()


def launches(call):
    """Names of the kernels of a call, which has been made before."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sorted(event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA and "ync" not in event.name)


def test_a_step_is_one_launch_before_attention():
    (q, k, v), caches, lengths = decoding()
    angle = torch.outer(torch.arange(caches[0].shape[1], device="cuda"), torch.arange(8, device="cuda") / 8)
    with torch.no_grad():
        alone = launches(lambda: fattn.with_kvcache(q, *caches, cache_seqlens=lengths + 0, causal=True))
        alone = [name for name in alone if "fattn" in name]
        step = launches(lambda: fattn.with_kvcache(q, *caches, k, v, cache_seqlens=lengths, causal=True, rotary_cos=angle.cos(), rotary_sin=angle.sin()))
        step = [name for name in step if "elementwise" not in name]  # cos and sin
    assert step == sorted([*alone, "fattn_append"])


def test_a_length_without_room():
    """Nothing is written for that sequence, and its o is NaN; the others are as they are without it."""
    (q, k, v), caches, lengths = decoding()
    caches = [x.clone() for x in caches]
    before, wanted_caches = [x.clone() for x in caches], [x.clone() for x in caches]
    wanted = step_of_each((q, k, v), wanted_caches, lengths)
    lengths[0] = caches[0].shape[1]
    with torch.no_grad():
        o = fattn.with_kvcache(q, *caches, k, v, cache_seqlens=lengths, causal=True)
    assert o[0].isnan().all()
    agree(o[1:], wanted[1:], roundings=1)  # docs/NUMERICS.md
    for cache, x, y in zip(caches, before, wanted_caches):
        assert torch.equal(cache[0], x[0]) and torch.equal(cache[1:], y[1:])


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
    """Tensors of another GPU than the current one: both passes there, on that GPU's streams, and the current one stays what it is."""
    if torch.cuda.device_count() < 2:
        pytest.skip("torch sees one CUDA device")
    leaf, dout = leaves(CASE, "cuda:1")
    o = fattn.attention(*leaf, causal=True)
    o.backward(dout)
    check(CASE, "o", o)
    for name, x in zip(("dq", "dk", "dv"), leaf):
        assert x.grad.device.index == 1
        check(CASE, name, x.grad)
    here = fattn.attention(*detached(), causal=True)
    assert o.device.index == 1 and torch.cuda.current_device() == 0 and torch.equal(o.detach().cpu(), here.cpu())
    stream = torch.cuda.Stream(1)
    with torch.cuda.stream(stream):
        late = [torch.zeros_like(x) for x in leaf]
        torch.cuda._sleep(200_000_000)
        with torch.no_grad():
            for x, y in zip(late, leaf):
                x.copy_(y)
        again = fattn.attention(*late, causal=True)
    stream.synchronize()
    assert torch.equal(again.cpu(), here.cpu())
    with pytest.raises(ValueError, match="CUDA device 1"):
        fattn.attention(leaf[0], *detached()[1:])


def test_refused():
    q, k, v = detached()
    with pytest.raises(ValueError, match="^k is on the CPU but q is on CUDA device 0"):
        fattn.attention(q, k.cpu(), v)
    with pytest.raises(NotImplementedError, match="fp64"):
        fattn.attention(q.double(), k.double(), v.double())
    with pytest.raises(NotImplementedError, match="headdim"):
        fattn.attention(*(x.repeat(1, 1, 1, 5) for x in (q, k, v)))
    check(CASE, "o", fattn.attention(q, k, v, causal=True))
