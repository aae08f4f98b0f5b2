"""The worker pool: order, limits, deaths, threads, daemons, clean exit."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from harness.errors import CellError
from harness.rewards.maths import MathGrader, Outcome
from harness.rewards.pool import Failure, WorkerPool

ROOT = Path(__file__).parent.parent

WORKER = """
import json, os, signal, sys, time
signal.setitimer(signal.ITIMER_PROF, 0)
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    what, value = json.loads(line)
    signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))
    if what == "die":
        os._exit(3)
    if what == "die once":
        if not os.path.exists(value):
            open(value, "w").close()
            os._exit(3)
    if what == "spin":
        while True: pass
    if what == "hoard":
        held = []
        while True: held.append(bytearray(8 << 20)); time.sleep(0.01)
    if what == "sleep":
        time.sleep(float(value))
    signal.setitimer(signal.ITIMER_PROF, 0)
    print(json.dumps([value, os.getpid()]), flush=True)
"""


@pytest.fixture
def module(tmp_path, monkeypatch) -> str:
    """A worker that misbehaves on demand, importable by the pool's children."""
    (tmp_path / "misbehaving_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "misbehaving_worker"


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_a_crash_loses_and_reorders_nothing(module):
    pool = WorkerPool(module, workers=2, seconds=5, megabytes=200)
    requests = [("die" if i in (3, 7) else "echo", str(i)) for i in range(12)]
    replies = pool.run(requests)
    for i, reply in enumerate(replies):
        if i in (3, 7):
            assert reply.failure is Failure.DIED
        else:
            assert reply.value[0] == str(i)
    assert [r.value[0] for r in pool.run([("echo", "again")])] == ["again"]
    pool.close()


def test_a_stray_death_is_tried_again_alone(module, tmp_path):
    pool = WorkerPool(module, workers=2, seconds=5, megabytes=200)
    replies = pool.run([("echo", "a"), ("die once", str(tmp_path / "flag")), ("echo", "b")])
    assert [r.failure for r in replies] == [None, None, None]
    assert (tmp_path / "flag").exists()
    pool.close()


def test_limits_of_time_and_memory(module):
    pool = WorkerPool(module, workers=2, seconds=0.5, megabytes=150)
    started = time.monotonic()
    replies = pool.run([("spin", ""), ("hoard", ""), ("echo", "x"), ("spin", ""), ("echo", "y")])
    assert [r.failure for r in replies] == [
        Failure.TIMEOUT, Failure.MEMORY, None, Failure.TIMEOUT, None,
    ]  # fmt: skip
    assert time.monotonic() - started < 30
    pool.close()


def test_waiting_is_not_charged_as_time(module):
    # Eight half-second requests on one worker queue for four seconds; none uses the processor.
    pool = WorkerPool(module, workers=1, seconds=0.3, megabytes=200)
    replies = pool.run([("sleep", "0.5")] * 4)
    assert [r.failure for r in replies] == [None] * 4
    pool.close()


def test_a_stopped_worker_counts_no_time(module):
    """A starved machine, in the extreme: the worker is not scheduled at all for a while."""
    pool = WorkerPool(module, workers=1, seconds=0.3, megabytes=200)
    (pid,) = {reply.value[1] for reply in pool.run([("echo", "x")])}
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(1.0, os.kill, (pid, signal.SIGCONT)).start()
    assert pool.run([("echo", "y")])[0].value == ["y", pid]
    pool.close()


def test_a_worker_killed_while_idle_is_replaced(module):
    pool = WorkerPool(module, workers=1, seconds=5, megabytes=200)
    first = pool.run([("echo", "a")])[0].value[1]
    os.kill(first, signal.SIGKILL)
    time.sleep(0.1)
    value, second = pool.run([("echo", "b")])[0].value
    assert value == "b"
    assert second != first
    pool.close()


def test_a_worker_that_cannot_start_is_reported():
    pool = WorkerPool("no_such_module_anywhere", workers=1, seconds=1, megabytes=200)
    with pytest.raises(CellError, match="no_such_module_anywhere"):
        pool.run([("echo", "a")])
    assert pool.started == 0


def test_threads_share_a_pool(module):
    pool = WorkerPool(module, workers=2, seconds=5, megabytes=200)
    found: dict[int, list[str]] = {}

    def ask(name: int) -> None:
        replies = pool.run([("echo", f"{name}-{i}") for i in range(20)])
        found[name] = [r.value[0] for r in replies]

    threads = [threading.Thread(target=ask, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {name: [f"{name}-{i}" for i in range(20)] for name in range(4)}
    pool.close()


def test_no_process_is_left_behind(module):
    before = children()
    pool = WorkerPool(module, workers=2, seconds=5, megabytes=200)
    pool.run([("die", ""), ("echo", "a"), ("echo", "b")])
    pool.run([("echo", "a"), ("echo", "b")])
    assert len(children() - before) == pool.started > 0
    pool.close()
    assert children() == before
    pool.run([("echo", "a")])
    assert len(children() - before) == 1
    del pool  # without close: the finalizer ends and reaps it
    assert children() == before


def test_the_fast_path_starts_no_process():
    before = children()
    with MathGrader(answer_format="marker") as grader:
        verdicts = grader.grade(["5", "1/2", "1,234"], ["A5", "A0.25", "A1234"])
        assert [v.correct for v in verdicts] == [True, False, True]
        assert grader.processes == 0
        assert (grader.stats.fast, grader.stats.verified) == (3, 0)
        assert children() == before


def test_bombs_end_as_timeout_and_error_and_spare_their_neighbours():
    bombs = [r"\boxed{10^{10^{10}}}", r"\boxed{2^{2^{40}}}"]
    texts = [r"\boxed{1+x}", bombs[0], r"\boxed{x+1}", r"\boxed{x+2}"]
    with MathGrader(workers=1, timeout_seconds=1.0) as grader:
        verdicts = grader.grade(["x+1"] * 4, texts)
        assert [v.outcome for v in verdicts] == [
            Outcome.CORRECT, Outcome.TIMEOUT, Outcome.CORRECT, Outcome.WRONG,
        ]  # fmt: skip
        assert not verdicts[1].correct
        assert grader.stats.timeouts == 1
    with MathGrader(workers=1, timeout_seconds=60.0, memory_mb=256) as grader:
        verdicts = grader.grade(["x+1"] * 2, [bombs[1], r"\boxed{1+x}"])
        assert [v.outcome for v in verdicts] == [Outcome.ERROR, Outcome.CORRECT]
        assert grader.stats.errors == 1


def _grade_in_child(queue) -> None:
    with MathGrader() as grader:
        queue.put([v.outcome.value for v in grader.grade(["x+1"], [r"\boxed{1+x}"])])


def test_usable_in_a_daemonic_process_and_in_a_thread():
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_grade_in_child, args=(queue,), daemon=True)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert queue.get() == ["correct"]
    found = []
    with MathGrader() as grader:
        thread = threading.Thread(
            target=lambda: found.extend(grader.grade(["x+1"], [r"\boxed{1+x}"]))
        )
        thread.start()
        thread.join()
    assert found[0].correct


def test_a_killed_parent_leaves_no_worker():
    code = (
        "import os\nfrom harness.rewards.maths import MathGrader\n"
        "g = MathGrader()\ng.grade(['x+1'], ['\\\\boxed{1+x}'])\n"
        "print([w.process.pid for w in g._pool._workers][0], flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    worker = int(done.stdout)
    for _ in range(50):
        if not psutil.pid_exists(worker) or psutil.Process(worker).status() == "zombie":
            return
        time.sleep(0.1)
    pytest.fail(f"worker {worker} outlived its parent")
