"""fattn gpt2 train --context-parallel: processes that share sequences, over the stand-in for NCCL (tests/stub/nccl_stub.cpp)."""
import json
import signal
import subprocess
import time

import pytest
import safetensors.numpy
from test_gpt2_group import LAST_PLACES, LONG, RUN, STEPS, Processes, difference, log_of, run, wait_for_steps, weights_of


def with_options(options: dict) -> list:
    return [options.get(RUN[i - 1], part) if i else part for i, part in enumerate(RUN)]


def trained(fattn, data, folder, name, ranks, context, *more, options=None) -> list[dict]:
    arguments = [*with_options(options or {}), *more, "--data", data, "--out", folder / name]
    if ranks == 1:
        fattn("gpt2", "train", *arguments)
    else:
        run(fattn, ranks, [*arguments, "--context-parallel", context, "--rendezvous", folder / f"meet-{name}"])
    return log_of(folder / name)


@pytest.mark.parametrize("ranks, context, more", [(2, 2, []), (3, 3, ["--positions", "rotary"]), (4, 2, ["--n-kv-head", 1]), (4, 4, []),
                                                  (2, 2, ["--checkpoint-activations", "--no-shuffle"])])
def test_processes_that_share_sequences_train_as_one(fattn, data, tmp_path, ranks, context, more):
    """Rows of 17 tokens, which nothing divides, with several documents in some of them. As of data parallel runs: what differs is the order in which
    numbers are summed, and a run of one process that sums gradients in another order says how much that may be."""
    odd = {"--seqlen": 17}
    log = trained(fattn, data, tmp_path, "run", ranks, context, *more, options=odd)
    one = trained(fattn, data, tmp_path, "one", 1, 1, *more, options=odd)
    reordered = trained(fattn, data, tmp_path, "other", 1, 1, *more, options=odd | {"--batch": 6, "--accumulate": 2})
    for name in ("step", "targets", "tokens", "learning_rate", "skipped"):
        assert [line[name] for line in log] == [line[name] for line in one]
    allowed = {key: max(4 * difference(reordered, one, key), LAST_PLACES) for key in ("loss", "gradient_norm", "logit_scale")}
    for key in ("loss", "gradient_norm"):
        steps = difference(one[1:], one[:-1], key)  # what one step changes
        assert difference(log, one, key) <= allowed[key] < steps / 100, key
    assert difference(log, one, "logit_scale") <= allowed["logit_scale"]
    validated = [[line for line in lines if "validation_loss" in line] for lines in (log, one)]
    assert len(validated[0]) == 2 and difference(*validated, "validation_loss") <= allowed["loss"]


def test_they_drop_what_one_process_drops(fattn, data, tmp_path):
    """Beside processes that take batches in turns, which have the masks of one too, and sum gradients in another order. Other masks are far away."""
    odd, drops = {"--seqlen": 17}, ["--dropout", 0.1]
    one, turns, log = (trained(fattn, data, tmp_path, name, ranks, context, *drops, options=odd) for name, ranks, context in (("one", 1, 1), ("turns", 2, 1), ("run", 4, 2)))
    none = trained(fattn, data, tmp_path, "none", 1, 1, options=odd)
    for key in ("loss", "gradient_norm"):
        allowed = max(4 * difference(turns, one, key), LAST_PLACES)
        assert difference(log, one, key) <= allowed < difference(none, one, key) / 100, key


def test_the_same_processes_give_the_same_bits(fattn, data, tmp_path):
    for name, bucket in (("a", "1GiB"), ("b", 4)):
        trained(fattn, data, tmp_path, name, 4, 2, "--bucket", bucket)
    assert log_of(tmp_path / "a") == log_of(tmp_path / "b") and weights_of(tmp_path / "a") == weights_of(tmp_path / "b")


def test_a_run_goes_on_with_other_numbers(fattn, data, tmp_path):
    """Until step 7 four processes, of which two share each sequence; then other numbers of both. What a checkpoint has is what one process writes."""
    begin = [*RUN, "--data", data]
    run(fattn, 4, [*begin, "--out", tmp_path / "whole", "--context-parallel", 2, "--rendezvous", tmp_path / "m1"])
    for ranks, context, name in ((4, 2, "same"), (3, 3, "three"), (2, 1, "batches"), (1, 1, "one"), (6, 2, "six")):
        subprocess.run(["cp", "-r", tmp_path / "whole", tmp_path / name], check=True)
        subprocess.run(["rm", "-r", tmp_path / name / f"step-{STEPS:08}"], check=True)
        run(fattn, ranks, ["--out", tmp_path / name, "--resume", "--every", 7, "--eval-batches", 5, "--keep", 0, "--threads", 1, "--context-parallel", context,
                           "--rendezvous", tmp_path / "m2"])
        log, whole = log_of(tmp_path / name), log_of(tmp_path / "whole")
        assert log[:7] == whole[:7] and difference(log, whole, "loss") <= LAST_PLACES
        if name == "same":
            assert log == whole and weights_of(tmp_path / name) == weights_of(tmp_path / "whole")
    fattn("gpt2", "train", *begin, "--out", tmp_path / "alone")
    files = [sorted(path.name for path in (tmp_path / name / f"step-{STEPS:08}").iterdir()) for name in ("alone", "whole")]
    assert files[0] == files[1]
    options = [json.loads((tmp_path / name / f"step-{STEPS:08}" / "checkpoint.json").read_text())["options"] for name in ("alone", "whole")]
    assert options[0] == options[1]


