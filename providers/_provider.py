"""What every provider on torch tensors shares: the protocol of README.md on stdin and stdout, inputs and results, time and memory. A provider is a class
with a name, what it needs, what it refuses and its forward call; torch differentiates it."""

import ctypes
import gc
import importlib
import json
import mmap
import os
import sys
import time

PROTOCOL = 1

# A provider has the name of its library, which must be imported instead of it.
sys.path[:] = [folder for folder in sys.path if os.path.realpath(folder or ".") != os.path.dirname(os.path.realpath(__file__))]


class Refusal(Exception):
    """An answer {"ok": false}: status is unsupported, unavailable, out_of_memory or failed. `absent`: in answer to hello, why the provider is not here at
    all, in a few words that others may have, too, so that they are said once."""

    def __init__(self, status, reason, absent=""):
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.absent = absent


def protocol_streams():
    """The host's lines. Whatever a library prints on stdout later goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return sys.stdin, answers


def resident_bytes(key):
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    raise Refusal("failed", f"/proc/self/status has no {key}")


def reset_resident_peak():
    """Returns freed memory to the system, resets VmHWM, and says what is resident now."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        pass
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as clear:
            clear.write("5")
    except OSError as error:
        raise Refusal("failed", f"the resident set's peak cannot be reset here: {error}") from error
    return resident_bytes("VmRSS")


def available_bytes():
    with open("/proc/meminfo", encoding="ascii") as info:
        for line in info:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62


def refuse_scores(wanted, problem):
    """Refuses score matrices of `wanted` bytes that the CPU has no room for: its allocator is given more than there is, and the process dies later."""
    allowed = available_bytes()
    if problem["memory_limit_bytes"] > 0:
        allowed = min(allowed, problem["memory_limit_bytes"])
    if wanted > allowed:
        raise Refusal("out_of_memory", f"the score matrices need {wanted / 2**20:.1f} MiB; allowed are {allowed / 2**20:.1f} MiB")


