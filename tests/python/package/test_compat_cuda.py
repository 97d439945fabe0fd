"""fattn.compat on a GPU: what it gives there is what it gives on the CPU, where the other tests hold it against the definition."""

import pytest

torch = pytest.importorskip("torch")
from attention_reference import rounded  # noqa: E402
from compat_reference import tensors  # noqa: E402

from fattn import compat  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
compat.install()
try:
    import flash_attn
    import flash_attn.cute
    import flash_attn_interface
    import xformers.ops as xops
    from xformers.ops.fmha import attn_bias as ab
finally:
    compat.uninstall()

DTYPES = torch.float32, torch.float16, torch.bfloat16
TERMS = 64, 64, 64, 150, 2 * 61  # q k, dout v, dout o; over the keys, over the queries of two heads


def ints(*x):
    return torch.tensor(x, dtype=torch.int32)


def to(x, device, dtype=None):
    if isinstance(x, torch.Tensor):
        return x.detach().to(device, dtype if x.is_floating_point() else None)
    if isinstance(x, dict):
        return {key: to(y, device, dtype) for key, y in x.items()}
    return type(x)(to(y, device, dtype) for y in x) if isinstance(x, (list, tuple)) else x.to(device) if isinstance(x, ab.AttentionBias) else x


def close(got: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, roundings: float) -> None:
    """In 16 bits so many roundings are on the way, in fp32 all sums."""
    limits = rounded("float32", *TERMS, one_way=True) if dtype == torch.float32 else rounded(str(dtype).removeprefix("torch."), roundings)
    torch.testing.assert_close(got.double(), exact.double(), **limits)


def both(function, inputs, options, dtype, gradients=True, before=0):
    """Results on the CPU in fp32 from rounded inputs, and on the GPU in this dtype, with the gradients of the first. There the weights and o are rounded,
    P, dS, rowsum(o dout) and a gradient, for lse an eighth of a weight (testing/check.h), and what is `before`."""
    results = []
    for device, as_dtype in (("cpu", torch.float32), ("cuda", dtype)):
        given = [x.requires_grad_(gradients) for x in to(to(inputs, "cpu", dtype), device, as_dtype)]
        out = function(*given, **to(options, device))
        outs = list(out) if isinstance(out, tuple) else [out]
        dout = torch.randn(outs[0].shape, generator=torch.Generator().manual_seed(1)).to(dtype).to(device, outs[0].dtype)
        results.append([x.detach().cpu() for x in outs] + ([x.cpu() for x in torch.autograd.grad(outs[0], given, dout)] if gradients else [x.detach().cpu() for x in given]))
    for i, (cpu, cuda) in enumerate(zip(*results)):
        close(cuda, cpu, dtype, before + (4 if gradients and i >= len(outs) else 2 if cuda.dtype == dtype else 0.25))


PACKED = {"cu_seqlens_q": ints(0, 3, 40, 61), "cu_seqlens_k": ints(0, 20, 100, 150), "max_seqlen_q": 37, "max_seqlen_k": 80}
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (20, 3), "softcap": 5.0}, {"alibi_slopes": SLOPES, "causal": True}])
def test_flash_attn(dtype, options):
    def function(*x, **more):
        return flash_attn.flash_attn_func(*x, return_attn_probs=True, **more)[:2]

    both(function, tensors((2, 61, 4, 64), (2, 150, 2, 64), (2, 150, 2, 64)), options, dtype)
    both(flash_attn.flash_attn_varlen_func, tensors((61, 4, 64), (150, 2, 64), (150, 2, 64)), PACKED | options, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout(dtype):
    q, k, v = (x.to("cuda", dtype) for x in tensors((2, 61, 4, 64), (2, 150, 2, 64), (2, 150, 2, 64)))
    o, _, s_dmask = flash_attn.flash_attn_func(q, k, v, 0.25, causal=True, return_attn_probs=True)
    expected = torch.einsum("bhij,bjhd->bihd", s_dmask.clamp(min=0).float() / 0.75, v.float().repeat_interleave(2, 2))
    close(o.cpu(), expected.cpu(), dtype, 3)  # S_dmask, the weights, o


ROTARY = {"rotary_cos": torch.outer(torch.arange(99.0), 100.0 ** -(torch.arange(16) / 16)).cos(), "rotary_sin": torch.outer(torch.arange(99.0), 100.0 ** -(torch.arange(16) / 16)).sin()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, ROTARY, {"cache_batch_idx": ints(3, 1)}, {"cache_leftpad": ints(2, 11)}, ROTARY | {"cache_batch_idx": ints(0, 3), "cache_leftpad": ints(1, 9)}])
@pytest.mark.parametrize("seqlen_q", [1, 5])
def test_caches(dtype, options, seqlen_q):
    def function(q, k_cache, v_cache, k, v, **more):
        more = {name: x.to(q.dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for name, x in more.items()}
        return flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, causal=True, return_softmax_lse=True, **more)

    batch = 4 if "cache_batch_idx" in options else 2
    shapes = (2, seqlen_q, 4, 64), (batch, 90, 2, 64), (batch, 90, 2, 64), (2, seqlen_q, 2, 64), (2, seqlen_q, 2, 64)
    both(function, tensors(*shapes), {"cache_seqlens": ints(17, 63)} | options, dtype, gradients=False,
         before=6 if "rotary_cos" in options else 0)  # cos, sin and the sum, for q and for k


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{"causal": True, "seqused_k": ints(20, 0, 33)}, {"seqused_q": ints(2, 37, 0)}, {"attention_chunk": 16, "causal": True}])
def test_flash_attn_3(dtype, options):
    def function(*x, **more):
        return flash_attn_interface.flash_attn_varlen_func(*x, return_attn_probs=True, **more)

    both(function, tensors((61, 4, 64), (150, 2, 64), (150, 2, 64)), PACKED | options, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window_size", [(None, None), (-4, 50), (30, -2)])
def test_flash_attn_4(dtype, window_size):
    sinks = torch.linspace(-1, 1, 4)
    both(flash_attn.cute.flash_attn_func, tensors((2, 61, 4, 64), (2, 150, 2, 64), (2, 150, 2, 64)), {"window_size": window_size, "learnable_sink": sinks}, dtype)
    both(flash_attn.cute.flash_attn_varlen_func, tensors((61, 4, 64), (150, 2, 64), (150, 2, 64)), PACKED | {"window_size": window_size}, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [ab.LowerTriangularMask(), ab.LowerTriangularFromBottomRightMask(), ab.LocalAttentionFromBottomRightMask(9, 4)])
def test_xformers(dtype, bias):
    both(xops.memory_efficient_attention, tensors((2, 61, 4, 64), (2, 150, 4, 64), (2, 150, 4, 64)), {"attn_bias": bias}, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_xformers_of_sequences(dtype):
    blocks = ab.BlockDiagonalMask.from_seqlens([20, 41], [70, 80])
    for bias in (blocks, blocks.make_causal(), blocks.make_causal_from_bottomright(), blocks.make_local_attention_from_bottomright(7),
                 ab.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([20, 41], 75, [33, 75])):
        both(xops.memory_efficient_attention, tensors((1, 61, 4, 64), (1, 150, 4, 64), (1, 150, 4, 64)), {"attn_bias": bias}, dtype)
