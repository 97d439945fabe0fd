"""`fattn check --values`: the time of a call by the values in it, and whether values that are hidden change a result."""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from .. import _attention
from .problems import DECODE_QUERIES, SOFTCAP, compile_ahead
from .spoilers import OPTIONS, Call, Shape, Spoiler, of_call
from .terminal import DTYPES, Parser, Progress, device_of, finite, machine, names, numbers, positive, require_writable, say, until_interrupted, write

LIMIT = 1.5
LONG_CALL_S = 0.3  # one is enough
QUEUED_CYCLES = 600_000  # the GPU waits so long for the host to have the call queued, so that its host time is no part of the measurement
ALGORITHMS = {"cuda": ("v2", "v3", "standard", "decode"), "cpu": ("v2", "standard", "decode")}
# What each option of the table asks of a call beside itself: wild scores are looked at in three calls.
SCORES = {"scores": {}, "scores, causal": {"causal": True}, "scores, softcap": {"softcap": SOFTCAP}}

DESCRIPTION = """Times calls whose tensors hold NaN, Inf, huge or subnormal numbers, hidden (behind lengths, masks, windows, documents, offsets) or visible, wild or
constant scores, and the same calls on random numbers, in turns: the ratio of the medians. Values that are hidden may change no bit of the results of
the queries, and of the gradients of the keys, that do not see them; zeros in their place are the comparison."""
EPILOG = f"""The goal: no call takes more than {LIMIT} times as long (--limit); one that does is measured again before it counts.
Exit 1 if one does or a bit changes, 130 after Ctrl-C, which keeps what was measured.

Examples:
  fattn check --values --quick
  fattn check --values --algorithm v3 --dtype bf16 --option seqused_k,causal
  fattn check --values --json docs/results/values.json"""


@dataclasses.dataclass(frozen=True)
class Target:
    algorithm: str  # or "decode"
    dtype: str
    headdim: int

    def options(self) -> dict[str, str]:
        return {} if self.algorithm == "decode" else {"algorithm": self.algorithm}

    @property
    def backward(self) -> bool:
        return self.algorithm != "decode" and (self.algorithm, self.dtype) != ("v3", "fp32")  # v3 has fp32 in the forward pass alone

    def __str__(self) -> str:
        return f"{self.algorithm} {self.dtype} d{self.headdim}"


@dataclasses.dataclass
class Result:
    target: Target
    option: str
    spoiler: Spoiler
    passed: str  # "fwd", "bwd"
    ratio: float
    seconds: float
    same_bits: bool | None

    def row(self, where: dict[str, str]) -> dict:
        return {"algorithm": self.target.algorithm, "dtype": self.target.dtype, "headdim": self.target.headdim, "pass": self.passed, "option": self.option,
                "values": self.spoiler.values, "where": self.spoiler.where, "ratio": finite(self.ratio), "time_s": finite(self.seconds),
                "same_bits": self.same_bits, **where}

    def __str__(self) -> str:
        bits = ", changes hidden from it" if self.same_bits is False else ""
        return f"{self.target} {self.passed} {self.option}, {self.spoiler.values} {self.spoiler.where}: {self.ratio:.2f} times{bits}"


class Timer:
    """Of calls on one device, in turns."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats

    def once(self, call: Callable[[], object]) -> float:
        if self.device.type == "cpu":
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(QUEUED_CYCLES)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def ratio(self, spoiled: Callable[[], object], plain: Callable[[], object], limit: float) -> tuple[float, float]:
        """Of the medians, and the spoiled one's. What is beyond the limit is measured again, twice at most: a slow path is slow each time."""
        best = None
        for _ in range(3):
            self.once(plain)
            self.once(spoiled)
            times: tuple[list[float], list[float]] = [], []
            for _ in range(self.repeats):
                times[0].append(self.once(spoiled))
                times[1].append(self.once(plain))
                if times[0][-1] > LONG_CALL_S and times[0][-1] > 3 * limit * times[1][-1]:
                    break
            medians = tuple(map(statistics.median, times))
            if best is None or medians[0] / medians[1] < best[0] / best[1]:
                best = medians
            if best[0] / best[1] <= limit or len(times[0]) < self.repeats:
                break
        return best[0] / best[1], best[0]


