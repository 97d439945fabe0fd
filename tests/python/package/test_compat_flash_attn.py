"""flash_attn 2 by fattn.compat: each function and argument against attention by its definition."""

import importlib
import inspect
import timeit

import pytest

torch = pytest.importorskip("torch")
from compat_reference import close, gradient_agrees, gradients_agree, reference, seen_by, tensors  # noqa: E402

from fattn import compat  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def flash_attn():
    compat.install()
    import flash_attn

    yield flash_attn
    compat.uninstall()


def qkv(requires_grad=False, seqlen_q=7, seqlen_k=11):
    return tensors((2, seqlen_q, 4, 16), (2, seqlen_k, 2, 16), (2, seqlen_k, 2, 16), requires_grad=requires_grad)


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
OPTIONS = [({}, {}), ({"causal": True}, {"seen": {"causal": True}}), ({"softmax_scale": 0.5}, {"softmax_scale": 0.5}), ({"softcap": 2.0}, {"softcap": 2.0}),
           ({"window_size": (3, 1)}, {"seen": {"left": 3, "right": 1}}), ({"window_size": [-1, 2]}, {"seen": {"right": 2}}),
           ({"window_size": (3, -7)}, {"seen": {"left": 3}}), ({"window_size": (-7, 2)}, {"seen": {"right": 2}}), ({"window_size": (2, 0), "causal": True}, {"seen": {"left": 2, "causal": True}}),
           ({"alibi_slopes": SLOPES}, {"alibi_slopes": SLOPES}), ({"alibi_slopes": SLOPES.repeat(2, 1), "causal": True}, {"alibi_slopes": SLOPES, "seen": {"causal": True}}),
           ({"deterministic": True, "causal": True}, {"seen": {"causal": True}})]


def wanted(q, k, v, seen=None, **options):
    return reference(q, k, v, None if seen is None else seen_by(q.shape[1], k.shape[1], **seen), **options)


@pytest.mark.parametrize(("options", "meaning"), OPTIONS)
def test_options_and_gradients(flash_attn, options, meaning):
    inputs = qkv(requires_grad=True)
    o, lse = wanted(*inputs, **meaning)
    got = flash_attn.flash_attn_func(*inputs, **options)
    close(got, o)
    gradients_agree(got, o, inputs)
    out, softmax_lse, s_dmask = flash_attn.flash_attn_func(*inputs, return_attn_probs=True, **options)
    close(out, o)
    close(softmax_lse, lse)
    assert s_dmask.numel() == 0  # without dropout nothing is stored


def test_arguments_by_position(flash_attn):
    q, k, v = qkv()
    o, lse = wanted(q, k, v, seen={"causal": True, "left": 4}, softmax_scale=0.3, softcap=3.0, alibi_slopes=SLOPES)
    close(flash_attn.flash_attn_func(q, k, v, 0.0, 0.3, True, (4, 0), 3.0, SLOPES, False, True)[1], lse)
    close(flash_attn.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), 0.0, 0.3, True, (4, 0), 3.0, SLOPES, False, False), o)


