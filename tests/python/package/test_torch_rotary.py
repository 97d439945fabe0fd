"""fattn.rotary, by itself and in fattn.with_kvcache."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import fattn  # noqa: E402
from fattn import _operators  # noqa: E402
from attention_reference import reordered, rounded  # noqa: E402
from torch_cases import agree  # noqa: E402


def angles(positions: int, half: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.outer(torch.arange(positions, dtype=torch.float64), 10000 ** -(torch.arange(half, dtype=torch.float64) / half))
    return angle.cos().to(dtype), angle.sin().to(dtype)


def turned(x: torch.Tensor, positions: torch.Tensor, half: int, interleaved: bool) -> torch.Tensor:
    """By complex numbers in fp64, of x (..., heads, headdim) with positions (...)."""
    x = x.double().clone()
    pairs = (x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]) if interleaved else (x[..., :half], x[..., half : 2 * half])
    angle = positions.double()[..., None, None] * 10000 ** -(torch.arange(half, dtype=torch.float64) / half)
    z = torch.complex(*(t.contiguous() for t in pairs)) * torch.polar(torch.ones_like(angle), angle)
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    x[..., first], x[..., second] = z.real, z.imag
    return x


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("half", [32, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows(device, dtype, half, interleaved):
    torch.manual_seed(half)
    x = torch.randn(3, 7, 2, 64, dtype=dtype)
    cos, sin = angles(50, half, torch.float64 if dtype == torch.float64 else torch.float32)
    # The table's cos and sin, two products and their sum; in 16 bits the result alone. Rotated numbers may be as large as 4, and their sum small.
    tolerance = rounded(str(dtype).removeprefix("torch."), 1 if dtype == torch.bfloat16 else 5, largest=4)
    on = [t.to(device) for t in (x, cos, sin)]
    for offsets in (0, 9, torch.tensor([0, 3, 43])):
        positions = torch.arange(7) + (offsets[:, None] if isinstance(offsets, torch.Tensor) else torch.full((3, 1), offsets))
        given = offsets.to(device) if isinstance(offsets, torch.Tensor) else offsets
        got = fattn.rotary(*on, interleaved=interleaved, offsets=given)
        assert got.dtype == dtype and got.shape == x.shape
        torch.testing.assert_close(got.double().cpu(), turned(x, positions, half, interleaved), **tolerance)
        swapped = fattn.rotary(on[0].transpose(1, 2), *on[1:], interleaved=interleaved, offsets=given, layout="bhsd")
        assert torch.equal(swapped.transpose(1, 2), got)
    cu = torch.tensor([0, 2, 2, 7], device=device)
    packed = fattn.rotary(on[0][0], *on[1:], interleaved=interleaved, cu_seqlens=cu, offsets=torch.tensor([4, 0, 10], device=device))
    wanted = turned(x[0], torch.tensor([4, 5, 10, 11, 12, 13, 14]), half, interleaved)
    torch.testing.assert_close(packed.double().cpu(), wanted, **tolerance)


@pytest.mark.parametrize("interleaved", [False, True])
def test_finite_differences(interleaved):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 2, 8, dtype=torch.float64, requires_grad=True)
    cos, sin = (t.requires_grad_() for t in angles(9, 3, torch.float64))
    torch.autograd.gradcheck(lambda *t: fattn.rotary(*t, interleaved=interleaved, offsets=2), (x, cos, sin))


def test_scores_depend_on_distance():
    """What it is for: the same distance, the same score."""
    q, k = torch.randn(2, 1, 1, 1, 64, dtype=torch.float64)
    cos, sin = angles(100, 32, torch.float64)
    scores = [(fattn.rotary(q, cos, sin, offsets=a) * fattn.rotary(k, cos, sin, offsets=a - 5)).sum() for a in (5, 30, 99)]
    for x in scores[1:]:
        torch.testing.assert_close(x, scores[0], **reordered("float64", 64, 5, 5))  # over headdim, and both rotations


@pytest.mark.parametrize("bhsd", [False, True])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("tensor_lengths", [False, True])
def test_with_kvcache(device, tensor_lengths, paged, bhsd):
    """New keys turned by their places, and queries by those of the last keys: as if all had been turned before."""
    torch.manual_seed(1)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    cos, sin = (t.to(device) for t in angles(64, 12))
    q, k, v = (torch.randn(2, 64, heads, 32, dtype=dtype, device=device) for heads in (4, 2, 2))
    q_all, k_all = (fattn.rotary(x, cos, sin) for x in (q, k))
    lengths = [30, 13] if tensor_lengths else [30, 30]
    options = {}
    if paged:
        options["block_table"] = torch.randperm(16, device=device).reshape(2, 8)
        caches = torch.zeros(2, 16, 8, 2, 32, dtype=dtype, device=device)
        for cache, x in zip(caches, (k_all, v)):
            for b, n in enumerate(lengths):
                for j in range(n):
                    cache[options["block_table"][b, j // 8], j % 8] = x[b, j]
    else:
        caches = torch.zeros(2, 2, 64, 2, 32, dtype=dtype, device=device)
        for cache, x in zip(caches, (k_all, v)):
            for b, n in enumerate(lengths):
                cache[b, :n] = x[b, :n]
    new = [torch.stack([x[b, n : n + 3] for b, n in enumerate(lengths)]) for x in (q, k, v)]
    wanted = torch.cat([fattn.attention(q_all[b : b + 1, n : n + 3], k_all[b : b + 1, : n + 3], v[b : b + 1, : n + 3], causal=True)
                        for b, n in enumerate(lengths)])
    swap = (lambda x: x.transpose(1, 2)) if bhsd else (lambda x: x)
    given = torch.tensor(lengths, device=device) if tensor_lengths else lengths[0]
    got = fattn.with_kvcache(*map(swap, (new[0], *caches, *new[1:])), cache_seqlens=given, causal=True, rotary_cos=cos, rotary_sin=sin,
                             layout="bhsd" if bhsd else "bshd", **options)
    agree(swap(got), wanted, 32, 33)  # q k, over the keys


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_at_once_is_as_by_operations_of_torch(device, monkeypatch, dtype, interleaved):
    """What torch.compile sees: on the CPU bit by bit, on a GPU but for products that are fused with sums."""
    torch.manual_seed(2)
    cos, sin = (t.to(device) for t in angles(40, 5))
    table = torch.randperm(10, device=device).reshape(2, 5)
    for number in (0, 1):
        for paged in (False, True):
            shape = (10, 6, 2, 16) if paged else (2, 30, 2, 16)
            caches = torch.randn(2, *shape, device=device).to(dtype)
            q, k, v = (torch.randn(2, n, heads, 16, device=device).to(dtype) for n, heads in ((2, 4), (3, 2), (3, 2)))
            lengths = 11 if number else torch.tensor([25, 4], device=device)
            options = {"block_table": table} if paged else {}
            results = []
            for by_torch in (False, True):
                monkeypatch.setattr(torch.compiler, "is_compiling", lambda: by_torch)
                own = caches.clone()
                o = fattn.with_kvcache(q, *own, k, v, cache_seqlens=lengths, causal=True, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved, **options)
                results.append((own, o))
            if device == "cpu":
                assert all(torch.equal(x, y) for x, y in zip(*results))
            else:
                agree(results[0][0], results[1][0], 2, 1)
                agree(results[0][1], results[1][1], 16, 28)


def test_operator():
    """Its schema, its shapes without data, and that it writes nothing but the caches."""
    cos, sin = angles(12, 4)
    caches, (k, v), q = torch.zeros(2, 2, 9, 2, 8), torch.randn(2, 2, 3, 2, 8), torch.randn(2, 3, 4, 8)
    lengths = torch.tensor([6, 0], dtype=torch.int32)
    torch.library.opcheck(_operators.append, (k, v, *caches, 0, lengths, None, q, cos, sin, False))
    torch.library.opcheck(_operators.append, (k, v, *caches, 4))


def test_bad_input():
    x, (cos, sin) = torch.zeros(2, 5, 2, 8), angles(9, 4)
    for arguments, options, message in (((x[0], cos, sin), {}, "x has 3 dimensions and layout is 'bshd'"), ((x, cos[None], sin[None]), {}, "cos has the shape"),
                                        ((x, cos, sin[1:]), {}, r"cos has the shape \(9, 4\) and sin \(8, 4\)"),
                                        ((x[..., :6], cos, sin), {}, "headdim is 6; allowed"), ((x, cos, sin), {"offsets": 5}, "positions 5 to 9 are rotated and cos has 9"),
                                        ((x, cos, sin), {"offsets": -1}, "positions -1 to 3"), ((x, cos, sin), {"offsets": torch.zeros(3, dtype=torch.int32)}, "offsets is a tensor"),
                                        ((x, cos, sin), {"offsets": torch.zeros(2)}, "offsets is a tensor of torch.float32"),
                                        ((x.long(), cos, sin), {}, "x is a tensor of torch.int64; allowed: torch.float32"), ((x, cos.bool(), sin), {}, "cos is a tensor of torch.bool"),
                                        ((x, cos.to("meta"), sin), {}, "cos is on meta and x on cpu"), ((x[0], cos, sin), {"cu_seqlens": torch.zeros(2)}, "cu_seqlens is a tensor of torch.float"),
                                        ((x[0], cos, sin), {"cu_seqlens": torch.zeros(1, 2, dtype=torch.int32)}, r"cu_seqlens is .* \(1, 2\); allowed: int32 or int64, \(batch \+ 1\)"),
                                        ((x[0], cos, sin), {"cu_seqlens": torch.zeros(0, dtype=torch.int32)}, r"cu_seqlens is .* \(0,\); allowed")):
        with pytest.raises(ValueError, match=message):
            fattn.rotary(*arguments, **options)
    with pytest.raises(TypeError, match="cos is a list"):
        fattn.rotary(x, [1], sin)
    with pytest.raises(TypeError, match="offsets is a float; it must be an int or a torch.Tensor"):
        fattn.rotary(x, cos, sin, offsets=1.5)
    with pytest.raises(TypeError, match="cu_seqlens is a list; it must be a torch.Tensor or None"):
        fattn.rotary(x[0], cos, sin, cu_seqlens=[0, 5])
    caches = torch.zeros(2, 2, 9, 2, 8)
    with pytest.raises(ValueError, match="rotary_sin is None, and the other is not"):
        fattn.with_kvcache(x[:, :1], *caches, cache_seqlens=3, rotary_cos=cos)
    with pytest.raises(ValueError, match="cache_seqlens is 8, for a sequence of 2 rows; rotary_cos has 9 rows"):
        fattn.with_kvcache(x[:, :2], *torch.zeros(2, 2, 12, 2, 8), x[:, :2], x[:, :2], cache_seqlens=8, rotary_cos=cos, rotary_sin=sin)


def test_sizes_that_depend_on_data_and_numpys_numbers_compile():
    """As symbols: nothing asks how many rows there are."""
    x, cos, sin = torch.randn(7, 2, 8), *torch.randn(2, 20, 4)
    keep, cu_seqlens = torch.tensor([1, 0, 1, 1, 0, 1, 1], dtype=torch.bool), torch.tensor([0, 2, 5], dtype=torch.int32)

    def chosen(x, keep):
        return fattn.rotary(x[keep.nonzero()[:, 0]], cos, sin, cu_seqlens=cu_seqlens)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert torch.equal(torch.compile(chosen, fullgraph=True, backend="eager")(x, keep), chosen(x, keep))
    turned = torch.compile(lambda x: fattn.rotary(x[None], cos, sin, offsets=np.int64(3)), fullgraph=True, backend="eager")
    assert torch.equal(turned(x), fattn.rotary(x[None], cos, sin, offsets=3))
