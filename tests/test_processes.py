"""Several processes, started as users start them: one gradient, one set of files, one run.

Launched by Accelerate, this file is also the program that those processes run: see `WORK`.
"""

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DistributedType
from conftest import wait_for, without_times
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import bench
import train
from grpo import group_advantages, token_log_probs
from rollouts import Rollouts
from support.adapters import whole
from train import Config, Run

ROOT = Path(__file__).parents[1]
SMALL = dict(n=8, m=4, prompts_per_step=1, steps=6, eval_problems=17, eval_every=3, save_every=2)


def launch(*arguments: object, processes: int = 2, flags: tuple = ("--multi_gpu",)) -> list[str]:
    """The command of `accelerate launch`; without a GPU, train.py then takes the CPU and gloo."""
    settings = (
        f"--num_machines 1 --mixed_precision no --dynamo_backend no --num_processes {processes}"
    )
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *flags]
    return [*command, *settings.split(), "--main_process_port", "0", *map(str, arguments)]


def run_command(command: list[str], **options) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment, **options
    )


def flags(**changes) -> list[str]:
    return [part for k, v in (SMALL | changes).items() for part in (train.flag(k), str(v))]


# ---- the work of the processes -------------------------------------------------------------------

# Two prompts' rewards: both groups have a signal, or the second process has nothing to compute.
REWARDS = {
    "both": [[1.0, 0.0, 0.5, 0.0, 1.2], [0.2, 0.0, 0.2, 0.2, 1.0]],
    "one": [[1.0, 0.0, 0.5, 0.0, 1.2], [0.2, 0.2, 0.2, 0.2, 0.2]],
}
CASES = [
    {"loss_type": loss_type, "micro_batch": micro_batch, "rewards": rewards, "beta": beta}
    for loss_type in ("grpo", "dapo", "dr_grpo")
    for micro_batch in (2, 64)
    for rewards in REWARDS
    for beta in (0.0, 0.5)
]


FIELDS = dataclasses.fields(Rollouts)


def gradients(out: Path, P: int, mine: slice) -> tuple[Run, list[dict[str, torch.Tensor]]]:
    """The gradient of every case, this process having the groups `mine` of the two."""
    run = Run(Config(n=5, m=5, prompts_per_step=P, max_grad_norm=1e9), out)
    if run.reference is None:  # away from the reference, so that the KL has a gradient
        run.reference = train.Policy(train.load_model("tiny_policy")[0])
        with torch.no_grad():
            for weight in run.reference.parameters():
                weight.mul_(1.02)
    prompts = run.train_data.prompt_ids[:2]
    rollouts = run.sampler.generate(prompts, 5, run.max_new_tokens, 1.0, seed=0)
    kept = Rollouts(**{field.name: getattr(rollouts, field.name)[mine] for field in FIELDS})
    run.optimizer.step = lambda: None  # look at the gradient only
    found = []
    for case in CASES:
        settings = {k: v for k, v in case.items() if k != "rewards"}
        run.config = dataclasses.replace(run.config, **settings)
        advantages = group_advantages(torch.tensor(REWARDS[case["rewards"]]))[mine]
        stats = train.update(run, kept, advantages)
        grads = {name: whole(w.grad).clone() for name, w in run.model.named_parameters()}
        found.append(grads | {"norm": torch.tensor(stats["grad_norm"])})
    return run, found


def updated(out: Path, P: int, mine: slice) -> tuple[Run, dict[str, torch.Tensor]]:
    """The weights after two real updates, clipped, in several micro-batches."""
    settings = dict(n=5, m=5, prompts_per_step=P, micro_batch=2, max_grad_norm=0.02, steps=2)
    run = Run(Config(**settings, eval_problems=17), out)
    rollouts = run.sampler.generate(run.train_data.prompt_ids[:2], 5, 26, 1.0, seed=0)
    parts = {field.name: getattr(rollouts, field.name)[mine] for field in FIELDS}
    for rewards in REWARDS.values():
        stats = train.update(run, Rollouts(**parts), group_advantages(torch.tensor(rewards))[mine])
        assert stats["grad_norm"] > 0.02  # it is clipped
    return run, {name: weight.detach().clone() for name, weight in run.model.named_parameters()}


