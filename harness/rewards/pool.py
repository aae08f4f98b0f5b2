"""Worker processes under a limit of time and memory, one request in flight each.

Workers are fresh interpreters started by ``subprocess``, not by ``multiprocessing``: they need no
``__main__`` guard, inherit no locks, and may be started from a thread or a daemonic process.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

import psutil

from harness.errors import CellError

_START_SECONDS = 300.0
_LOOK_SECONDS = 0.02  # between two looks at a busy worker's memory
_ROOT = str(Path(__file__).resolve().parents[2])


class Failure(StrEnum):
    """Why a request has no reply."""

    TIMEOUT = "timeout"
    MEMORY = "memory"
    DIED = "died"


@dataclass(frozen=True)
class Reply:
    """What a worker answered (``value``), or why it did not (``failure``)."""

    value: Any = None
    failure: Failure | None = None


class _Worker:
    """One child process and its two pipes."""

    def __init__(self, module: str, seconds: float, megabytes: int) -> None:
        self.seconds, self.megabytes = seconds, megabytes
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives with the worker
        paths = [_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, str(seconds), str(megabytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the parent only, which then cleans up
        )
        self.seen = psutil.Process(self.process.pid)
        self.ready = False
        self.item: int | None = None
        self.since = time.monotonic()
        self.buffer = b""
        self.ended_for: Failure | None = None

    def send(self, item: int, request: Sequence[str]) -> bool:
        """Hand over a request; False where the worker has died while idle."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(list(request)).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            return False
        self.item, self.since = item, time.monotonic()
        return True

    def read(self) -> str | None:
        """The next whole line, "" while there is none yet, None once the worker has ended."""
        assert self.process.stdout is not None
        piece = os.read(self.process.stdout.fileno(), 1 << 16)
        if not piece:
            return None
        self.buffer += piece
        line, found, rest = self.buffer.partition(b"\n")
        if not found:
            return ""
        self.buffer = rest
        return line.decode()

    def police(self) -> None:
        """End the worker if it is over its memory, or hangs without using the processor."""
        try:
            resident = self.seen.memory_info().rss
        except psutil.Error:
            return  # it has ended; its pipe says so
        if resident > self.megabytes << 20:
            self.ended_for = Failure.MEMORY
            self.process.kill()
        # The kernel limits processor time; this is for a worker that sleeps or is starved.
        elif time.monotonic() - self.since > 20 * self.seconds + 30:
            self.ended_for = Failure.TIMEOUT
            self.process.kill()

    def verdict(self) -> Failure:
        """Why the worker has ended. Waits for it."""
        code = self.process.wait()
        if self.ended_for is not None:
            return self.ended_for
        if code == -signal.SIGPROF:
            return Failure.TIMEOUT
        return Failure.MEMORY if code == 71 else Failure.DIED

    def complaint(self) -> str:
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no message"

    def close(self) -> None:
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout, self.errors):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self.process.wait()


def _close_all(workers: list[_Worker], owner: int) -> None:
    if os.getpid() == owner:  # a forked child must not end its parent's workers
        for worker in workers:
            worker.close()
    workers.clear()


class WorkerPool:
    """Answers requests in order, whatever happens to single workers.

    Args:
        module: run as ``python -m module SECONDS MEGABYTES``; says ``"ready"``, then answers each
            line (a JSON list of strings) with one line of JSON.
        workers: processes at most; none is started before the first request.
        seconds: processor time for one request (queueing and a busy machine do not count).
        megabytes: resident memory of a worker, interpreter and libraries included.
    """

    def __init__(self, module: str, *, workers: int, seconds: float, megabytes: int) -> None:
        self._module, self._limit = module, workers
        self._seconds, self._megabytes = seconds, megabytes
        self._lock = threading.Lock()
        self._own()

    def _own(self) -> None:
        self._workers: list[_Worker] = []
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, _close_all, self._workers, self._owner)

    @property
    def started(self) -> int:
        """Processes that exist now."""
        return len(self._workers)

    def run(self, requests: Sequence[Sequence[str]]) -> list[Reply]:
        """One reply for each request, in order. Thread-safe; calls wait for one another.

        A request whose worker hung or died for no known reason is tried once more, alone, before
        its failure stands: a starved machine or a stray kill is not the request's fault.

        Raises:
            CellError: no worker can be started.
        """
        if os.getpid() != self._owner:
            self._lock = threading.Lock()
            self._own()
        with self._lock:
            replies: list[Reply] = [Reply()] * len(requests)
            again = self._answer(requests, range(len(requests)), self._limit, replies)
            for item in again:
                self._answer(requests, [item], 1, replies)
            return replies

    def close(self) -> None:
        """End all processes; the next request starts new ones."""
        if os.getpid() != self._owner:
            return  # forked: they are the parent's
        with self._lock:
            _close_all(self._workers, self._owner)

    def _answer(
        self, requests: Sequence[Sequence[str]], items: Sequence[int], limit: int, out: list[Reply]
    ) -> list[int]:
        """Fill ``out`` for ``items``; gives back those that deserve another try."""
        waiting, left, again = deque(items), len(items), []
        try:
            while left:
                self._hand_out(requests, waiting, min(limit, left))
                for worker in self._listen():
                    line = worker.read()
                    if line is None:
                        left -= self._bury(worker, out, again)
                    elif line and not worker.ready:
                        worker.ready = True
                    elif line and worker.item is not None:
                        out[worker.item], worker.item = Reply(json.loads(line)), None
                        left -= 1
                for worker in self._workers:
                    if worker.ready and worker.item is not None:
                        worker.police()
                    elif not worker.ready and time.monotonic() - worker.since > _START_SECONDS:
                        worker.process.kill()
        except BaseException:
            _close_all(self._workers, self._owner)  # a half-read reply must not answer the next
            raise
        return again

    def _hand_out(self, requests: Sequence[Sequence[str]], waiting: deque[int], need: int) -> None:
        while len(self._workers) < need:
            self._workers.append(_Worker(self._module, self._seconds, self._megabytes))
        for worker in list(self._workers):
            busy = sum(w.item is not None for w in self._workers)
            if not waiting or busy >= need:
                return
            if worker.ready and worker.item is None:
                if worker.send(waiting[0], requests[waiting[0]]):
                    waiting.popleft()
                else:
                    self._remove(worker)

    def _listen(self) -> list[_Worker]:
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                assert worker.process.stdout is not None
                selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
            return [key.data for key, _ in selector.select(_LOOK_SECONDS)]

    def _bury(self, worker: _Worker, out: list[Reply], again: list[int]) -> int:
        """Record why a worker ended; how many requests that settles."""
        failure, item = worker.verdict(), worker.item
        if not worker.ready:
            raise CellError(f"a grading process cannot start: {worker.complaint()}")
        tired = worker.ended_for is Failure.TIMEOUT or failure is Failure.DIED
        self._remove(worker)
        if item is None:
            return 0
        if tired and out[item].failure is None:
            again.append(item)
        out[item] = Reply(failure=failure)
        return 1

    def _remove(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.close()
