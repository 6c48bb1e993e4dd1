"""The page of a run: its rules are those of pods.py, it stays small, no text of a model acts."""

import json
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from browser import CHROMIUM, Browser
from conftest import ROOT

from grpo import group_advantages
from pods import RULES
from support import page
from support.page import TEMPLATE, page_of

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="needs Node.js")
TABS = {"run": "The run", "evaluation": "Evaluation", "rule": "The rule", "pays": "When it pays"}
REWARDS, KEPT = [0.0, 0.05, 0.1, 0.1, 0.2, 0.2, 1.0, 1.2], [0, 1, 6, 7]
HOSTILE = (
    "</script><script>window.acted = 1</script>",
    "<img src=x onerror='window.acted = 1'><svg onload='window.acted = 1'>",
    "<!-- <script> javascript:window.acted=1 <a href='javascript:window.acted=1'>x</a>",
    "__DATA__ __POLICY__ ${window.acted = 1} `\\u003cscript>window.acted = 1\\u003c/script>`",
    "right \u202e to left, \0 nothing, \x1b[31m red, half a sign \ud800, a line \u2028 ends",
    "x" * 1_000_000,
)
SPELLED = {"\u202e": "[U+202E]", "\0": "[U+0000]", "\x1b": "[U+001B]", "\ud800": "[U+D800]"}


def in_node(expression: str, data: object, folder: Path) -> object:
    """What a JavaScript expression makes of `data`, with the page's functions for rules."""
    functions = TEMPLATE.read_text().partition("<script>\n")[2].partition("// ---- The page")[0]
    (folder / "data.json").write_text(json.dumps(data))
    script = f"{functions}const data = JSON.parse(require('fs').readFileSync('data.json'));"
    (folder / "script.js").write_text(script + f"console.log(JSON.stringify({expression}));")
    answer = subprocess.run([NODE, "script.js"], cwd=folder, capture_output=True, check=True)
    return json.loads(answer.stdout)


def groups(count: int) -> list[tuple[list[float], int]]:
    """Rewards and m: ties, offsets, negative ones, 0/1, float32's, outliers, m = 2 and m = n."""
    draw, made = random.Random(0), []
    kinds = (
        lambda: draw.choice([0.0, 1.0]),
        lambda: draw.choice([0.0, 0.05, 0.1, 0.2, 1.0, 1.2]),
        lambda: draw.gauss(0, 1),
        lambda: 1e8 + draw.randrange(5),
        lambda: -draw.randrange(4) / 3,
        lambda: float(torch.tensor(draw.choice([0.1, 0.2, 0.7, 1.1]))),
        lambda: draw.choice([draw.random(), 1e6]),
    )
    for i in range(count):
        n = draw.randrange(2, 70)
        rewards = [kinds[i % len(kinds)]() for _ in range(n)]
        made.append((rewards, (2, n, draw.randint(2, n))[i % 3]))
    return made


@needs_node
def test_the_rules_and_advantages_of_the_page_are_those_of_the_code(tmp_path):
    keeps = "Object.fromEntries(entries(RULES).map(([name, rule]) => [name, rule(r, m)]))"
    each = f"{{ keeps: {keeps}, advantages: advantages(r, r), split: splits(r, m) }}"
    made = groups(1000)
    all_found = in_node(f"data.map(([r, m]) => ({each}))", made, tmp_path)
    for (rewards, m), found in zip(made, all_found, strict=True):
        by_chance = found["keeps"].pop("random")
        assert found["keeps"] == {rule: RULES[rule](rewards, m).tolist() for rule in found["keeps"]}
        assert found["keeps"].keys() | {"random"} == RULES.keys()
        assert sorted({*by_chance} & {*range(len(rewards))}) == by_chance and len(by_chance) == m
        expected = group_advantages(torch.tensor(rewards, dtype=torch.float64))
        assert found["advantages"] == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-5)
        # Every split again, without the page's or pods.py's way to the best of them.
        x, split = torch.tensor(sorted(rewards), dtype=torch.float64), found["split"]
        x -= x.mean()
        kept = [torch.cat([x[:k], x[len(x) - m + k :]]) for k in range(m + 1)]
        variances = torch.stack(kept).var(-1, correction=0)
        noise = 1e-9 * variances.max().item()
        assert split["variances"] == pytest.approx(variances.tolist(), rel=1e-6, abs=noise)
        for k, sign in enumerate(split["signs"]):
            assert -sign * (variances[k + 1] - variances[k]).item() >= -noise
        assert split["signs"].count(-1) == split["k"]


