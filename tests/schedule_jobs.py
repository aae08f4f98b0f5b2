"""Jobs for the scheduler's tests, in a module that their processes can import."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def work(folder: Path, job: str) -> None:
    """A job that does what its name says; it leaves its begin and end in files."""
    (folder / f"{job}.began").write_text(f"{os.getpid()} {time.monotonic()}")
    if job.startswith("raise"):
        raise ValueError(f"{job} went\nwrong")
    if job.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if job.startswith("exit"):
        os._exit(7)
    if job.startswith("sleep"):
        time.sleep(0.5)
    if job.startswith("beat"):
        with (folder / f"{job}.beats").open("a") as file:
            while True:
                file.write(".")
                file.flush()
                time.sleep(0.02)
    (folder / f"{job}.ended").write_text(str(time.monotonic()))
