"""The scheduler: jobs in processes that cannot hurt one another or outlive their parent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none
from schedule_jobs import work

from harness.schedule import Ended, execute

HERE = Path(__file__).parent


def run(folder: Path, jobs: Sequence[str], width: int) -> dict[str, Ended[str]]:
    found: dict[str, Ended[str]] = {}

    def note(ended: Ended[str]) -> None:
        found[ended.job] = ended

    execute(lambda: jobs, partial(work, folder), width, on_end=note)
    return found


def moment(path: Path) -> float:
    return float(path.read_text().split()[-1])


def test_a_job_that_fails_is_told_and_stops_no_other(tmp_path: Path):
    found = run(tmp_path, ["raise", "kill", "exit", "plain"], 4)
    assert {job: (e.ok, e.signal) for job, e in found.items()} == {
        "raise": (False, None), "kill": (False, 9), "exit": (False, None), "plain": (True, None),
    }  # fmt: skip
    assert {job: e.error for job, e in found.items()} == {
        "raise": "raise went wrong", "kill": None, "exit": None, "plain": None,
    }  # fmt: skip
    assert (tmp_path / "plain.ended").exists()


def test_no_more_than_the_width_run_at_once_in_processes_of_their_own(tmp_path: Path):
    jobs = [f"sleep{i}" for i in range(5)]
    assert all(e.ok for e in run(tmp_path, jobs, 2).values())
    pids = {(tmp_path / f"{j}.began").read_text().split()[0] for j in jobs}
    assert len(pids) == 5
    assert str(os.getpid()) not in pids
    begins = sorted(moment(tmp_path / f"{j}.began") for j in jobs)
    ends = sorted(moment(tmp_path / f"{j}.ended") for j in jobs)
    assert all(begins[i + 2] >= ends[i] for i in range(3))
    assert begins[1] < ends[0]


def test_jobs_that_become_ready_later_are_run_and_none_twice(tmp_path: Path):
    asked = []

    def ready() -> list[str]:
        asked.append(1)
        second = ["second"] if (tmp_path / "first.ended").exists() else []
        return ["first", "first", *second]

    ended: list[str] = []
    execute(ready, partial(work, tmp_path), 2, on_end=lambda e: ended.append(e.job))
    assert ended == ["first", "second"]


def test_nothing_ready_is_nothing_done(tmp_path: Path):
    assert run(tmp_path, [], 2) == {}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_an_interrupted_run_takes_its_jobs_along(tmp_path: Path):
    def stop(running: Sequence[str]) -> None:
        if (tmp_path / "beat.beats").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(lambda: ["beat"], partial(work, tmp_path), 1, on_tick=stop)
    pid = int((tmp_path / "beat.began").read_text().split()[0])
    assert not alive(pid)


PARENT = """
import sys
from functools import partial
from pathlib import Path
from schedule_jobs import work
from harness.schedule import execute
if __name__ == "__main__":
    execute(lambda: ["beat1", "beat2"], partial(work, Path(sys.argv[1])), 2)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="children die with their parent on Linux")
def test_the_jobs_of_a_killed_parent_are_gone_at_once(tmp_path: Path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = os.environ | {"PYTHONPATH": str(HERE)}
    parent = subprocess.Popen([sys.executable, str(script), str(tmp_path)], env=environment)
    beats = [tmp_path / f"beat{i}.beats" for i in (1, 2)]
    try:
        assert wait_until(lambda: all(b.exists() and b.stat().st_size > 2 for b in beats))
    finally:
        parent.kill()
        parent.wait()
    pids = [int((tmp_path / f"beat{i}.began").read_text().split()[0]) for i in (1, 2)]
    assert wait_until(lambda: not any(alive(pid) for pid in pids), 10)
    sizes = [b.stat().st_size for b in beats]
    time.sleep(0.2)
    assert [b.stat().st_size for b in beats] == sizes
