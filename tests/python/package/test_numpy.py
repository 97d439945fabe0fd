"""fattn.numpy: the table of cases, layouts and views, what NumPy can view, and what is refused."""

import array
import threading

import ml_dtypes
import numpy as np
import pytest

import fattn.numpy
from attention_cases import CASES, SCORE_CASES, Case, names, prepare
from attention_reference import NUMPY, dropout_factors, judge, reordered


def inputs_of(case: Case) -> list[np.ndarray]:
    prepared = prepare(case)
    return [x.astype(NUMPY[case.dtype]) for x in (prepared.q, prepared.k, prepared.v, prepared.dout)]


def check(case: Case, o, lse, gradients) -> None:
    prepared = prepare(case)
    for name, got in zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *gradients)):
        judge(name, got, prepared.expected, prepared.allowed)


@pytest.mark.parametrize("case", **names(CASES))
def test_case(case):
    q, k, v, dout = inputs_of(case)
    before = [x.copy() for x in (q, k, v, dout)]
    o, lse = fattn.numpy.forward(q, k, v, return_lse=True, **case.options)
    assert o.dtype == q.dtype and lse.dtype == (np.float64 if case.dtype == "float64" else np.float32)
    check(case, o, lse, fattn.numpy.backward(dout, q, k, v, o, lse, **case.options))
    for x, y in zip((q, k, v, dout), before):
        assert np.array_equal(x, y), "an input was written"


@pytest.mark.parametrize("case", **names(SCORE_CASES))
def test_scores(case):
    q, k, v, dout = inputs_of(case)
    scores = prepare(case).scores
    options = case.options | {name: getattr(scores, name) for name in ("seqused_k", "alibi_slopes", "mask", "dropout_p", "dropout_state", "document_q",
                                                                  "document_k")}
    if scores.bias is not None:
        options["bias"] = scores.bias.astype(NUMPY[case.dtype])
    o, lse = fattn.numpy.forward(q, k, v, return_lse=True, **options)
    *gradients, dbias = fattn.numpy.backward(dout, q, k, v, o, lse, return_dbias=True, **options) if case.bias else (
        *fattn.numpy.backward(dout, q, k, v, o, lse, **options), None)
    check(case, o, lse, gradients)
    if case.bias:
        judge("dbias", dbias, prepare(case).expected, prepare(case).allowed)


def test_gradient_of_lse():
    """With dout 0 and dlse 1 the gradients are those of the sum of lse: dv is 0, and dq the mean of the keys by weight."""
    q, k, v, dout = inputs_of(Case())
    o, lse = fattn.numpy.forward(q, k, v, return_lse=True)
    dq, _, dv = fattn.numpy.backward(np.zeros_like(dout), q, k, v, o, lse, dlse=np.ones_like(lse))
    mean = fattn.numpy.forward(q, k, k) * 32**-0.5
    np.testing.assert_allclose(dq, mean, **reordered("float32", 32, 33, 33))  # q k, over the keys in both passes
    assert not dv.any()
    with pytest.raises(ValueError, match="dlse has the shape"):
        fattn.numpy.backward(dout, q, k, v, o, lse, dlse=lse[:, :, :3])


def test_biases_and_masks_broadcast():
    q, k, v, _ = inputs_of(Case(batch=2, seqlen_k=40))
    random = np.random.default_rng(0)
    whole = random.standard_normal((2, 2, 33, 40)).astype(np.float32)
    for x in (whole[0, 0], whole[:, :1, :1], whole[..., :1], whole[0, 0, 0], whole.swapaxes(2, 3).copy().swapaxes(2, 3)):
        expected = fattn.numpy.forward(q, k, v, bias=np.broadcast_to(x, whole.shape).copy(), mask=np.broadcast_to(x > 0, whole.shape).copy())
        assert np.array_equal(fattn.numpy.forward(q, k, v, bias=x, mask=x > 0), expected)


