"""Tensors without numbers, on meta and as torch's fakes: every function says the shapes of its results, and asks for no number."""

import pytest

torch = pytest.importorskip("torch")
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import fattn  # noqa: E402


def calls(make):
    """What a call returns, and the shape that it must have. `make`: a tensor of shape and dtype."""
    q, k, v, new = make(2, 5, 4, 8), make(2, 9, 2, 8), make(2, 9, 2, 8), make(2, 1, 2, 8)
    step, lengths, begins, table = make(2, 1, 4, 8), make(2, dtype=torch.int32), make(3, dtype=torch.int32), make(2, 3, dtype=torch.int32)
    cos, pages, pages_v, lse = make(20, 4), make(7, 3, 2, 8), make(7, 3, 2, 8), make(2, 4, 5)
    angles = {"rotary_cos": cos, "rotary_sin": make(20, 4)}
    packed = {"cu_seqlens_q": begins, "max_seqlen_q": 3, "max_seqlen_k": 9}
    return {
        "attention": (lambda: fattn.attention(q, k, v, causal=True, seqused_k=lengths), q.shape),
        "dropout": (lambda: fattn.attention(q, k, v, dropout_p=0.5), q.shape),
        "attention_varlen": (lambda: fattn.attention_varlen(q[0], k[0], v[0], **packed), q[0].shape),
        "attention_backward": (lambda: fattn.attention_backward(q, q, k, v, q, lse)[1], k.shape),
        "with_kvcache": (lambda: fattn.with_kvcache(step, k, v, new, new, cache_seqlens=3), step.shape),
        "with_kvcache_of_lengths": (lambda: fattn.with_kvcache(step, k, v, new, new, cache_seqlens=lengths), step.shape),
        "with_kvcache_that_turns": (lambda: fattn.with_kvcache(step, k, v, new, new, cache_seqlens=lengths, **angles), step.shape),
        "with_kvcache_of_pages": (lambda: fattn.with_kvcache(step, pages, pages_v, new, new, cache_seqlens=lengths, block_table=table), step.shape),
        "rotary": (lambda: fattn.rotary(q, cos, angles["rotary_sin"], offsets=lengths), q.shape),
        "merge": (lambda: fattn.merge(q, lse, q, lse)[0], q.shape),
        "cascade": (lambda: fattn.cascade(q, k[0], v[0], k, v, causal=True, seqused_k=lengths), q.shape),
        "weights": (lambda: fattn.weights(q, k, rows=[0, -1], seqused_k=lengths), (2, 4, 2, 9)),
        "largest_logits": (lambda: fattn.largest_logits(q, k, seqused_k=lengths), (4,)),
    }


def zeros(*shape, dtype=torch.float32, device=None):
    return torch.zeros(shape, dtype=dtype, device=device)


NAMES = list(calls(zeros))


@pytest.mark.parametrize("name", NAMES)
def test_meta(name):
    call, shape = calls(lambda *shape, dtype=torch.float32: zeros(*shape, dtype=dtype, device="meta"))[name]
    result = call()
    assert result.is_meta and result.shape == shape


@pytest.mark.parametrize("name", NAMES)
def test_fake(name):
    with FakeTensorMode():
        call, shape = calls(zeros)[name]
        assert call().shape == shape


def test_longest_sequences_are_given():
    q, begins = zeros(5, 2, 8, device="meta"), zeros(3, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match="^cu_seqlens_q is on meta, where its numbers are not; give max_seqlen_q"):
        fattn.attention_varlen(q, q, q, cu_seqlens_q=begins, max_seqlen_k=5)
    with pytest.raises(ValueError, match="^seqused_k is on meta, where its numbers are not; give max_seqlen_k"):
        fattn.attention_varlen(q, q, q, cu_seqlens_q=begins, max_seqlen_q=5, seqused_k=begins[:2])