@needs_node
def test_the_formula_of_the_page_is_a_mean_over_all_groups_of_rights_and_wrongs(tmp_path):
    cases = [
        [{"p": p, "gap": gap, "v1": v1, "v0": 1.0}, rule, n, m]
        for p, gap, v1 in ((0.05, 0.1, 0.5), (0.4, 2.0, 0.05), (0.9, 0.02, 3.0))
        for rule, n, m in (("random", 4, 4), ("max_variance", 8, 4), ("max_reward", 7, 3))
    ]
    found = in_node("data.map(one => formula(...one))", cases, tmp_path)
    for (of, rule, n, m), signal in zip(cases, found, strict=True):
        chances, shares = [], []  # of each of the 2^n groups; of right ones among its kept
        for group in range(2**n):
            rewards = [group >> i & 1 for i in range(n)]
            kept = range(n) if n == m else RULES[rule](rewards, m).tolist()
            shares.append(sum(rewards[i] for i in kept) / m)
            chances.append(of["p"] ** sum(rewards) * (1 - of["p"]) ** (n - sum(rewards)))
        chance, s = torch.tensor(chances).double(), torch.tensor(shares).double()
        chance, length, mixed = chance / chance.sum(), (s * (1 - s)).sqrt(), (s > 0) & (s < 1)
        mean = (chance * length).sum()
        noise = (chance * (length - mean) ** 2).sum() * of["gap"]
        noise += (chance * mixed * ((1 - s) * of["v1"] + s * of["v0"])).sum() / m
        expected = {"signal": mean**2 * of["gap"], "noise": noise, "busy": (chance * mixed).sum()}
        assert signal == pytest.approx({k: v.item() for k, v in expected.items()}, rel=1e-5)


# ---- a page in a folder --------------------------------------------------------------------------


