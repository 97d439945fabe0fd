"""xformers.ops.fmha: attention, its gradient and parts of it, on fattn."""

import torch

from fattn._merge import merge_rows

from . import attn_bias
from ._problem import gradients_of, run
from .attn_bias import (
    AttentionBias,
    BlockDiagonalCausalFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionMask,
    BlockDiagonalCausalLocalAttentionPaddedKeysMask,
    BlockDiagonalCausalMask,
    BlockDiagonalCausalWithOffsetGappyKeysMask,
    BlockDiagonalCausalWithOffsetPaddedKeysMask,
    BlockDiagonalGappyKeysMask,
    BlockDiagonalMask,
    BlockDiagonalPaddedKeysMask,
    LocalAttentionFromBottomRightMask,
    LowerTriangularFromBottomRightLocalAttentionMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularMask,
    LowerTriangularMaskWithTensorBias,
    PagedBlockDiagonalCausalWithOffsetGappyKeysMask,
    PagedBlockDiagonalCausalWithOffsetPaddedKeysMask,
    PagedBlockDiagonalGappyKeysMask,
    PagedBlockDiagonalPaddedKeysMask,
)

AttentionOp = tuple
# What programs give as `op`: which kernel runs is planned, whatever it says.
MemoryEfficientAttentionCutlassOp = ("cutlass", "cutlass")
MemoryEfficientAttentionCutlassFwdFlashBwOp = ("cutlass", "flash")
MemoryEfficientAttentionFlashAttentionOp = ("flash", "flash")
MemoryEfficientAttentionCkOp = ("ck", "ck")
MemoryEfficientAttentionSplitKCkOp = ("ck_splitk", "ck")

__all__ = ["AttentionBias", "AttentionOp", "BlockDiagonalCausalFromBottomRightMask", "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
           "BlockDiagonalCausalLocalAttentionMask", "BlockDiagonalCausalLocalAttentionPaddedKeysMask", "BlockDiagonalCausalMask",
           "BlockDiagonalCausalWithOffsetGappyKeysMask", "BlockDiagonalCausalWithOffsetPaddedKeysMask", "BlockDiagonalGappyKeysMask",
           "BlockDiagonalMask", "BlockDiagonalPaddedKeysMask", "LocalAttentionFromBottomRightMask",
           "LowerTriangularFromBottomRightLocalAttentionMask", "LowerTriangularFromBottomRightMask", "LowerTriangularMask",
           "LowerTriangularMaskWithTensorBias", "MemoryEfficientAttentionCkOp", "MemoryEfficientAttentionCutlassFwdFlashBwOp",
           "MemoryEfficientAttentionCutlassOp", "MemoryEfficientAttentionFlashAttentionOp", "MemoryEfficientAttentionSplitKCkOp",
           "PagedBlockDiagonalCausalWithOffsetGappyKeysMask", "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask",
           "PagedBlockDiagonalGappyKeysMask", "PagedBlockDiagonalPaddedKeysMask", "attn_bias",
           "memory_efficient_attention", "memory_efficient_attention_backward", "memory_efficient_attention_forward",
           "memory_efficient_attention_forward_requires_grad", "memory_efficient_attention_partial", "merge_attentions"]

_NO_DROPOUT = "p is {}; dropout has no functions for each pass, allowed: 0. memory_efficient_attention has dropout and a gradient"


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
    """query (batch, seqlen_q, heads, headdim), key and value (batch, seqlen_k, heads, ...), or without heads, or with groups of heads before them; attn_bias: a
    tensor that is added, which has a gradient, or a class of attn_bias -> a tensor of query's order."""
    return run(query, key, value, attn_bias, p, scale, output_dtype)[0]


def memory_efficient_attention_forward(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
    """The same without a gradient."""
    with torch.no_grad():
        return memory_efficient_attention(query, key, value, attn_bias, p, scale, output_dtype=output_dtype)


def memory_efficient_attention_forward_requires_grad(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
    """(out, lse (batch, heads, seqlen_q)), for memory_efficient_attention_backward."""
    if p:
        raise NotImplementedError(_NO_DROPOUT.format(p))
    with torch.no_grad():
        return run(query, key, value, attn_bias, 0, scale, output_dtype)


def memory_efficient_attention_backward(grad, output, lse, query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None):
    """(dq, dk, dv), from what memory_efficient_attention_forward_requires_grad returned."""
    if p:
        raise NotImplementedError(_NO_DROPOUT.format(p))
    with torch.no_grad():
        return gradients_of(grad, output, lse, query, key, value, attn_bias, scale)


def memory_efficient_attention_partial(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
    """(out, lse (batch, heads, seqlen_q), with groups (batch, groups, heads, seqlen_q)) over some of the keys, for merge_attentions. Both have gradients."""
    if p:
        raise NotImplementedError(_NO_DROPOUT.format(p))
    return run(query, key, value, attn_bias, 0, scale, output_dtype)


def merge_attentions(attn_split, lse_split, write_lse=True, output_dtype=None):
    """attn_split: (parts, batch, seqlen, heads, headdim), or as many tensors; lse_split: (parts, batch, heads, seqlen), likewise -> (out, lse), lse None
    without write_lse. Differentiable."""
    outs, lses = list(attn_split), [x.movedim(-1, 1) for x in lse_split]
    o, lse = merge_rows(outs, lses)
    return o.to(output_dtype or outs[0].dtype), (lse.movedim(1, -1) if write_lse else None)