def work_gradients(out: Path) -> None:
    """Gradients of two processes with one prompt each, and how often they were sent."""
    process = int(os.environ["RANK"])
    run, found = gradients(out, 1, slice(process, process + 1))
    sent = []

    def counting(state, bucket):
        sent.append(bucket.index())
        return allreduce_hook(state, bucket)

    run.policy.register_comm_hook(None, counting)
    counts = []
    for micro_batch in (1, 64):
        run.config = dataclasses.replace(run.config, micro_batch=micro_batch, beta=0.0)
        _, prompt_ids = run.prompts(1)
        kept = run.sampler.generate(prompt_ids, 5, run.max_new_tokens, 1.0, seed=0)
        sent.clear()
        train.update(run, kept, group_advantages(torch.tensor(REWARDS["both"][:1])))
        counts.append(len(sent))
    if process == 0:
        torch.save({"gradients": found, "counts": counts}, out / "found.pt")


def work_seeds(out: Path) -> None:
    """Which problems each process gets in three steps, and what its seeds make of one prompt."""
    run = Run(Config(**SMALL), out)
    seen = []
    for step in (1, 2, 3):
        problems, _ = run.prompts(step)
        seed, same_prompt = run.step_seed("rollouts", step), run.train_data.prompt_ids[:1]
        (completions,) = run.sampler.generate(same_prompt, 8, 26, 1.0, seed).texts
        keep = torch.Generator().manual_seed(run.step_seed("rule", step))
        random = train.down_sample(torch.zeros(1, 64), 8, "random", keep).tolist()
        seen.append({"prompts": [p.prompt for p in problems], "rollouts": completions})
        seen[-1] |= {"random rule": random}
    everything = train.gather_object([seen])
    if int(os.environ["RANK"]) == 0:
        (out / "seen.json").write_text(json.dumps(everything))


def learn(out: Path, P: int) -> list[float]:
    """Held-out accuracy after 30 steps, three seeds."""
    accuracies = []
    for seed in range(3):
        config = Config(n=32, m=8, prompts_per_step=P, steps=30, seed=seed, lr=5e-4, eval_every=0)
        run = Run(config, out / str(seed))
        for step in run.steps():
            train.train_step(run, step)
        accuracies.append(run.rows[-1]["eval_accuracy"])
    return accuracies


def work_accumulate(out: Path) -> None:
    """How often each case of the bench sends its gradients: counted, not timed."""
    prepare, found, sent = bench.prepare_update, {}, []

    def counted(case):
        update = prepare(case)

        def counting(state, bucket):
            sent.append(bucket.index())
            return allreduce_hook(state, bucket)

        update.args[0].policy.register_comm_hook(None, counting)
        return update

    def once_each(functions, rounds, least):
        for name, function in functions.items():
            function()  # after a first update DDP puts the gradients into other buckets
            sent.clear()
            function()
            found[name] = len(sent)
        return {name: [1.0] for name in functions}

    bench.prepare_update, bench.interleaved = counted, once_each
    bench.accumulate(SimpleNamespace(m=32, prompts=2, rounds=1))
    if int(os.environ["RANK"]) == 0:
        (out / "sent.json").write_text(json.dumps(found))


def work_learn(out: Path) -> None:
    accuracies = learn(out, 2)
    if int(os.environ["RANK"]) == 0:
        (out / "accuracies.json").write_text(json.dumps(accuracies))