def made_run(folder: Path, steps=3, groups=2, texts=("<think>1+1=2</think>",)) -> Path:
    """A run's files as train.py would write them, without training."""
    rows = {name: [] for name in ("metrics", "groups", "rollouts", "evaluation")}
    rows["metrics"].append({"step": 0, "time": 0.0, "eval": {"sums": {"accuracy": 0.1}}})
    for step in range(1, steps + 1):
        text = texts[step % len(texts)]
        numbers = {"reward": 0.5, "reward_kept": 0.6, "accuracy": 0.2, "grad_norm": None}
        numbers |= {"seconds": {"generate": 0.5}, "groups": groups, "groups_without_signal": 0}
        rows["metrics"].append({"step": step, "time": float(step)} | numbers)
        for group in range(groups):
            head = {"step": step, "group": group, "prompt": f"sum {text}", "answer": text}
            own = {"rewards": REWARDS, "parts": {"accuracy": [0] * 6 + [1, 1]}, "kept": KEPT}
            own |= {"lengths": [5] * 8, "finished": [1] * 8, "advantages": [-1, -0.9, 0.8, 1.1]}
            rows["groups"].append(head | own)
            rows["rollouts"].append(head | {"index": 7, "completion": text})
    for problem, read in enumerate(("2", None, *texts)):
        head = {"step": steps, "task": "sums", "problem": problem, "prompt": read, "answer": "2"}
        head |= {"completion": read or texts[0], "finished": problem < 2, "length": 5}
        rows["evaluation"].append(head | {"read": read, "accuracy": float(problem == 0)})
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    config = {"n": 8, "m": 4, "rule": "max_variance", "select_by": "total", "task": "sums"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_page(folder: Path) -> Path:
    path = folder / "view.html"
    path.write_text(page_of(folder))
    return path


def data_of(path: Path) -> dict:
    """What stands in a page's block of JSON."""
    text = path.read_text().partition('<script type="application/json" id="data">')[2]
    return json.loads(text.partition("</script>")[0])


def test_a_page_shows_what_there_is_of_a_run(tmp_path):
    counts = {"metrics": 4, "groups": 6, "texts": 6, "answers": 3}
    made_run(tmp_path)
    for file, name in (("rollouts", "texts"), ("groups",) * 2, ("evaluation", "answers")):
        data = data_of(write_page(tmp_path))
        assert {part: len(data[part]) for part in counts} == counts
        (tmp_path / f"{file}.jsonl").unlink()
        counts[name] = 0


def test_a_page_stays_small_however_long_the_run_is(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "FILE_BYTES", 300_000)
    made_run(tmp_path, steps=1501, groups=10, texts=["y" * 500])
    with open(tmp_path / "groups.jsonl", "a") as file:
        file.write('{"step": 1502, "group": 0, "prom')  # killed here
    path = write_page(tmp_path)
    assert path.stat().st_size < 4 * 300_000
    data = data_of(path)
    assert {row["group"] for row in data["groups"]} == set(range(page.GROUPS))
    for name in ("metrics", "groups", "texts"):
        *steps, last = sorted({row["step"] for row in data[name]})
        assert 10 < len(steps) <= page.STEPS and last == 1501
        every = steps[1] - steps[0]
        assert every & (every - 1) == 0  # a power of two: the steps of one file are in others, too
        assert all(step % every == 0 for step in steps)


def test_the_template_is_small_makes_no_html_and_is_the_stored_pages():
    text, stored = TEMPLATE.read_text(), (ROOT / "docs" / "explore.html").read_text()
    assert len(text) <= 45_000 and text.isascii()
    assert not [word for word in ("HTML(", "innerHTML", "eval(", "document.write") if word in text]
    assert all(part in stored for part in text.partition("__POLICY__")[2].split("__DATA__"))
    assert len(stored) < 1_500_000


# ---- in a browser --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """It had nothing to complain of when all tests have ended."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()
    assert not browser.errors


@pytest.fixture
def run_page(tmp_path) -> Path:
    return write_page(made_run(tmp_path))


def kept_dots(browser: Browser, place: str) -> list[int]:
    """The numbers of the filled dots."""
    dots = f"[...document.querySelectorAll('{place} .dot.kept[data-dot]')]"
    return sorted(browser.run(f"{dots}.map(dot => +dot.dataset.dot)"))


@pytest.mark.parametrize("tab", TABS)
def test_each_tab_fits_its_window(browser, run_page, tab):
    for width, scheme in ((1280, "light"), (400, "dark")):
        browser.open(run_page, f"#tab={tab}", width, scheme)
        assert browser.text("nav [aria-pressed=true]") == TABS[tab]
        assert browser.run("document.documentElement.scrollWidth") <= width


def test_a_step_its_groups_and_a_rollout_are_looked_at(browser, run_page):
    browser.open(run_page)
    assert kept_dots(browser, ".card.chosen") == KEPT
    for press, step in (("ArrowRight", 2), ("End", 3), ("ArrowLeft", 2), ("Home", 1)):
        browser.key(press)
        assert browser.text("#step") == f"step {step} of 3"
    browser.drag("#curve circle.ink", 2000)
    assert browser.text("#step") == "step 3 of 3"
    browser.drag(".card:not(.chosen) [data-dot='4']")
    assert browser.text("#rollout") == "Rollout 4 of 8: left out"
    assert "0.2 is between them" in browser.text(".stay")
    for _ in range(2):
        browser.key("ArrowUp")
    assert browser.text("#rollout") == "Rollout 6 of 8: kept"
    assert "one of the 2 highest" in browser.text(".stay")
    browser.drag("[data-dot='7']")
    assert "<think>1+1=2</think>" in browser.text(".stay")
    browser.open(run_page, browser.run("location.hash"))
    assert browser.text("#rollout") == "Rollout 7 of 8: kept"


def test_the_last_evaluation_is_filtered_and_read(browser, run_page):
    browser.open(run_page)
    browser.drag("nav button:nth-of-type(2)")
    for number, count in enumerate((3, 1, 2, 1, 1), start=1):  # all, right, wrong, not read, cut
        browser.drag(f".row button:nth-of-type({number})")
        assert browser.run("document.querySelectorAll('details').length") == count
    browser.drag("summary")
    browser.run("new Promise(requestAnimationFrame)")
    assert "cut off before its end" in browser.text("details")
    assert browser.text("details pre:last-of-type") == "<think>1+1=2</think>"


def test_what_is_kept_follows_a_dragged_reward_and_is_max_variance(browser, run_page):
    rewards, seen = [0, 0.1, 0.2, 0.3, 0.35, 1], set()
    browser.open(run_page, f"#tab=rule&m=3&r={','.join(map(str, rewards))}")
    for dot, by in ((5, 500), (0, 900), (3, -200), (5, -1100)):
        browser.drag(f"#line [data-dot='{dot}']", by)
        address = browser.run("new URLSearchParams(location.hash.slice(1)).get('r')")
        before, rewards = rewards, [float(reward) for reward in address.split(",")]
        assert [i for i in range(6) if rewards[i] != before[i]] == [dot]
        assert kept_dots(browser, "#line") == RULES["max_variance"](rewards, 3).tolist()
        seen.add(tuple(kept_dots(browser, "#line")))
    assert len(seen) > 2
    browser.drag("#m", 400)
    assert kept_dots(browser, "#line") == list(range(6))


def test_a_prediction_is_revealed_and_the_sentence_on_when_it_pays_is_computed(browser, run_page):
    browser.open(run_page, "#tab=rule")
    browser.drag(".row button:nth-of-type(1)")
    assert not browser.run("document.getElementById('verdict')")
    browser.drag("#guess", -60)
    browser.drag("#reveal")
    assert "You said" in browser.text("#main")
    assert "Kept are the 3 lowest and 1 highest." in browser.text("#verdict")
    browser.open(run_page, "#tab=pays&p=0.02")
    assert browser.text("#pays").endswith("it pays.")
    browser.drag("#p", -20)  # from the middle
    assert browser.text("#pays").endswith("GRPO is better.")


def test_no_text_of_a_model_acts(browser, tmp_path):
    path = write_page(made_run(tmp_path, steps=len(HOSTILE), groups=1, texts=HOSTILE))

    def shown(address: str, *places: str) -> list[str]:
        browser.open(path, address)
        browser.run("document.querySelectorAll('details').forEach(row => { row.open = true; })")
        browser.run("new Promise(requestAnimationFrame)")
        assert browser.run("window.acted === undefined")
        assert browser.run("document.querySelectorAll('img, a, iframe, [onload]').length") == 0
        assert browser.run("document.querySelectorAll('script').length") == 2
        assert browser.run("document.documentElement.scrollWidth") <= 1280
        return [browser.text(place) for place in places]

    row = "details:nth-of-type({}) pre:last-of-type"
    answers = shown("#tab=evaluation", *(row.format(i + 3) for i in range(len(HOSTILE))))
    for i, text in enumerate(HOSTILE):
        for sign, spelled in SPELLED.items():
            text = text.replace(sign, spelled)
        for found in (answers[i], *shown(f"#step={i or len(HOSTILE)}&dot=7", ".stay")):
            assert text[:9_000] in found and len(found) < 70_000