def needed(module, package):
    """Imports a library, or refuses with what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = getattr(error, "name", None) or module
        absent = f"no module named {missing}" if isinstance(error, ModuleNotFoundError) else f"cannot import {missing}"
        reason = f"{sys.executable} cannot import {module}: {error}. Install {package}, or name another Python with --python"
        raise Refusal("unavailable", reason, absent) from error


class Provider:
    name = ""
    runs_on = ("cpu", "cuda")
    compiles = False  # for each problem, for tens of seconds; such a provider gets ready last
    heads_first = False  # the layout that it likes best: (batch, heads, seqlen, headdim), else (batch, seqlen, heads, headdim)

    def __init__(self):
        self.torch = None
        self.problem = None
        self.tensors = {}
        self.results = None

    # What a provider says.
    def load(self):
        """Imports the library and returns its version; `needed` refuses where it is absent."""
        raise NotImplementedError

    def variants(self):
        """{"cpu": [...], "cuda": [...]}: what there is, the default first; a device that is absent cannot be used."""
        raise NotImplementedError

    def forward_only(self, _device):
        """Why there is no backward pass on "cpu" or "cuda"; empty if there is."""
        return ""

    def accept(self, p):
        """Refuses what cannot be computed, as far as is known before it is tried."""

    def forward(self):
        """o of self.tensors, in the layout of the inputs."""
        raise NotImplementedError

    # hello: import the library, say what is here.
    def hello(self, request):
        if request.get("protocol") != PROTOCOL:
            raise Refusal("failed", f"speaks protocol {PROTOCOL}, was asked for {request.get('protocol')}")
        device = request.get("device", self.runs_on[0])
        if device not in self.runs_on:
            raise Refusal("unsupported", f"{self.name} runs on GPUs only", "for GPUs")
        version = self.load()
        self.torch = needed("torch", "PyTorch")
        there = self.variants()
        if not self.torch.cuda.is_available():
            there.pop("cuda", None)
        answer = {"protocol": PROTOCOL, "provider": self.name, "version": version, "devices": there, "compiles": self.compiles}
        forward_only = self.forward_only(device)
        return {**answer, "forward_only": forward_only} if forward_only else answer

    # problem: can it be computed? Allocates nothing.
    def take_problem(self, p):
        torch = self.torch
        self.drop()
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
        if p["dtype"] not in dtypes:
            raise Refusal("unsupported", f"no dtype {p['dtype']}; there are {', '.join(dtypes)}")
        if p["variant"] not in self.variants().get(p["device"], []):
            raise Refusal("unsupported", f"no variant {p['variant']} on {p['device']}")
        self.problem = p
        self.dtype = dtypes[p["dtype"]]
        self.device = torch.device("cpu") if p["device"] == "cpu" else torch.device(p["device"], p.get("device_index", 0))
        if self.device.type == "cuda":
            if self.device.index >= torch.cuda.device_count():
                raise Refusal("unsupported", f"no device {self.device}; torch sees {torch.cuda.device_count()}")
            torch.cuda.set_device(self.device)
        torch.set_num_threads(p["threads"])
        self.accept(p)
        return {}

    # prepare: copy the inputs to tensors of torch's own.
    def prepare(self, request):
        torch, p = self.torch, self.problem
        shapes = {
            "q": (p["batch"], p["seqlen_q"], p["nheads"], p["headdim"]),
            "k": (p["batch"], p["seqlen_k"], p["nheads_k"], p["headdim"]),
            "v": (p["batch"], p["seqlen_k"], p["nheads_k"], p["headdim_v"]),
            "dout": (p["batch"], p["seqlen_q"], p["nheads"], p["headdim_v"]),
        }
        for name, path in request["inputs"].items():
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED) as raw:
                view = torch.frombuffer(bytearray(raw), dtype=self.dtype).view(shapes[name])
            tensor = (view.transpose(1, 2).contiguous() if self.heads_first else view).to(self.device)
            self.tensors[name] = tensor.requires_grad_(p["grad"] and name != "dout")
        return {"kernel": self.kernel()}

    def kernel(self):
        """For people."""
        return f"{self.name} {self.problem['variant']}"

    def backward(self, o):
        t = self.tensors
        return self.torch.autograd.grad(o, (t["q"], t["k"], t["v"]), t["dout"], retain_graph=True)

    def synchronize(self):
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()

    # check: one forward and backward, the results in the host's layout to its files.
    def check(self, request):
        with self.torch.set_grad_enabled(self.problem["grad"]):  # as it is timed: what compiles does so once
            o = self.forward()
        results = {"o": o}
        if self.problem["grad"]:
            results.update(zip(("dq", "dk", "dv"), self.backward(o)))
        for name, path in request["outputs"].items():
            result = results[name].detach()
            result = (result.transpose(1, 2) if self.heads_first else result).contiguous().cpu().flatten().view(self.torch.uint8)
            with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as raw:
                self.torch.frombuffer(raw, dtype=self.torch.uint8).copy_(result)
                # The tensor of frombuffer is gone here; mmap refuses to close while one exists.
        return {}

    def calls(self, name):
        """The function to time, and what must be called before the clock starts."""
        if name == "fwd":
            if self.problem["grad"]:
                return self.forward_without_graph
            return self.forward_inference
        if name == "bwd":
            if self.results is None:
                self.results = self.forward()
            return lambda: self.backward(self.results)
        return lambda: self.backward(self.forward())

    def forward_without_graph(self):
        # What training pays: the forward keeps what the backward needs.
        self.forward()

    def forward_inference(self):
        with self.torch.no_grad():
            self.forward()

    # memory: the peak that a call adds over the inputs, its results included.
    def memory(self, request):
        name = request["pass"]
        self.release({})
        if self.device.type == "cuda":
            self.torch.cuda.empty_cache()
            self.synchronize()
            self.torch.cuda.reset_peak_memory_stats()
            before = self.torch.cuda.memory_allocated()
            kept = self.run_once(name)
            self.synchronize()
            extra = self.torch.cuda.max_memory_allocated() - before
            method = "allocator"
        else:
            self.run_once(name)  # threads, code and workspaces that stay are no memory of the call
            before = reset_resident_peak()
            kept = self.run_once(name)
            extra = max(0, resident_bytes("VmHWM") - before)
            method = "resident set"
        del kept
        return {"extra_bytes": extra, "method": method}

    def run_once(self, name):
        """As time does, but holding the results: for bwd the forward's are part of what it adds."""
        if name == "fwd":
            if self.problem["grad"]:
                return self.forward()
            with self.torch.no_grad():
                return self.forward()
        o = self.forward()
        return o, self.backward(o)

    # time: seconds a call, by the rules of the README.
    def time(self, request):
        call = self.calls(request["pass"])
        seconds = self.time_cuda(call, request) if self.device.type == "cuda" else self.time_cpu(call, request)
        return {"seconds": seconds}

    def time_cpu(self, call, request):
        for _ in range(request["warmup"]):
            call()
        clock = time.perf_counter
        start = clock()
        call()
        once = clock() - start
        least = self.problem["min_sample_s"]
        calls = 1 if once >= least else min(int(least / max(once, 1e-9)) + 1, 10000)
        seconds = [once] if calls == 1 else []
        while len(seconds) < request["samples"]:
            start = clock()
            for _ in range(calls):
                call()
            seconds.append((clock() - start) / calls)
        return seconds

    def time_cuda(self, call, request):
        torch = self.torch
        flush = torch.empty(self.problem.get("flush_bytes", 0), dtype=torch.uint8, device=self.device)
        for _ in range(request["warmup"]):
            call()
        seconds = []
        for _ in range(request["samples"]):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.synchronize()
            for _ in range(self.problem.get("flush_repeats", 1)):  # so long that the call is queued before it begins
                flush.zero_()
            begin.record()
            call()
            end.record()
            self.synchronize()
            seconds.append(begin.elapsed_time(end) / 1000)
        return seconds

    def release(self, _request):
        self.results = None
        gc.collect()
        if self.problem and self.device.type == "cuda":
            self.torch.cuda.empty_cache()  # others on this device need it
        return {}

    def drop(self):
        self.tensors = {}
        self.problem = None
        self.release({})

    def answer(self, request):
        operations = {
            "hello": self.hello,
            "problem": self.take_problem,
            "prepare": self.prepare,
            "check": self.check,
            "memory": self.memory,
            "time": self.time,
            "release": self.release,
        }
        operation = operations.get(request.get("op"))
        if operation is None:
            raise Refusal("failed", f"unknown op {request.get('op')!r}")
        if request["op"] != "hello" and self.torch is None:
            raise Refusal("failed", "hello comes first")
        return operation(request)

    def refusal(self, error):
        """Out of memory by the allocator's own exception type; everything else is a failure with its text."""
        torch = self.torch
        if isinstance(error, Refusal):
            answer = {"ok": False, "status": error.status, "reason": error.reason}
            return {**answer, "absent": error.absent} if error.absent else answer
        if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
            return {"ok": False, "status": "out_of_memory", "reason": f"{type(error).__name__} from the allocator"}
        if isinstance(error, NotImplementedError):  # what a library raises that has no kernel for the problem
            return {"ok": False, "status": "unsupported", "reason": f"{type(error).__name__}: {error}"[:500]}
        return {"ok": False, "status": "failed", "reason": f"{type(error).__name__}: {error}"[:500]}


def main(provider):
    lines, answers = protocol_streams()
    for line in lines:
        try:
            request = json.loads(line)
            if request.get("op") == "quit":
                return
            answer = {"ok": True, **provider.answer(request)}
        except Exception as error:  # pylint: disable=broad-except  # every failure is an answer
            answer = provider.refusal(error)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