def work_fsdp(out: Path) -> None:
    """The gradient cases and a short run with every weight spread over both processes."""
    plain = train.make_accelerator

    def sharding(*arguments):
        """What Accelerate sets up on GPUs when its configuration says FSDP."""
        accelerator = plain(*arguments)
        state = accelerator.state
        state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            cpu_ram_efficient_loading=False,
            reshard_after_forward=True,
        )
        return accelerator

    train.make_accelerator = sharding
    process = int(os.environ["RANK"])
    run, found = gradients(out / "gradients", 1, slice(process, process + 1))
    assert all(isinstance(weight, DTensor) for weight in run.model.parameters())
    if process == 0:
        torch.save({"gradients": found}, out / "found.pt")
    adapter = {"lora_rank": 4, "beta": 0.1, "dtype": "bfloat16", "gradient_checkpointing": True}
    for name, options in (("run", {}), ("adapter", adapter | {"micro_batch": 3, "merge": True})):
        config = Config(**SMALL | options)
        half = Run(dataclasses.replace(config, steps=3), out / name)
        for step in half.steps():
            train.train_step(half, step)
            gap = half.rows[-1]["logprob_gap"]  # small: the sampler has the trained weights
            assert gap["mean"] is None or gap["mean"] < (1e-2 if options else 1e-5)
        half._save()
        if half.accelerator.is_main_process:
            half.lock.close()
        before = {name: whole(weight.detach()) for name, weight in half.model.named_parameters()}
        resumed = Run(config, out / name, resume=True)
        for key, weight in resumed.model.named_parameters():
            assert torch.equal(whole(weight.detach()), before[key]), key
        moments = resumed.optimizer.state.values()
        assert moments and all(float(whole(m["step"])) == 3 for m in moments)
        for step in resumed.steps():
            train.train_step(resumed, step)
        resumed._save()
        base = resumed.model.get_base_model() if options else resumed.model
        resumed._save_model("model", base, train.merged_weights(resumed.model))


def work_deepspeed(out: Path) -> None:
    """The weights after two updates by DeepSpeed's ZeRO-2, and a checkpoint of it."""
    from accelerate.utils import DeepSpeedPlugin

    plain = train.make_accelerator
    process = int(os.environ["RANK"])

    def zero_2(*arguments):
        """What Accelerate sets up on GPUs when its configuration says DeepSpeed."""
        accelerator = plain(*arguments)
        state = accelerator.state
        state.distributed_type = DistributedType.DEEPSPEED
        PartialState._shared_state["distributed_type"] = DistributedType.DEEPSPEED
        plugin = DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=1)
        plugin.select(_from_accelerator_state=True)
        state.deepspeed_plugins = {"default": plugin}
        accelerator.deepspeed_engine_wrapped = None
        return accelerator

    train.make_accelerator = zero_2
    run, weights = updated(out / "updates", 1, slice(process, process + 1))
    if process == 0:
        torch.save(weights, out / "weights.pt")
    run._save()
    if process == 0:
        run.lock.close()
    before = {name: weight.detach().clone() for name, weight in run.model.named_parameters()}
    resumed = Run(run.config, out / "updates", resume=True)
    for name, weight in resumed.model.named_parameters():
        assert torch.equal(weight, before[name]), name
    resumed.optimizer.param_groups[0]["lr"] = 1e-9  # a step that moves next to nothing
    _, prompt_ids = resumed.prompts(1)
    kept = resumed.sampler.generate(prompt_ids, 5, 26, 1.0, seed=0)
    train.update(resumed, kept, group_advantages(torch.tensor(REWARDS["both"][:1])))
    for name, weight in resumed.model.named_parameters():
        torch.testing.assert_close(weight, before[name], rtol=0, atol=1e-6, msg=name)
    resumed._save_model("model", resumed.model, resumed.model.state_dict().items())


WORK = {
    "gradients": work_gradients,
    "seeds": work_seeds,
    "accumulate": work_accumulate,
    "learn": work_learn,
    "fsdp": work_fsdp,
    "deepspeed": work_deepspeed,
}


def in_two_processes(work: str, out: Path) -> None:
    done = run_command(launch(__file__, work, out))
    assert done.returncode == 0, done.stderr[-5000:]


# ---- one gradient --------------------------------------------------------------------------------


