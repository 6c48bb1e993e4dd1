"""How good the policy is, and what a run shows of itself.

results = evaluation(run)               # of every task: accuracy, pass@k, form, lengths
print(save_completions(run, out))       # what it wrote: evaluation.jsonl, and three to read
print(report(run, rows, out))           # at the end of a run: that, curves.png, the summary
rows = examples(step, problems, rollouts, parts, keep)      # a few rollouts to read
"""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from rewards import extract_answer
from rollouts import Rollouts
from support.data import Data, derived_seed
from support.files import json_line, write_atomically
from support.run import PHASES, Run
from support.settings import REWARD_PARTS
from support.tasks import Problem

SHOWN_CHARACTERS = 600  # of a completion, its beginning and its end


def evaluation(run: Run) -> dict[str, dict[str, float]]:
    """The numbers of `evaluate` for each evaluation task, by its name.

    What was written is in `run.completions` until the next evaluation: this process's part of it.
    """
    results, run.completions = {}, []
    for name, data in run.eval_data.items():
        results[name], rows = evaluate(run, data)
        run.completions += [{"task": name} | row for row in rows]
    return results


def held_out(run: Run, step: int, time: float) -> dict:
    """Evaluate and say so.

    Returns:
        What the step's row gets: `eval_accuracy` (of the first evaluation task) and `eval`, all
        numbers of all tasks.
    """
    results = evaluation(run)
    run.completions = [{"step": step} | row for row in run.completions]
    shown = ", ".join(f"{name} {result['accuracy']:.3f}" for name, result in results.items())
    tqdm.write(f"step {step:4}  {time:7.1f} s  held-out accuracy: {shown}")
    return {"eval_accuracy": next(iter(results.values()))["accuracy"], "eval": results}


