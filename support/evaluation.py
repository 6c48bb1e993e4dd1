"""How good the policy is, and what a run shows of itself.

numbers, rows = evaluate(run)           # of every task: accuracy, pass@k, form, lengths; each text
print(save_completions(run, rows, out)) # evaluation.jsonl; a few of its lines to read
row |= held_out(run, row, out)          # that, as the loop does it
print(report(run, rows, out))           # at the end of a run: curves.png, the summary
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from rewards import extract_answer, lenient_accuracy
from support.data import Data, derived_seed
from support.run import PHASES, Run
from support.storage import json_line, write_atomically, writing


def held_out(run: Run, row: dict, folder: Path) -> dict:
    """Evaluate, say so, write evaluation.jsonl; returns what the step's `row` gets."""
    results, completions = evaluate(run)
    save_completions(run, [{"step": row["step"]} | one for one in completions], folder)
    shown = ", ".join(f"{name} {result['accuracy']:.3f}" for name, result in results.items())
    tqdm.write(f"step {row['step']:4}  {row['time']:7.1f} s  held-out accuracy: {shown}")
    return {"eval_accuracy": next(iter(results.values()))["accuracy"], "eval": results}


def evaluate(run: Run) -> tuple[dict[str, dict[str, float]], list[dict]]:
    """Sample at the training temperature, `eval_samples` completions of each held-out problem.

    Returns:
        The numbers of each evaluation task, by its name. And a row of evaluation.jsonl for each
        completion of all processes, in the order of tasks and problems.
    """
    results, rows = {}, []
    for name, data in run.eval_data.items():
        shares = run.processes.gather([{"task": name} | row for row in own_share(run, data)])
        found = sorted((row for share in shares for row in share), key=lambda row: row["problem"])
        results[name] = numbers_of(found, run.config.eval_samples)
        rows += found
    return results, rows


