"""A rank that differs, dies or stalls is named on every other rank; nothing hangs and nothing wrong comes out."""

import pytest

distributed = pytest.importorskip("torch.distributed")
if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("this torch is built without gloo", allow_module_level=True)

import distributed_faults as faults
from distributed_ranks import gather, run_ranks, start
from fattn.distributed._ranks import GRACE

MISMATCHES = {
    "causal": "ValueError: causal is True on rank 1 and False on rank 0; all ranks must call fattn.distributed.ring_attention with the same",
    "dtype": "ValueError: dtype is 'torch.float64' on rank 1 and 'torch.float32' on rank 0",
    "window": "ValueError: window is [3, 0] on rank 1 and [4, 0] on rank 0",
    "headdim_v": "ValueError: headdim_v is 4 on rank 1 and 8 on rank 0",
    "cu_seqlens_q": "ValueError: cu_seqlens_q is '3 numbers, crc32",
    "rows": "ValueError: q has 6, 5, 6 rows on rank 0 and rank 1 and rank 2; 17 positions over 3 ranks in layout 'zigzag' are 5, 6, 6. ",
    "gradients": "ValueError: gradients is True on rank 1 and False on rank 0",
    "wrong": "k (1, 2, 2, 8), v (1, 6, 2, 8); allowed: one batch, k and v of the same rows and heads",
    "sinks": "ValueError: tensors that are given is ['sinks'] on rank 1 and [] on rank 0",
    "unsupported": "NotImplementedError: ",
}


def all_mismatches(rank: int) -> dict[str, str]:
    return {name: faults.mismatch(rank, name) for name in MISMATCHES}


def test_mismatch_is_named_on_every_rank():
    results = run_ranks(3, all_mismatches)
    for name, words in MISMATCHES.items():
        for rank, said in enumerate(results):
            assert words in said[name], f"{name}, rank {rank}: {said[name]}"
        if name in ("wrong", "unsupported"):
            assert "rank 1 called fattn.distributed.ring_attention wrongly" in results[0][name] and "rank 1 called" not in results[1][name]
        else:
            assert len({said[name] for said in results}) == 1


@pytest.mark.parametrize(("function", "arguments"), [
    (faults.end_inside, (2, "dies", False, 2.0)),
    (faults.end_inside, (2, "stalls", False, 2.0)),
    (faults.end_inside, (1, "dies", True, 2.0)),
    (faults.does_not_call, (3, 2.0)),
], ids=["dies", "stalls", "dies in the backward pass", "does not call"])
def test_culprit_is_named_on_every_other_rank(function, arguments):
    culprit, timeout = arguments[0], arguments[-1]
    others = {0, 1, 2, 3} - {culprit}
    found = gather(*start(4, function, *arguments), others, 60)
    for rank in others:
        text, seconds = found[rank]
        assert text.startswith(f"rank {culprit} "), f"rank {rank}: {text}"
        assert seconds < timeout + GRACE + 10, f"rank {rank} took {seconds} s"  # without load it is timeout and what GRACE says at most
