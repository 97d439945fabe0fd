"""What fattn.numpy.merge computes: fattn.merge without torch and gradients."""

import numpy as np


def wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64 if x.dtype == np.float64 else np.float32, copy=False)


def merged(outs: list[np.ndarray], lses: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """outs (..., headdim), lses (...) in the order of their rows. A part that saw no key for a row (lse -inf) adds nothing to it, whatever it holds."""
    parts = np.stack([wide(x) for x in lses])
    top = parts.max(0)
    weights = np.exp(parts - np.where(top == -np.inf, 0, top))
    total = weights.sum(0)
    empty = total == 0
    divisor = np.where(empty, 1, total)
    lse = np.where(empty, -np.inf, top + np.log(divisor)).astype(parts.dtype, copy=False)
    o = 0
    for out, weight, part in zip(outs, weights / divisor, parts):
        o = o + np.where((part == -np.inf)[..., None], 0, wide(out)) * weight[..., None]
    return o, lse
