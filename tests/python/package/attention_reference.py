"""Attention by its definition, standard attention as a dtype stores it, and how far a result may be from the former: at most twice as far as
standard attention (three times for gradients), docs/NUMERICS.md. Arrays are (batch, seqlen, heads, headdim), in a wider dtype than the one tested."""

import dataclasses
from collections.abc import Callable

import ml_dtypes
import numpy as np

NUMPY = {"float64": np.float64, "float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
EPSILON = {name: float(ml_dtypes.finfo(dtype).eps) for name, dtype in NUMPY.items()}


@dataclasses.dataclass
class Results:
    """What a forward and a backward pass give, or the error allowed in each."""

    o: np.ndarray | float
    lse: np.ndarray | float
    dq: np.ndarray | float
    dk: np.ndarray | float
    dv: np.ndarray | float


def _heads_first(x: np.ndarray, repeat: int = 1) -> np.ndarray:
    return np.repeat(x.transpose(0, 2, 1, 3), repeat, axis=1)


def _of_key_heads(x: np.ndarray, nheads_k: int) -> np.ndarray:
    """Summed over the query heads that share a key head, back in (batch, seqlen, heads, headdim)."""
    batch, nheads, seqlen, headdim = x.shape
    return x.reshape(batch, nheads_k, nheads // nheads_k, seqlen, headdim).sum(axis=2).transpose(0, 2, 1, 3)


def _hidden(seqlen_q: int, seqlen_k: int, causal: bool, window: tuple[int, int] | None) -> np.ndarray:
    """Where a query does not see a key."""
    i, j = np.indices((seqlen_q, seqlen_k))
    left, right = window or (-1, -1)
    distance = j - (i + seqlen_k - seqlen_q)
    hidden = distance > 0 if causal else (distance > right if right >= 0 else np.zeros((seqlen_q, seqlen_k), bool))
    return hidden | (-distance > left) if left >= 0 else hidden


def _weights(scores: np.ndarray, causal: bool, window: tuple[int, int] | None) -> tuple[np.ndarray, np.ndarray]:
    """softmax and log-sum-exp of the scores that the mask leaves."""
    scores = np.where(_hidden(*scores.shape[2:], causal, window), -np.inf, scores)
    highest = scores.max(axis=3, keepdims=True, initial=-np.inf)
    highest = np.where(np.isfinite(highest), highest, 0)
    terms = np.exp(scores - highest)
    total = terms.sum(axis=3, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (highest + np.log(total))[..., 0]
    return terms / np.where(total > 0, total, 1), lse


def attention(q, k, v, dout, *, causal: bool, softmax_scale: float, window: tuple[int, int] | None = None, softcap: float = 0.0,
              store: Callable[[np.ndarray], np.ndarray] = lambda x: x) -> Results:
    """Forward and backward; `store` rounds every matrix that standard attention keeps in memory."""
    nheads_k = k.shape[2]
    group = q.shape[2] // nheads_k
    q, k, v, dout = _heads_first(q), _heads_first(k, group), _heads_first(v, group), _heads_first(dout)
    scores = store(q @ k.swapaxes(2, 3) * softmax_scale)
    if softcap:
        scores = store(softcap * np.tanh(scores / softcap))
    p, lse = _weights(scores, causal, window)
    p = store(p)
    o = store(p @ v)
    ds = store(p * (store(dout @ v.swapaxes(2, 3)) - (o * dout).sum(axis=3, keepdims=True)))
    if softcap:
        ds = store(ds * (1 - (scores / softcap) ** 2))
    return Results(
        o=o.transpose(0, 2, 1, 3),
        lse=lse,
        dq=store(ds @ k * softmax_scale).transpose(0, 2, 1, 3),
        dk=store(_of_key_heads(ds.swapaxes(2, 3) @ q * softmax_scale, nheads_k)),
        dv=store(_of_key_heads(p.swapaxes(2, 3) @ dout, nheads_k)),
    )


def _standard(q, k, v, dout, dtype: str, *, softmax_scale: float, softcap: float, **mask) -> Results:
    """Computed in the dtype; the 16-bit ones sum in a wider one and round what they store."""
    if dtype in ("float16", "bfloat16"):
        return attention(q, k, v, dout, softmax_scale=softmax_scale, softcap=softcap, store=lambda x: x.astype(NUMPY[dtype]).astype(x.dtype), **mask)
    return attention(*(x.astype(dtype) for x in (q, k, v, dout)), softmax_scale=NUMPY[dtype](softmax_scale), softcap=NUMPY[dtype](softcap), **mask)


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x[np.isfinite(x)]).max(initial=0))


def _floors(q, k, v, dout, dtype: str, *, softmax_scale: float, softcap: float, **mask) -> Results:
    """What the last places of the sums inside make of a result, which standard attention may miss by luck, and does with so few elements:
    one unit of a score for o, lse and dv, one of dP and one of rowsum(o dout) for dq and dk (testing/check.h)."""
    nheads_k = k.shape[2]
    group = q.shape[2] // nheads_k
    scale, sums = abs(softmax_scale), EPSILON["float64" if dtype == "float64" else "float32"]
    q, k, v, dout = _heads_first(q), _heads_first(k, group), _heads_first(v, group), _heads_first(dout)
    scores = q @ k.swapaxes(2, 3) * softmax_scale
    p, _ = _weights(softcap * np.tanh(scores / softcap) if softcap else scores, **mask)
    score = sums * _largest(abs(q) @ abs(k).swapaxes(2, 3)) * scale
    dp = 2 * sums * _largest(abs(dout) @ abs(v).swapaxes(2, 3)) * scale
    weight = EPSILON[dtype] / 8 if dtype in ("float16", "bfloat16") else 0
    return Results(
        o=score * _largest(p @ abs(v)),
        lse=max(score, weight),
        dq=dp * _largest(p @ abs(k)),
        dk=dp * _largest(_of_key_heads(p.swapaxes(2, 3) @ abs(q), nheads_k)),
        dv=score * _largest(_of_key_heads(p.swapaxes(2, 3) @ abs(dout), nheads_k)),
    )


def allowed(q, k, v, dout, dtype: str, expected: Results, **options) -> Results:
    """The largest error allowed in each result; options as `attention` takes them."""
    standard = _standard(q, k, v, dout, dtype, **options)
    floors = _floors(q, k, v, dout, dtype, **options)
    bounds = {}
    for name, factor in (("o", 2), ("lse", 2), ("dq", 3), ("dk", 3), ("dv", 3)):
        wanted, usual = getattr(expected, name), getattr(standard, name)
        finite = np.isfinite(wanted)
        unit = EPSILON["float32" if name == "lse" and dtype != "float64" else dtype] * _largest(wanted)
        bounds[name] = factor * _largest(usual[finite] - wanted[finite]) + max(unit, getattr(floors, name))
    return Results(**bounds)


def judge(name: str, got: np.ndarray, expected: Results, bounds: Results) -> None:
    """Fails unless every element is close enough; NaN never is, and -inf is met by -inf alone."""
    wanted, bound = getattr(expected, name), getattr(bounds, name)
    assert got.shape == wanted.shape, f"{name} has the shape {got.shape}, expected {wanted.shape}"
    got = got.astype(wanted.dtype)
    with np.errstate(invalid="ignore"):
        close = (abs(got - wanted) <= bound) | ((got == wanted) & np.isneginf(wanted))
    bad = [tuple(place.tolist()) for place in np.argwhere(~close)]
    assert not bad, f"{name}{bad[0]} is {got[bad[0]]}, expected {wanted[bad[0]]}; {len(bad)} of {got.size} elements are off by more than {bound:.3g}"
