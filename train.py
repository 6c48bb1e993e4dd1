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

Prompts, rollouts and the random rule are functions of (seed, step, process), so a run that is
resumed repeats exactly what the uninterrupted one did: on CPUs. On a GPU, attention's backward pass
adds up in no fixed order, so two runs of one seed differ by rounding errors, resumed or not.

Legend: P prompts, n rollouts a prompt, m kept, B = P*m sequences, b of them in a micro-batch, L
prompt and T completion tokens. Left out: schedules other than warm-up then constant (the paper's);
DAPO's dynamic sampling (other prompts for groups without signal: each try costs n more rollouts,
and with n = 64 few groups need one).
"""

import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # in the seconds of imports: no pages of traceback
    sys.path.insert(0, str(Path(__file__).parent))  # which PYTHONSAFEPATH leaves out

import json
import math
from functools import partial
from shlex import quote

import torch
import transformers
from tqdm import tqdm

from grpo import group_advantages, grpo_loss, importance_weights
from pods import down_sample
from rollouts import Rollouts
from support.errors import RANK, InputError, explained
from support.evaluation import evaluate, held_out, not_finite, report, save_completions
from support.learner import Learner, MicroBatch
from support.page import logged
from support.presets import machine_for, parse
from support.processes import Largest, StopSignal, combined, lasting_output
from support.rehearsal import Rehearsal
from support.run import Run
from support.settings import Config, as_flags
from support.storage import Folder, new_folder, write_atomically

FAILURES = 3  # so many gradients in a row that are not finite end a run


def train(config: Config, out: Path | None, resume: bool = False) -> list[dict]:
    """Run PODS, write everything to `out` (default: a new folder in runs/).

    Returns:
        The rows of `metrics.jsonl`.

    Raises:
        InputError: the model, the data or `out` cannot be used.
    """
    run = Run(config)
    rehearsal = Rehearsal(run)
    folder = Folder(out or run.processes.on_first(new_folder), run)
    print(f"{run.description()}\nwriting to {folder.path}")
    progress = folder.go_back() if resume else folder.create()
    folder.begin(progress)
    if resume:
        over = ": there is nothing left to do, give a larger --steps or --minutes"
        print(f"resuming after step {progress.step}" + over * progress.is_over(config))

    saved, failed = progress.step, 0  # the step of the newest checkpoint; failures in a row
    hidden = not run.processes.first or None  # None: where the output is no terminal
    bar = tqdm(total=config.steps, initial=progress.step, unit="step", disable=hidden)
    with StopSignal(run.processes) as stop, bar:
        if not progress.rows:
            row = {"step": 0, "time": 0.0}
            folder.log(progress, row | held_out(run, row, folder.path))

        while not progress.is_over(config) and not stop.asked():
            progress.step += 1
            stats, logs = train_step(run, progress.step)
            progress.time += sum(stats["seconds"].values())
            row = {"step": progress.step, "time": progress.time} | stats
            due = config.eval_every and progress.step % config.eval_every == 0
            if due or progress.is_over(config):
                row |= held_out(run, row, folder.path)
            folder.log(progress, row, **logs)
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
                    f"--lr, from the weights before these: --model {quote(f'{folder.path}/model')}"
                )
            if progress.step - saved >= config.save_every and not failed:
                folder.save(progress)
                saved = progress.step

        folder.finish(progress)
        print(report(run, progress.rows, folder.path))
        run.leave()
    if stop.stopped:
        N = run.processes.count
        start = "python" if N == 1 else f"the same launcher ({N} processes) and"
        print(f"stopped; go on with: {start} train.py --resume --out {quote(str(folder.path))}")
        raise SystemExit(stop.exit_code)
    return progress.rows


def train_step(run: Run, step: int) -> tuple[dict, dict[str, list[dict]]]:
    """One step of the paper's algorithm: generate, score, select, update.

    Returns:
        The step's row of metrics.jsonl and its rows of the other logs, by name: the same in all
        processes.
    """
    config, P, n, m = run.config, run.config.prompts_per_step, run.config.n, run.config.m
    problems, prompt_ids = run.prompts(step)  # P problems, P lists of token ids
    run.start_step()

    with run.clock("generate"):
        rollouts = run.sampler.generate(
            prompt_ids, n, run.max_new_tokens, config.temperature, run.seed("rollouts", step)
        )  # [P, n, T]
    with run.clock("score"):
        completions = [text for group in rollouts.texts for text in group]
        parts = run.score([problem for problem in problems for _ in range(n)], completions)
        rewards = torch.tensor(parts["total"], dtype=torch.float64).view(P, n)  # [P, n]
    with run.clock("select"):
        # Each group is decided by its own rewards alone. Of equal rewards the first are kept, and
        # that is a choice by chance, because rollouts have no order.
        generator = torch.Generator().manual_seed(run.seed("rule", step))  # for "random" alone
        # The paper's rule sees the total reward; another one may see a part of it.
        seen = torch.tensor(parts[config.select_by], dtype=torch.float64).view(P, n)  # [P, n]
        keep = down_sample(seen, m, config.rule, generator)  # [P, m]
        kept = rollouts.select(keep)  # [P, m, T]
        if config.advantages == "kept":  # normalised once, by mean and deviation of the kept
            advantages = group_advantages(rewards.gather(-1, keep), config.scale)  # [P, m]
        else:  # by those of all n: the paper's appendix A.3, and CPPO
            advantages = group_advantages(rewards, config.scale).gather(-1, keep)  # [P, m]
        if config.mask_truncated:  # as DAPO: a text that was cut off is neither good nor bad
            advantages = advantages * kept.finished.cpu()
    with run.clock("update"):
        run.sampler.sleep()  # the memory is the update's until the sync
        for group in run.learner.optimizer.param_groups:
            group["lr"] = config.lr * min(1.0, step / max(1, config.warmup_steps))
        stats = update(run.learner, kept, advantages, run.max_new_tokens)
    with run.clock("sync"):
        run.sampler.sync(run.model)

    stats |= numbers(rollouts, parts, rewards, keep, advantages) | {"seconds": run.seconds}
    logs = logged(run.processes, step, problems, rollouts, parts, keep, advantages)
    return combined(run.processes.gather(stats)), logs


def update(
    learner: Learner, kept: Rollouts, advantages: torch.Tensor, max_new_tokens: int
) -> dict[str, object]:
    """One batch's optimiser steps (`epochs` of them) on the kept rollouts, in micro-batches.

    Args:
        kept: m rollouts of each of P prompts.
        advantages: [P, m].
        max_new_tokens: the tokens a completion may have; used by the loss "dr_grpo" alone.

    Returns:
        `loss` and `entropy` of the last epoch, `grad_norm` before clipping, `skipped` (there was
        nothing to learn from, or a gradient was not finite), and `logprob_gap`, the `mean` and
        `max` of |sampler's - trainer's log-prob| over the tokens that were computed (None if none
        were): about 1e-6 in float32 and 1e-2 in bfloat16. If it is larger, the sampler has other
        weights, or another temperature, than are trained.
    """
    config = learner.config
    stats = {"loss": 0.0, "grad_norm": 0.0, "skipped": True, "entropy": None}
    stats["logprob_gap"] = {"mean": None, "max": None}
    # Counted over the whole update first, so that the gradient is the same for any micro-batch.
    batches, normalizer = learner.prepare(kept, advantages, max_new_tokens)
    if not normalizer:
        return stats
    # The ratio's denominator is the policy that generated, so it is fixed before the first step.
    # With a single step, the forward pass of that step has this policy, and need not be made twice.
    if config.epochs > 1:
        with torch.no_grad():
            for batch in batches:
                batch.old = batch.log_probs(learner.policy, config.temperature)
    for _ in range(config.epochs):
        learner.optimizer.zero_grad()
        loss_sum, gaps, entropies = 0.0, [], []
        for batch in batches:
            loss, gap, entropy = loss_of(batch, learner, normalizer)
            loss.backward()
            loss_sum += loss.item()
            gaps.append(gap)
            entropies.append(entropy)
        norm = learner.finish_gradient()
        stats |= {"loss": loss_sum, "grad_norm": norm}
        if gaps and len(gap := torch.cat(gaps)):
            stats["logprob_gap"] = {"mean": gap.mean().item(), "max": Largest(gap.max())}
            stats["entropy"] = torch.cat(entropies).mean().item()
        if not math.isfinite(norm):  # a step along it would leave no weight finite
            return stats
        learner.optimizer.step()
    return stats | {"skipped": False}


def loss_of(
    batch: MicroBatch, learner: Learner, normalizer: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A micro-batch's part of the loss; |sampler's - trainer's log-prob| and entropy [tokens]."""
    config, mask = learner.config, batch.mask
    current, entropy = batch.log_probs(learner.policy, config.temperature, entropy=True)  # [b, T]
    old = current.detach() if batch.old is None else batch.old
    options = {"loss_type": config.loss_type, "normalizer": normalizer, "clip": config.clip}
    if config.beta > 0:
        with torch.no_grad(), learner.reference() as policy:
            reference = batch.log_probs(policy, config.temperature)
        options |= {"beta": config.beta, "ref_log_probs": reference}
    if config.importance_cap:
        cap = config.importance_cap
        options["importance"] = importance_weights(old, batch.sampled, mask, cap)
    loss = grpo_loss(current, old, batch.advantages, mask, **options)
    return loss, (old - batch.sampled).abs()[mask], entropy[mask]


