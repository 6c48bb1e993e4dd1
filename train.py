"""Train a policy with PODS: generate n rollouts a prompt, score all, select m, update on those.

    python train.py --n 64 --m 16                 # the embedded default: learns to carry, 1 minute
    python train.py --n 16 --m 16                 # vanilla GRPO
    python train.py --n 64 --m 64                 # GRPO-GA: all rollouts, by gradient accumulation
    python train.py --preset gsm8k-qwen2.5-3b-l40s --dry-run    # the paper's: plan and memory
    torchrun --nproc-per-node 8 -- train.py --preset gsm8k-qwen2.5-3b-h100
    python train.py --resume --out runs/...       # go on where a run was stopped or killed
    python train.py --eval-only --model DIR --task gsm8k --eval-samples 8

Read it from here to `update`: the loop, a step of it in the paper's four verbs, and the gradient.
The baselines are settings of the same loop, not other code. What it rests on is in support/, one
concept a file: what a run holds (run.py, learner.py), what it leaves on disk (storage.py), several
processes (processes.py), evaluation and curves (evaluation.py), the settings (settings.py).

Everything random is a function of (seed, step, process): prompts, rollouts, the random rule. A run
that is resumed needs no generator state to repeat exactly what the uninterrupted one did: on CPUs.
On a GPU the same seeds are drawn from, but attention's backward pass adds up in no fixed order, so
that two runs part by rounding errors, resumed or not.

Legend: P prompts, n rollouts a prompt, m kept, B = P*m sequences, L prompt and T completion tokens.
Left out: schedules other than warm-up then constant (the paper's); DAPO's dynamic sampling (other
prompts for groups without signal: each try costs n more rollouts, and with n = 64 few groups need
one); and everything that an option nobody used would add.
"""

import signal

if __name__ == "__main__":  # Ctrl-C during the seconds of imports: no pages of traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import json
import math
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import torch
import transformers
from torch import nn
from tqdm import tqdm

from grpo import group_advantages, grpo_loss, importance_weights, loss_normalizer
from logprobs import whole
from pods import down_sample
from rewards import grader_stats, score
from rollouts import Rollouts
from support import trackers
from support.batches import MicroBatch, micro_batches
from support.errors import InputError, explained
from support.evaluation import evaluation, examples, held_out, not_finite, report, save_completions
from support.files import new_folder, shell, write_atomically
from support.learner import Learner
from support.presets import machine_for
from support.processes import RANK, Largest, combined
from support.rehearsal import Rehearsal
from support.run import Run
from support.settings import REWARD_PARTS, Config, as_flags, importance_cap, parse
from support.stopping import StopSignal
from support.storage import Folder

FAILURES = 3  # gradients in a row that are not finite end a run


def train(config: Config, out: Path | None, resume: bool = False) -> list[dict]:
    """Run PODS, write everything to `out` (default: a new folder in runs/).

    Returns:
        The rows of `metrics.jsonl`.

    Raises:
        InputError: the model, the data or `out` cannot be used.
    """
    trackers.check(config.tracker)
    run = Run(config)
    rehearsal = Rehearsal(run)
    folder = Folder(out or run.processes.on_first(new_folder), run)
    print(f"{run.description()}\nwriting to {folder.path}")
    progress = folder.go_back() if resume else folder.create()
    tracker = trackers.start(config.tracker, run.processes, folder.path, vars(config))
    folder.write_settings()
    if resume:
        over = ": there is nothing left to do, give a larger --steps or --minutes"
        print(f"resuming after step {progress.step}" + over * progress.is_over(config))

    def log(row: dict, rollouts: Sequence[dict] = ()) -> None:
        progress.rows.append(row)
        folder.log(row, rollouts)
        tracker.log(row, row["step"])

    saved, failed = progress.step, 0  # the step of the newest checkpoint; failures in a row
    hidden = None if run.processes.first else True  # None: where the output is no terminal
    bar = tqdm(total=config.steps, initial=progress.step, unit="step", disable=hidden)
    with StopSignal(run.processes) as stop, bar:
        if not progress.rows:
            log({"step": 0, "time": 0.0} | held_out(run, progress.step, progress.time))

        while not progress.is_over(config) and not stop.asked():
            progress.step += 1
            stats, rollouts = train_step(run, progress.step)
            progress.time += sum(stats["seconds"].values())
            row = {"step": progress.step, "time": progress.time} | stats
            due = config.eval_every and progress.step % config.eval_every == 0
            if due or progress.is_over(config):
                row |= held_out(run, progress.step, progress.time)
            log(row, rollouts)
            rehearsal.after(progress.step, row)
            bar.set_postfix(reward=f"{row['reward']:.3f}", accuracy=f"{row['accuracy']:.3f}")
            bar.update()

            failed = failed + 1 if not_finite(row) else 0
            if failed and run.processes.first:
                message = f"step {progress.step}: the gradient is not finite, no update"
                tqdm.write(message, file=sys.stderr)
            if failed == FAILURES:
                folder.save_models()
                raise InputError(
                    f"{FAILURES} gradients in a row were not finite: start a new run with a lower "
                    f"--lr, from the weights before these: --model {shell(folder.path / 'model')}"
                )
            if progress.step - saved >= config.save_every and not failed:
                folder.save(progress)
                saved = progress.step

        folder.save(progress)
        folder.save_models()
        print(report(run, progress.rows, folder.path))
        tracker.close()
        run.leave()
    if stop.stopped:
        N = run.processes.count
        start = "python" if N == 1 else f"the same launcher ({N} processes) and"
        print(f"stopped; go on with: {start} train.py --resume --out {shell(folder.path)}")
        raise SystemExit(stop.exit_code)
    return progress.rows


