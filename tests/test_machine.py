"""Systems without locks, names that shells split, launchers' variables: a run goes on."""

import errno
import fcntl
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest
from conftest import flags, run_command, without_times, write_sums

import train
from support.tasks import load_task, sums

SHORT = flags(n=4, m=2, steps=2, eval_problems=8)
ALL = "a b $c_$d größe 数 it's [x]*? ="


@pytest.mark.parametrize("reason", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_goes_on_and_says_so(tmp_path, monkeypatch, capsys, reason):
    def lock(*_) -> None:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(fcntl, "flock", lock)
    assert train.main([*SHORT, "--out", str(tmp_path / "run")]) == 0
    assert f"no lock ({os.strerror(reason)})" in capsys.readouterr().err


def test_a_lock_that_another_holds_still_keeps_others_out(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    with open(tmp_path / "run" / "lock", "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert train.main([*SHORT, "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "another process is still writing there" in said and "no lock (" not in said


def test_runs_without_out_do_not_meet_and_what_is_refused_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "now")
    assert train.main([*SHORT, "--task", "nosuch.jsonl"]) == 2
    assert list(tmp_path.iterdir()) == []
    assert train.main(SHORT) == 0
    assert train.main(["--eval-only", "--eval-problems", "8"]) == 0
    assert (tmp_path / "runs" / "now" / "metrics.jsonl").exists()
    assert (tmp_path / "runs" / "now-2" / "eval.json").exists()


def test_any_name_will_do_and_the_printed_command_goes_on_in_a_shell(tmp_path, capsys, monkeypatch):
    (tmp_path / ALL).mkdir()
    task, out = write_sums(tmp_path / ALL / f"{ALL}.jsonl", sums()[:40]), tmp_path / f"{ALL} out"
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(train.Rehearsal, "after", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        train.main([*SHORT, "--task", task, "--out", str(out)])
    printed = capsys.readouterr().out.partition("go on with: ")[2].splitlines()[0]
    assert shlex.split(printed) == ["python", "train.py", "--resume", "--out", str(out)]
    assert train.main(["--resume", "--out", str(out)]) == 0
    assert (out / "curves.png").stat().st_size > 0
    again = ["--model", str(out / "model"), "--task", task, "--out", str(tmp_path / f"{ALL} again")]
    assert train.main([*SHORT, *again]) == 0


def test_data_lies_anywhere(tmp_path):
    (tmp_path / ALL).mkdir()
    write_sums(tmp_path / ALL / "train.jsonl", [("How much?", "#### 3")])
    assert load_task("gsm8k", "train", tmp_path / ALL)[0].answer == "3"


VARIABLES = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_USE_FSDP": "true",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "3",
    "SLURM_PROCID": "1",
}
# The program without the modules that Windows lacks (psutil, a library's, needs one on Linux only),
# and without the script's folder in sys.path.
START = """
import psutil, runpy, sys
sys.modules.update(dict.fromkeys(["fcntl", "resource"]))
sys.argv = ["train.py", *sys.argv[1:]]
runpy.run_path("train.py", run_name="__main__")
"""


def test_neither_launchers_nor_missing_modules_nor_safe_paths_change_a_number(tmp_path):
    """In a process of its own, because these are read when modules are imported."""
    command = [sys.executable, "-c", START, *SHORT, "--out", str(tmp_path / "there")]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | VARIABLES
    environment["PYTHONSAFEPATH"] = "1"
    done = run_command(command, cwd=Path(train.__file__).parent, env=environment)
    assert done.returncode == 0, done.stderr
    assert "no lock (the system has none), run one command at a time there" in done.stderr
    assert train.main([*SHORT, "--out", str(tmp_path / "here")]) == 0
    assert without_times(tmp_path / "there") == without_times(tmp_path / "here")
