"""xFormers by fattn.compat: memory_efficient_attention, each class of biases against its materialised tensor, gradients, parts that are merged."""

import pytest

torch = pytest.importorskip("torch")
from compat_reference import close, gradient_agrees, gradients_agree, reference, tensors  # noqa: E402

from fattn import compat  # noqa: E402

compat.install("xformers")
try:
    import xformers.ops as xops
    from xformers.ops import fmha
    from xformers.ops.fmha import attn_bias as ab
finally:
    compat.uninstall()

blocks = ab.BlockDiagonalMask.from_seqlens
# Lengths of q and k, and the bias.
DENSE = [(6, 6, ab.LowerTriangularMask()), (4, 9, ab.LowerTriangularMask()), (9, 4, ab.LowerTriangularMask()), (4, 9, ab.LowerTriangularFromBottomRightMask()),
         (9, 4, ab.LowerTriangularFromBottomRightMask()), (4, 9, ab.LowerTriangularFromBottomRightMask().make_local_attention(3)),
         (4, 9, ab.LocalAttentionFromBottomRightMask(window_left=2, window_right=1)), (6, 6, None)]
PACKED = [blocks([5, 7]), blocks([5, 7]).make_causal(), blocks([5, 7]).make_local_attention(2), blocks([4, 5], [9, 7]), blocks([4, 5], [9, 7]).make_causal(),
          blocks([4, 5], [9, 7]).make_causal_from_bottomright(), blocks([4, 5], [9, 7]).make_local_attention(2),
          blocks([4, 5], [9, 7]).make_local_attention_from_bottomright(3), blocks([4, 5], [9, 2]).make_causal(), blocks([4, 5], [9, 2]).make_local_attention(2),
          ab.BlockDiagonalPaddedKeysMask.from_seqlens([2, 3], 8, [5, 8]), ab.BlockDiagonalPaddedKeysMask.from_seqlens([2, 3], 8, [5, 8]).make_causal(),
          ab.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(q_seqlen=[2, 3], kv_padding=8, kv_seqlen=[5, 8]),
          ab.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local([2, 3], 8, [5, 8], 2),
          ab.BlockDiagonalGappyKeysMask.from_seqlens([2, 3], [1, 9, 16], [5, 3]), ab.BlockDiagonalGappyKeysMask.from_seqlens([2, 3], [1, 9, 16], [5, 3]).make_causal()]


def by_bias(q, k, v, added):
    return reference(q, k, v, added != -torch.inf, bias=added.masked_fill(added == -torch.inf, 0))


def check(inputs, bias, added):
    o, lse = by_bias(*inputs, added)
    got = xops.memory_efficient_attention(*inputs, attn_bias=bias)
    close(got, o)
    gradients_agree(got, o, inputs)
    out, got_lse = fmha.memory_efficient_attention_forward_requires_grad(*inputs, bias)
    assert not out.requires_grad
    close(out, o)
    close(got_lse, lse)
    dout = torch.randn(o.shape, generator=torch.Generator().manual_seed(2))
    wanted = torch.autograd.grad(o, inputs, dout.double())
    for x, y in zip(fmha.memory_efficient_attention_backward(dout, out, got_lse, *inputs, bias), wanted):
        gradient_agrees(x, y)
    assert torch.equal(fmha.memory_efficient_attention_forward(*inputs, bias), out)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "bias"), DENSE, ids=[f"{type(x[2]).__name__}-{x[0]}-{x[1]}" for x in DENSE])
def test_masks(seqlen_q, seqlen_k, bias):
    inputs = tensors((2, seqlen_q, 3, 8), (2, seqlen_k, 3, 8), (2, seqlen_k, 3, 12), requires_grad=True)
    shape = (2, 3, seqlen_q, seqlen_k)
    check(inputs, bias, torch.zeros(shape) if bias is None else bias.materialize(shape))


