"""One table of problems for every front: shapes, masks, scales and dtypes, with their inputs, results and allowed errors."""

import dataclasses
import functools
import itertools
import zlib

import numpy as np

import attention_reference as reference


@dataclasses.dataclass(frozen=True)
class Case:
    batch: int = 1
    seqlen_q: int = 33
    seqlen_k: int = 33
    nheads: int = 2
    nheads_k: int = 2
    headdim: int = 32
    headdim_v: int = 32
    dtype: str = "float32"
    causal: bool = False
    softmax_scale: float | None = None
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    lengths: bool = False
    alibi: str = ""  # the dimensions of the slopes: "h" or "bh"
    bias: str = ""  # those that are not 1, of "bhqk"
    mask: str = ""
    dropout_p: float = 0.0
    documents: bool = False

    @property
    def name(self) -> str:
        name = f"{self.dtype}-b{self.batch}-q{self.seqlen_q}-k{self.seqlen_k}-h{self.nheads}_{self.nheads_k}-d{self.headdim}_{self.headdim_v}"
        if self.causal:
            name += "-causal"
        if self.softmax_scale is not None:
            name += f"-scale{self.softmax_scale:g}"
        if self.window:
            name += "-window{}_{}".format(*self.window)
        if self.softcap:
            name += f"-softcap{self.softcap:g}"
        for what in ("alibi", "bias", "mask"):
            if getattr(self, what):
                name += f"-{what}_{getattr(self, what)}"
        if self.dropout_p:
            name += f"-dropout{self.dropout_p:g}"
        if self.documents:
            name += "-documents"
        return f"{name}-lengths" if self.lengths else name

    @property
    def options(self) -> dict:
        """As every front takes them."""
        return {"causal": self.causal, "softmax_scale": self.softmax_scale, "window": self.window, "softcap": self.softcap}

    @property
    def scale(self) -> float:
        return self.headdim**-0.5 if self.softmax_scale is None else self.softmax_scale


def _shape(batch, seqlen_q, seqlen_k, nheads, nheads_k, headdim, headdim_v=None) -> Case:
    return Case(batch, seqlen_q, seqlen_k, nheads, nheads_k, headdim, headdim_v or headdim)


SHAPES = [
    _shape(2, 33, 33, 2, 2, 32),
    _shape(1, 127, 65, 2, 1, 64),  # causal: rows that see nothing
    _shape(1, 65, 127, 6, 3, 40),
    _shape(2, 1, 300, 8, 2, 64),  # decode
    _shape(1, 7, 9, 4, 1, 17, 23),
    _shape(1, 130, 130, 1, 1, 128),
    _shape(2, 5, 1, 2, 2, 8),
    _shape(0, 5, 7, 2, 1, 16),
    _shape(2, 0, 7, 2, 1, 16),
    _shape(2, 5, 0, 2, 1, 16),
]
CASES = [dataclasses.replace(shape, dtype=dtype, causal=causal)
         for dtype, shape, causal in itertools.product(("float32", "bfloat16", "float16", "float64"), SHAPES, (False, True))]
CASES += [dataclasses.replace(SHAPES[0], softmax_scale=scale) for scale in (0.0, -0.3, 1.0)]
CASES += [dataclasses.replace(shape, dtype=dtype, window=window, causal=causal)
          for dtype, shape, (window, causal) in itertools.product(
              ("float32", "bfloat16", "float16", "float64"), (SHAPES[1], SHAPES[2], SHAPES[3]),
              (((8, 5), False), ((20, -1), False), ((-1, 3), False), ((16, 4), True), ((0, 0), False)))]
CASES += [dataclasses.replace(shape, dtype=dtype, softcap=softcap, softmax_scale=1.0)
          for dtype, shape, softcap in itertools.product(("float32", "bfloat16", "float16", "float64"), (SHAPES[0], SHAPES[2]), (2.0, 50.0))]
CASES += [dataclasses.replace(SHAPES[2], dtype=dtype, causal=True, window=(30, 0), softcap=20.0) for dtype in ("float32", "bfloat16")]

