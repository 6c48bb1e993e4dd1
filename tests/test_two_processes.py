"""Several processes, started as users start them: one gradient, one set of files, one run.

Starting two costs seconds: what needs no start of its own is done in one, by two_processes.py.
"""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import (
    ROOT,
    TASK,
    assert_equal,
    assert_same_run,
    has_logged,
    log_probs,
    metrics,
    run_command,
    wait_for,
    without_times,
)
from two_processes import CASES, KINDS, SMALL, arguments, evaluated, gradients

import train
from support.adapters import add_lora
from support.models import load_model
from support.storage import checkpoints, load_checkpoint


def torchrun(*arguments: object) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", "2", "--", *map(str, arguments)]


def train_py(*arguments: object) -> list[str]:
    return torchrun(ROOT / "train.py", *arguments)


def run_together(command: list[str], out: Path | None = None) -> str:
    """Run a launcher's command, which must end well; returns what it printed.

    In torch 2.13 a thread of gloo's was seen to crash while it let go of a finished collective,
    once in some hundred starts. That alone gets a second chance: with another cause it is there
    again. `out` is emptied before.
    """
    done = run_command(command)
    if "Signal 11 (SIGSEGV)" in done.stderr:
        if out is not None:
            shutil.rmtree(out)
            out.mkdir()
        done = run_command(command)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    return done.stdout


def findings(work: str, out: Path) -> list[dict]:
    """What two_processes.py finds, for each process."""
    run_together(torchrun(Path(__file__).parent / "two_processes.py", out, TASK, work), out)
    return [torch.load(out / f"found_{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("together")


@pytest.fixture(scope="module")
def found(out) -> list[dict]:
    return findings("together", out)


# ---- one gradient --------------------------------------------------------------------------------


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()]).double()


@pytest.fixture(scope="module", params=list(KINDS))
def both(request, found) -> tuple:
    """Gradients and weights of two processes, and those of one with all prompts."""
    kind = request.param
    rank = KINDS[kind].get("lora_rank", 0)
    return found[0][kind], found[1][kind], gradients(slice(0, 4), lora_rank=rank)


def test_gradients_of_two_processes_are_those_of_one_with_all_prompts(both):
    """Also where one of them has no group with a signal, or more micro-batches than the other."""
    (first, _), (second, _), (alone, _) = both
    for case, one, other, expected in zip(CASES, first, second, alone, strict=True):
        assert one.keys() == expected.keys() and expected["norm"] > 0
        for name, gradient in one.items():
            assert torch.equal(gradient, other[name]), (case, name)
        # The loss is nearly 0 by construction, so it has no scale of its own.
        assert abs(one.pop("loss") - expected.pop("loss")) < 1e-6, case
        scale = flat(expected).norm()
        # Where weights are spread every prompt is read once; alone, one of a single row is not.
        assert (flat(one) - flat(expected)).norm() <= 1e-5 * scale, case


def test_updates_of_two_processes_are_those_of_one_with_all_prompts(both):
    (_, first), (_, second), (_, alone) = both
    start = load_model("tiny_policy")[0].state_dict()
    assert first.keys() == alone.keys()
    for name, weight in alone.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], weight, rtol=0, atol=1e-5, msg=name)
        assert name not in start or not torch.equal(weight, start[name])


def test_all_start_and_stay_equal_and_a_weight_that_nobody_uses_is_left_alone(found):
    """The first process has nothing to learn from: it sends zeros."""
    first, second = (process["one start"] for process in found)
    assert first["norm"] == second["norm"] > 0
    assert_equal(first["start"], second["start"])
    assert_equal(first["end"], second["end"])
    for name, weight in first["start"].items():
        assert torch.equal(weight, first["end"][name]) == name.startswith("vision"), name


def test_an_update_holds_gradients_once(found):
    """Gradients 1, AdamW's moments 2, and 1 of what a layer and the optimizer need in between."""
    for process in found:
        assert 3 < process["peak"] < 4.5


def test_every_process_has_its_own_prompts_and_random_numbers(found):
    steps = found[0]["seeds"] + found[1]["seeds"]
    for what in ("prompts", "rollouts", "rule"):  # the rollouts are of one and the same prompt
        assert len({str(step[what]) for step in steps}) == 6, what