def test_materialized_masks():
    """By hand, as the others are held against these."""
    inf = -torch.inf
    for mask, rows in ((ab.LowerTriangularMask(), [[0, inf, inf], [0, 0, inf]]), (ab.LowerTriangularFromBottomRightMask(), [[0, 0, inf], [0, 0, 0]]),
                       (ab.LocalAttentionFromBottomRightMask(1, 0), [[0, 0, inf], [inf, 0, 0]]),
                       (ab.LowerTriangularFromBottomRightLocalAttentionMask(1), [[inf, 0, inf], [inf, inf, 0]]),
                       (blocks([1, 1], [2, 1]), [[0, 0, inf], [inf, inf, 0]]), (blocks([1, 1], [2, 1]).make_causal(), [[0, inf, inf], [inf, inf, 0]]),
                       (blocks([2], [3]).make_local_attention(1), [[0, inf, inf], [inf, 0, inf]]),
                       (blocks([2], [3]).make_local_attention_from_bottomright(2), [[0, 0, inf], [inf, 0, 0]]),
                       (ab.BlockDiagonalGappyKeysMask.from_seqlens([1, 1], [1, 2, 3], [1, 1]), [[inf, 0, inf], [inf, inf, 0]]),
                       (ab.BlockDiagonalPaddedKeysMask.from_seqlens([2], 3, [2]).make_causal(), [[0, inf, inf], [0, 0, inf]])):
        assert mask.materialize((2, 3)).tolist() == rows, type(mask).__name__
        assert mask.to("cpu").materialize((2, 2, 3), dtype=torch.bfloat16).tolist() == [rows, rows]


@pytest.mark.parametrize("bias", PACKED, ids=[f"{i}-{type(x).__name__}" for i, x in enumerate(PACKED)])
def test_sequences_behind_each_other(bias):
    total_q, total_k = bias.q_seqinfo.seqstart_py[-1], bias.k_seqinfo.seqstart_py[-1]
    inputs = tensors((1, total_q, 3, 8), (1, total_k, 3, 8), (1, total_k, 3, 8), requires_grad=True)
    check(inputs, bias, bias.materialize((1, 1, total_q, total_k)))


def test_tensors():
    """Added to scores, with a gradient; -inf hides; also without a dimension of heads, and beside a causal mask."""
    *inputs, bias = tensors((2, 5, 3, 8), (2, 7, 3, 8), (2, 7, 3, 8), (2, 3, 5, 7), requires_grad=True)
    o = by_bias(*inputs, bias)[0]
    got = xops.memory_efficient_attention(*inputs, attn_bias=bias, scale=8**-0.5)
    close(got, o)
    gradients_agree(got, o, [*inputs, bias])
    causal = ab.LowerTriangularMask().add_bias(bias)
    assert isinstance(causal, ab.LowerTriangularMaskWithTensorBias)
    got, o = xops.memory_efficient_attention(*inputs, attn_bias=causal), by_bias(*inputs, causal.materialize((2, 3, 5, 7)))[0]
    close(got, o)
    gradients_agree(got, o, [*inputs, bias])
    inputs = tensors((2, 5, 8), (2, 7, 8), (2, 7, 8), requires_grad=True)
    (bias,) = tensors((2, 5, 7))
    o = by_bias(*(x[:, :, None] for x in inputs), bias[:, None])[0][:, :, 0]
    got = xops.memory_efficient_attention(*inputs, attn_bias=bias)
    close(got, o)
    gradients_agree(got, o, inputs)


def test_groups_of_heads():
    """5 dimensions: keys are one head of each group, expanded."""
    q, k, v = tensors((2, 5, 2, 3, 8), (2, 7, 2, 1, 8), (2, 7, 2, 1, 8), requires_grad=True)
    for expanded in (True, False):
        keys = [x.expand(2, 7, 2, 3, 8) if expanded else x.expand(2, 7, 2, 3, 8).contiguous() for x in (k, v)]
        o, lse = reference(q.flatten(2, 3), k[:, :, :, 0], v[:, :, :, 0])
        got = xops.memory_efficient_attention(q, *keys)
        close(got.flatten(2, 3), o)
        gradients_agree(got, o.unflatten(2, (2, 3)), [q, k, v])
        close(fmha.memory_efficient_attention_partial(q, *keys)[1].flatten(1, 2), lse)


