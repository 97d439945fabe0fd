"""batch_invariant: a row of o and lse has the same bits alone and in any company, and whether its sequence's queries come together or one by one."""

import pytest

torch = pytest.importorskip("torch")

import fattn  # noqa: E402
from torch_cases import agree  # noqa: E402

CASES = [{}, {"causal": True}, {"causal": True, "window": (50, 0)}, {"causal": True, "softcap": 5.0, "sinks": True}, {"causal": True, "alibi_slopes": True},
         {"causal": True, "dropout_p": 0.3}]
LONGEST = 300


DTYPES = torch.bfloat16, torch.float16, torch.float32
MOST_FP32_ON_GPU = 192  # headdim


def dtypes_of(device: str, headdim: int) -> tuple[torch.dtype, ...]:
    return DTYPES[:2] if device == "cuda" and headdim > MOST_FP32_ON_GPU else DTYPES


def tensors(device: str, dtype: torch.dtype, batch: int, headdim: int = 64) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(headdim)
    q = torch.randn(batch, LONGEST, 4, headdim, dtype=dtype, device=device) * 2
    k, v = torch.randn(2, batch, LONGEST, 2, headdim, dtype=dtype, device=device)
    return q, k, v


def options_of(case: dict, device: str) -> dict:
    options = dict(case, batch_invariant=True, return_lse=True)
    if case.get("sinks"):
        options["sinks"] = torch.linspace(-1, 2, 4, device=device)
    if case.get("alibi_slopes"):
        options["alibi_slopes"] = torch.linspace(0.01, 0.5, 4, device=device)
    if case.get("dropout_p"):
        options["dropout_state"] = torch.tensor([5, 7], device=device)
    return options


def same(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_alone_and_in_a_batch(device, case, headdim):
    """With other lengths, other sequences and any number of them."""
    for dtype in dtypes_of(device, headdim):
        q, k, v = tensors(device, dtype, 64 if headdim == 64 else 6, headdim)
        options = options_of(case, device)
        lengths = torch.randint(1, LONGEST + 1, (len(q),), device=device)
        lengths[0], lengths[1] = LONGEST, 17
        o, lse = fattn.attention(q[:, :20], k, v, seqused_k=lengths, **options)
        for b in (0, 1, 5):
            if case.get("dropout_p") and b > 0:
                continue  # whose random numbers are of its place
            n = int(lengths[b])
            alone = fattn.attention(q[b : b + 1, :20], k[b : b + 1, :n], v[b : b + 1, :n], **options)
            assert same(alone, (o[b : b + 1], lse[b : b + 1])), (dtype, b)


@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("case", [x for x in CASES if "causal" in x and "dropout_p" not in x], ids=str)
def test_prefill_and_decoding(device, case, headdim):
    """One query after the other, in chunks, all together, and packed beside others."""
    for dtype in dtypes_of(device, headdim):
        q, k, v = tensors(device, dtype, 2, headdim)
        options = options_of(case, device)
        o, lse = fattn.attention(q, k, v, **options)
        for begin, end in ((0, 1), (1, 2), (63, 64), (64, 65), (100, 137), (200, 300), (299, 300)):
            step = fattn.attention(q[:, begin:end], k[:, :end], v[:, :end], **options)
            assert same(step, (o[:, begin:end], lse[..., begin:end])), (dtype, begin, end)
        cu_q = torch.tensor([0, 1, 301], dtype=torch.int32, device=device)
        cu_k = torch.tensor([0, 250, 550], dtype=torch.int32, device=device)
        packed = fattn.attention_varlen(torch.cat((q[0, 249:250], q[1])), torch.cat((k[0, :250], k[1])), torch.cat((v[0, :250], v[1])), cu_seqlens_q=cu_q,
                                        cu_seqlens_k=cu_k, **options)
        assert same((packed[0][:1], packed[1][:, :1]), (o[0, 249:250], lse[0, :, 249:250]))
        assert same((packed[0][1:], packed[1][:, 1:]), (o[1], lse[1]))


def test_pages(device):
    q, k, v = tensors(device, torch.bfloat16, 2)
    options = options_of({"causal": True}, device)
    table = torch.randperm(60, device=device).reshape(2, 30)
    pages = [torch.empty_like(x.reshape(60, 10, 2, 64)) for x in (k, v)]
    for to, x in zip(pages, (k, v)):
        to[table.flatten()] = x.reshape(60, 10, 2, 64)
    side_by_side = fattn.attention(q, k, v, **options)
    assert same(fattn.attention(q, *pages, block_table=table, **options), side_by_side)
    lengths = torch.tensor([300, 120], device=device)
    step = fattn.attention(torch.stack((q[0, 299], q[1, 119]))[:, None], *pages, block_table=table, seqused_k=lengths, **options)
    assert torch.equal(step[0][0, 0], side_by_side[0][0, 299]) and torch.equal(step[0][1, 0], side_by_side[0][1, 119])


def test_without_it_bits_differ():
    """What the option is for: otherwise decoding has another order of sums."""
    q, k, v = tensors("cpu", torch.float32, 2)
    o = fattn.attention(q, k, v, causal=True)
    assert not torch.equal(fattn.attention(q[:, 299:], k, v, causal=True), o[:, 299:])


def test_gradients(device):
    """The backward pass does not look at it."""
    q, k, v = (x.float().requires_grad_() for x in tensors(device, torch.bfloat16, 2))
    for invariant in (False, True):
        o = fattn.attention(q, k, v, causal=True, batch_invariant=invariant, deterministic=True)
        gradients = torch.autograd.grad(o.float().square().sum(), (q, k, v))
        if not invariant:
            wanted = gradients
    for x, y in zip(gradients, wanted):
        agree(x, y, 3 * 64, LONGEST, 2 * LONGEST, largest=float(y.detach().abs().max()))  # q k, dout v, dout o; over the keys, over the queries of two heads


def test_refusals(device):
    shapes = [(1, 64, 4, 64)] * 3
    for algorithm in ("standard", "v1"):
        refused = fattn.support(*shapes, dtype="bf16", device=device, algorithm=algorithm, batch_invariant=True)
        assert not refused and "batch_invariant" in refused.reason
    assert fattn.support(*shapes, dtype="bf16", device=device, batch_invariant=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_wide_fp32_is_refused_on_a_gpu():
    q, k, v = tensors("cuda", torch.float32, 2, MOST_FP32_ON_GPU + 1)
    with pytest.raises(NotImplementedError, match="with batch_invariant the CUDA kernels for fp32 take up to 192"):
        fattn.attention(q, k, v, batch_invariant=True)
