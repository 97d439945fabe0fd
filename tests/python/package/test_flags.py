"""Options that are True or False: what is neither is refused by every front, whatever it would be taken for."""

import numpy as np
import pytest
import torch

import fattn
import fattn.numpy
from fattn import distributed
from fattn.compat.peers.flash_attn import flash_attn_interface as flash

X = torch.randn(1, 5, 2, 8)
BOUNDS = torch.tensor([0, 5], dtype=torch.int32)
ARRAY = X.numpy()
O, LSE = fattn.attention(X, X, X, return_lse=True)
FRONTS = {
    "attention": (lambda **flags: fattn.attention(X, X, X, **flags), ("causal", "return_lse", "return_dropout_state", "batch_invariant", "deterministic")),
    "attention, packed": (lambda **flags: fattn.attention(X[0], X[0], X[0], cu_seqlens_q=BOUNDS, **flags), ("causal", "return_lse", "deterministic")),
    "attention_varlen": (lambda **flags: fattn.attention_varlen(X[0], X[0], X[0], cu_seqlens_q=BOUNDS, **flags),
                         ("causal", "return_lse", "return_dropout_state", "batch_invariant", "deterministic")),
    "attention_kvpacked": (lambda **flags: fattn.attention_kvpacked(X, torch.stack((X, X), 2), **flags), ("causal", "return_lse")),
    "with_kvcache": (lambda **flags: fattn.with_kvcache(X, X.clone(), X.clone(), cache_seqlens=BOUNDS[1:], **flags), ("causal", "return_lse", "batch_invariant")),
    "attention_backward": (lambda **flags: fattn.attention_backward(X, X, X, X, O, LSE, **flags), ("causal", "deterministic", "return_dbias")),
    "attention_varlen_backward": (lambda **flags: fattn.attention_varlen_backward(X[0], X[0], X[0], X[0], O[0], LSE[0], cu_seqlens_q=BOUNDS, **flags), ("causal", "deterministic")),
    "cascade": (lambda **flags: fattn.cascade(X, X[0], X[0], X, X, **flags), ("causal", "return_lse", "deterministic")),
    "weights": (lambda **flags: fattn.weights(X, X, rows=[0], **flags), ("causal",)),
    "numpy.forward": (lambda **flags: fattn.numpy.forward(ARRAY, ARRAY, ARRAY, **flags), ("causal", "return_lse", "batch_invariant")),
    "numpy.backward": (lambda **flags: fattn.numpy.backward(ARRAY, ARRAY, ARRAY, ARRAY, O.numpy(), LSE.numpy(), **flags), ("causal",)),
    "support": (lambda **flags: fattn.support(X.shape, X.shape, **flags), ("causal", "deterministic")),
    "ring_attention": (lambda **flags: distributed.ring_attention(X, X, X, **flags), ("causal", "return_lse", "deterministic")),
    "decode_attention": (lambda **flags: distributed.decode_attention(X, X, X, **flags), ("return_lse",)),
    "flash_attn_func": (lambda **flags: flash.flash_attn_func(X, X, X, **flags), ("causal",)),
}
CASES = [(front, name) for front, (_, names) in FRONTS.items() for name in names]


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('group') / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("front, name", CASES)
@pytest.mark.parametrize(
    "value, said",
    [(1.5, "1.5"), (0.0, "0.0"), (float("nan"), "nan"), (2, "2"), ("no", "a str"), ("", "a str"), (torch.tensor(True), "a Tensor"), (np.ones(2, bool), "a ndarray"),
     (np.float32(1), "1.0")],
    ids=str,
)
def test_what_is_neither_true_nor_false_is_refused(front, name, value, said):
    with pytest.raises(TypeError, match=f"{name} is {said}; it must be True or False"):
        FRONTS[front][0](**{name: value})


@pytest.mark.parametrize("front, name", [case for case in CASES if case[1] != "return_dbias"])
def test_numbers_and_numpy_are_as_good(front, name):
    call = FRONTS[front][0]
    for yes, no in ((1, 0), (np.True_, np.False_), (np.int64(1), np.uint8(0))):
        for given, meant in ((yes, True), (no, False)):
            a, b = call(**{name: given}), call(**{name: meant})
            assert type(a) is type(b)
            if front != "support":
                torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["causal", "return_lse", "batch_invariant"])
def test_none_is_no_flag_and_deterministic_may_be_none(name):
    with pytest.raises(TypeError, match=f"{name} is None; it must be True or False"):
        fattn.attention(X, X, X, **{name: None})
    assert torch.equal(fattn.attention(X, X, X, deterministic=None), fattn.attention(X, X, X))


def test_a_symbol_stays_one_in_compiled_code():
    compiled = torch.compile(lambda q: fattn.attention(q, q, q, causal=q.shape[1] != 7, batch_invariant=q.shape[1] > 2, return_lse=q.shape[1] > 2)[0], dynamic=True, fullgraph=True)
    for seqlen in (8, 9, 7):
        q = torch.randn(1, seqlen, 2, 8)
        torch.testing.assert_close(compiled(q), fattn.attention(q, q, q, causal=seqlen != 7))
