"""Run jobs in parallel processes: isolated from one another, and gone when this process goes.

Knows nothing of learning: a job is anything picklable with a name.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Generic, TypeVar

J = TypeVar("J", bound=Hashable)

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Ended(Generic[J]):
    """A job whose process is over; ``signal`` where it was killed, ``error`` what it raised."""

    job: J
    ok: bool
    signal: int | None
    seconds: float
    error: str | None = None


@dataclass
class _Running(Generic[J]):
    job: J
    process: BaseProcess
    complaint: Connection  # what the job raised, should the disk not take it
    start: float

    def ended(self) -> Ended[J]:
        code, error = self.process.exitcode or 0, None
        with suppress(EOFError, OSError), self.complaint:
            if self.complaint.poll():
                error = str(self.complaint.recv())
        seconds = time.monotonic() - self.start
        return Ended(self.job, code == 0, -code if code < 0 else None, seconds, error)


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
        ready: the jobs that could start now, in order of preference; asked whenever a process is
            free.
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
            if len(running) < width:
                new = [job for job in dict.fromkeys(ready()) if job not in tried]
                for job in new[: width - len(running)]:
                    tried.add(job)
                    running.append(_start(context, work, job))
            if not running:
                return
            on_tick([r.job for r in running])
            time.sleep(POLL_SECONDS)
            over = [r for r in running if not r.process.is_alive()]
            for r in over:
                running.remove(r)
                on_end(r.ended())
    finally:
        for r in running:
            r.process.terminate()
        for r in running:
            r.process.join(5)
            if r.process.is_alive():
                r.process.kill()


def _start(context: ForkServerContext, work: Callable[[J], None], job: J) -> _Running[J]:
    reader, writer = context.Pipe(duplex=False)
    with writer:
        process = context.Process(target=_child, args=(work, job, writer), daemon=False)
        process.start()
    return _Running(job, process, reader, time.monotonic())


def _child(work: Callable[[J], None], job: J, complaint: Connection) -> None:
    """The process of one job: dies with its parent, and is stopped by its parent alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        work(job)
    except Exception as error:
        with suppress(OSError):
            complaint.send(" ".join(str(error).split()) or type(error).__name__)
        sys.exit(1)


def _die_with_parent() -> None:
    """Kill this process when the one that scheduled it dies, so that no orphan goes on writing.

    The kernel's own PR_SET_PDEATHSIG would watch the fork server, which lives as long as its jobs.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)
