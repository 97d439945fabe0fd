"""A diffusion transformer: image tokens see the text, whose lengths differ; written for xFormers.

    python -m fattn.compat diffusion_transformer.py
"""

import torch
import xformers.ops as xops
from xformers.ops.fmha.attn_bias import BlockDiagonalMask

import fattn

BATCH, TOKENS, NHEADS, HEADDIM = 2, 64, 4, 32
TEXT = [9, 17]  # tokens of each prompt


def before(q, k, v, text_k, text_v):
    x = xops.memory_efficient_attention(q, k, v)
    bias = BlockDiagonalMask.from_seqlens([TOKENS] * BATCH, TEXT)
    cross = xops.memory_efficient_attention(q.reshape(1, -1, NHEADS, HEADDIM), text_k[None], text_v[None], attn_bias=bias)
    return x + cross.reshape(q.shape)


def after(q, k, v, text_k, text_v):
    x = fattn.attention(q, k, v)
    ends = torch.tensor([0, *TEXT]).cumsum(0).to(torch.int32)
    begins = torch.arange(BATCH + 1, dtype=torch.int32) * TOKENS
    cross = fattn.attention_varlen(q.flatten(0, 1), text_k, text_v, cu_seqlens_q=begins, cu_seqlens_k=ends, max_seqlen_q=TOKENS, max_seqlen_k=max(TEXT))
    return x + cross.reshape(q.shape)


torch.manual_seed(0)
inputs = [torch.randn(BATCH, TOKENS, NHEADS, HEADDIM, requires_grad=True) for _ in range(3)]
inputs += [torch.randn(sum(TEXT), NHEADS, HEADDIM, requires_grad=True) for _ in range(2)]
was, now = before(*inputs), after(*inputs)
torch.testing.assert_close(now, was, rtol=1e-4, atol=1e-5)
for a, b in zip(torch.autograd.grad(was.square().sum(), inputs), torch.autograd.grad(now.square().sum(), inputs)):
    torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)
print(f"{BATCH} images of {TOKENS} tokens, prompts of {TEXT}: the same before and after, and so are the gradients")
