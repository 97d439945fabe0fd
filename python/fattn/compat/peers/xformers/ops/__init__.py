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


__all__ = ["AttentionBias", "AttentionOp", "LowerTriangularMask", "MemoryEfficientAttentionCkOp", "MemoryEfficientAttentionCutlassFwdFlashBwOp",
           "MemoryEfficientAttentionCutlassOp", "MemoryEfficientAttentionFlashAttentionOp", "MemoryEfficientAttentionSplitKCkOp", "fmha",
           "memory_efficient_attention", "memory_efficient_attention_backward", "memory_efficient_attention_forward",
           "memory_efficient_attention_forward_requires_grad", "unbind"]
