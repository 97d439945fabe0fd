"""The devices that tests of torch run on."""

import pytest


@pytest.fixture(params=["cpu", "cuda"])
def device(request) -> str:
    torch = pytest.importorskip("torch")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return request.param