def numbers(
    rollouts: Rollouts,
    parts: dict[str, list[float]],
    rewards: torch.Tensor,
    keep: torch.Tensor,
    advantages: torch.Tensor,
) -> dict[str, object]:
    """What metrics.jsonl says of a step's rollouts; `parts` holds P*n numbers for each name."""
    right = torch.tensor(parts["accuracy"]).view(rewards.shape)  # [P, n]
    means = {name: sum(part) / len(part) for name, part in parts.items()}
    return {
        "reward": rewards.mean().item(),  # of all n: how good the policy is
        "reward_kept": rewards.gather(-1, keep).mean().item(),  # pulled towards the middle
        "reward_std": rewards.std(-1).mean().item(),
        "accuracy": means["accuracy"],
        "rewards": means,
        "pass_rates": right.mean(-1).tolist(),  # [P]
        "completion_length": rollouts.mask.sum(-1).double().mean().item(),
        "truncated": 1 - rollouts.finished.double().mean().item(),
        "groups": len(rewards),
        "groups_without_signal": int((advantages == 0).all(-1).sum()),
    }


# ---- the command line ----------------------------------------------------------------------------


@lasting_output()
def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code. What the user can mend is one line, no traceback."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        config, command = parse(argv, __doc__.partition("\n\nRead it")[0])
    except InputError as error:
        if RANK == 0:  # the others read the same command line
            print(f"train.py: {error}", file=sys.stderr)
        return 2
    try:
        if command.eval_only:
            evaluate_only(config, command.out)
            return 0
        differing = as_flags(config) or "  none, these are the defaults"
        print(f"settings that differ from the defaults:\n{differing}")
        if command.dry_run:
            from support.plan import dry_run

            print(dry_run(config, machine_for(command.preset)))
        else:
            train(config, command.out, command.resume)
    except KeyboardInterrupt:
        print("\nstopped at once; the last checkpoint, if any, is kept", file=sys.stderr)
        return 130
    except Exception as error:
        if not (known := explained(error)):
            raise
        line, code = known
        # Most are the same for all processes, but a folder may be missing on one machine only.
        print(f"train.py: {f'process {RANK}: ' if RANK else ''}{line}", file=sys.stderr)
        return code
    return 0


def evaluate_only(config: Config, out: Path | None) -> None:
    """Print an evaluation's numbers and a few texts; write eval.json, evaluation.jsonl."""
    if out and (out / "config.json").exists():
        raise InputError(f"--out {out} holds a run, and its own evaluation.jsonl: name another")
    if RANK == 0 and out:
        out.mkdir(parents=True, exist_ok=True)  # before the hours of work, not after
    run = Run(config, train=False)
    Rehearsal(run)
    out = out or run.processes.on_first(new_folder)
    numbers, rows = evaluate(run)
    results = json.dumps(numbers, indent=1)
    run.processes.on_first(partial(write_atomically, out / "eval.json", results + "\n"))
    print(f"{results}\n{save_completions(run, rows, out)}")
    print(f"written to {out / 'eval.json'}, what the model wrote to evaluation.jsonl beside it")
    run.leave()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
