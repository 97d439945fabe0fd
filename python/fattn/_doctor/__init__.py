"""fattn.doctor: which attention of a model runs fattn, which not and why, and what the model would gain."""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .calls import Call
from .operators import FLEX, LAYERS
from .prices import Price, price_of
from .reasons import Verdict, as_now, verdict
from .report import Diagnosis, Layer
from .subject import Subject
from .watch import Watch

__all__ = ["Diagnosis", "Layer", "doctor"]

_PATIENCE = 20.0  # seconds; who asks wants an answer
_Seconds = dict[int, tuple[float, float | None]]  # of a call, by its number in a pass


def _watched(subject: Subject, kept: Any, operators: bool, eagerly: bool) -> list[Call]:
    watch = Watch(subject.model, operators=operators, eagerly=eagerly)
    with watch.at_work():
        subject.run(kept)
    return watch.calls


def _times(subject: Subject, kept: Any, seen: list[Call], repeat: int) -> tuple[float, _Seconds]:
    """Of a pass, and of each call in it, in turns. The least of each: whatever else a machine does makes it longer."""
    operators = any(call.kind in ("operator", "written") for call in seen)
    # FlexAttention is compiled by itself, and slow where it is not. What looks at operators sees none in compiled code.
    eagerly = operators or subject.is_compiled() or not any(FLEX in call.function for call in seen)
    whole, samples = [], defaultdict(list)
    end = time.perf_counter() + _PATIENCE
    for passed in range(repeat):
        if passed >= 2 and time.perf_counter() > end:
            break
        whole.append(subject.run(kept))
        calls = _watched(subject, kept, operators, eagerly)
        if len(calls) == len(seen):  # a model may go another way each time
            for i, call in enumerate(calls):
                samples[i].append(call.seconds())
    found: _Seconds = {}
    for i, call in enumerate(seen):
        forwards, backwards = zip(*(samples[i] or [call.seconds()]))
        there = [x for x in backwards if x is not None]
        found[i] = min(forwards), min(there, default=None)
    return min(whole), found


def _priced(call: Call, found: Verdict, backward: bool, notes: dict[str, None]) -> tuple[Price | None, Price | None]:
    """As it runs now, and by fattn."""
    now = as_now(call)
    if now is None or call.q.dim() == 0:
        return None, None
    ways = {"now": now} | ({} if found.by_fattn is None else {"fattn": found.by_fattn})
    try:
        measured = price_of(call, ways, backward)
    except Exception as error:  # a layer may want what only the model can give it
        notes[f"A call of {call.function} could not be measured by itself: {type(error).__name__}: {error}"] = None
        return None, None
    return measured["now"], measured.get("fattn")


def _all_priced(seen: list[Call], seconds: _Seconds, verdicts: dict[tuple, Verdict], backward: bool, notes: dict[str, None]) -> dict[tuple, tuple[Price | None, Price | None]]:
    """Of each kind of call that fattn does not compute, those first that take most of a pass: a generation has many kinds, one for each length."""
    taken, one = defaultdict(float), {}
    for i, call in enumerate(seen):
        if not call.ours:
            taken[call.key] += sum(x or 0.0 for x in seconds[i])
            one[call.key] = call
    measured, end = {}, time.perf_counter() + _PATIENCE
    for key in sorted(taken, key=taken.__getitem__, reverse=True):
        if time.perf_counter() > end:
            notes[f"{len(taken) - len(measured)} of {len(taken)} kinds of calls, those that take least, were not measured by themselves."] = None
            break
        measured[key] = _priced(one[key], verdicts[key], backward, notes)
    return measured


def _total(call: Call, forward: float, backward: float | None, price: Price | None) -> float:
    """Of a call in the model. A backward pass that was not seen takes as long, beside its forward pass, as by itself; and so does attention inside of the operator
    of a whole layer."""
    if price is not None and call.operators & set(LAYERS):
        return min(forward, price.forward)
    if backward is None and price is not None and price.both is not None and price.forward > 0:
        return forward * max(price.both / price.forward, 1.0)
    return forward + (backward or 0.0)


def _ratio(now: Price | None, ours: Price | None) -> float | None:
    if now is None or ours is None:
        return None
    return now.forward / ours.forward if now.both is None or ours.both is None else now.both / ours.both