@pytest.mark.parametrize("dimensions", [4, 5])
@pytest.mark.parametrize("stacked", [False, True])
def test_parts_are_merged(dimensions, stacked):
    heads = (3,) if dimensions == 4 else (2, 3)
    inputs = tensors((2, 5, *heads, 8), (2, 9, *heads, 8), (2, 9, *heads, 8), requires_grad=True)
    q, k, v = inputs
    parts = [fmha.memory_efficient_attention_partial(q, k[:, a:b], v[:, a:b]) for a, b in ((0, 2), (2, 6), (6, 9))]
    outs, lses = zip(*parts)
    got, got_lse = fmha.merge_attentions(torch.stack(outs), torch.stack(lses)) if stacked else fmha.merge_attentions(outs, lses)
    o, lse = reference(*(x.flatten(2, -2) for x in inputs))
    close(got.flatten(2, -2), o)
    close(got_lse.flatten(1, -2), lse)
    gradients_agree(got, o.reshape(got.shape), inputs)
    assert fmha.merge_attentions(outs, lses, write_lse=False)[1] is None
    assert fmha.merge_attentions(outs, lses, output_dtype=torch.bfloat16)[0].dtype == torch.bfloat16


def test_a_row_that_no_part_sees():
    o, lse = fmha.merge_attentions([torch.ones(1, 1, 1, 8)] * 2, [torch.full((1, 1, 1), -torch.inf)] * 2)
    assert o.eq(0).all() and lse.eq(-torch.inf).all()


def test_lists_of_tensors():
    a, b = tensors((2, 3, 2, 8), (1, 5, 2, 8))
    mask, x = ab.BlockDiagonalMask.from_tensor_list([a, b])
    assert x.shape == (1, 11, 2, 8) and mask.q_seqinfo.lengths() == [3, 3, 5]
    assert all(torch.equal(y, z) for y, z in zip(mask.split(x), (a, b)))
    o = mask.split(xops.memory_efficient_attention(x, x, x, attn_bias=mask))
    close(o[0], reference(a, a, a)[0])
    close(o[1], reference(b, b, b)[0])
    keys = tensors((2, 4, 2, 8), (1, 6, 2, 8), seed=1)
    mask, q, k, v = ab.BlockDiagonalMask.from_tensor_lists_qkv([a, b], keys, keys)
    close(mask.split_queries(xops.memory_efficient_attention(q, k, v, mask))[0], reference(a, keys[0], keys[0])[0])
    assert torch.equal(mask.split_kv(k)[1], keys[1])
    with pytest.raises(ValueError, match="take split_queries or split_kv"):
        mask.split(q)


@pytest.mark.parametrize("kind", [ab.PagedBlockDiagonalPaddedKeysMask, ab.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask])
def test_keys_in_pages(kind):
    tables = torch.tensor([[5, 0, 3], [2, 6, 1]], dtype=torch.int32)
    bias = kind.from_seqlens(q_seqlen=[2, 3], kv_seqlen=[9, 4], block_tables=tables, page_size=4).to("cpu")
    q, k, v = tensors((1, 5, 4, 8), (1, 28, 2, 8), (1, 28, 2, 8))
    o, lse = fmha.memory_efficient_attention_forward_requires_grad(q, k, v, bias)
    added = bias.materialize((1, 4, 5, 28))
    seen = added[0, 0] == 0
    rows = [20, 21, 22, 23, 0, 1, 2, 3, 12], [8, 9, 10, 11]
    assert set(seen[1].nonzero()[:, 0].tolist()) == set(rows[0]) and set(seen[4].nonzero()[:, 0].tolist()) == set(rows[1])
    assert seen[0].sum() == (8 if "Causal" in kind.__name__ else 9) and seen[2].sum() == (2 if "Causal" in kind.__name__ else 4)
    wanted = by_bias(q, k, v, added)
    close(o, wanted[0])
    close(lse, wanted[1])
    with pytest.raises(NotImplementedError, match="keys in pages have no gradient"):
        fmha.memory_efficient_attention_backward(o, o, lse, q, k, v, bias)
    with pytest.raises(NotImplementedError, match="block_table"):
        xops.memory_efficient_attention(q.requires_grad_(), k, v, bias)
    with pytest.raises(ValueError, match=r"attn_bias allows \(1, 5, ...\) and \(1, pages \* 4, ...\)"):
        xops.memory_efficient_attention(q.detach(), k[:, :27], v[:, :27], bias)