@pytest.mark.parametrize("work", ["gradients", "fsdp"])
def test_gradient_of_two_processes_is_that_of_one_with_all_prompts(tmp_path, work):
    in_two_processes(work, tmp_path)
    found = torch.load(tmp_path / "found.pt")
    _, expected = gradients(tmp_path / "alone", 2, slice(0, 2))
    for case, together, alone in zip(CASES, found["gradients"], expected, strict=True):
        assert together.keys() == alone.keys()
        assert alone["norm"] > 0
        for name in alone:
            torch.testing.assert_close(together[name], alone[name], rtol=1e-3, atol=1e-6, msg=case)
    if work == "gradients":  # sent once, whatever the number of micro-batches
        assert found["counts"][0] == found["counts"][1] > 0
        return
    # The short runs under FSDP left ordinary models, as their checkpoints say, and whole logs.
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    for name in ("run", "adapter"):
        assert [row["step"] for row in without_times(tmp_path / name)] == [0, 1, 2, 3, 4, 5, 6]
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / name / "model")
        assert type(saved).__name__ == "LlamaForCausalLM"
        state = train.load_checkpoint(tmp_path / name / "checkpoint")
        dtype = torch.float32 if name == "run" else torch.bfloat16
        model, _ = train.load_model("tiny_policy", dtype)
        if name == "adapter":
            model = train.add_lora(model, 4)
        assert not model.load_state_dict(state["model"], strict=False).unexpected_keys
        model = model if name == "run" else model.merge_and_unload()
        log_probs = token_log_probs(model.float(), ids, torch.ones_like(ids), 3)
        expected = token_log_probs(saved.float(), ids, torch.ones_like(ids), 3)
        torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-5 if name == "run" else 0.1)


def test_updates_of_deepspeed_are_those_of_one_process(tmp_path):
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    in_two_processes("deepspeed", tmp_path)
    together = torch.load(tmp_path / "weights.pt")
    _, alone = updated(tmp_path / "alone", 2, slice(0, 2))
    start = train.load_model("tiny_policy")[0].state_dict()
    for name, weight in alone.items():
        torch.testing.assert_close(together[name], weight, rtol=0, atol=1e-5, msg=name)
        assert (weight - start[name]).abs().max() > 1e-5, name


def test_every_process_has_its_own_prompts_and_random_numbers(tmp_path):
    in_two_processes("seeds", tmp_path)
    first, second = json.loads((tmp_path / "seen.json").read_text())
    steps = first + second
    assert len({step["prompts"][0] for step in steps}) == 6
    assert len({str(step["rollouts"]) for step in steps}) == 6  # of one and the same prompt
    assert len({str(step["random rule"]) for step in steps}) == 6


def test_two_processes_learn_like_one_with_as_many_prompts(tmp_path):
    """Three seeds; the means differ by less than four standard errors of their difference."""
    in_two_processes("learn", tmp_path)
    two = torch.tensor(json.loads((tmp_path / "accuracies.json").read_text()))
    one = torch.tensor(learn(tmp_path / "one", 4))
    assert min(two.min(), one.min()) > 0.5  # from 0.34
    error = ((two.var() + one.var()) / 3 + 2 * 0.015**2 / 3).sqrt()
    assert (two.mean() - one.mean()).abs() < 4 * error, (two, one)


# ---- one set of files ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory) -> Path:
    """An uninterrupted run of two processes, and the rows that it left."""
    out = tmp_path_factory.mktemp("processes") / "whole"
    done = run_command(launch(ROOT / "train.py", *flags(steps=40), "--out", out))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "in each of 2 processes" in done.stdout
    assert done.stdout.count("writing to") == 1
    return out