ENDS_Q, ENDS_K = [0, 5, 5, 12, 13], [0, 7, 9, 14, 20]  # one has no query, and rows behind the last belong to none


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("lengths", [np.int32, np.int64])
def test_packed_sequences(dtype, lengths):
    """Each as a call of its own, with everything that a score depends on."""
    random = np.random.default_rng(0)
    q, k, v, dout = (random.standard_normal((n, h, d)).astype(dtype) for n, h, d in ((15, 4, 5), (21, 2, 5), (21, 2, 3), (15, 4, 3)))
    bias, mask = random.standard_normal((4, 4, 7, 7)).astype(dtype), random.random((4, 1, 7, 7)) > 0.2
    ids = {"document_q": random.integers(0, 2, 15).astype(np.int32), "document_k": random.integers(0, 2, 21).astype(np.int32)}
    packed = {"cu_seqlens_q": np.array(ENDS_Q, lengths), "cu_seqlens_k": np.array(ENDS_K, lengths), "bias": bias, "mask": mask, **ids}
    options = {"causal": True, "window": (4, 0), "softcap": 3.0}
    o, lse = fattn.numpy.forward(q, k, v, return_lse=True, **options, **packed)
    got = o, lse, *fattn.numpy.backward(dout, q, k, v, o, lse, return_dbias=True, max_seqlen_q=7, max_seqlen_k=7, **options, **packed)
    wanted = [np.zeros_like(x) for x in got]
    wanted[1][:] = -np.inf
    for b, (i, j, m, n) in enumerate(zip(ENDS_Q, ENDS_Q[1:], ENDS_K, ENDS_K[1:])):
        extra = {"bias": bias[b : b + 1, :, : j - i, : n - m], "mask": mask[b : b + 1, :, : j - i, : n - m], "document_q": ids["document_q"][None, i:j],
                 "document_k": ids["document_k"][None, m:n]}
        one = q[None, i:j], k[None, m:n], v[None, m:n]
        part, part_lse = fattn.numpy.forward(*one, return_lse=True, **options, **extra)
        dq, dk, dv, dbias = fattn.numpy.backward(dout[None, i:j], *one, part, part_lse, return_dbias=True, **options, **extra)
        wanted[0][i:j], wanted[1][:, i:j], wanted[2][i:j], wanted[3][m:n], wanted[4][m:n] = part[0], part_lse[0], dq[0], dk[0], dv[0]
        wanted[5][b, :, : j - i, : n - m] = dbias[0]
    close = reordered(dtype, 5, 3, 3, 7, 2 * 7)  # q k, dout v, dout o; over the keys, over the queries of both heads of a group
    for x, y in zip(got, wanted):
        np.testing.assert_allclose(x, y, **close)
    alike = fattn.numpy.forward(q, q, q, cu_seqlens_q=packed["cu_seqlens_q"])
    assert np.array_equal(alike, fattn.numpy.forward(q, q, q, cu_seqlens_q=packed["cu_seqlens_q"], cu_seqlens_k=packed["cu_seqlens_q"], max_seqlen_q=7, max_seqlen_k=9))


PACKED = np.ones((6, 2, 8), np.float32)


@pytest.mark.parametrize(
    ("q", "options", "error", "message"),
    [
        (PACKED[None], {}, ValueError, r"^q has 4 dimensions; allowed: 3 \(total, heads, headdim\)"),
        (PACKED, {"layout": "bhsd"}, ValueError, "^layout is 'bhsd' and cu_seqlens_q is given; packed sequences are"),
        (PACKED, {"cu_seqlens_q": np.array(6)}, ValueError, "^cu_seqlens_q"),
        (PACKED, {"cu_seqlens_q": np.array([0.0, 6.0])}, TypeError, "^cu_seqlens_q has the dtype float64; allowed: int32, int64"),
        (PACKED, {"cu_seqlens_q": np.array([0, 7])}, ValueError, "^cu_seqlens_q"),
        (PACKED, {"cu_seqlens_q": np.zeros((1, 2), np.int32)}, ValueError, r"^cu_seqlens_q has the shape \(1, 2\); allowed: \(batch \+ 1\)"),
        (PACKED, {"cu_seqlens_q": None, "cu_seqlens_k": np.array([0, 6])}, ValueError, "^cu_seqlens_k is given and cu_seqlens_q is not; give cu_seqlens_q"),
        (PACKED, {"cu_seqlens_q": None, "max_seqlen_k": 6}, ValueError, "^max_seqlen_k is given and cu_seqlens_q is not"),
        (PACKED, {"max_seqlen_q": 3}, ValueError, "max_seqlen_q"),
        (PACKED, {"document_q": np.zeros(6, np.int64)}, TypeError, "^document_q has the dtype int64; allowed: int32"),
        (PACKED, {"document_q": np.zeros(5, np.int32)}, ValueError, r"^document_q has the shape \(5\)"),
        (PACKED, {"algorithm": "standard"}, NotImplementedError, "^algorithm standard of backend cpu does not compute packed"),
    ],
)
def test_packed_sequences_refused(q, options, error, message):
    with pytest.raises(error, match=message):
        fattn.numpy.forward(q, PACKED, PACKED, **{"cu_seqlens_q": np.array([0, 2, 6])} | options)


