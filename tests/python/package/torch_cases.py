"""The table of cases as torch tensors on a device."""

import numpy as np
import torch

import fattn
from attention_cases import Case, prepare
from attention_reference import judge, reordered

SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float64": "fp64"}


def plain(device: str, **options) -> Case:
    """A case of the dtype that the device computes in, unless one is given."""
    return Case(**{"dtype": "float32" if device == "cpu" else "bfloat16"} | options)


def tensor(x: np.ndarray, dtype: str, device: str, **options) -> torch.Tensor:
    return torch.tensor(np.asarray(x, np.float64), dtype=getattr(torch, dtype), device=device, **options)


def leaves(case: Case, device: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v that ask for gradients, and dout."""
    prepared = prepare(case)
    return [tensor(x, case.dtype, device, requires_grad=True) for x in (prepared.q, prepared.k, prepared.v)], tensor(prepared.dout, case.dtype, device)


def scores_of(case: Case, device: str) -> dict[str, torch.Tensor | float]:
    """The arguments beside q, k and v; the bias asks for its gradient."""
    scores = prepare(case).scores
    names = ("seqused_k", "alibi_slopes", "mask", "dropout_state", "document_q", "document_k")
    arguments = {name: torch.tensor(x, device=device) for name in names if (x := getattr(scores, name)) is not None}
    if scores.bias is not None:
        arguments["bias"] = tensor(scores.bias, case.dtype, device, requires_grad=True)
    return arguments | {"dropout_p": case.dropout_p}


def check(case: Case, name: str, got: torch.Tensor) -> None:
    prepared = prepare(case)
    judge(name, got.detach().double().cpu().numpy(), prepared.expected, prepared.allowed)


def agree(got: torch.Tensor, wanted: torch.Tensor, *sums: int, roundings: float = 2, dtype: torch.dtype | None = None, **more) -> None:
    """Both were computed of the same numbers in this dtype, or that of `got`; `sums` and more as `reordered` takes them. In 16 bits, where sums are in fp32,
    `roundings` says what is rounded on the way: the weights and a result are 2, and P, dS, rowsum(o dout) and a gradient 4; an lse is a quarter, an
    eighth of a weight in each of the two (testing/check.h)."""
    dtype = dtype or got.dtype
    terms = (roundings,) if dtype.itemsize == 2 else sums
    torch.testing.assert_close(got, wanted, **reordered(str(dtype).removeprefix("torch."), *terms, **more))


def supported(case: Case, device: str, backward: bool = False, **more) -> fattn.Support:
    """What the library says about the case. Everything must be computed on the CPU, and on a GPU at least both masks in 16 bits."""
    prepared = prepare(case)
    shapes = [x.shape for x in (prepared.q, prepared.k, prepared.v)]
    scores = {"seqused_k": case.lengths, "alibi_slopes": bool(case.alibi), "documents": case.documents, "dropout_p": case.dropout_p}
    scores |= {name: x.shape for name in ("bias", "mask") if (x := getattr(prepared.scores, name)) is not None}
    support = fattn.support(*shapes, dtype=SHORT[case.dtype], device=device, backward=backward, **case.options, **scores, **more)
    must = device == "cpu" or (case.dtype in ("float16", "bfloat16") and not case.window and not case.softcap and not any(scores.values()))
    assert support or not must, support.reason
    return support
