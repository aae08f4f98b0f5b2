"""Run jobs in parallel processes: isolated from one another, and gone when this process goes.

Knows nothing of learning: a job is anything picklable with a name.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Generic, TypeVar

J = TypeVar("J", bound=Hashable)

POLL_SECONDS = 0.2
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Ended(Generic[J]):
    """A job whose process is over; ``signal`` where it was killed."""

    job: J
    ok: bool
    signal: int | None
    seconds: float


@dataclass
class _Running(Generic[J]):
    job: J
    process: BaseProcess
    start: float


def execute(
    ready: Callable[[], Sequence[J]],
    work: Callable[[J], None],
    width: int,
    *,
    preload: Sequence[str] = (),
    on_end: Callable[[Ended[J]], None] = lambda ended: None,
    on_tick: Callable[[Sequence[J]], None] = lambda running: None,
) -> None:
    """Do jobs until none is ready and none is running.

    Args:
        ready: the jobs that could start now, in order of preference; asked again after each end.
        work: what to do with a job, in a process of its own. It must be importable by name.
        width: processes at once.
        preload: modules that the fork server imports once, for all jobs.
        on_end: called here as each job ends, well or not; the others go on.
        on_tick: called here several times a second with the running jobs.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    running: list[_Running[J]] = []
    tried: set[J] = set()
    try:
        while True:
            for job in ready():
                if len(running) >= width:
                    break
                if job in tried:
                    continue
                tried.add(job)
                process = context.Process(target=_child, args=(work, job), daemon=False)
                process.start()
                running.append(_Running(job, process, time.monotonic()))
            if not running:
                return
            on_tick([r.job for r in running])
            time.sleep(POLL_SECONDS)
            over = [r for r in running if not r.process.is_alive()]
            for r in over:
                running.remove(r)
                code = r.process.exitcode or 0
                seconds = time.monotonic() - r.start
                on_end(Ended(r.job, code == 0, -code if code < 0 else None, seconds))
    finally:
        for r in running:
            r.process.terminate()
        for r in running:
            r.process.join(5)
            if r.process.is_alive():
                r.process.kill()


def _child(work: Callable[[J], None], job: J) -> None:
    """The process of one job: dies with its parent, and is stopped by its parent alone."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        work(job)
    except Exception:
        sys.exit(1)  # the job has written down why


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, so that no orphan goes on writing."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return  # not Linux: the cell's own lock still keeps two writers apart