# What a score depends on beside q and k: each by itself, in every shape, and all of it.
_FEATURES = [
    {"lengths": True, "causal": True},
    {"lengths": True, "window": (9, 3)},
    {"alibi": "h"},
    {"alibi": "bh", "causal": True, "lengths": True},
    {"bias": "bhqk"},
    {"bias": "hqk", "causal": True},
    {"bias": "bk", "softcap": 5.0},
    {"mask": "qk"},
    {"mask": "bhk", "causal": True},
    {"dropout_p": 0.25},
    {"documents": True, "causal": True},
    {"lengths": True, "alibi": "h", "bias": "qk", "mask": "bqk", "dropout_p": 0.1, "documents": True, "causal": True, "window": (40, 0),
     "softcap": 20.0},
]
_WIDE = Case(2, 65, 97, 6, 3, 40, 40)
SCORE_CASES = [dataclasses.replace(shape, dtype=dtype, **features)
               for (dtype, shape), features in itertools.product((("float32", _WIDE), ("bfloat16", _WIDE), ("float64", SHAPES[4])), _FEATURES)]
SCORE_CASES += [dataclasses.replace(SHAPES[3], dtype="float16", lengths=True, alibi="h"), dataclasses.replace(SHAPES[8], bias="hqk", dropout_p=0.5)]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Inputs that the dtype holds exactly, in a wider one; the results; the allowed errors."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    scores: reference.Scores
    expected: reference.Results
    allowed: reference.Results


def _scores(case: Case, random: np.random.Generator) -> reference.Scores:
    """The numbers of a bias are of bfloat16, so that every dtype holds them."""
    sizes = {"b": case.batch, "h": case.nheads, "q": case.seqlen_q, "k": case.seqlen_k}

    def pairs(dimensions: str) -> np.ndarray:
        return random.standard_normal([sizes[name] if name in dimensions else 1 for name in "bhqk"])

    scores = reference.Scores(dropout_p=case.dropout_p)
    if case.lengths:
        scores.seqused_k = random.integers(0, case.seqlen_k + 1, case.batch).astype(np.int32)
    if case.alibi:
        scores.alibi_slopes = random.random([sizes[name] for name in case.alibi]).astype(np.float32)
    if case.bias:
        scores.bias = pairs(case.bias).astype(reference.NUMPY["bfloat16"]).astype(np.float64)
    if case.mask:
        scores.mask = pairs(case.mask) > -0.5
    if case.dropout_p:
        scores.dropout_state = random.integers(-(2**63), 2**63 - 1, 2)
    if case.documents:
        scores.document_q, scores.document_k = (np.sort(random.integers(0, 4, (case.batch, n)), axis=1).astype(np.int32)[:, ::-1].copy()
                                                for n in (case.seqlen_q, case.seqlen_k))
    return scores


@functools.cache
def prepare(case: Case) -> Prepared:
    random = np.random.default_rng(zlib.crc32(case.name.encode()))
    wide = np.longdouble if case.dtype == "float64" else np.float64

    def normal(seqlen: int, heads: int, headdim: int) -> np.ndarray:
        return random.standard_normal((case.batch, seqlen, heads, headdim)).astype(reference.NUMPY[case.dtype]).astype(wide)

    q = normal(case.seqlen_q, case.nheads, case.headdim)
    k = normal(case.seqlen_k, case.nheads_k, case.headdim)
    v = normal(case.seqlen_k, case.nheads_k, case.headdim_v)
    dout = normal(case.seqlen_q, case.nheads, case.headdim_v)
    scores = _scores(case, random)
    options = case.options | {"softmax_scale": case.scale, "scores": scores}
    expected = reference.attention(q, k, v, dout, **options)
    return Prepared(q, k, v, dout, scores, expected, reference.allowed(q, k, v, dout, case.dtype, expected, **options))


def names(cases: list[Case]) -> dict:
    return {"argvalues": cases, "ids": [case.name for case in cases]}
