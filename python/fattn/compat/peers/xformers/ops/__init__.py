"""xformers.ops: attention that stores no scores."""

import torch

from . import fmha
from .fmha import (
    AttentionBias,
    AttentionOp,
    LowerTriangularMask,
    MemoryEfficientAttentionCkOp,
    MemoryEfficientAttentionCutlassFwdFlashBwOp,
    MemoryEfficientAttentionCutlassOp,
    MemoryEfficientAttentionFlashAttentionOp,
    MemoryEfficientAttentionSplitKCkOp,
    memory_efficient_attention,
    memory_efficient_attention_backward,
    memory_efficient_attention_forward,
    memory_efficient_attention_forward_requires_grad,
)


def unbind(x, dim):
    """torch.unbind: views."""
    return torch.unbind(x, dim)


def index_select_cat(sources, indices):
    """The rows `indices[i]` of each source, flattened, behind each other."""
    return torch.cat([source[rows.long()].flatten() for source, rows in zip(sources, indices)])


def scaled_index_add(input, index, source, scaling=None, alpha=1.0):
    """input with alpha * scaling * source added to its rows `index`, of which none repeats; in place where no gradient is asked for."""
    added = source if scaling is None else source * scaling
    add = torch.index_add if torch.is_grad_enabled() and (input.requires_grad or added.requires_grad) else torch.Tensor.index_add_
    return add(input, 0, index.long(), added.to(input.dtype), alpha=alpha)


__all__ = ["AttentionBias", "AttentionOp", "LowerTriangularMask", "MemoryEfficientAttentionCkOp", "MemoryEfficientAttentionCutlassFwdFlashBwOp",
           "MemoryEfficientAttentionCutlassOp", "MemoryEfficientAttentionFlashAttentionOp", "MemoryEfficientAttentionSplitKCkOp", "fmha", "index_select_cat",
           "memory_efficient_attention", "memory_efficient_attention_backward", "memory_efficient_attention_forward",
           "memory_efficient_attention_forward_requires_grad", "scaled_index_add", "unbind"]