@pytest.mark.parametrize("algorithm", ["standard", "v1", "v2"])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_algorithms_and_threads(algorithm, num_threads):
    case = Case(seqlen_q=40, seqlen_k=50, nheads=4, causal=True)
    q, k, v, dout = inputs_of(case)
    options = {"causal": True, "algorithm": algorithm, "num_threads": num_threads}
    o, lse = fattn.numpy.forward(q, k, v, return_lse=True, **options)
    check(case, o, lse, fattn.numpy.backward(dout, q, k, v, o, lse, **options))


def test_bhsd_is_the_same_problem():
    q, k, v, dout = inputs_of(Case(seqlen_k=40, nheads=4))
    o, lse = fattn.numpy.forward(q, k, v, return_lse=True, causal=True)
    gradients = fattn.numpy.backward(dout, q, k, v, o, lse, causal=True)
    swapped = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v, dout)]
    o2, lse2 = fattn.numpy.forward(*swapped[:3], return_lse=True, causal=True, layout="bhsd")
    assert np.array_equal(o2.swapaxes(1, 2), o) and np.array_equal(lse2, lse) and o2.flags.c_contiguous
    for x, y in zip(fattn.numpy.backward(swapped[3], *swapped[:3], o2, lse2, causal=True, layout="bhsd"), gradients):
        assert np.array_equal(x.swapaxes(1, 2), y)


def test_views_are_not_copied():
    q, k, v, _ = inputs_of(Case())
    packed = np.concatenate([q, k, v], axis=2)
    batch = np.broadcast_to(q, (3, *q.shape[1:]))
    expected = fattn.numpy.forward(q, k, v)
    assert np.array_equal(fattn.numpy.forward(packed[:, :, :2], packed[:, :, 2:4], packed[:, :, 4:]), expected)
    repeated = fattn.numpy.forward(batch, *(np.broadcast_to(x, (3, *x.shape[1:])) for x in (k, v)))
    assert all(np.array_equal(o, expected[0]) for o in repeated)


class OnlyDlpack:
    """A tensor of some other library."""

    def __init__(self, x: np.ndarray):
        self.x = x

    def __dlpack__(self, **options):
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


def test_dlpack_and_buffers():
    q, k, v, _ = inputs_of(Case())
    expected = fattn.numpy.forward(q, k, v)
    assert np.array_equal(fattn.numpy.forward(OnlyDlpack(q), memoryview(k), OnlyDlpack(v)), expected)
    flat = memoryview(array.array("f", v.ravel())).cast("B").cast("f", v.shape)
    assert np.array_equal(fattn.numpy.forward(q, k, flat), expected)
    q.flags.writeable = False
    assert np.array_equal(fattn.numpy.forward(q, k, v), expected)


def test_threads_of_the_caller():
    q, k, v, _ = inputs_of(Case(seqlen_q=65, seqlen_k=65))
    expected = fattn.numpy.forward(q, k, v)
    results, messages = [None] * 8, [None] * 8

    def work(i):
        results[i] = fattn.numpy.forward(q, k, v)
        try:
            fattn.numpy.forward(q, k[:, : i + 1], v)
        except ValueError as error:
            messages[i] = str(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(result, expected) for result in results)
    assert all(f"expected (1, {i + 1}, 2, 32)" in message for i, message in enumerate(messages))


