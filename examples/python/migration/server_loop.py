"""A server's loop: requests of unequal lengths are decoded together, each with its row of the cache.

    python -m fattn.compat server_loop.py
"""

import torch
from flash_attn import flash_attn_with_kvcache

import fattn

BATCH, LONGEST, NHEADS, NHEADS_K, HEADDIM, STEPS = 3, 64, 8, 2, 32, 6


def before(q, k_cache, v_cache, k, v, lengths):
    return flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)


def after(q, k_cache, v_cache, k, v, lengths):
    return fattn.with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)


@torch.inference_mode()
def serve(attention):
    generator = torch.Generator().manual_seed(0)
    caches = torch.randn(2, BATCH, LONGEST, NHEADS_K, HEADDIM, generator=generator)
    lengths = torch.tensor([11, 3, 40], dtype=torch.int32)
    outputs = []
    for _ in range(STEPS):
        q = torch.randn(BATCH, 1, NHEADS, HEADDIM, generator=generator)
        k, v = torch.randn(2, BATCH, 1, NHEADS_K, HEADDIM, generator=generator)
        outputs.append(attention(q, *caches, k, v, lengths))
        lengths = lengths + 1
    return torch.cat(outputs, 1), caches


for was, now in zip(serve(before), serve(after)):
    torch.testing.assert_close(now, was, rtol=1e-4, atol=1e-5)
print(f"{STEPS} steps of {BATCH} requests: outputs and caches are the same before and after")