SIGNATURES = {
    "flash_attn_func": "q k v dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs",
    "flash_attn_kvpacked_func": "q kv dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs",
    "flash_attn_qkvpacked_func": "qkv dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic "
                              "return_attn_probs block_table",
    "flash_attn_varlen_kvpacked_func": "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal window_size softcap alibi_slopes "
                                       "deterministic return_attn_probs",
    "flash_attn_varlen_qkvpacked_func": "qkv cu_seqlens max_seqlen dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs",
    "flash_attn_with_kvcache": "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table softmax_scale causal window_size "
                               "softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(flash_attn, name):
    parameters = inspect.signature(getattr(flash_attn, name)).parameters
    assert list(parameters) == SIGNATURES[name].split()
    assert all(x.kind is x.POSITIONAL_OR_KEYWORD for x in parameters.values())
    defaults = {"dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0, "rotary_interleaved": True, "num_splits": 0}
    assert all(parameters[x].default == defaults[x] for x in defaults if x in parameters)


def test_packed(flash_attn):
    (x,) = tensors((2, 9, 3, 4, 16), requires_grad=True)
    o, lse = wanted(*x.unbind(2), seen={"causal": True})
    got, softmax_lse, _ = flash_attn.flash_attn_qkvpacked_func(x, causal=True, return_attn_probs=True)
    close(got, o)
    close(softmax_lse, lse)
    gradients_agree(got, o, [x])
    q, kv = tensors((2, 5, 4, 16), (2, 9, 2, 2, 16), requires_grad=True)
    got, o = flash_attn.flash_attn_kvpacked_func(q, kv, causal=True), wanted(q, *kv.unbind(2), seen={"causal": True})[0]
    close(got, o)
    gradients_agree(got, o, [q, kv])


LENGTHS_Q, LENGTHS_K = (3, 6, 1), (5, 4, 9)


def cu_seqlens(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def by_sequence(q, k, v, seen=None, **options):
    """o and lse (nheads, total) of packed sequences, each for itself."""
    o, lse = zip(*(wanted(a[None], b[None], c[None], seen, **options)
                   for a, b, c in zip(q.split(LENGTHS_Q), k.split(LENGTHS_K), v.split(LENGTHS_K))))
    return torch.cat(o, 1)[0], torch.cat(lse, 2)[0]


@pytest.mark.parametrize(("options", "meaning"), OPTIONS[:-2])
def test_varlen(flash_attn, options, meaning):
    inputs = tensors((10, 4, 16), (18, 2, 16), (18, 2, 16), requires_grad=True)
    o, lse = by_sequence(*inputs, **meaning)
    where = cu_seqlens(LENGTHS_Q), cu_seqlens(LENGTHS_K), 6, 9
    got, softmax_lse, s_dmask = flash_attn.flash_attn_varlen_func(*inputs, *where, return_attn_probs=True, **options)
    close(got, o)
    close(softmax_lse, lse)
    gradients_agree(got, o, inputs)
    q, k, v = inputs
    close(flash_attn.flash_attn_varlen_kvpacked_func(q, torch.stack((k, v), 1), *where, **options), o)


def test_varlen_qkvpacked(flash_attn):
    (x,) = tensors((10, 3, 4, 16))
    o = torch.cat([wanted(*y[None].unbind(2), seen={"causal": True})[0] for y in x.split(LENGTHS_Q)], 1)[0]
    close(flash_attn.flash_attn_varlen_qkvpacked_func(x, cu_seqlens(LENGTHS_Q), 6, causal=True), o)


def test_dropout(flash_attn):
    """S_dmask is the weights, negative where they were taken: o follows from it, and about dropout_p of them are."""
    inputs = tensors((2, 50, 4, 16), (2, 160, 2, 16), (2, 160, 2, 16), requires_grad=True)
    q, k, v = inputs
    torch.manual_seed(3)
    o, lse, s_dmask = flash_attn.flash_attn_func(*inputs, dropout_p=0.25, causal=True, return_attn_probs=True)
    assert s_dmask.shape == (2, 4, 50, 160)
    seen = seen_by(50, 160, causal=True)
    assert 0.22 < (s_dmask.signbit() & seen).sum() / (2 * 4 * seen.sum()) < 0.28
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double().repeat_interleave(2, 2)) / 4
    weights = (scores.masked_fill(~seen, -torch.inf)).softmax(-1)
    close(s_dmask.abs(), weights, 16, 160)
    kept = torch.where(s_dmask.signbit(), 0, weights) / 0.75
    expected = torch.einsum("bhij,bjhd->bihd", kept, v.double().repeat_interleave(2, 2))
    close(o, expected, 16, 160)
    gradients_agree(o, expected, inputs, 16, 16, 16, 160, 2 * 50)
    torch.manual_seed(3)
    assert torch.equal(flash_attn.flash_attn_func(*inputs, dropout_p=0.25, causal=True), o)
    assert not torch.equal(flash_attn.flash_attn_func(*inputs, dropout_p=0.25, causal=True), o)


def test_weights_of_float64_and_of_no_keys(flash_attn):
    """S_dmask is as exact as its dtype, and there where there are no keys."""
    q, k, v = (x.double() for x in tensors((2, 5, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16)))
    _, _, s_dmask = flash_attn.flash_attn_func(q, k, v, dropout_p=0.25, return_attn_probs=True)
    weights = (torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) / 4).softmax(-1)
    close(s_dmask.abs(), weights, 16, 9, dtype="float64")
    o, _, s_dmask = flash_attn.flash_attn_func(q, k[:, :0], v[:, :0], dropout_p=0.25, return_attn_probs=True)
    assert s_dmask.shape == (2, 4, 5, 0) and not o.any()
    starts = torch.zeros(3, dtype=torch.int32)
    _, _, s_dmask = flash_attn.flash_attn_varlen_func(q[0], k[0, :0], v[0, :0], cu_seqlens((2, 3)), starts, 3, 0, dropout_p=0.25, return_attn_probs=True)
    assert s_dmask.shape == (2, 4, 3, 0)


def test_dropout_of_packed_sequences(flash_attn):
    q, k, v = tensors((10, 4, 16), (18, 2, 16), (18, 2, 16))
    o, lse, s_dmask = flash_attn.flash_attn_varlen_func(q, k, v, cu_seqlens(LENGTHS_Q), cu_seqlens(LENGTHS_K), 6, 9, dropout_p=0.5, return_attn_probs=True)
    assert s_dmask.shape == (3, 4, 6, 9)
    for b, (a, c) in enumerate(zip(cu_seqlens(LENGTHS_Q).tolist(), cu_seqlens(LENGTHS_K).tolist()[:-1])):
        if b == 3:
            break
        n, m = LENGTHS_Q[b], LENGTHS_K[b]
        values = v[c : c + m].repeat_interleave(2, 1)
        close(o[a : a + n], torch.einsum("hij,jhd->ihd", s_dmask[b, :, :n, :m].clamp(min=0) * 2, values), 16, 9, 9)
        assert not s_dmask[b, :, n:].any() and not s_dmask[b, :, :, m:].any()


def test_errors(flash_attn):
    """RuntimeError, as the peer's C++ code raises, with fattn's words; ValueError by the way, as fattn itself raises."""
    q, k, v = qkv()
    for call, message in ((lambda: flash_attn.flash_attn_func(q, k[:, :, :1].expand(2, 11, 3, 16), v), "nheads"),
                          (lambda: flash_attn.flash_attn_func(q, k, v, window_size=3), r"window_size is 3; allowed: \(left, right\)"),
                          (lambda: flash_attn.flash_attn_func(q, k, v, dropout_p=1.5), "dropout"),
                          (lambda: flash_attn.flash_attn_with_kvcache(q, k, v, k, v), "k is given and cache_seqlens is None"),
                          (lambda: flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], torch.tensor([0, 7], dtype=torch.int32), torch.tensor([0, 11, 11], dtype=torch.int32), 7, 11), "cu_seqlens")):
        with pytest.raises(RuntimeError, match=message) as error:
            call()
        assert isinstance(error.value, ValueError)
    with pytest.raises(TypeError, match="q is a list"):
        flash_attn.flash_attn_func([1], k, v)


