"""Attention by its definition in float64 by operations of torch, for what the modules of fattn.compat take; (batch, seqlen, heads, headdim)."""

import torch

from attention_reference import reordered

FORWARD = 16, 12  # terms of the sums behind o and lse, in nearly all tests: q k, over the keys
BACKWARD = 16, 16, 16, 12, 2 * 7  # q k, dout v, dout o; over the keys, over the queries of two heads


def seen_by(seqlen_q: int, seqlen_k: int, causal: bool = False, left: int | None = None, right: int | None = None) -> torch.Tensor:
    """Which keys a query sees, aligned to the bottom right."""
    distance = torch.arange(seqlen_k) - torch.arange(seqlen_q)[:, None] - (seqlen_k - seqlen_q)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        seen &= distance <= 0
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return seen


def reference(q, k, v, seen=None, *, softmax_scale=None, softcap=0.0, alibi_slopes=None, bias=None, sinks=None):
    """o and lse."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if alibi_slopes is not None:
        distance = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None] - (k.shape[1] - q.shape[1])
        scores = scores - alibi_slopes.double().reshape(-1, q.shape[2], 1, 1) * distance.abs()
    if bias is not None:
        scores = scores + bias.double()
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(*scores.shape[:3], 1)], 3)
    lse = scores.logsumexp(3)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()[..., : k.shape[1]]
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse


def close(got: torch.Tensor, wanted: torch.Tensor, *sums: int, dtype: str = "float32", largest: float = 1.0) -> None:
    """One of the two, or both, was computed in the dtype, and `sums` are as `reordered` takes them."""
    torch.testing.assert_close(got.double(), wanted.double(), **reordered(dtype, *(sums or FORWARD), largest=largest))


def tensors(*shapes, requires_grad: bool = False, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).requires_grad_(requires_grad) for shape in shapes]


def gradient_agrees(got: torch.Tensor, wanted: torch.Tensor, *sums: int) -> None:
    """Sums of a gradient are as great as the greatest of its elements, and cancel in others."""
    close(got, wanted, *(sums or BACKWARD), largest=max(1.0, float(wanted.detach().abs().max())) if wanted.numel() else 1.0)


def gradients_agree(got: torch.Tensor, wanted: torch.Tensor, inputs: list[torch.Tensor], *sums: int) -> None:
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(got.shape, generator=generator)
    for x, y in zip(torch.autograd.grad(got, inputs, dout), torch.autograd.grad(wanted, inputs, dout.double(), retain_graph=True)):
        gradient_agrees(x, y, *sums)