def train_step(run: Run, step: int) -> tuple[dict, list[dict]]:
    """One step of the paper's algorithm: generate, score, select, update.

    Returns:
        The step's row of metrics.jsonl, the same in all processes, and a few rollouts to read.
    """
    config, weights = run.config, dict(zip(REWARD_PARTS, run.config.reward_weights))
    P, n, m = config.prompts_per_step, config.n, config.m
    problems, prompt_ids = run.prompts(step)  # P problems, P lists of token ids
    run.start_step()

    with run.clock("generate"):
        rollouts = run.sampler.generate(
            prompt_ids, n, run.max_new_tokens, config.temperature, run.seed("rollouts", step)
        )  # [P, n, T]
    with run.clock("score"):
        completions = [text for group in rollouts.texts for text in group]
        answers = [problem.answer for problem in problems for _ in range(n)]
        failures = grader_failures()
        parts = score(completions, answers, weights, run.opens_think)
        rewards = torch.tensor(parts["total"], dtype=torch.float64).view(P, n)  # [P, n]
    with run.clock("select"):
        # Each group is decided by its own rewards alone: processes need not communicate for it.
        # Of equally good ones the first are kept: rollouts have no order, so that is by chance.
        generator = torch.Generator().manual_seed(run.seed("rule", step))
        # The rule may see a part of the reward alone; the paper's sees the total.
        seen = torch.tensor(parts[config.select_by], dtype=torch.float64).view(P, n)  # [P, n]
        keep = down_sample(seen, m, config.rule, generator)  # [P, m]
        kept, kept_rewards = rollouts.select(keep), rewards.gather(-1, keep)  # [P, m]
        scaled = config.scale == "std"
        if config.advantages == "kept":
            # Normalised once, on the kept rewards: the mean of all n is not their zero.
            advantages = group_advantages(kept_rewards, scaled)  # [P, m]
        else:  # before the selection: the paper's appendix A.3, and CPPO
            advantages = group_advantages(rewards, scaled).gather(-1, keep)  # [P, m]
    with run.clock("update"):
        run.sampler.sleep()  # the memory is the update's until the sync
        for group in run.learner.optimizer.param_groups:
            group["lr"] = config.lr * min(1.0, step / max(1, config.warmup_steps))
        stats = update(run.learner, kept, advantages, run.max_new_tokens)
    with run.clock("sync"):
        run.sampler.sync(run.model)

    stats |= {
        "reward": rewards.mean().item(),  # of all n: how good the policy is
        "reward_kept": kept_rewards.mean().item(),  # of the kept m: pulled towards the middle
        "reward_std": rewards.std(-1).mean().item(),
        "accuracy": sum(parts["accuracy"]) / len(completions),
        "pass_rates": torch.tensor(parts["accuracy"]).view(P, n).mean(-1).tolist(),  # [P]
        "completion_length": rollouts.mask.sum(-1).double().mean().item(),
        "truncated": 1 - rollouts.finished.double().mean().item(),
        "groups": P,
        "groups_without_signal": int((advantages == 0).all(-1).sum()),
        "grader_failures": grader_failures() - failures,
        "seconds": run.seconds,
    }
    return combined(run.processes.gather(stats)), examples(step, problems, rollouts, parts, keep)


def grader_failures() -> int:
    """Answers so far that the grader gave up on, too big or too slow: scored 0, perhaps right."""
    stats = grader_stats()
    return stats["failed"] + stats["refused"]


