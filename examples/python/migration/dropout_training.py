"""A training loop with dropout, a window and bf16: with the same seed both versions take the same path.

    python -m fattn.compat dropout_training.py
"""

import torch
import torch.nn as nn
from flash_attn import flash_attn_qkvpacked_func

import fattn

WIDTH, NHEADS, SEQLEN, STEPS = 64, 4, 64, 8


def before(qkv, training):
    return flash_attn_qkvpacked_func(qkv, dropout_p=0.1 if training else 0.0, causal=True, window_size=(31, 0))


def after(qkv, training):
    return fattn.attention_qkvpacked(qkv, dropout_p=0.1 if training else 0.0, causal=True, window=(31, 0))


class Model(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.embed, self.qkv, self.out, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 32)

    def forward(self, tokens):
        x = self.embed(tokens)
        o = self.attention(self.qkv(x).unflatten(-1, (3, NHEADS, WIDTH // NHEADS)), self.training)
        return self.head(x + self.out(o.flatten(2)))


def train(attention):
    torch.manual_seed(0)
    model = Model(attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(SEQLEN + 1).mul(7).remainder(32).expand(4, -1)
    losses = []
    for _ in range(STEPS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


was, now = train(before), train(after)
assert was == now and now[-1] < now[0] / 2, (was, now)
print(f"loss {now[0]:.3f} to {now[-1]:.3f} in {STEPS} steps, step by step the same before and after")
