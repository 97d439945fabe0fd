"""fattn.distributed over gloo against one process: random combinations of layouts, methods and options, on 1 to 8 ranks."""

import pytest

distributed = pytest.importorskip("torch.distributed")
if not distributed.is_available() or not distributed.is_gloo_available():
    pytest.skip("this torch is built without gloo", allow_module_level=True)

from distributed_cases import defects_of_many, rms_shares
from distributed_ranks import run_ranks


@pytest.mark.parametrize(("nranks", "count"), [(1, 60), (2, 120), (3, 100), (4, 100), (8, 60)])
def test_random_combinations(nranks, count):
    found = [text for texts in run_ranks(nranks, defects_of_many, [1000 * nranks + i for i in range(count)], nranks) for text in texts]
    assert not found, "\n".join(found[:3])


def test_rms_errors_are_those_of_one_call():
    for shares in run_ranks(3, rms_shares):
        assert all(share <= 1.25 for share in shares.values()), shares