def test_two_processes_evaluate_like_one(found, out):
    alone = evaluated(TASK)["arithmetic"]
    for rank in (0, 1):
        assert found[rank]["evaluated"]["arithmetic"] == pytest.approx(alone)
    (code, output, _), (other, nothing, _) = (process["eval only"] for process in found)
    assert code == other == 0 and nothing == ""
    assert json.loads((out / "evaluation" / "eval.json").read_text())[TASK]["problems"] == 30
    assert f"written to {out / 'evaluation' / 'eval.json'}" in output
    rows = metrics(out / "evaluation", "evaluation.jsonl")
    assert [row["problem"] for row in rows] == list(range(30))


# ---- who speaks ----------------------------------------------------------------------------------


def test_bad_input_is_said_once(found):
    for work, words in (("bad flag", "--nonsense"), ("bad number", "--m 80")):
        (code, _, errors), (other, _, nothing) = (process[work] for process in found)
        assert code == other == 2
        assert errors.count("\n") == 1 and words in errors and nothing == ""
    # The first process alone looks at its folder, and the others end with it without a word.
    (code, _, errors), (other, _, nothing) = (process["full folder"] for process in found)
    assert code == other == 2
    assert "is not empty" in errors and "train.py: " not in nothing
    # A folder may be missing on one machine only, so of that each process speaks for itself.
    (_, output, errors), (_, nothing, others) = (process["bad model"] for process in found)
    assert errors.startswith("train.py: --model ./missing") and errors.count("\n") == 1
    assert others.startswith("train.py: process 1: --model ./missing") and others.count("\n") == 1
    assert "settings that differ" in output and nothing == ""


def test_a_file_that_cannot_be_written_is_said_once(found, out):
    """The first process writes; the others end with it, without a word and without waiting."""
    (code, _, errors), (other, _, nothing) = (process["full disk"] for process in found)
    assert code == other == 1
    (line,) = re.findall("^train.py: .*", errors, re.MULTILINE)
    assert "cannot write" in line and "step_000002.pt" in line
    assert "train.py: " not in nothing
    assert [row["step"] for row in metrics(out / "full")] == [0, 1, 2]
    assert not list((out / "full" / "checkpoint").iterdir())


# ---- a sharded adapter ---------------------------------------------------------------------------


def test_a_sharded_adapter_goes_on_exactly(found):
    for process in found:
        adapter = process["adapter"]
        assert adapter["progress"] == (3, 3.0, 3)
        assert adapter["back"] and adapter["on"] and adapter["moved"]
        # The sampler's own model has the trained weights.
        assert max(gap for gap in adapter["gaps"] if gap is not None) < 0.02


def test_a_sharded_adapter_leaves_an_ordinary_one_and_the_merged_model(found, out):
    adapter, merged = (load_model(str(out / "adapter" / name))[0] for name in ("model", "merged"))
    plain, _ = load_model("tiny_policy")
    for model in (adapter, merged):
        assert type(model).__name__ == "LlamaForCausalLM"
    difference = log_probs(adapter.float()) - log_probs(plain)
    assert difference.abs().max() > 0.05
    # In bfloat16 a merged weight keeps only a part of what the adapter adds to it.
    lost = log_probs(adapter.float()) - log_probs(merged.float())
    assert lost.abs().mean() < difference.abs().mean() / 2
    state = load_checkpoint(out / "adapter" / "checkpoint")
    names = add_lora(load_model("tiny_policy")[0], 4).state_dict().keys()
    assert set(state["model"]) == {name for name in names if ".lora_" in name}
    assert set(state["optimizer"]["state"]) == set(state["model"])


# ---- whole runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "weights"), [("", "each with all weights"), (", --shard", "weights spread over them")]
)
def test_one_process_speaks_and_writes(found, out, kind, weights):
    (code, printed, _), (other, nothing, _) = (process["run" + kind] for process in found)
    assert code == other == 0 and nothing == ""
    assert f"in each of 2 processes ({weights})" in printed
    run = out / f"run{kind}"
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(SMALL["steps"] + 1))
    assert {row["groups"] for row in rows[1:]} == {2}  # of both together
    assert rows[-1]["eval"][TASK]["problems"] == 17
    assert len(metrics(run, "rollouts.jsonl")) == SMALL["steps"] * 2 * 4  # four texts of a group
    state, saved = load_checkpoint(run / "checkpoint"), load_model(str(run / "model"))[0]
    assert state["processes"] == 2
    weights = dict(saved.named_parameters())
    assert state["model"].keys() == weights.keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in state["model"].items())
    gaps = [row["logprob_gap"]["max"] for row in rows[1:]]
    assert max(gap for gap in gaps if gap is not None) < 1e-4  # the sampler has these weights


PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
# One after the other. SIGKILL: one process dies. SIGTERM: to the launcher. SIGINT: to all, as by a
# terminal.
STOPS = [([], (signal.SIGKILL, signal.SIGINT)), (["--shard"], (signal.SIGTERM,))]


@pytest.mark.parametrize(("options", "stops"), STOPS)
def test_a_run_that_was_stopped_is_in_the_end_the_same(found, out, tmp_path, options, stops):
    stopped = tmp_path / "stopped"
    start = arguments(TASK, *options)
    for number, rows in zip(stops, (5, 12)):
        command = train_py(*start, "--out", stopped)
        process = subprocess.Popen(command, **PIPES, text=True, start_new_session=True)
        wait_for(has_logged(stopped, rows), process)
        if number == signal.SIGKILL:
            list_children = ["pgrep", "-P", str(process.pid)]
            children = subprocess.run(list_children, capture_output=True, text=True, check=True)
            os.kill(int(children.stdout.split()[-1]), number)
        elif number == signal.SIGTERM:
            process.send_signal(number)
        else:
            os.killpg(process.pid, number)
        output, errors = process.communicate(timeout=300)
        assert process.returncode != 0
        done = metrics(stopped)[-1]["step"]
        assert done < SMALL["steps"]
        if number == signal.SIGKILL:
            assert "another process has ended" in errors
        else:
            again = f"the same launcher (2 processes) and train.py --resume --out {stopped}"
            assert again in output
            assert (stopped / "checkpoint" / f"step_{done:06}.pt").exists()
        assert "Error: " not in errors.split("another process has ended")[0].split("elastic")[0]
        start = ["--resume"]
    run_together(train_py("--resume", "--out", stopped))
    assert_same_run(stopped, out / ", ".join(["run", *options]))


def test_a_run_goes_on_with_another_number_of_processes_and_says_so(tmp_path, capsys):
    """One process, then two that shard, then one again: of the same weights and moments."""
    out = tmp_path / "run"
    assert train.main(arguments(TASK, "--out", out, steps=2, eval_every=0)) == 0
    before = without_times(out)
    printed = run_together(train_py("--resume", "--out", out, "--steps", 4, "--shard"))
    assert "had 1 process(es) and goes on with 2" in printed
    capsys.readouterr()
    assert train.main(["--resume", "--out", str(out), "--steps", "6", "--no-shard"]) == 0
    assert "had 2 process(es) and goes on with 1" in capsys.readouterr().out
    rows = without_times(out)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert rows[:3] == before
    first, last = (torch.load(path) for path in checkpoints(out / "checkpoint"))
    assert (first["processes"], last["processes"]) == (2, 1)
    for name, moments in last["optimizer"]["state"].items():
        assert (first["optimizer"]["state"][name]["step"], moments["step"]) == (4, 6)
    drift = [(last["model"][name] - weight).abs().max() for name, weight in first["model"].items()]
    assert 0 < max(drift) < 2 * 2 * 3e-4  # two steps of AdamW away, not a run of its own


# ---- an engine in each process -------------------------------------------------------------------


needs_vllm = pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="needs vLLM")


@needs_vllm
@pytest.mark.parametrize("kind", ["whole", "--shard, adapter"])
def test_each_process_has_an_engine_of_its_own_with_the_trained_weights(tmp_path, kind):
    first, second = findings(kind, tmp_path)
    for row in (*first["rows"], *second["rows"]):
        assert row["groups"] == 2
        assert row["logprob_gap"]["max"] is None or row["logprob_gap"]["max"] < 1e-3
    assert first["texts"] != second["texts"]


@needs_vllm
def test_a_sharded_run_with_engines_goes_from_beginning_to_end(tmp_path):
    out = tmp_path / "run"
    start = arguments(TASK, "--shard", "--out", out, steps=3, sampler="vllm")
    run_together(train_py(*start), out)
    gaps = [row["logprob_gap"]["max"] for row in metrics(out)[1:]]
    assert max(gap for gap in gaps if gap is not None) < 1e-3
    assert (out / "model" / "model.safetensors").exists()
