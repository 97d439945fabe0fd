"""Decoding with a cache of keys and values: each step computes one query against all keys so far. The result is that of one call on the whole sequence.

    python examples/python/decode.py [--device cuda]
"""

import argparse

import torch

import fattn


class Cache:
    """Keys and values of the tokens so far, in memory for the longest sequence. What attention gets are views of it; nothing is copied."""

    def __init__(self, batch: int, longest: int, nheads_k: int, headdim: int, like: torch.Tensor):
        self.k = like.new_empty(batch, longest, nheads_k, headdim)
        self.v = torch.empty_like(self.k)
        self.seqlen = 0

    def append(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        end = self.seqlen + k.shape[1]
        self.k[:, self.seqlen : end], self.v[:, self.seqlen : end] = k, v
        self.seqlen = end
        return self.k[:, :end], self.v[:, :end]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    torch.manual_seed(0)
    batch, prompt, steps, nheads, nheads_k, headdim = 2, 100, 20, 8, 2, 64
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q = torch.randn(batch, prompt + steps, nheads, headdim, device=device, dtype=dtype)
    k, v = torch.randn(2, batch, prompt + steps, nheads_k, headdim, device=device, dtype=dtype)

    cache = Cache(batch, prompt + steps, nheads_k, headdim, q)
    with torch.inference_mode():
        # Masks align to the bottom right: the last query sees every key, so causal=True is right for the prompt and for every step.
        parts = [fattn.attention(q[:, :prompt], *cache.append(k[:, :prompt], v[:, :prompt]), causal=True)]
        for i in range(prompt, prompt + steps):
            parts.append(fattn.attention(q[:, i : i + 1], *cache.append(k[:, i : i + 1], v[:, i : i + 1]), causal=True))
        whole = fattn.attention(q, k, v, causal=True)
    difference = (torch.cat(parts, dim=1) - whole).abs().max().item()
    print(f"{steps} steps after a prompt of {prompt}: the largest difference from one call is {difference:.2g}")
    if not difference <= (1e-5 if dtype == torch.float32 else 2e-2):
        raise SystemExit("decoding differs from one call")


if __name__ == "__main__":
    main()