@pytest.mark.parametrize("starts", [[0, 0], [4, 8], [3, 1], [5, 10]])
@pytest.mark.parametrize("kind", [ab.PagedBlockDiagonalGappyKeysMask, ab.PagedBlockDiagonalCausalWithOffsetGappyKeysMask])
def test_keys_in_pages_from_a_row_on(kind, starts):
    """Whole pages are skipped, and rows of the first one are hidden."""
    tables = torch.tensor([[5, 0, 3], [2, 6, 1]], dtype=torch.int32)
    bias = kind.from_seqlens(q_seqlen=[2, 3], kv_seqstarts=starts, kv_seqlen=[6, 2], block_tables=tables, page_size=4).to("cpu")
    q, k, v = tensors((1, 5, 4, 8), (1, 28, 2, 8), (1, 28, 2, 8))
    o, lse = fmha.memory_efficient_attention_forward_requires_grad(q, k, v, bias)
    added = bias.materialize((1, 4, 5, 28))
    rows = (tables[0].long()[:, None] * 4 + torch.arange(4)).flatten()[starts[0] : starts[0] + 6]
    assert (added[0, 0, 1] == 0).nonzero()[:, 0].tolist() == sorted(rows.tolist())
    assert (added[0, 0] == 0).sum() == (5 + 6 + 0 + 1 + 2 if "Causal" in kind.__name__ else 2 * 6 + 3 * 2)
    wanted = by_bias(q, k, v, added)
    close(o, wanted[0])
    close(lse, wanted[1])
    with pytest.raises(NotImplementedError, match="keys in pages have no gradient"):
        fmha.memory_efficient_attention_backward(o, o, lse, q, k, v, bias)


def test_made_paged():
    """As from_seqlens of the paged class makes them."""
    tables = torch.tensor([[5, 0, 3], [2, 6, 1]], dtype=torch.int32)
    q, k, v = tensors((1, 5, 4, 8), (1, 28, 2, 8), (1, 28, 2, 8))
    padded, kind = ab.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens([2, 3], 20, [9, 4]), ab.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask
    made, wanted = padded.make_paged(tables, 4, kind), kind.from_seqlens([2, 3], [9, 4], tables, 4)
    assert type(made) is kind and torch.equal(xops.memory_efficient_attention(q, k, v, made), xops.memory_efficient_attention(q, k, v, wanted))
    gappy, kind = ab.BlockDiagonalGappyKeysMask.from_seqlens([2, 3], [3, 21, 40], [6, 2]), ab.PagedBlockDiagonalGappyKeysMask
    made, wanted = gappy.make_paged(tables, 4, 20, kind), kind.from_seqlens([2, 3], [3, 1], [6, 2], tables, 4)
    assert type(made) is kind and torch.equal(xops.memory_efficient_attention(q, k, v, made), xops.memory_efficient_attention(q, k, v, wanted))
    with pytest.raises(ValueError, match=r"block_tables has the shape \(1, 3\); allowed: \(2, columns\)"):
        padded.make_paged(tables[:1], 4, kind)
    with pytest.raises(ValueError, match="allowed: rows within 3 pages of 4"):
        gappy.make_paged(tables, 4, 30, kind)
    local = ab.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local([2, 3], 20, [9, 4], 2)
    with pytest.raises(NotImplementedError, match="has a window, and PagedBlockDiagonalPaddedKeysMask has none"):
        local.make_paged(tables, 4, ab.PagedBlockDiagonalPaddedKeysMask)


