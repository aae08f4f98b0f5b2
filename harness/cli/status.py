"""The matrix as rows: what stands on disk, against what there should be."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

from harness.job import Context
from harness.matrix import Matrix


def matrix_rows(context: Context) -> list[dict[str, Any]]:
    """Every cell with its state, its share of the budget and, where it failed, why."""
    matrix = Matrix(context)
    busy = _held(context.results / ".lock")
    known = {(cell.arm, cell.name) for cell in matrix.known()}
    rows = []
    for arm, name in matrix.expected():
        folder = matrix.store.cell(arm, name)
        note = ""
        if folder.done:
            state = "done"
            done = folder.json("done.json")
            note = done.get("reason", "") if done["status"] != "done" else ""
        elif folder.failed:
            state, note = "failed", folder.json("error.json")["error"]
        elif folder.started:
            state = "running" if busy else "stopped"
        else:
            state = "ready" if (arm, name) in known else "waiting"
            note = "" if state == "ready" else "for this arm's tuning"
        share = matrix.share_done(folder)
        rows.append({"arm": arm, "cell": name, "state": state, "share": share, "note": note})
    return rows


def _held(lock: Path) -> bool:
    """Whether a process is writing to the results folder now."""
    if not lock.exists():
        return False
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        return False