def test_one_process_writes(whole_run):
    assert [row["step"] for row in without_times(whole_run)] == list(range(41))
    shown = [json.loads(line) for line in (whole_run / "rollouts.jsonl").read_text().splitlines()]
    assert len(shown) == 40 * 4
    assert without_times(whole_run)[-1]["eval"]["arithmetic"]["problems"] == 17
    assert {row["groups"] for row in without_times(whole_run)[1:]} == {2}  # of both together
    AutoModelForCausalLM.from_pretrained(whole_run / "model")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_stopped_run_of_two_processes_is_resumed_exactly(whole_run, tmp_path, number):
    """Killed: one process dies. SIGTERM: to the launcher. SIGINT: to all, as by a terminal."""
    out = tmp_path / "stopped"
    process = subprocess.Popen(
        launch(ROOT / "train.py", *flags(steps=40), "--out", out),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    metrics = out / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 5, process)
    if number == signal.SIGKILL:
        children = subprocess.run(
            ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
        )
        os.kill(int(children.stdout.split()[-1]), number)
        output, errors = process.communicate(timeout=100)
        assert "another process has ended" in errors and "Error: " not in errors.split("ended")[0]
    elif number == signal.SIGTERM:
        process.send_signal(number)
    else:
        os.killpg(process.pid, number)
    if number != signal.SIGKILL:
        output, errors = process.communicate(timeout=100)
    assert process.returncode != 0
    done = len(without_times(out)) - 1
    assert done < 40
    if number != signal.SIGKILL:
        assert f"--resume --out {out}" in output, errors[-3000:]
        assert (out / "checkpoint" / f"step_{done:06}.pt").exists()
    again = run_command(launch(ROOT / "train.py", "--resume", "--out", out))
    assert again.returncode == 0, again.stderr[-3000:]
    assert without_times(out) == without_times(whole_run)
    assert (out / "rollouts.jsonl").read_text() == (whole_run / "rollouts.jsonl").read_text()


def test_run_of_two_processes_goes_on_with_one_and_says_so(whole_run, tmp_path, capsys):
    out = tmp_path / "run"
    done = run_command(launch(ROOT / "train.py", *flags(steps=2), "--out", out))
    assert done.returncode == 0, done.stderr[-3000:]
    assert train.main(["--resume", "--out", str(out), "--steps", "4"]) == 0
    assert "had 2 process(es) and goes on with 1" in capsys.readouterr().out
    rows = without_times(out)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    # The first two steps are those of two processes; the third goes on from their checkpoint.
    for row, expected in zip(rows[:3], without_times(whole_run)[:3], strict=True):
        assert expected.items() <= row.items()  # step 2 was this run's last, and evaluated
    first, last = (torch.load(out / "checkpoint" / f"step_00000{i}.pt") for i in (2, 4))
    assert (first["processes"], last["processes"]) == (2, 1)
    for name, moments in last["optimizer"]["state"].items():
        assert (first["optimizer"]["state"][name]["step"], moments["step"]) == (2, 4)
    drift = [(last["model"][name] - weight).abs().max() for name, weight in first["model"].items()]
    assert 0 < max(drift) < 2 * 2 * 3e-4  # two steps of AdamW away, not a run of its own