def own_share(run: Run, data: Data) -> Iterator[dict]:
    """This process's completions of a task."""
    config, problems, k, T = run.config, data.problems, run.config.eval_samples, run.max_new_tokens
    # How many prompts go into one call. It must fit into memory, and must not depend on the number
    # of processes, or results would. vLLM queues what does not fit, so it gets all prompts of the
    # process at once, and waits for the longest completion only once.
    at_once = max(1, 128 // k)
    if config.sampler == "vllm":
        at_once = math.ceil(len(problems) / run.processes.count)
    for start in range(0, len(problems), at_once)[run.processes.rank :: run.processes.count]:
        prompt_ids = data.prompt_ids[start : start + at_once]
        seed = derived_seed(config.seed, "evaluation", start)
        rollouts = run.sampler.generate(prompt_ids, k, T, config.temperature, seed)  # [P, k, T]
        numbers = [start + p for p in range(len(prompt_ids)) for _ in range(k)]
        texts = [text for group in rollouts.texts for text in group]
        parts = run.score([problems[number] for number in numbers], texts)
        del parts["total"]  # its weights are the training's
        finished = rollouts.finished.flatten().tolist()
        lengths = rollouts.mask.sum(-1).flatten().tolist()
        for i, (number, text) in enumerate(zip(numbers, texts)):
            answer = problems[number].answer
            row = {"problem": number, "prompt": problems[number].prompt, "answer": answer}
            row |= {"completion": text, "read": extract_answer(text, run.opens_think)}
            row |= {"finished": finished[i], "length": lengths[i]}
            row |= {name: values[i] for name, values in parts.items()}
            yield row | {"lenient_accuracy": lenient_accuracy(text, answer, run.opens_think)}


def numbers_of(rows: Sequence[dict], k: int) -> dict[str, float]:
    """What a task's rows say, k of them for each problem. docs/questions.md defines the numbers."""

    def mean(values: Sequence[float]) -> float | None:
        return sum(values) / len(values) if values else None

    correct = torch.tensor([row["accuracy"] for row in rows], dtype=torch.float64).view(-1, k)
    means = correct.mean(-1)  # [problems]
    result = {"accuracy": means.mean().item()}
    # The error is of the problems' means: repeats of one problem are no new evidence.
    result["accuracy_se"] = means.std().item() / math.sqrt(len(means)) if len(means) > 1 else 0.0
    right = correct.sum(-1).int().tolist()
    for tries in (1, 4, 8):
        if tries <= k:
            result[f"pass@{tries}"] = mean([pass_at_k(k, c, tries) for c in right])
    names = list(rows[0])
    for name in names[names.index("length") + 1 :]:  # the parts of the reward, lenient_accuracy
        result.setdefault(name, mean([row[name] for row in rows]))
    return result | {
        "formed_accuracy": mean([float(row["accuracy"] == row["format"] == 1) for row in rows]),
        "finished_accuracy": mean([row["accuracy"] for row in rows if row["finished"]]),
        "truncated": 1 - mean([row["finished"] for row in rows]),
        "completion_length": mean([row["length"] for row in rows]),
        "problems": len(means),
        "samples": k,
    }


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Chance that k draws without replacement hold a correct one, unbiased (arXiv 2107.03374)."""
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def save_completions(run: Run, rows: Sequence[dict], folder: Path) -> str:
    """Write evaluation.jsonl; returns one right and two wrong ones of its lines, if there are."""
    text = "".join(map(json_line, rows))
    run.processes.on_first(partial(write_atomically, folder / "evaluation.jsonl", text))
    right = [row for row in rows if row["accuracy"]]
    wrong = [row for row in rows if not row["accuracy"]]
    return "".join(map(json_line, right[:1] + wrong[:2]))


def report(run: Run, rows: Sequence[dict], folder: Path) -> str:
    """Draw curves.png; returns `summary`."""
    run.processes.on_first(partial(draw_curves, rows, folder / "curves.png"))
    return summary(rows, folder)


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
    first, last = evaluated[0], evaluated[-1]
    for name, after in last["eval"].items():
        lines.append(
            f"held-out accuracy on {name}: {first['eval'][name]['accuracy']:.3f} at step "
            f"{first['step']}, {after['accuracy']:.3f} +- {after['accuracy_se']:.3f} at step "
            f"{last['step']} ({after['problems']} problems, {after['samples']} sample(s) each)"
        )
    idle = sum(row["groups_without_signal"] for row in steps)
    groups = sum(row["groups"] for row in steps)
    lines.append(f"groups without signal: {idle} of {groups} (all kept rewards equal)")
    if skipped := sum(map(not_finite, steps)):
        lines.append(f"steps without an update, because the gradient was not finite: {skipped}")
    names = sorted(path.name for path in out.glob("*"))
    return "\n".join([*lines, f"{out}: {', '.join(names)}"])


def draw_curves(rows: Sequence[dict], path: Path) -> None:
    """Accuracy, reward and entropy against training time; view.html shows more."""
    from matplotlib.figure import Figure  # not pyplot: no window, no global state

    steps = [row for row in rows if "seconds" in row]
    if not steps:
        return
    figure = Figure(figsize=(13, 4), layout="constrained")
    axes = figure.subplots(1, 3)
    for ax, title, curves in (
        (axes[0], "share of right answers", {"accuracy": "rollouts (training prompts)"}),
        (axes[1], "mean reward", {"reward": "all n rollouts", "reward_kept": "the m kept"}),
        (axes[2], "entropy of the policy, nats", {"entropy": "mean over trained tokens"}),
    ):
        for name, label in curves.items():
            values = [row.get(name) for row in steps]  # None, as the entropy may be, leaves a gap
            ax.plot([row["time"] / 60 for row in steps], values, alpha=0.7, label=label)
        ax.set(title=title, xlabel="training minutes, evaluation excluded")
    evaluated = [row for row in rows if "eval" in row]
    for name in evaluated[0]["eval"]:
        minutes = [row["time"] / 60 for row in evaluated]
        accuracy = [row["eval"][name]["accuracy"] for row in evaluated]
        error = [row["eval"][name]["accuracy_se"] for row in evaluated]
        label = "held out: " + Path(name).name.replace("$", r"\$")  # no formula
        axes[0].errorbar(minutes, accuracy, error, marker=".", label=label)
    for ax in axes:
        ax.legend(fontsize=8)
    with writing(path):
        figure.savefig(path, dpi=110)
