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
    dbias: np.ndarray | float | None = None


@dataclasses.dataclass
class Scores:
    """What a score depends on beside q and k, as the fronts take it, and the random numbers of dropout."""

    seqused_k: np.ndarray | None = None  # (batch)
    alibi_slopes: np.ndarray | None = None  # (nheads) or (batch, nheads)
    bias: np.ndarray | None = None  # 4 dimensions, of 1 where it is the same for all
    mask: np.ndarray | None = None
    dropout_state: np.ndarray | None = None
    document_q: np.ndarray | None = None  # (batch, seqlen_q)
    document_k: np.ndarray | None = None
    dropout_p: float = 0.0


def _heads_first(x: np.ndarray, repeat: int = 1) -> np.ndarray:
    return np.repeat(x.transpose(0, 2, 1, 3), repeat, axis=1)


def _of_key_heads(x: np.ndarray, nheads_k: int) -> np.ndarray:
    """Summed over the query heads that share a key head, back in (batch, seqlen, heads, headdim)."""
    batch, nheads, seqlen, headdim = x.shape
    return x.reshape(batch, nheads_k, nheads // nheads_k, seqlen, headdim).sum(axis=2).transpose(0, 2, 1, 3)


def _philox(seed: int, counters: np.ndarray) -> np.ndarray:
    """Philox4x32-7 (Salmon et al. 2011) of counters (..., 4)."""
    x = [counters[..., i].astype(np.uint64) for i in range(4)]
    key, low = [seed & 0xFFFFFFFF, seed >> 32], np.uint64(0xFFFFFFFF)
    for _ in range(7):
        a, b = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
        x = [(b >> np.uint64(32)) ^ x[1] ^ np.uint64(key[0]), b & low, (a >> np.uint64(32)) ^ x[3] ^ np.uint64(key[1]), a & low]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack(x, axis=-1)


def dropout_factors(shape: tuple[int, ...], p: float, state: np.ndarray) -> np.ndarray:
    """What a weight is multiplied with, docs/NUMERICS.md."""
    batch, nheads, seqlen_q, seqlen_k = shape
    seed, offset = (int(x) % 2**64 for x in state)
    below = round(65536 * p)
    stream = np.array([(offset + n) % 2**64 for n in range(batch * nheads)], np.uint64).reshape(batch, nheads, 1, 1)
    i, j = np.arange(seqlen_q).reshape(-1, 1), np.arange(seqlen_k)
    words = _philox(seed, np.stack([x.astype(np.uint64) for x in np.broadcast_arrays(
        stream & np.uint64(0xFFFFFFFF), i // 16 * 8 + i % 8, 4 * (j // 64) + j % 8 // 2, stream >> np.uint64(32))], axis=-1))
    place = np.broadcast_to(i // 8 % 2 * 8 + j // 8 % 8 + 16 * (j % 2), shape).astype(np.uint64)

    def digit(further):
        bits = (words >> ((place + np.uint64(further)) % np.uint64(32))[..., None]) & np.uint64(1)
        return (bits << np.arange(4, dtype=np.uint64)).sum(axis=-1, dtype=np.uint64)

    number = 4096 * digit(0) + 256 * (digit(8) ^ digit(13)) + 16 * digit(12) + (digit(12) ^ digit(17))
    return np.where(number < below, 0.0, 65536 / (65536 - below))


def _pairs(shape: tuple[int, ...], causal: bool, window: tuple[int, int] | None, scores: Scores) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where a query (batch, nheads, seqlen_q, seqlen_k) does not see a key, what is added to its score, and what multiplies its weight."""
    batch, nheads, seqlen_q, seqlen_k = shape
    i, j = np.indices((seqlen_q, seqlen_k))
    left, right = window or (-1, -1)
    lengths = np.full(batch, seqlen_k) if scores.seqused_k is None else scores.seqused_k
    distance = j - (i + lengths.reshape(-1, 1, 1, 1) - seqlen_q)
    hidden = (j >= lengths.reshape(-1, 1, 1, 1)) | (distance > (0 if causal else right if right >= 0 else seqlen_q + seqlen_k))
    if left >= 0:
        hidden |= -distance > left
    added = np.zeros(shape)
    if scores.alibi_slopes is not None:
        slopes = scores.alibi_slopes.astype(np.float64)
        added = added - slopes.reshape(-1 if slopes.ndim == 2 else 1, nheads, 1, 1) * abs(distance)
    if scores.bias is not None:
        added = added + scores.bias
    if scores.mask is not None:
        hidden = hidden | (scores.mask == 0)
    if scores.document_q is not None:
        hidden = hidden | (scores.document_q[:, None, :, None] != scores.document_k[:, None, None, :])
    kept = dropout_factors(shape, scores.dropout_p, scores.dropout_state) if scores.dropout_p else np.ones(shape)
    return np.broadcast_to(hidden, shape), added, kept


def _weights(scores: np.ndarray, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """softmax and log-sum-exp of the scores that the mask leaves."""
    scores = np.where(hidden, -np.inf, scores)
    highest = scores.max(axis=3, keepdims=True, initial=-np.inf)
    highest = np.where(np.isfinite(highest), highest, 0)
    terms = np.exp(scores - highest)
    total = terms.sum(axis=3, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (highest + np.log(total))[..., 0]
    return terms / np.where(total > 0, total, 1), lse


def _summed(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Over every dimension that is 1 in the shape."""
    return x.sum(axis=tuple(i for i, n in enumerate(shape) if n == 1), keepdims=True)


def attention(q, k, v, dout, *, causal: bool, softmax_scale: float, window: tuple[int, int] | None = None, softcap: float = 0.0, scores: Scores = Scores(),
              store: Callable[[np.ndarray], np.ndarray] = lambda x: x) -> Results:
    """Forward and backward; `store` rounds every matrix that standard attention keeps in memory."""
    nheads_k = k.shape[2]
    group = q.shape[2] // nheads_k
    hidden, added, kept = _pairs((q.shape[0], q.shape[2], q.shape[1], k.shape[1]), causal, window, scores)
    q, k, v, dout = _heads_first(q), _heads_first(k, group), _heads_first(v, group), _heads_first(dout)
    added, kept = added.astype(q.dtype), kept.astype(q.dtype)
    capped = store(q @ k.swapaxes(2, 3) * softmax_scale)
    if softcap:
        capped = store(softcap * np.tanh(capped / softcap))
    p, lse = _weights(store(capped + added), hidden)
    p = store(p)
    o = store(p * kept @ v)
    ds = dbias = store(p * (store(dout @ v.swapaxes(2, 3)) * kept - (o * dout).sum(axis=3, keepdims=True)))
    if softcap:
        ds = store(ds * (1 - (capped / softcap) ** 2))
    return Results(
        o=o.transpose(0, 2, 1, 3),
        lse=lse,
        dq=store(ds @ k * softmax_scale).transpose(0, 2, 1, 3),
        dk=store(_of_key_heads(ds.swapaxes(2, 3) @ q * softmax_scale, nheads_k)),
        dv=store(_of_key_heads((p * kept).swapaxes(2, 3) @ dout, nheads_k)),
        dbias=None if scores.bias is None else store(_summed(dbias, scores.bias.shape)),
    )


def _standard(q, k, v, dout, dtype: str, *, softmax_scale: float, softcap: float, **mask) -> Results:
    """Computed in the dtype; the 16-bit ones sum in a wider one and round what they store."""
    if dtype in ("float16", "bfloat16"):
        return attention(q, k, v, dout, softmax_scale=softmax_scale, softcap=softcap, store=lambda x: x.astype(NUMPY[dtype]).astype(x.dtype), **mask)
    return attention(*(x.astype(dtype) for x in (q, k, v, dout)), softmax_scale=NUMPY[dtype](softmax_scale), softcap=NUMPY[dtype](softcap), **mask)


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x[np.isfinite(x)]).max(initial=0))


def _floors(q, k, v, dout, dtype: str, *, softmax_scale: float, softcap: float, scores: Scores = Scores(), causal: bool,
            window: tuple[int, int] | None = None) -> Results:
    """What the last places of the sums inside make of a result, which standard attention may miss by luck, and does with so few elements:
    one unit of a score for o, lse and dv, one of dP and one of rowsum(o dout) for dq and dk (testing/check.h)."""
    nheads_k = k.shape[2]
    group = q.shape[2] // nheads_k
    hidden, added, kept = _pairs((q.shape[0], q.shape[2], q.shape[1], k.shape[1]), causal, window, scores)
    scale, sums = abs(softmax_scale), EPSILON["float64" if dtype == "float64" else "float32"]
    q, k, v, dout = _heads_first(q), _heads_first(k, group), _heads_first(v, group), _heads_first(dout)
    capped = q @ k.swapaxes(2, 3) * softmax_scale
    p, _ = _weights((softcap * np.tanh(capped / softcap) if softcap else capped) + added, hidden)
    score = sums * (_largest(abs(q) @ abs(k).swapaxes(2, 3)) * scale + _largest(added))
    dp = 2 * sums * _largest(abs(dout) @ abs(v).swapaxes(2, 3)) * _largest(kept)
    weight = EPSILON[dtype] / 8 if dtype in ("float16", "bfloat16") else 0
    return Results(
        o=score * _largest(p * kept @ abs(v)),
        lse=max(score, weight),
        dq=dp * scale * _largest(p @ abs(k)),
        dk=dp * scale * _largest(_of_key_heads(p.swapaxes(2, 3) @ abs(q), nheads_k)),
        dv=score * _largest(_of_key_heads((p * kept).swapaxes(2, 3) @ abs(dout), nheads_k)),
        dbias=None if scores.bias is None else dp * _largest(_summed(p, scores.bias.shape)),
    )


def allowed(q, k, v, dout, dtype: str, expected: Results, **options) -> Results:
    """The largest error allowed in each result; options as `attention` takes them."""
    standard = _standard(q, k, v, dout, dtype, **options)
    floors = _floors(q, k, v, dout, dtype, **options)
    bounds = {}
    for name, factor in (("o", 2), ("lse", 2), ("dq", 3), ("dk", 3), ("dv", 3), ("dbias", 3)):
        wanted, usual = getattr(expected, name), getattr(standard, name)
        if wanted is None:
            continue
        finite = np.isfinite(wanted)
        unit = EPSILON["float32" if name == "lse" and dtype != "float64" else dtype] * _largest(wanted)
        bounds[name] = factor * _largest(usual[finite] - wanted[finite]) + max(unit, getattr(floors, name))
    return Results(**bounds)


def reordered(dtype: str, *sums: float, largest: float = 1.0, one_way: bool = False) -> dict[str, float]:
    """How far two results may be apart that are computed of the same numbers in another order: `sums` says how many terms each sum on the way has, and
    `largest` how great the numbers are. Each of the two rounds each term once, by half an epsilon, which makes an epsilon a term. That is if all go one
    way, as in matrix instructions of a GPU, which round towards 0; else signs are chance, and the standard deviation of n such pairs is sqrt(n / 6)
    epsilons, of which 2 sqrt(n) are five. In 16 bits sums are in fp32: what is rounded are the weights and a result, or P, dS, rowsum(o dout) and a
    gradient, each a sum of one."""
    terms = sum(sums)
    bound = (terms if one_way else min(terms, 2 * terms**0.5)) * EPSILON[dtype]
    return {"rtol": bound, "atol": bound * largest}


def rounded(dtype: str, *sums: float, **more) -> dict[str, float]:
    """How far a result may be from one in a wider dtype, which rounds nothing: half of what two may be apart."""
    return {name: bound / 2 for name, bound in reordered(dtype, *sums, **more).items()}


def judge(name: str, got: np.ndarray, expected: Results, bounds: Results) -> None:
    """Fails unless every element is close enough; NaN never is, and -inf is met by -inf alone."""
    wanted, bound = getattr(expected, name), getattr(bounds, name)
    assert got.shape == wanted.shape, f"{name} has the shape {got.shape}, expected {wanted.shape}"
    got = got.astype(wanted.dtype)
    with np.errstate(invalid="ignore"):
        close = (abs(got - wanted) <= bound) | ((got == wanted) & np.isneginf(wanted))
    bad = [tuple(place.tolist()) for place in np.argwhere(~close)]
    assert not bad, f"{name}{bad[0]} is {got[bad[0]]}, expected {wanted[bad[0]]}; {len(bad)} of {got.size} elements are off by more than {bound:.3g}"