def evaluate(run: Run, data: Data) -> tuple[dict[str, float], list[dict]]:
    """Accuracy by sampling at the training temperature, `eval_samples` completions a problem.

    Returns:
        The numbers, and the rows of `save_completions` that this process wrote. The numbers are of
        all processes: `accuracy` (mean over all completions) with `accuracy_se` (its standard
        error: the spread of the problems' own means over the root of their number, so that repeats
        of one problem do not count as new evidence); `pass@k` for k = 1, 4, 8 up to eval_samples;
        `format`; `truncated` (share without EOS); `completion_length` in tokens; `problems`,
        `samples`.
    """
    config, problems, k = run.config, data.problems, run.config.eval_samples
    # Prompts a call: few enough for the memory, and the same number whatever the number of
    # processes, so that it decides nothing but who does which call. An engine lets wait what does
    # not fit: with all of a process's prompts in one call, only one longest completion is awaited.
    rank, processes = run.processes.rank, run.processes.count
    at_once = max(1, 128 // k)
    if config.sampler == "vllm":
        at_once = math.ceil(len(problems) / processes)
    rows = []
    for start in range(0, len(problems), at_once)[rank::processes]:
        chunk = slice(start, start + at_once)
        seed = derived_seed(config.seed, "evaluation", start)
        rollouts = run.sampler.generate(
            data.prompt_ids[chunk], k, run.max_new_tokens, config.temperature, seed
        )  # [P, k, T]
        completions = [text for group in rollouts.texts for text in group]
        asked = [(i, problems[i]) for i in range(len(problems))[chunk] for _ in range(k)]
        scores = run.score([problem for _, problem in asked], completions)
        finished = rollouts.finished.flatten().tolist()
        lengths = rollouts.mask.sum(-1).flatten().tolist()
        rows += [
            {"problem": number, "prompt": problem.prompt, "answer": problem.answer}
            | {"completion": completions[i], "finished": finished[i], "length": lengths[i]}
            | {name: scores[name][i] for name in config.reward_parts()}
            for i, (number, problem) in enumerate(asked)
        ]
    # One list for all processes; the k samples of a problem stay together. The texts stay at home.
    names = (*config.reward_parts(), "finished", "length")
    shares = run.processes.gather({name: [row[name] for row in rows] for name in names})
    parts = {name: [value for share in shares for value in share[name]] for name in names}
    count = len(parts["length"])
    correct = torch.tensor(parts["accuracy"], dtype=torch.float64).view(-1, k)  # [problems, k]
    means = correct.mean(-1)
    result = {"accuracy": means.mean().item()}
    result["accuracy_se"] = means.std().item() / math.sqrt(len(means)) if len(means) > 1 else 0.0
    for tries in (1, 4, 8):
        if tries <= k:
            right = correct.sum(-1).int().tolist()
            result[f"pass@{tries}"] = sum(pass_at_k(k, c, tries) for c in right) / len(right)
    result |= {
        "format": sum(parts["format"]) / count,
        **{name: sum(parts[name]) / count for name in config.reward_parts()[len(REWARD_PARTS) :]},
        "truncated": 1 - sum(parts["finished"]) / count,
        "completion_length": sum(parts["length"]) / count,
        "problems": len(problems),
        "samples": k,
    }
    return result, rows


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Chance that k of the samples, drawn without replacement, hold a correct one.

    The unbiased estimator 1 - C(samples - correct, k) / C(samples, k) (arXiv 2107.03374).
    """
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def save_completions(run: Run, folder: Path) -> str:
    """Write what the model wrote in the last evaluation to `evaluation.jsonl`, a line each.

    A row has its `task`, the number of its `problem`, `prompt`, `answer` (the reference) and
    `completion`; what was `read` of that as its answer (null: nothing); `finished` (with EOS),
    `length` in tokens, and the parts of the reward. A run's rows have their `step`, too.

    Returns:
        Three of them to read: one right and two wrong ones, as far as there are such.
    """
    tasks = list(run.eval_data)
    rows = [row for share in run.processes.gather(run.completions) for row in share]
    if not rows:  # a run that was resumed and had nothing left to do
        return ""
    rows.sort(key=lambda row: (tasks.index(row["task"]), row["problem"]))
    rows = [row | {"read": extract_answer(row["completion"], run.opens_think)} for row in rows]
    text = "".join(map(json_line, rows))
    run.processes.on_first(partial(write_atomically, folder / "evaluation.jsonl", text))
    right, wrong = ([row for row in rows if bool(row["accuracy"]) is it] for it in (True, False))
    return "\n".join(map(shown, (right[:1] + wrong[:2] + right[1:3] + wrong[2:])[:3]))


def shown(row: dict) -> str:
    """One completion, what was read in it as the answer, and what it got for that."""
    text = row["completion"]
    if len(text) > SHOWN_CHARACTERS:
        half = SHOWN_CHARACTERS // 2
        text = f"{text[:half]} [...] {text[-half:]}"
    parts = ", ".join(f"{name} {row[name]:g}" for name in REWARD_PARTS)
    end = "" if row["finished"] else ", cut off before EOS"
    # As Python writes them: a text may hold line breaks, and what a terminal takes for a command.
    return (
        f"{'right' if row['accuracy'] else 'wrong'}: {row['prompt']!r}\n  {text!r}\n"
        f"  answer {row['answer']!r}, read {row['read']!r}; {parts}; "
        f"{row['length']} tokens{end}"
    )


def report(run: Run, rows: Sequence[dict], folder: Path) -> str:
    """What a run leaves to be read at its end: evaluation.jsonl, curves.png; returns `summary`."""
    save_completions(run, folder)
    run.processes.on_first(partial(draw_curves, rows, folder / "curves.png"))
    return summary(rows, folder)


def examples(
    step: int,
    problems: Sequence[Problem],
    rollouts: Rollouts,
    parts: dict,
    keep: torch.Tensor,
) -> list[dict]:
    """A few rollouts of the step's first prompt, to read: kept ones, and ones that were not."""
    n = rollouts.mask.shape[1]
    kept = set(keep[0].tolist())
    shown = sorted(kept)[:1] + sorted(kept)[-1:] + [i for i in range(n) if i not in kept][:2]
    return [
        {"step": step, "prompt": problems[0].prompt, "answer": problems[0].answer}
        | {"completion": rollouts.texts[0][i], "finished": bool(rollouts.finished[0, i])}
        | {name: values[i] for name, values in parts.items()}
        | {"kept": i in kept}
        for i in shown
    ]


def not_finite(row: dict) -> bool:
    """Whether a step's gradient was not finite, which metrics.jsonl holds as null."""
    return row["grad_norm"] is None or not math.isfinite(row["grad_norm"])


def summary(rows: Sequence[dict], out: Path) -> str:
    """Where the time went and what was learned, as a table."""
    steps = [row for row in rows if "seconds" in row]
    if not steps:
        return f"no step was done; {out} holds the settings"
    lines = [f"\n{'phase':10} {'seconds':>9} {'s/step':>8} {'share':>6}"]
    total = sum(sum(row["seconds"].values()) for row in steps)
    for phase in PHASES:
        seconds = sum(row["seconds"][phase] for row in steps)
        share = seconds / total if total else 0.0
        lines.append(f"{phase:10} {seconds:9.2f} {seconds / len(steps):8.4f} {share:6.1%}")
    lines.append(f"{'total':10} {total:9.2f} {total / len(steps):8.4f}  over {len(steps)} steps")
    evaluated = [row for row in rows if "eval" in row]
    for name, after in evaluated[-1]["eval"].items():
        before = evaluated[0]["eval"][name]
        lines.append(
            f"held-out accuracy on {name}: {before['accuracy']:.3f} at step "
            f"{evaluated[0]['step']}, {after['accuracy']:.3f} +- {after['accuracy_se']:.3f} "
            f"at step {evaluated[-1]['step']} "
            f"({after['problems']} problems, {after['samples']} sample(s) each)"
        )
    idle = sum(row["groups_without_signal"] for row in steps)
    lines.append(
        f"groups without signal: {idle} of {sum(row['groups'] for row in steps)} "
        f"(all kept rewards equal, nothing to learn)"
    )
    skipped = sum(map(not_finite, steps))
    if skipped:
        lines.append(f"steps without an update, because the gradient was not finite: {skipped}")
    names = "metrics.jsonl", "rollouts.jsonl", "evaluation.jsonl", "curves.png", "model/"
    lines.append(f"{out}: {', '.join(n for n in (*names, 'checkpoint/') if (out / n).exists())}")
    return "\n".join(lines)


def draw_curves(rows: Sequence[dict], path: Path) -> None:
    """Accuracy and reward against training time, and where a step's time goes."""
    from matplotlib.figure import Figure  # not pyplot: no window, no global state

    steps = [row for row in rows if "seconds" in row]
    if not steps:
        return
    figure = Figure(figsize=(13, 4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    # In the unit in which a run is read: seconds, or minutes where it takes many.
    unit, size = ("minutes", 60) if steps[-1]["time"] > 300 else ("seconds", 1)
    times = [row["time"] / size for row in steps]

    evaluated = [row for row in rows if "eval" in row]
    left.plot(times, [row["accuracy"] for row in steps], color="tab:gray", lw=0.8, alpha=0.6)
    left.lines[-1].set_label("rollouts (training prompts)")
    for name in evaluated[0]["eval"]:
        left.errorbar(
            [row["time"] / size for row in evaluated],
            [row["eval"][name]["accuracy"] for row in evaluated],
            yerr=[row["eval"][name]["accuracy_se"] for row in evaluated],
            marker="o",
            ms=3,
            capsize=2,
            label="held out: " + Path(name).name.replace("$", r"\$"),  # no formula
        )
    left.set(title="Accuracy", ylabel="share of right answers", ylim=(-0.02, 1.02))

    middle.plot(times, [row["reward"] for row in steps], label="all n rollouts")
    middle.plot(times, [row["reward_kept"] for row in steps], label="the m kept", alpha=0.7)
    middle.set(title="Mean reward before and after selection", ylabel="reward")

    phases = [phase for phase in PHASES if any(row["seconds"][phase] > 0 for row in steps)]
    parts = [[row["seconds"][phase] for row in steps] for phase in phases]
    right.stackplot([row["step"] for row in steps], parts, labels=phases)
    right.set(title="Where a step's time goes", xlabel="step", ylabel="seconds a step")
    for axes in (left, middle):
        axes.set_xlabel(f"training time in {unit}, evaluation excluded")
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="best")
    figure.savefig(path, dpi=110)
