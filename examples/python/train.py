"""Trains a small language model whose attention is fattn.attention: the letters of a text, on the CPU or a CUDA GPU. Ends with an error if it learns nothing.

    python examples/python/train.py [--steps N] [--device cuda]
"""

import argparse

import torch
import torch.nn.functional as F

import fattn

TEXT = "the quick brown fox jumps over the lazy dog, and the dog, who is not so lazy, jumps over the fox. " * 20


class Block(torch.nn.Module):
    def __init__(self, width: int, nheads: int):
        super().__init__()
        self.nheads = nheads
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)])
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seqlen, width = x.shape
        # (batch, seqlen, 3, nheads, headdim): q, k and v are views of one tensor, and need no copy.
        q, k, v = self.qkv(self.norms[0](x)).view(batch, seqlen, 3, self.nheads, -1).unbind(2)
        x = x + self.out(fattn.attention(q, k, v, causal=True).reshape(batch, seqlen, width))
        return x + self.mlp(self.norms[1](x))


class Model(torch.nn.Module):
    def __init__(self, letters: int, width: int = 64, nheads: int = 4, nlayers: int = 2, seqlen: int = 64):
        super().__init__()
        self.letter = torch.nn.Embedding(letters, width)
        self.place = torch.nn.Embedding(seqlen, width)
        self.blocks = torch.nn.Sequential(*(Block(width, nheads) for _ in range(nlayers)))
        self.head = torch.nn.Linear(width, letters)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.blocks(self.letter(tokens) + self.place(places)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    alphabet = sorted(set(TEXT))
    text = torch.tensor([alphabet.index(letter) for letter in TEXT], device=arguments.device)
    model = Model(len(alphabet)).to(arguments.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = loss = None
    for step in range(arguments.steps):
        begin = torch.randint(0, len(text) - 65, (8,)).tolist()
        letters = torch.stack([text[i : i + 65] for i in begin])
        # bfloat16 inside, parameters and loss in float32; on a GPU attention is in 16 bits.
        with torch.autocast(arguments.device, dtype=torch.bfloat16):
            logits = model(letters[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), letters[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        first = loss.item() if first is None else first
        if step % 10 == 0 or step == arguments.steps - 1:
            print(f"step {step:4d}  loss {loss.item():.3f}")
    if not loss.item() < 0.5 * first:
        raise SystemExit(f"the loss went from {first:.3f} to {loss.item():.3f} only")


if __name__ == "__main__":
    main()