def test_less_is_kept_by_each(fattn, tmp_path):
    def memory(context, seqlen=512):
        sizes = ["--n-layer", 2, "--n-head", 2, "--n-embd", 32, "--seqlen", seqlen, "--batch", 2, "--memory", "--context-parallel", context]
        fattn("gpt2", "train", *sizes, "--json", tmp_path / "memory.json")
        record = json.loads((tmp_path / "memory.json").read_text())
        assert record["context_parallel"] == context
        return {use["what"]: use["bytes"] for use in record["memory"]}

    whole, half, quarter = memory(1), memory(2), memory(4)
    assert whole["gradients"] == half["gradients"] == quarter["gradients"]
    assert half["activations"] < 0.51 * whole["activations"] and quarter["activations"] < 0.26 * whole["activations"]
    # Of 17 rows ranks 0 to 2 have 5, 6 and 6: without a starter the record is of the most.
    five, most, six = (memory(3, seqlen)["activations"] for seqlen in (15, 17, 18))
    assert six - most < (six - five) / 4


def test_what_cannot_be_shared_is_refused(fattn, data, tmp_path):
    def errors(ranks, *more, options=None):
        with Processes(fattn, ranks, [*with_options(options or {}), *more, "--data", data, "--out", tmp_path / "run", "--rendezvous", tmp_path / "meet"]) as processes:
            for code, _, error in processes.ends():
                assert code == 2
                yield error

    for error in errors(4, "--context-parallel", 3):
        assert "--context-parallel 3 does not divide the number of processes, which is 4; allowed: 1, 2, 4" in error
    assert "which is 1; allowed: 1. torchrun" in fattn.refuses("gpt2", "train", *RUN, "--data", data, "--out", tmp_path / "run", "--context-parallel", 2)
    for error in errors(4, "--context-parallel", 4, options={"--seqlen": 7, "--accumulate": 1}):
        assert "sequences of 7 tokens are too short for 4 processes" in error and "give at most 3" in error
    for error in errors(4, "--context-parallel", 2, options={"--accumulate": 5}):
        assert "cannot be shared by 2 groups of 2 processes (--context-parallel)" in error
    alone = [part for i, part in enumerate(RUN) if "--accumulate" not in RUN[max(i - 1, 0):i + 1]]  # whose number of batches N would change
    with Processes(fattn, 2, lambda rank: [*alone, "--data", data, "--out", tmp_path / "run", "--rendezvous", tmp_path / "meet", "--context-parallel", 1 + rank]) as both:
        for code, _, error in both.ends():
            assert code == 2 and "rank 1 has --context-parallel 2, rank 0 has --context-parallel 1" in error
    assert "--context-parallel" in fattn.refuses("gpt2", "train", *RUN, "--data", data, "--out", tmp_path / "run", "--context-parallel", 0)


def model_of(fattn, data, folder, edit):
    """A model's folder: one that has learnt nothing, but for what `edit` does to its weights."""
    fattn("gpt2", "train", *with_options({"--steps": 1, "--learning-rate": 1e-30}), "--data", data, "--out", folder / "first")
    model = folder / "first" / "step-00000001"
    weights = {name: weight.copy() for name, weight in safetensors.numpy.load_file(model / "model.safetensors").items()}
    edit({name.removeprefix("transformer."): weight for name, weight in weights.items()})
    safetensors.numpy.save_file(weights, model / "model.safetensors", {"format": "pt"})
    return model


def without_sizes(options: dict) -> list:
    arguments = with_options(options)
    return arguments[arguments.index("--seqlen"):]