class Runner:
    """The calls of one target and option, on random inputs and on spoiled ones."""

    def __init__(self, target: Target, name: str, call: Call, timer: Timer, limit: float) -> None:
        self.target, self.name, self.call, self.timer, self.limit = target, name, call, timer, limit
        self.extra = SCORES.get(name, {})
        self.plain = call.inputs(DTYPES[target.dtype], 0)

    def _attention(self, inputs: dict[str, torch.Tensor], **options) -> torch.Tensor:
        return _attention.attention(inputs["q"], inputs["k"], inputs["v"], **self.call.arguments, **self.extra, **self.target.options(), **options)

    def _graph(self, inputs: dict[str, torch.Tensor], **options) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        leaves = [inputs[name].detach().requires_grad_(self.target.backward) for name in ("q", "k", "v")]
        o, lse = self._attention(dict(zip("qkv", leaves)), return_lse=True, **options)
        return leaves, o, lse

    def _forward(self, inputs: dict[str, torch.Tensor]) -> Callable[[], object]:
        def call() -> object:
            with torch.no_grad():
                return self._attention(inputs)
        return call

    def _backward(self, inputs: dict[str, torch.Tensor]) -> Callable[[], object]:
        leaves, o, _ = self._graph(inputs)
        return lambda: torch.autograd.grad(o, leaves, inputs["dout"], retain_graph=True)

    def _outputs(self, inputs: dict[str, torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """By pass, the rows of queries or keys first: o, lse; dq, dk, dv."""
        leaves, o, lse = self._graph(inputs, deterministic=True)
        packed = self.call.packed
        rows_first = [o.detach() if packed else o.detach().transpose(0, 1), lse.detach().movedim(-1, 0)]
        try:
            gradients = torch.autograd.grad(o, leaves, inputs["dout"]) if self.target.backward else ()
        except NotImplementedError:  # as it is asked for, deterministic
            gradients = ()
        return rows_first, [g if packed else g.transpose(0, 1) for g in gradients]

    def same_bits(self, spoiler: Spoiler, spoiled: dict[str, torch.Tensor]) -> tuple[bool, bool | None]:
        """Of each pass, of what does not see the spoiled keys. None: there is no backward pass whose bits are always the same."""
        blank = {name: x.clone() for name, x in self.plain.items()}
        for name in ("k", "v"):
            blank[name][..., spoiler.keys, :, :] = 0
        if "one element" in spoiler.where:  # the rest of the key is as random
            spoiled = {name: x.clone() for name, x in blank.items()}
            spoiler.apply(spoiled)
        rows, keys = self.call.untouched(spoiler.keys)

        def same(got: list[torch.Tensor], wanted: list[torch.Tensor], which: list[torch.Tensor]) -> bool:
            return all(torch.equal(_bits(a[at]), _bits(b[at])) for a, b, at in zip(got, wanted, which))

        (forward, backward), (blank_forward, blank_backward) = self._outputs(spoiled), self._outputs(blank)
        return same(forward, blank_forward, [rows, rows]), same(backward, blank_backward, [rows, keys, keys]) if backward and blank_backward else None

    def results(self, spoiler: Spoiler) -> list[Result]:
        spoiled = {name: x.clone() for name, x in self.plain.items()}
        spoiler.apply(spoiled)
        bits = self.same_bits(spoiler, spoiled) if spoiler.keys is not None else (None, None)
        found = []
        for passed, make, same in (("fwd", self._forward, bits[0]), ("bwd", self._backward, bits[1]))[: 1 + self.target.backward]:
            ratio, seconds = self.timer.ratio(make(spoiled), make(self.plain), self.limit)
            found.append(Result(self.target, self.name, spoiler, passed, ratio, seconds, same))
        return found


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def _flags(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("fattn check --values", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--device", default="auto", metavar="DEVICE", help="cuda, cuda:N, cpu, or auto: cuda if torch sees one [auto]")
    parser.add_argument("--algorithm", type=names(("v2", "v3", "v1", "standard", "decode")), metavar="NAME,...",
                        help="what computes: v1, v2, v3, standard, decode [v2,v3,standard,decode; on the CPU without v3]")
    parser.add_argument("--dtype", type=names(tuple(DTYPES)), metavar="NAME,...", help="dtypes [bf16,fp16,fp32; with --quick bf16]")
    parser.add_argument("--headdim", type=numbers(int), default=[64, 128], metavar="N,...", help="sizes of a head [64,128]")
    parser.add_argument("--option", type=names(OPTIONS), default=list(OPTIONS), metavar="NAME,...", help=f"what hides values: {', '.join(OPTIONS)} [all]")
    parser.add_argument("--batch", type=positive, metavar="N", help="batch size: a whole number, 1 or more [4; on the CPU 1]")
    parser.add_argument("--seqlen", type=positive, metavar="N", help="queries and keys [2048; on the CPU 512]")
    parser.add_argument("--nheads", type=positive, metavar="N", help="heads [16; on the CPU 4]")
    parser.add_argument("--repeats", type=positive, default=7, metavar="N", help="calls of each kind [7]")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="X", help=f"the ratio that a call may have [{LIMIT}]")
    parser.add_argument("--quick", action="store_true", help="NaN in one element and in all that is hidden; bf16")
    parser.add_argument("--full", action="store_true", help="every value in every extent")
    parser.add_argument("--json", metavar="FILE|-", help="write the ratios as a list of JSON objects, one for each call and pass")
    flags = parser.parse_args(arguments)
    flags.device = device_of(flags.device)
    cpu = flags.device.type == "cpu"
    flags.algorithm = flags.algorithm or list(ALGORITHMS[flags.device.type])
    flags.dtype = flags.dtype or (["bf16"] if flags.quick else list(DTYPES))
    flags.batch = flags.batch or (1 if cpu else 4)
    flags.seqlen = flags.seqlen or (512 if cpu else 2048)
    flags.nheads = flags.nheads or (4 if cpu else 16)
    if not flags.limit > 1:
        parser.error("--limit must be above 1")
    if flags.seqlen < 32:
        parser.error("--seqlen must be at least 32: keys are hidden in it")
    return flags


def _names(target: Target, flags: argparse.Namespace) -> dict[str, str]:
    """What a row has as its option, and the option."""
    chosen = [option for option in flags.option if target.algorithm != "decode" or option not in ("packed", "documents", "window")]
    return {name: option for option in chosen for name in (SCORES if option == "scores" else (option,))}


def _shape(target: Target, flags: argparse.Namespace) -> Shape:
    return Shape(flags.batch, DECODE_QUERIES if target.algorithm == "decode" else flags.seqlen, flags.seqlen, flags.nheads, target.headdim)


def _calls(target: Target, flags: argparse.Namespace) -> Iterator[tuple[str, Call]]:
    for name, option in _names(target, flags).items():
        yield name, Call(option, _shape(target, flags), flags.device)


def _plan(target: Target, name: str, call: Call, index: int) -> dict:
    q, k = call.tensor_shape("q"), call.tensor_shape("k")
    return {"q": q, "k": k, "dtype": target.dtype, "device": "cuda", "device_index": index, "backward": target.backward, **target.options(), **call.plan,
            **SCORES.get(name, {})}


def _print_line(out, target: Target, name: str, found: list[Result], limit: float) -> None:
    """The worst of each pass."""
    parts = []
    for passed in ("fwd", "bwd"):
        of = [r for r in found if r.passed == passed]
        if of:
            worst = max(of, key=lambda r: r.ratio)
            parts.append(f"{passed} {worst.ratio:7.2f} {worst.spoiler.values:9}")
    wrong = any(r.same_bits is False for r in found)
    slow = any(not r.ratio <= limit for r in found)
    print(f"{str(target):19}{name:16}{'  '.join(parts)}{' bits' if wrong else ''}{' !' if wrong or slow else ''}", file=out, flush=True)


def _verdict(out, results: list[Result], skipped: list[str], broken: list[str], flags: argparse.Namespace) -> int:
    slow = sorted((r for r in results if not r.ratio <= flags.limit), key=lambda r: -r.ratio)
    wrong = [r for r in results if r.same_bits is False]
    print(file=out)
    for reason in skipped[:8]:
        say(out, f"skipped {reason}"[:160])
    for failure in broken[:20]:
        say(out, f"FAILED {failure}")
    for what, of in (("SLOW", slow), ("BITS", wrong)):
        for r in of[:20]:
            say(out, f"{what} {r}")
        if len(of) > 20:
            print(f"and {len(of) - 20} more", file=out)
    bad = sum(1 for r in results if not r.ratio <= flags.limit or r.same_bits is False)
    failed = bad + len(broken)
    print(f"{len(results)} calls on {flags.device}, limit {flags.limit:g}: {len(results) - bad} passed, {failed} failed, {len(skipped)} skipped", file=out)
    return 1 if failed or not results else 0


def run(arguments: Sequence[str]) -> int:
    flags = _flags(arguments)
    require_writable(flags.json)
    out = sys.stderr if flags.json == "-" else sys.stdout
    where = machine(flags.device)
    timer = Timer(flags.device, flags.repeats)
    targets = [Target(algorithm, dtype, headdim) for algorithm in flags.algorithm for dtype in flags.dtype for headdim in flags.headdim]
    results: list[Result] = []
    skipped: list[str] = []
    broken: list[str] = []
    progress = Progress("values", sum(len(_names(target, flags)) for target in targets))
    say(out, "The largest time over that of random values, and the values; ! is beyond the limit; bits: values that are hidden change a result.")


    def measure() -> None:
        if flags.device.type == "cuda":
            compile_ahead([{**_plan(t, name, call, flags.device.index or 0), "deterministic": deterministic}
                           for t in targets for name, call in _calls(t, flags) for deterministic in ((False, True) if t.backward else (False,))])
        for target in targets:
            for name, call in _calls(target, flags):
                first = len(results)
                try:
                    runner = Runner(target, name, call, timer, flags.limit)
                    for spoiler in of_call(call, DTYPES[target.dtype], flags.full, flags.quick):
                        results.extend(runner.results(spoiler))
                except NotImplementedError as error:
                    skipped.append(f"{target} {name}: {str(error).splitlines()[0]}")
                except RuntimeError as error:
                    broken.append(f"{target} {name}: {str(error).splitlines()[0]}")
                progress.step(f"{target} {name}")
                progress.clear()
                if len(results) > first:
                    _print_line(out, target, name, results[first:], flags.limit)

    def finish() -> int:
        progress.clear()
        verdict = _verdict(out, results, skipped, broken, flags)
        write([r.row(where) for r in results], flags.json)
        return verdict

    return until_interrupted(measure, finish)