Q = np.ones((1, 4, 2, 8), np.float32)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((Q, Q[..., :4], Q), {}, ValueError, r"k has the shape \(1, 4, 2, 4\); expected \(1, 4, 2, 8\), from q's batch and headdim"),
        ((Q, Q.repeat(2, axis=2)[:, :, :3], Q.repeat(2, axis=2)[:, :, :3]), {}, ValueError, "nheads is 2 and nheads_k is 3"),
        ((Q[0], Q, Q), {}, ValueError, "q has 3 dimensions; allowed: 4"),
        ((Q[None], Q, Q), {}, ValueError, "q has 5 dimensions; allowed: 4"),
        ((Q, Q.astype(np.float16), Q), {}, ValueError, "k is fp16 but q is fp32"),
        ((Q, Q, Q[:, ::-1]), {}, ValueError, "v has the stride -16 in dimension 1; strides must be at least 0"),
        ((Q[..., ::2], Q[..., :4], Q), {}, ValueError, r"q has the stride 2 in its last dimension \(headdim\)"),
        ((Q.astype(np.int32), Q, Q), {}, TypeError, "q has the dtype int32; allowed: float32"),
        ((Q.astype(">f4"), Q, Q), {}, TypeError, "q has the dtype >f4; allowed: float32"),
        ((Q.tolist(), Q, Q), {}, TypeError, "q is a list that NumPy cannot view"),
        ((None, Q, Q), {}, TypeError, "q is a NoneType that NumPy cannot view"),
        ((Q, Q, Q), {"window": (-2, 0)}, ValueError, "window_left is -2; allowed: -1"),
        ((Q, Q, Q), {"window": (0, 2**63)}, ValueError, r"window\[1\] is 9223372036854775808, which does not fit into 64 bits"),
        ((Q, Q, Q), {"window": 4}, ValueError, r"window is 4; allowed: None, or \(left, right\)"),
        ((Q, Q, Q), {"window": (1, 2, 3)}, ValueError, r"window is \(1, 2, 3\); allowed"),
        ((Q, Q, Q), {"softcap": -1.0}, ValueError, "softcap is -1; allowed: 0"),
        ((Q, Q, Q), {"softcap": 3.0, "algorithm": "standard"}, NotImplementedError, "algorithm standard of backend cpu does not compute softcap"),
        ((Q, Q, Q), {"seqused_k": np.array([5])}, ValueError, r"seqused_k\[0\] is 5; allowed: 0 to seqlen_k, 4"),
        ((Q, Q, Q), {"mask": Q[0, :, 0]}, TypeError, "mask has the dtype float32; allowed: bool, uint8"),
        ((Q, Q, Q), {"bias": Q[None]}, ValueError, "bias has 5 dimensions; allowed: up to 4"),
        ((Q, Q, Q), {"dropout_p": 0.5}, ValueError, "p_dropout is 0.5, and dropout_state is absent"),
        ((Q, Q, Q), {"softmax_scale": float("nan")}, ValueError, "softmax_scale is nan; it must be finite"),
        ((Q, Q, Q), {"softmax_scale": "1"}, TypeError, "softmax_scale is a str; it must be a number"),
        ((Q, Q, Q), {"softmax_scale": Q}, TypeError, "softmax_scale is a ndarray; it must be a number"),
        ((Q, Q, Q), {"softcap": ""}, TypeError, "softcap is a str; it must be a number"),
        ((Q, Q, Q), {"dropout_p": None}, TypeError, "dropout_p is a NoneType; it must be a number"),
        ((Q, Q, Q), {"causal": "no"}, TypeError, "causal is a str; it must be True or False"),
        ((Q, Q, Q), {"causal": Q}, TypeError, "causal is a ndarray; it must be True or False"),
        ((Q, Q, Q), {"layout": "sbhd"}, ValueError, "layout is 'sbhd'; allowed: 'bshd', 'bhsd'"),
        ((Q, Q, Q), {"backend": "tpu"}, ValueError, "backend is 'tpu'; allowed: 'auto', 'reference', 'cpu', 'cuda'"),
        ((Q, Q, Q), {"algorithm": ["v2"]}, ValueError, r"algorithm is \['v2'\]; allowed"),
        ((np.array([[[[""]]]]), Q, Q), {}, TypeError, "q has the dtype <U"),
        ((Q, Q, Q), {"num_threads": 2**32}, ValueError, "num_threads is 4294967296, which does not fit into 32 bits"),
        ((Q, Q, Q), {"num_threads": -1}, ValueError, "num_threads is -1"),
        ((Q, Q, Q), {"backend": "cuda"}, NotImplementedError, "cuda"),
        ((Q.astype(np.float64),) * 3, {"backend": "cpu"}, NotImplementedError, "fp64"),
    ],
)
def test_refused(arguments, options, error, message):
    with pytest.raises(error, match=message):
        fattn.numpy.forward(*arguments, **options)