def test_compiles_without_a_break(flash_attn):
    """One graph, with gradients, in all that models call."""
    cu = cu_seqlens(LENGTHS_Q)

    def model(x, packed):
        q, k, v = x.unbind(2)
        o = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(4, 0), softcap=3.0)
        o = o + flash_attn.flash_attn_qkvpacked_func(x) + flash_attn.flash_attn_kvpacked_func(q, x[:, :, 1:], 0.0, None, True)
        return o, flash_attn.flash_attn_varlen_func(*packed.unbind(1), cu, cu, 6, 6, causal=True)

    x, packed = tensors((2, 9, 3, 4, 16), (10, 3, 4, 16), requires_grad=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got, expected = compiled(x, packed), model(x, packed)
    for a, b in zip(got, expected):
        close(a, b)
    for a, b in zip(*(torch.autograd.grad(o.square().sum() + of_packed.square().sum(), (x, packed)) for o, of_packed in (got, expected))):
        gradient_agrees(a, b)


def test_decoding_compiles_without_a_break(flash_attn):
    def step(q, caches, k, v, cos, sin, lengths, entries):
        o = flash_attn.flash_attn_with_kvcache(q, *caches, k, v, cos, sin, lengths, causal=True)
        return o + flash_attn.flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths, cache_batch_idx=entries, causal=True)

    q, k_cache, v_cache, k, v, cos, sin = tensors((2, 1, 4, 16), (3, 12, 2, 16), (3, 12, 2, 16), (2, 1, 2, 16), (2, 1, 2, 16), (12, 8), (12, 8))
    lengths, entries = torch.tensor([3, 6], dtype=torch.int32), torch.tensor([2, 0])
    caches = [[x.clone() for x in (k_cache, v_cache)] for _ in range(2)]
    with torch.no_grad():
        got = torch.compile(step, fullgraph=True, backend="aot_eager")(q, caches[0], k, v, cos, sin, lengths, entries)
        close(got, step(q, caches[1], k, v, cos, sin, lengths, entries))
    for a, b, before in zip(*caches, (k_cache, v_cache)):
        close(a, b)
        assert not torch.equal(a, before)


@pytest.mark.parametrize("module", ["flash_attn.flash_attn_interface", "flash_attn_interface", "flash_attn.cute.interface"])
def test_costs_little_more_than_fattn(module, monkeypatch):
    """What a call does before it is fattn.attention's: at most 2 us."""
    module = importlib.import_module(module)
    monkeypatch.setattr(module, "attention", lambda q, k, v, **options: q)
    x = torch.randn(1, 1, 1, 8)
    flash, nothing = module.flash_attn_func, module.attention
    calls, costs = 2000, ([], [])
    for _ in range(30):
        costs[0].append(timeit.timeit(lambda: flash(x, x, x, causal=True), number=calls))
        costs[1].append(timeit.timeit(lambda: nothing(x, x, x, causal=True), number=calls))
    cost = (min(costs[0]) - min(costs[1])) / calls * 1e6
    print(f"{cost:.2f} us")
    assert 0 < cost < 2
