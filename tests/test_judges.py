"""Verdicts on many answers: remembered, the same whatever the load, and bounded in cost."""

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from grading.judges import are_gradable, is_gradable, judge
from rewards import accuracy, grader_stats, score

ROOT = Path(__file__).parents[1]


def question(i: int) -> tuple[str, str]:
    """A pair that only math-verify can settle, as right; a new one for each i."""
    return rf"\mathbb{{R}}\setminus\{{{i}\}}", rf"(-\infty,{i})\cup({i},\infty)"


POISON = [
    *("9^{9^{9^{9}}}", "10^{1000000000}", "7^{77777777}", "3000000!", "((99!)!)!", "8**8**8**8"),
    *(r"\binom{10000000}{5000000}", r"\sum_{k=1}^{10^{9}} \frac{1}{k^2+k+1}", "(x+y+z)^{900}"),
    *(r"x^{11}+x^3-7x+\sin(x)>3", "{" * 3000 + "1" + "}" * 3000, "(" * 40 + "x" + ")" * 40),
    *("7" * 1_000_000, "(1," * 300 + "1" + ")" * 300, "|x|" * 30, ",".join(["x+1"] * 200)),
]


@pytest.fixture(autouse=True, scope="module")
def started_server():
    assert judge([question(0)]) == [True]


def children() -> list[int]:
    """The processes that this one has started for algebra."""
    command = ["pgrep", "-P", str(os.getpid()), "-f", "grading.algebra"]
    return [int(pid) for pid in subprocess.run(command, capture_output=True).stdout.split()]


def test_verdicts_are_in_order_and_none_is_wrong():
    assert judge([("0.5", "1/2"), (None, "1/2"), question(1), ("7", "8"), question(1)[::-1]]) == [
        *(True, False, True, False),
        True,
    ]


def test_equal_questions_are_asked_once_and_remembered():
    before = grader_stats()["algebra"]
    assert judge([question(2)] * 30) == [True] * 30
    assert judge([question(2)]) == [True]
    assert grader_stats()["algebra"] == before + 1


def test_references_are_checked_without_a_server():
    before = grader_stats()["algebra"]
    assert are_gradable(["5", r"\sqrt{}+", question(3)[0]] * 1000) == [True, False, True] * 1000
    assert is_gradable("5")
    assert grader_stats()["algebra"] == before


def test_refusals_are_counted():
    before = grader_stats()["refused"]
    assert judge([(r"A\cap\{9^{9^{9}}\}", r"A\cap\{2\}")]) == [False]
    assert grader_stats()["refused"] == before + 1


def hard(i: int) -> tuple[str, str]:
    return rf"f(g(f(g(x^{{{i}}}))))\cap f(g(h(g(x+{i}))))\in A", r"\mathbb{R}\setminus\{1\}"


def test_verdicts_are_the_same_in_every_process_and_at_any_load():
    """In new processes, so that nothing is remembered; alone, then beside four busy ones."""
    code = (
        "from grading.judges import judge, grader_stats\n"
        f"pairs = {[*map(hard, range(3, 9)), *map(question, range(6))]}\n"
        "print(judge(pairs), grader_stats()['failed'])\n"
    )
    command, busy = [sys.executable, "-c", code], [sys.executable, "-c", "while True: pass"]
    alone = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    load = [subprocess.Popen(busy) for _ in range(4)]
    try:
        beside = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    finally:
        for process in load:
            process.kill()
            process.wait()
    assert beside == alone
    assert alone.startswith(str([False] * 6 + [True] * 6))


@pytest.mark.parametrize("gold", ["5", r"2\sqrt{3}", "(x+y)^{900}", "x>3"])
def test_poisoned_answers_are_wrong_soon_and_the_others_still_graded(gold):
    good = [(r"\boxed{\sqrt{8}}", r"2\sqrt{2}"), ("<answer>42</answer>", "42")]
    start, memory = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    texts = [f"<answer>{text}</answer>" for text in POISON]
    scores = score(texts + [text for text, _ in good], [gold] * len(texts) + [g for _, g in good])
    assert scores["accuracy"] == [0.0] * len(texts) + [1.0, 1.0]
    assert time.perf_counter() - start < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < memory + 100_000


def test_64_poisons_of_the_worst_kind_are_given_up_and_counted():
    before, cpu = grader_stats(), os.times()
    assert judge([hard(i) for i in range(100, 164)]) == [False] * 64
    assert grader_stats()["failed"] > before["failed"]
    assert os.times().user - cpu.user < 1  # the trainer itself does nothing
    assert judge([question(4)]) == [True]


def test_it_works_from_threads():
    results = []
    thread = threading.Thread(target=lambda: results.extend(judge([question(10)])))
    thread.start()
    thread.join()
    with ThreadPoolExecutor(4) as pool:
        results += pool.map(lambda i: judge([question(i)])[0], range(11, 19))
        results += pool.map(
            lambda i: accuracy(rf"\boxed{{\sqrt{{{i * i * 2}}}}}", rf"{i}\sqrt{{2}}"), range(2, 10)
        )
    assert results == [True] * 17


def test_a_killed_server_is_restarted_and_later_answers_are_right():
    before = grader_stats()["restarted"]
    (server,) = children()
    os.kill(server, signal.SIGKILL)
    assert judge(list(map(question, range(20, 26)))) == [True] * 6
    assert grader_stats()["restarted"] == before + 1


def test_a_server_killed_in_the_middle_of_a_batch_is_restarted():
    before, results = grader_stats()["restarted"], []
    (server,) = children()
    pairs = list(map(question, range(30, 60)))
    thread = threading.Thread(target=lambda: results.extend(judge(pairs)))
    thread.start()
    time.sleep(0.15)
    os.kill(server, signal.SIGKILL)
    thread.join()
    assert results == [True] * 30
    assert grader_stats()["restarted"] == before + 1


def in_child(queue):
    queue.put((judge([question(70)]), children()))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_child_processes_have_servers_of_their_own(method):
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=in_child, args=(queue,))
    child.start()
    verdicts, servers = queue.get(timeout=300)
    child.join()
    assert verdicts == [True]
    assert len(servers) == 1
    assert servers != children()
    assert judge([question(71)]) == [True]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_script_without_main_guard_works_and_leaves_no_process(end, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, subprocess\n"
        "from grading.judges import judge\n"
        f"print(judge([{question(80)}]))\n"
        "find = ['pgrep', '-P', str(os.getpid()), '-f', 'grading.algebra']\n"
        "print(subprocess.run(find, capture_output=True, text=True).stdout, flush=True)\n"
        f"{end}\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, script]
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    right, pid = run.stdout.split()
    assert right == "[True]"
    for _ in range(100):
        if not is_running(int(pid)):
            return
        time.sleep(0.1)
    pytest.fail(f"process {pid} outlived its trainer")


def test_without_math_verify_the_error_says_what_to_install(tmp_path):
    (tmp_path / "latex2sympy2_extended.py").write_text("raise ImportError\n")
    code = f"from grading.judges import judge\njudge([{question(90)}])\n"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.stderr.splitlines()[-1].startswith("RuntimeError: the grader did not start: pip")