def _layer(calls: list[Call], found: Verdict, seconds: float, speedup: float | None) -> Layer:
    call = calls[0]
    return Layer(call.layer, call.module, call.where if call.kind != "interface" else "", len(calls), call.function, call.ours, found.runs, found.why, found.change,
                 call.q.shape, call.k.shape, call.v.shape, str(call.q.dtype).removeprefix("torch."), str(call.q.device), call.causal,
                 call.masked or call.mask is not None if found.masked is None else found.masked, call.dropout_p, seconds, speedup)


def doctor(model: Any, inputs: torch.Tensor | Sequence[Any] | Mapping[str, Any], *, backward: bool = False, repeat: int = 5) -> Diagnosis:
    """Runs a model, and says which of its calls of attention fattn computes and which it does not, why not, what to change, how much of the time attention takes,
    and how much faster the whole is expected to be with fattn.

        print(fattn.doctor(model, {"input_ids": tokens}))

    It finds F.scaled_dot_product_attention, fattn's own functions, the attention of transformers' models, the operators of flash_attn, xFormers and torch, and
    attention that is written out as matmul, softmax and matmul. The time of each call is measured in the model; each that is not fattn's is then measured by itself,
    as it is and by fattn, and the whole is expected to become faster by what its calls do. What is around attention is not counted: in the place of fused kernels
    the gain comes within a few percent of what is expected; in the place of standard attention more comes, because masks and the memory of the scores are no
    longer there. Of a machine that does something else, too, expect less.

    Models that torch.compile has are timed as they are, and looked at uncompiled; the time of their attention is then that of uncompiled calls.

    Args:
        model: a torch.nn.Module, in eval or training mode, or a function; as it is to be used: under `torch.no_grad()` or `torch.autocast` if it is.
        inputs: its arguments: a tensor, a sequence of them, or a mapping of keywords.
        backward: the backward pass too: of the result's `loss` if it has one, else of all floating-point results.
        repeat: passes that are timed; fewer, but two, where they take more than 20 seconds. The model runs 2 + 2 * repeat times.

    Returns:
        A `Diagnosis`: `layers`, `share`, `expected_speedup` and others, `to_dict()` for JSON, and its `str`.
        Nothing is left changed: parameters, gradients, buffers, hooks and random numbers are as they were, also if the model raises.

    Raises:
        TypeError: the model cannot be called.
        ValueError: `repeat` is less than 1, or `backward` is asked for and no result asks for a gradient.
        What the model itself raises.
    """
    if repeat < 1:
        raise ValueError(f"repeat is {repeat}; allowed: 1 and more")
    subject = Subject(model, inputs, backward)
    with subject.kept() as kept:
        subject.run(kept)  # warms up
        watch = Watch(model, closely=True, operators=True)
        with watch.at_work():
            subject.run(kept)
        seen, notes = watch.calls, {}
        whole, seconds = _times(subject, kept, seen, repeat)
        alike = {call.key: call for call in seen}
        verdicts = {key: verdict(call, backward) for key, call in alike.items()}
        measured = _all_priced(seen, seconds, verdicts, backward, notes)
    return _diagnosis(subject, seen, whole, seconds, verdicts, measured, notes)


def _diagnosis(subject: Subject, seen: list[Call], whole: float, seconds: _Seconds, verdicts: dict[tuple, Verdict], measured: dict[tuple, tuple[Price | None, Price | None]],
               notes: dict[str, None]) -> Diagnosis:
    groups: dict[tuple, list[int]] = defaultdict(list)
    for i, call in enumerate(seen):
        groups[call.layer, call.where, call.key].append(i)
    layers, saved = [], 0.0
    for (_, _, key), numbers in groups.items():
        now, ours = measured.get(key, (None, None))
        taken, speedup = sum(_total(seen[i], *seconds[i], now) for i in numbers), _ratio(now, ours)
        if speedup is not None and speedup > 1:
            saved += taken * (1 - 1 / speedup)
        layers.append(_layer([seen[i] for i in numbers], verdicts[key], taken, speedup))
    if any(FLEX in call.operators for call in seen):
        notes["FlexAttention was timed uncompiled: where the model has it compiled, its time and the share of attention are too large."] = None
    compiled = subject.is_compiled()
    if compiled:
        notes["torch.compile has the model or a part of it: its layers were looked at uncompiled, and the time of attention is that of uncompiled calls."] = None
    attention = sum(layer.seconds for layer in layers)
    if attention > whole:
        notes["Attention by itself took longer than the whole model, whose time its share is held to: the compiler joins it with what is around it, or the machine is busy."] = None
        saved *= whole / attention
    return Diagnosis(subject.name, tuple(layers), subject.backward, str(subject.device), compiled, whole, attention, whole - saved, tuple(notes))