def test_a_number_that_is_none_ends_all(fattn, data, tmp_path):
    """One rank alone has it: behind the last attention, in a row of a sequence's first part, from which a causal mask lets no gradient go to other
    rows' keys. All take part in the search for the first tensor that has one, in every batch."""
    place = 1  # of "Z", in part 0 of 4: rank 0's
    text = "".join(chr(97 + i % 7) for i in range(16 * 24))
    (tmp_path / "text.txt").write_text(text[:place] + "Z" + text[place + 1:])
    fattn("gpt2", "tokenize", data / "tokenizer", tmp_path / "text.txt", "--out", tmp_path / "tokens", "--threads", 1)

    def edit(weights):
        """Channel 0 is 0 but where "Z" is; there the last MLP overflows."""
        weights["wte.weight"][:, 0] = weights["wpe.weight"][:, 0] = 0
        weights["wte.weight"][ord("Z")] = [10, *[0] * 15]
        for i in range(2):
            weights[f"h.{i}.attn.c_proj.weight"][:] = 0
        weights["h.0.mlp.c_proj.weight"][:, 0] = 0
        weights["h.1.mlp.c_fc.weight"][:, 0] = [1e12, *[0] * 15]
        weights["h.1.mlp.c_fc.bias"][0] = -2e12
        weights["h.1.mlp.c_proj.weight"][0] = 1e27

    model = model_of(fattn, data, tmp_path, edit)
    with Processes(fattn, 4, [model, *without_sizes({}), "--no-shuffle", "--data", tmp_path / "tokens", "--out", tmp_path / "run", "--rendezvous",
                              tmp_path / "meet", "--context-parallel", 2]) as processes:
        done = processes.ends()
    assert [code for code, _, _ in done] == [1] * 4
    assert "the first tensor that is not finite is 'h.1.out'" in done[0][2] and " of rank 0. There is no checkpoint" in done[0][2], done[0][2]


def test_steps_that_overflow_are_skipped_by_all(fattn, data, tmp_path):
    """In fp16, as by one process."""
    def edit(weights):
        weights["ln_f.weight"] *= 1000

    model = model_of(fattn, data, tmp_path, edit)
    arguments = [model, *without_sizes({}), "--dtype", "fp16", "--data", data]
    run(fattn, 4, [*arguments, "--out", tmp_path / "run", "--context-parallel", 2, "--rendezvous", tmp_path / "meet"])
    fattn("gpt2", "train", *arguments, "--out", tmp_path / "one")
    log, one = log_of(tmp_path / "run"), log_of(tmp_path / "one")
    for name in ("skipped", "loss_scale", "overflows"):
        assert [line[name] for line in log] == [line[name] for line in one]
    assert 0 < sum(line["skipped"] for line in log) < STEPS


@pytest.mark.parametrize("what, said", [("KILL", "rank 3 has ended without a word"), ("STALL", "rank 3 has stood still for 4 s"),
                                        ("LOSE", "all ranks have waited for an exchange for 4 s")])
def test_what_happens_inside_an_exchange_of_rows_is_named(fattn, data, tmp_path, what, said):
    with Processes(fattn, 4, [*LONG, "--bucket", "1GiB", "--context-parallel", 2, "--data", data, "--out", tmp_path / "run", "--rendezvous",
                              tmp_path / "meet"], of_rank={3: {f"STUB_NCCL_{what}": "3:45"}}) as processes:
        for rank in range(3):
            _, error = processes.all[rank].communicate(timeout=60)
            assert processes.all[rank].returncode == 2 and said in error
        code = processes.all[3].wait(timeout=30)
        assert code == (-signal.SIGKILL if what == "KILL" else 2)


def test_a_first_exchange_that_never_connects_ends(fattn, data, tmp_path):
    """Both processes are in the call that begins it, while steps have no limit yet."""
    with Processes(fattn, 2, [*LONG, "--start-timeout", 6, "--context-parallel", 2, "--data", data, "--out", tmp_path / "run", "--rendezvous",
                              tmp_path / "meet"], of_rank={rank: {"STUB_NCCL_CONNECT": f"{rank}:1"} for rank in range(2)}) as processes:
        for code, _, error in processes.ends():
            assert code == 2 and "all ranks have waited for an exchange for 6 s" in error


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_stops_is_named(fattn, data, tmp_path, how):
    """Whoever shares sequences with it, and who does not."""
    with Processes(fattn, 4, [*LONG, "--context-parallel", 2, "--data", data, "--out", tmp_path / "run", "--rendezvous", tmp_path / "meet"]) as processes:
        wait_for_steps(tmp_path / "run", 3)
        processes.all[3].send_signal(how)
        began = time.monotonic()
        for rank in range(3):
            _, error = processes.all[rank].communicate(timeout=40)
            assert processes.all[rank].returncode == 2
            assert ("rank 3 has ended without a word" if how == signal.SIGKILL else "rank 3 has said nothing for 4 s") in error
        assert time.monotonic() - began < 30
