"""How long the matrix takes when so many cells run at once."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """A cell and how long it takes.

    Attributes:
        name: its own.
        seconds: alone on its core or GPU.
        after: names of the jobs that must end first.
    """

    name: str
    seconds: float
    after: frozenset[str] = frozenset()


def wall_seconds(jobs: Sequence[Job], width: int) -> float:
    """End of the last job when free places take the first job that may start, in the given order.

    Raises:
        ValueError: a job waits for one that never ends.
    """
    waiting, ended = list(jobs), set[str]()
    running: list[tuple[float, str]] = []
    now = 0.0
    while waiting or running:
        for job in [j for j in waiting if j.after <= ended]:
            if len(running) >= width:
                break
            heapq.heappush(running, (now + job.seconds, job.name))
            waiting.remove(job)
        if not running:
            raise ValueError(f"{waiting[0].name} waits for {sorted(waiting[0].after - ended)}")
        now, name = heapq.heappop(running)
        ended.add(name)
    return now