def test_each_process_has_a_vllm_engine_of_its_own(tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    out = tmp_path / "run"
    done = run_command(launch(ROOT / "train.py", *flags(sampler="vllm", steps=3), "--out", out))
    assert done.returncode == 0, done.stderr[-5000:]
    gaps = [row["logprob_gap"]["max"] for row in without_times(out)[1:]]
    assert max(gap for gap in gaps if gap is not None) < 1e-3  # both act on the trained weights


def test_engines_that_leave_no_whole_weights_are_refused():
    fsdp_1 = SimpleNamespace(distributed_type=DistributedType.FSDP, is_fsdp2=False, state=None)
    plugin = SimpleNamespace(zero_stage=3)
    zero_3 = SimpleNamespace(
        distributed_type=DistributedType.DEEPSPEED, state=SimpleNamespace(deepspeed_plugin=plugin)
    )
    for engine, words in ((fsdp_1, "fsdp_version: 2"), (zero_3, "zero_stage: 2")):
        with pytest.raises(train.InputError, match=words):
            train.distribute(engine, None, None, Config())


def test_bad_input_is_said_once(tmp_path):
    for arguments in (("--m", 80), ("--nonsense",), ("--model", "./missing")):
        done = run_command(launch(ROOT / "train.py", *arguments, "--out", tmp_path / "run"))
        assert done.returncode != 0
        said = re.findall("^train.py: .*", done.stderr, re.MULTILINE)
        others = [line for line in said if line.startswith("train.py: process 1: ")]
        assert len(said) - len(others) == 1, done.stderr
        assert len(others) <= (1 if arguments[0] == "--model" else 0)


def test_launch_that_starts_one_process_only_is_an_error(tmp_path):
    command = launch(ROOT / "train.py", *flags(), "--out", tmp_path / "run", flags=("--cpu",))
    done = run_command(command)
    assert "give it --multi_gpu too" in done.stderr
    assert not (tmp_path / "run").exists()


def test_configurations_in_the_readme_are_accelerates(tmp_path):
    """Its loader refuses keys that it does not know, and its launcher has flags for the rest."""
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    configurations = {}
    for block in blocks:
        path = tmp_path / "config.yaml"
        path.write_text(block)
        loaded = load_config_from_file(str(path))
        configurations[loaded.distributed_type.value] = loaded
    fsdp, deepspeed = configurations["FSDP"], configurations["DEEPSPEED"]
    assert fsdp.num_processes == deepspeed.num_processes == 8
    assert fsdp.mixed_precision == deepspeed.mixed_precision == "no"
    assert fsdp.fsdp_config["fsdp_version"] == 2
    assert fsdp.fsdp_config["fsdp_cpu_ram_efficient_loading"] is False
    known = vars(launch_command_parser().parse_args(["train.py"]))
    assert fsdp.fsdp_config.keys() <= known.keys()
    assert deepspeed.deepspeed_config.keys() <= known.keys()
    assert deepspeed.deepspeed_config["zero_stage"] == 2


def test_bench_measures_accumulation_in_all_processes_and_one_reports(tmp_path):
    command = launch(ROOT / "bench.py", "accumulate", "--rounds", 2, "--m", 32, "--out", tmp_path)
    done = run_command(command)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("update on 2 process(es)") == 1
    result = json.loads((tmp_path / "accumulate.json").read_text())
    assert result["processes"] == 2
    assert [(row["m"], row["passes"], row["sent"]) for row in result["rows"]] == [
        (16, 1, "once"),
        (32, 2, "once"),
        (32, 2, "every pass"),
        (32, 2, "never"),
        (32, 1, "once"),
    ]


def test_bench_sends_gradients_as_its_table_says(tmp_path):
    in_two_processes("accumulate", tmp_path)
    sent = json.loads((tmp_path / "sent.json").read_text())
    buckets = sent["PODS, one pass"]
    assert buckets > 0
    assert sent == {
        "PODS, one pass": buckets,
        "GA, accumulated": buckets,
        "GA, sent every pass": 2 * buckets,
        "GA, never sent": 0,
        "GA, one pass": buckets,
    }


def test_two_processes_evaluate_like_one(tmp_path):
    settings = ("--eval-only", "--eval-problems", 300, "--eval-samples", 4)
    done = run_command(launch(ROOT / "train.py", *settings, "--out", tmp_path / "two"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert train.main([*map(str, settings), "--out", str(tmp_path / "one")]) == 0
    two, one = (json.loads((tmp_path / name / "eval.json").read_text()) for name in ("two", "one"))
    assert two["arithmetic"] == pytest.approx(one["arithmetic"])


def test_a_file_that_cannot_be_written_is_said_once(tmp_path):
    """The first process writes; the others end with it, without a word and without waiting."""
    command = launch(ROOT / "train.py", *flags(), "--out", tmp_path / "run")
    limits = "ulimit -f 400; exec " + shlex.join(map(str, command))  # KB: no checkpoint fits
    done = run_command(["bash", "-c", limits])
    assert done.returncode != 0
    said = re.findall("^train.py: .*", done.stderr, re.MULTILINE)
    assert len(said) == 1 and "cannot write" in said[0] and "step_000002.pt" in said[0], done.stderr
    assert len(without_times(tmp_path / "run")) == 3  # steps 0 to 2 are logged


if __name__ == "__main__":
    WORK[sys.argv[1]](Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # the runs were not finished: their process group is not to be taken apart
