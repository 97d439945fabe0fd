"""fattn.numpy.merge: parts of the keys become the whole, against float64."""

import itertools

import ml_dtypes
import numpy as np
import pytest

import fattn.numpy
from attention_reference import EPSILON, rounded


def inputs(dtype, seqlen_k=50):
    random = np.random.default_rng(5)
    return [random.standard_normal((2, n, h, d)).astype(dtype) for n, h, d in ((7, 4, 16), (seqlen_k, 2, 16), (seqlen_k, 2, 24))]


def parts_of(q, k, v, edges, layout="bshd", **options):
    axis = 2 if layout == "bhsd" else 1
    parts = [fattn.numpy.forward(q, np.take(k, range(a, b), axis), np.take(v, range(a, b), axis), return_lse=True, layout=layout, **options)
             for a, b in itertools.pairwise(edges)]
    return list(itertools.chain(*parts))


@pytest.mark.parametrize("edges", [(0, 50), (0, 20, 50), (0, 1, 49, 50), (0, 0, 50)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16], ids=lambda x: np.dtype(x).name)
def test_parts(dtype, edges):
    q, k, v = inputs(dtype)
    wanted, wanted_lse = fattn.numpy.forward(*(x.astype(np.float64) for x in (q, k, v)), return_lse=True, backend="reference")
    wide = {"out_dtype": "float32"} if np.dtype(dtype).itemsize == 2 else {}
    backend = {"backend": "reference"} if dtype is np.float64 else {}
    parts = parts_of(q, k, v, edges, **wide, **backend)
    o, lse = fattn.numpy.merge(*parts)
    close = rounded("float64" if dtype is np.float64 else "float32", 16, 50, len(edges) - 1)  # q k, over the keys, over the parts
    np.testing.assert_allclose(lse, wanted_lse, **close)
    # The kernels of bfloat16 may round the weights, which their sum does not know.
    np.testing.assert_allclose(o.astype(np.float64), wanted, **(rounded("bfloat16", 1) if dtype is ml_dtypes.bfloat16 else close))
    assert o.dtype == parts[0].dtype and lse.dtype == (np.float64 if dtype is np.float64 else np.float32)
    assert fattn.numpy.merge(*parts, out_dtype=dtype)[0].dtype == dtype


def test_layouts():
    q, k, v = inputs(np.float32)
    o, lse = fattn.numpy.merge(*parts_of(q, k, v, (0, 20, 50)))
    swapped = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
    other, other_lse = fattn.numpy.merge(*parts_of(*swapped, (0, 20, 50), layout="bhsd"), layout="bhsd")
    np.testing.assert_array_equal(other.swapaxes(1, 2), o)
    np.testing.assert_array_equal(other_lse, lse)
    packed = fattn.numpy.merge(*[x[0] for x in parts_of(q, k, v, (0, 20, 50))])
    np.testing.assert_array_equal(packed[0], o[0])
    np.testing.assert_array_equal(packed[1], lse[0])


def test_far_apart():
    """Differences of 1e4, and parts that saw nothing, whatever they hold."""
    o = np.arange(4, dtype=np.float32).reshape(1, 1, 1, 4)
    at = lambda x: np.full((1, 1, 1), x, np.float32)  # noqa: E731
    for difference in (0, 1, 100, 1e4, -1e4):
        got, lse = fattn.numpy.merge(o, at(5000), -o, at(5000 + difference))
        share = np.exp(-np.logaddexp(0, -difference))
        np.testing.assert_allclose(got, o * (1 - 2 * share), **rounded("float32", 3, 2, largest=3))  # each weight a difference, exp and quotient
        np.testing.assert_allclose(lse, 5000 + np.logaddexp(0, difference), rtol=EPSILON["float32"] / 2)  # added in float64, rounded once
    nothing = at(-np.inf)
    got, lse = fattn.numpy.merge(o, at(0), np.full_like(o, np.nan), nothing)
    assert np.array_equal(got, o) and lse.item() == 0
    got, lse = fattn.numpy.merge(o, nothing, np.full_like(o, np.nan), nothing)
    assert not got.any() and lse.item() == -np.inf
    assert np.isnan(fattn.numpy.merge(o, at(np.nan), o, nothing)[0]).all()


O, LSE = np.ones((1, 3, 2, 4), np.float32), np.ones((1, 2, 3), np.float32)


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ((), TypeError, "^fattn.numpy.merge got 0 tensors; allowed: o1, lse1"),
        ((O, LSE, O), TypeError, "got 3 tensors"),
        ((O, LSE, O, "x"), TypeError, "^lse2 is a str that NumPy cannot view"),
        ((O, LSE.astype(np.int32)), TypeError, "^lse1 has the dtype int32"),
        ((O[0, 0], LSE), ValueError, "^o1 has 2 dimensions; allowed: 4"),
        ((O, LSE, O, LSE[:, :, :2]), ValueError, r"^lse2 has the shape \(1, 2, 2\); expected \(1, 2, 3\), from o1"),
        ((O, LSE, O[:, :2], LSE), ValueError, "^o2 has the shape"),
    ],
)
def test_refused(parts, error, message):
    with pytest.raises(error, match=message):
        fattn.numpy.merge(*parts)
