"""A Llama block: rotary embeddings, grouped heads, causal. `before` is written for flash_attn, `after` for fattn; both give the same.

    python -m fattn.compat llama_block.py
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from flash_attn import flash_attn_func
from flash_attn.layers.rotary import apply_rotary_emb

import fattn

NHEADS, NHEADS_K, HEADDIM = 8, 2, 16


def before(q, k, v, cos, sin):
    q, k = apply_rotary_emb(q, cos, sin), apply_rotary_emb(k, cos, sin)
    return flash_attn_func(q, k, v, causal=True)


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def after(q, k, v, cos, sin):
    q, k = rotate(q, cos[:, None], sin[:, None]), rotate(k, cos[:, None], sin[:, None])
    return fattn.attention(q, k, v, causal=True)


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        width = NHEADS * HEADDIM
        self.attention = attention
        self.norm, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, NHEADS_K * HEADDIM, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        h = self.norm(x)
        q, k, v = self.q(h).unflatten(-1, (NHEADS, HEADDIM)), self.k(h).unflatten(-1, (NHEADS_K, HEADDIM)), self.v(h).unflatten(-1, (NHEADS_K, HEADDIM))
        angles = torch.outer(torch.arange(x.shape[1]), 10000.0 ** -(torch.arange(0, HEADDIM, 2) / HEADDIM))
        x = x + self.out(self.attention(q, k, v, angles.cos(), angles.sin()).flatten(2))
        h = self.norm_mlp(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


torch.manual_seed(0)
block = Block(before)
x = torch.randn(2, 48, NHEADS * HEADDIM)
results = []
for attention in (before, after):
    block.attention = attention
    block.zero_grad()
    y = block(x)
    y.square().mean().backward()
    results.append((y.detach(), block.q.weight.grad.clone()))
for was, now in zip(*results):
    torch.testing.assert_close(now, was, rtol=1e-4, atol=1e-5)
print(f"a Llama block of {tuple(x.shape)}: the same before and after, and so is the gradient")