@pytest.mark.parametrize("scaling", [None, torch.tensor([1.0, 2.0, 0.5])])
def test_rows_of_nested_batches(scaling):
    """What DINOv2 calls around attention."""
    x, y, source = tensors((4, 2, 3), (3, 5, 3), (2, 2, 3), requires_grad=True)
    rows = torch.tensor([3, 1])
    assert torch.equal(xops.index_select_cat([x.flatten(1), y.flatten(1)], [rows, torch.tensor([0])]), torch.cat([x[rows].flatten(), y[0].flatten()]))
    wanted = x.detach().clone()
    wanted[rows] += 0.5 * source.detach() * (1 if scaling is None else scaling)
    got = xops.scaled_index_add(x, rows, source, scaling, alpha=0.5)
    close(got, wanted)
    assert torch.autograd.grad(got.sum(), source)[0].sum() == pytest.approx(6.0 if scaling is None else 7.0)
    place = x.detach().clone()
    assert xops.scaled_index_add(place, rows, source.detach(), scaling, alpha=0.5) is place
    close(place, wanted)


def test_dropout():
    q, k, v = tensors((1, 64, 2, 8), (1, 64, 2, 8), (1, 64, 2, 8))
    torch.manual_seed(0)
    o = xops.memory_efficient_attention(q, k, v, None, 0.5)
    torch.manual_seed(0)
    assert torch.equal(xops.memory_efficient_attention(q, k, v, p=0.5, op=xops.MemoryEfficientAttentionFlashAttentionOp), o)
    assert not torch.equal(xops.memory_efficient_attention(q, k, v, p=0.5), o)
    for function in (fmha.memory_efficient_attention_forward_requires_grad, fmha.memory_efficient_attention_partial):
        with pytest.raises(NotImplementedError, match="p is 0.5"):
            function(q, k, v, p=0.5)


def test_errors():
    """ValueError and NotImplementedError, as the peer's."""
    x = torch.ones(2, 3, 2, 8)
    for call, message in ((lambda: xops.memory_efficient_attention(x, x[0], x), "key has 3 dimensions and query 4"),
                          (lambda: xops.memory_efficient_attention(x, x, x, torch.ones(2, 2, 3, 3, dtype=torch.bool)), "attn_bias is a tensor of torch.bool"),
                          (lambda: xops.memory_efficient_attention(x, x, x, blocks([3])), "query has a batch of 2"),
                          (lambda: xops.memory_efficient_attention(x[:1], x[:1], x[:1], blocks([4])), "query has 3 rows and attn_bias needs 4"),
                          (lambda: ab.LocalAttentionFromBottomRightMask(-1, 0), "window_left is -1"),
                          (lambda: blocks([3]).make_local_attention(0), "the window has 0 keys"),
                          (lambda: ab.BlockDiagonalPaddedKeysMask.from_seqlens([1], 2, [3]), "kv_seqlen has 3 and kv_padding is 2"),
                          (lambda: ab.BlockDiagonalGappyKeysMask.from_seqlens([1], [0], [3]), "allowed: n, n \\+ 1 and n")):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="query is a list"):
        xops.memory_efficient_attention([1], x, x)
    with pytest.raises(NotImplementedError, match="attn_bias is a str"):
        xops.memory_efficient_attention(x, x, x, "causal")
    gappy, tables = ab.PagedBlockDiagonalGappyKeysMask.from_seqlens, torch.zeros(1, 2, dtype=torch.int32)
    for given, message in ((([1], [0, 2], [2]), "kv_seqstarts 2, kv_seqlen 1 and block_tables 1 rows"), (([1], [3], [2]), "allowed: rows within 2 pages of 2"),
                           (([1], [-1], [2]), "allowed: rows within")):
        with pytest.raises(ValueError, match=message):
            gappy(*given, tables, 2)


def test_compiles_without_a_break():
    def model(x):
        q, k, v = x.unbind(2)
        return xops.memory_efficient_attention(q, k, v, attn_bias=xops.LowerTriangularMask()) + xops.memory_efficient_attention(q, k, v)

    (x,) = tensors((2, 9, 3, 4, 8), requires_grad=True)
    got, wanted = torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x)
    close(got, wanted)
    gradient_agrees(torch.autograd.grad(got.sum(), x)[0], torch.autograd.grad(wanted.sum(), x)[0])