def update(
    learner: Learner, kept: Rollouts, advantages: torch.Tensor, max_new_tokens: int
) -> dict[str, object]:
    """One batch's optimiser steps (`epochs` of them) on the kept rollouts, in micro-batches.

    With several processes each brings its own rollouts, and the gradient is that of all of them
    together. What the engines average is each process's sum over *its* share of the tokens, so all
    divide by the same number, the mean share. Gradients are sent once an optimiser step, with the
    last micro-batch.

    Args:
        learner: the policy, its optimizer, the reference, the processes, the settings.
        kept: m rollouts of each of P prompts.
        advantages: [P, m].
        max_new_tokens: the tokens a completion may have; used by the loss "dr_grpo" alone.

    Returns:
        `loss` of the last epoch, `grad_norm` before clipping, `skipped` (there was nothing to learn
        from, or a gradient was not finite and the rest left out), and `logprob_gap`, the `mean` and
        `max` of |sampler's - trainer's log-prob| over the tokens that were computed (None if none
        were): about 1e-6 in float32 and 1e-2 in bfloat16. More means that the sampler acts on other
        weights, or at another temperature, than are trained.
    """
    config, processes = learner.config, learner.processes
    batches, idle = micro_batches(kept, advantages, config)
    counted = kept.mask  # [P, m, T]: groups without signal are part of the mean, though they are 0
    if config.average_over == "signal":
        counted = counted[(advantages != 0).any(-1)]
    rows = counted.flatten(0, 1)
    own = loss_normalizer(rows, config.loss_type, max_new_tokens) if len(rows) else 0.0
    shares = processes.gather((own, len(batches)))
    normalizer = sum(share for share, _ in shares) / len(shares)
    # Where gradients are sent a process waits for all others, so all make equally many passes.
    batches += (max(count for _, count in shares) - len(batches)) * [idle]
    # The ratio's denominator belongs to the policy that generated, fixed before the first step.
    # With a single step that is the policy of this very forward pass: no need to compute it twice.
    if config.epochs > 1:
        with torch.no_grad():
            for batch in batches:
                batch.old = batch.log_probs(learner.policy, config.temperature)

    def loss_and_gap(batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The micro-batch's part of the loss, and |sampler's - trainer's log-prob| [tokens]."""
        current = batch.log_probs(learner.policy, config.temperature)  # [b, T]
        old = current.detach() if batch.old is None else batch.old
        reference = importance = None
        if config.beta > 0:
            with torch.no_grad(), learner.reference() as policy:
                reference = batch.log_probs(policy, config.temperature)
        if cap := importance_cap(config):
            importance = importance_weights(old, batch.sampled, batch.mask, cap)
        loss = grpo_loss(
            current,
            old,
            batch.advantages,
            batch.mask,
            loss_type=config.loss_type,
            normalizer=normalizer,
            clip=config.clip,
            beta=config.beta,
            ref_log_probs=reference,
            importance=importance,
        )
        return loss, (old - batch.sampled).abs()[batch.mask]

    stats = {"loss": 0.0, "grad_norm": 0.0, "skipped": not batches}
    stats["logprob_gap"] = {"mean": None, "max": None}
    for _ in range(config.epochs if batches else 0):
        learner.optimizer.zero_grad()
        loss_sum, gaps = 0.0, []
        for i, batch in enumerate(batches, start=1):
            with processes.gradients_sent(learner.policy, last=i == len(batches)):
                loss, gap = loss_and_gap(batch)
                loss.backward()
            loss_sum += loss.item()
            gaps.append(gap)
        norm = nn.utils.clip_grad_norm_(learner.policy.parameters(), config.max_grad_norm)
        stats |= {"loss": loss_sum, "grad_norm": whole(norm).item()}
        if len(gap := torch.cat(gaps)):
            stats["logprob_gap"] = {"mean": gap.mean().item(), "max": Largest(gap.max())}
        if not math.isfinite(stats["grad_norm"]):  # one step along it would leave no weight finite
            return stats | {"skipped": True}
        learner.optimizer.step()
    return stats


# ---- the command line ----------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code. What the user can mend is one line, no traceback."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        config, command = parse(argv, __doc__)
    except InputError as error:
        if RANK == 0:  # the others read the same command line
            print(f"train.py: {error}", file=sys.stderr)
        return 2
    try:
        # One process speaks for all.
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere if RANK else sys.stdout):
            if command.eval_only:
                evaluate_only(config, command.out)
                return 0
            origin = "of the run" if command.resume else f"from --preset {command.preset or 'cpu'}"
            print(f"settings {origin}:\n{as_flags(config)}")
            if command.dry_run:
                from support.plan import dry_run

                print(dry_run(config, machine_for(command.preset)))
            else:
                train(config, command.out, command.resume)
    except KeyboardInterrupt:
        print("\nstopped at once; the last checkpoint, if any, is kept", file=sys.stderr)
        return 130
    except Exception as error:
        known = explained(error)
        if known is None:
            raise
        line, code = known
        # Most are the same for all processes, but a folder may be missing on one machine only.
        print(f"train.py: {f'process {RANK}: ' if RANK else ''}{line}", file=sys.stderr)
        return code
    return 0


def evaluate_only(config: Config, out: Path | None) -> None:
    """Print an evaluation's numbers and three completions; write eval.json, evaluation.jsonl."""
    if out and (out / "config.json").exists():
        raise InputError(f"--out {out} holds a run, and its own evaluation.jsonl: name another")
    if RANK == 0 and out:
        out.mkdir(parents=True, exist_ok=True)  # before the hours of work, not after
    run = Run(config, train=False)
    Rehearsal(run)
    out = out or run.processes.on_first(new_folder)
    results = json.dumps(evaluation(run), indent=1)
    run.processes.on_first(partial(write_atomically, out / "eval.json", results + "\n"))
    print(f"{results}\n{save_completions(run, out)}")
    print(f"written to {out / 'eval.json'}, what the model wrote to evaluation.jsonl beside it")
    run.leave()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