def test_backward_refuses_what_does_not_belong_together():
    o, lse = fattn.numpy.forward(Q, Q, Q, return_lse=True)
    with pytest.raises(ValueError, match=r"lse has the shape \(1, 2, 3\); expected \(1, 2, 4\)"):
        fattn.numpy.backward(o, Q, Q, Q, o, lse[..., :3])
    with pytest.raises(ValueError, match="dout has the shape"):
        fattn.numpy.backward(o[:, :3], Q, Q, Q, o, lse)
    with pytest.raises(ValueError, match="lse is fp16; it must be fp32"):
        fattn.numpy.backward(o, Q, Q, Q, o, lse.astype(np.float16))
    with pytest.raises(ValueError, match="return_dsinks asks for the gradient of sinks, and sinks is absent"):
        fattn.numpy.backward(o, Q, Q, Q, o, lse, return_dsinks=True)
    with pytest.raises(ValueError, match="return_dbias asks for the gradient of bias, and bias is absent"):
        fattn.numpy.backward(o, Q, Q, Q, o, lse, return_dbias=True)


def test_bfloat16_of_a_library_that_numpy_cannot_view():
    with pytest.raises(TypeError, match="q has the dtype uint16"):
        fattn.numpy.forward(Q.astype(ml_dtypes.bfloat16).view(np.uint16), Q, Q)


def test_dropout_mask():
    shape, state = (2, 3, 20, 130), np.array([-5, 2**40])
    mask = fattn.numpy.dropout_mask(*state.tolist(), 0.3, shape)
    assert mask.dtype == np.bool_ and (mask == (dropout_factors(shape, 0.3, state) != 0)).all()
    assert fattn.numpy.dropout_mask(1, 2, 0.5, (2, 3, 0, 4)).shape == (2, 3, 0, 4)
    for arguments, words in (((1, 2, 1.0, shape), "p_dropout is 1; allowed"), ((1, 2, 0.5, (2, -3, 4, 5)), "nheads is -3; allowed"), ((1, 2, 0.5, (2**40, 1, 1, 1)), "batch is 1099511627776"),
                             ((1, 2, 0.5, (2, 3, 4)), r"shape is \(2, 3, 4\); allowed: \(batch"), ((2**63, 2, 0.5, shape), "seed is 9223")):
        with pytest.raises(ValueError, match=words):
            fattn.numpy.dropout_mask(*arguments)


def test_keys_in_any_order():
    """With seqused_k only the beginnings of cu_seqlens_k are read, and the longest is that of the used."""
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((n, 2, 8), np.float32) for n in (6, 40, 40))
    begins, used, ends = np.array([26, 3, -1]), np.array([9, 17]), np.array([0, 2, 6])
    k[12:20] = np.nan
    begins[1] = 20
    used[1] = 6
    options = {"cu_seqlens_q": ends, "cu_seqlens_k": begins, "seqused_k": used}
    o, lse = fattn.numpy.forward(q, k, v, return_lse=True, **options)
    for i, j, m, n in ((0, 2, 26, 9), (2, 6, 20, 6)):
        wanted = fattn.numpy.forward(q[None, i:j], k[None, m : m + n], v[None, m : m + n])
        np.testing.assert_allclose(o[i:j], wanted[0], **reordered("float32", 8, n))
    _, dk, dv = fattn.numpy.backward(np.ones_like(o), q, k, v, o, lse, **options)
    assert not dk[:20].any() and not dk[35:].any() and not dv[:20].any() and dv[20:35].all()


def test_sinks():
    """A sink is a key of that score whose value is 0."""
    q, k, v, dout = (np.random.default_rng(n).standard_normal((1, 5, 2, 8)) for n in range(4))
    sinks = np.array([0.5, -1.0])
    k0, v0 = (np.concatenate([x, np.zeros((1, 1, 2, 8))], 1) for x in (k, v))
    bias = np.zeros((1, 2, 5, 6))
    bias[..., 5] = sinks[:, None]
    o, lse = fattn.numpy.forward(q, k, v, sinks=sinks, return_lse=True)
    wanted_o, wanted_lse = fattn.numpy.forward(q, k0, v0, bias=bias, return_lse=True)
    np.testing.assert_allclose(o, wanted_o, **reordered("float64", 8, 6))
    np.testing.assert_allclose(lse, wanted_lse, **reordered("float64", 8, 6))
    *_, dsinks = fattn.numpy.backward(dout, q, k, v, o, lse, sinks=sinks, return_dsinks=True)
    *_, dbias = fattn.numpy.backward(dout, q, k0, v0, o, lse, bias=bias, return_dbias=True)
    np.testing.assert_allclose(dsinks, dbias[..., 5].sum((0, 2)), **reordered("float64", 8, 6, 8, 8, 5))
