"""One experiment from spec to finished matrix: lock, tune, run; then certificate and report."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from harness.cell import run_cell
from harness.errors import CellError, InputError, suggest
from harness.job import Cell, Context
from harness.lock import agree, locked, make_lock, read_lock, write_lock
from harness.matrix import Matrix
from harness.plugins import HASH_KEY, copy_name
from harness.schedule import Ended, execute
from harness.spec.load import load_spec
from harness.spec.sweep import load_sweep
from harness.store import SWEEP_FILE, CellFolder, ResultStore, disk_errors, write_bytes, write_json


def open_context(
    spec_file: Path, overrides: Sequence[str], plugins: Sequence[Path], results: Path | None
) -> Context:
    """A spec with its overrides and extra plugin files, and the folder its results go to.

    Raises:
        InputError: a bad spec.
    """
    spec = load_spec(spec_file, overrides)
    root = spec_file.parent.resolve()
    extra = tuple(os.path.relpath(p.resolve(), root) for p in plugins)
    if extra:
        spec = spec.model_copy(update={"plugins": (*spec.plugins, *extra)})
    return Context(spec, root, (results or Path("results") / spec.name).resolve())


def open_contexts(
    spec_file: Path,
    overrides: Sequence[str],
    plugins: Sequence[Path],
    results: Path | None,
    case: str | None = None,
) -> list[Context]:
    """As ``open_context``; of a sweep, one for each case (or the one that is named).

    Raises:
        InputError: a bad spec, or no such case.
    """
    sweep = load_sweep(spec_file, overrides)
    if sweep is None:
        if case is not None:
            raise InputError(f"--case {case!r}: {spec_file} is no sweep; leave --case out")
        return [open_context(spec_file, overrides, plugins, results)]
    names = [c.name for c in sweep.cases]
    if case is not None and case not in names:
        raise InputError(f"--case {case!r} is none of this sweep's.{suggest(case, names)}")
    root = spec_file.parent.resolve()
    extra = tuple(os.path.relpath(p.resolve(), root) for p in plugins)
    folder = (results or Path("results") / sweep.name).resolve()
    found = []
    for one in sweep.cases:
        if case in (None, one.name):
            spec = one.spec
            if extra:
                spec = spec.model_copy(update={"plugins": (*spec.plugins, *extra)})
            found.append(Context(spec, root, folder / one.name))
    return found


def write_sweep(spec_file: Path, overrides: Sequence[str], results: Path | None) -> Path | None:
    """``sweep.json`` in a sweep's results folder, which is returned; None where it is no sweep."""
    sweep = load_sweep(spec_file, overrides)
    if sweep is None:
        return None
    folder = (results or Path("results") / sweep.name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / SWEEP_FILE, sweep.to_json())
    return folder


@dataclass
class Outcome:
    """How a run of the matrix ended."""

    done: int
    failed: list[tuple[str, str, str]]  # arm, cell, error
    missing: int


def run_experiment(
    context: Context,
    width: int,
    *,
    on_lock: Callable[[], None] = lambda: None,
    on_end: Callable[[Ended[Cell], Matrix, str | None], None] = lambda ended, matrix, error: None,
    on_tick: Callable[[Sequence[Cell], Matrix], None] = lambda running, matrix: None,
) -> Outcome:
    """Run every cell that is missing; a failed cell is tried once more, from its checkpoint.

    Raises:
        InputError: bad input, another process on the folder, or a folder of another spec.
    """
    matrix = Matrix(context)
    lock = make_lock(context)  # before anything is written: it may refuse
    with matrix.store.exclusive():
        ensure_lock(context, lock)
        context = locked(context)
        on_lock()
        failed_now: dict[tuple[str, str], str] = {}

        def ready() -> list[Cell]:
            return [
                cell
                for cell in matrix.known()
                if not matrix.folder(cell).done and (cell.arm, cell.name) not in failed_now
            ]

        def ended(end: Ended[Cell]) -> None:
            folder = matrix.folder(end.job)
            if not folder.done:
                failed_now[end.job.arm, end.job.name] = _note_death(end, folder)
            if end.job.kind == "trial":
                with suppress(CellError):  # written again at the end
                    matrix.write_tuning(end.job.arm)
            on_end(end, matrix, failed_now.get((end.job.arm, end.job.name)))

        _set_threads(context.spec.runtime.threads)
        execute(
            ready, partial(run_cell_quietly, context), width,
            preload=("harness.cell",), on_end=ended,
            on_tick=lambda running: on_tick(running, matrix),
        )  # fmt: skip
        for arm in matrix.arms:  # a killed run may have left one unwritten
            matrix.write_tuning(arm)
    return outcome(matrix, failed_now)


def run_cell_quietly(context: Context, cell: Cell) -> None:
    """``run_cell`` with its process's chatter in the cell's own log."""
    folder = context.results / "runs" / cell.arm / cell.name
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "log.txt").open("a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
    run_cell(context, cell)


def ensure_lock(context: Context, lock: Mapping[str, Any]) -> None:
    """Write the lock, or check that the folder's lock is of this very spec and code.

    A copy of each plugin file is put beside it.

    Raises:
        InputError: it is not.
    """
    path = context.results / "spec.lock.yaml"
    if path.exists():
        agree(read_lock(path), lock, path)
        _keep_plugins(context, lock["hashes"])
        return
    if (context.results / "runs").exists():
        raise InputError(f"{context.results}: has runs but no spec.lock.yaml; move the folder away")
    _keep_plugins(context, lock["hashes"])
    write_lock(path, lock)


def _keep_plugins(context: Context, hashes: Mapping[str, str]) -> None:
    """Copy the plugin files that are not kept yet; one that is kept is never written again."""
    store = ResultStore(context.results)
    for path in context.plugin_files:
        copy = store.plugins / copy_name(path.name, hashes[HASH_KEY + path.name])
        if not copy.exists():
            write_bytes(copy, path.read_bytes())


def outcome(matrix: Matrix, errors: Mapping[tuple[str, str], str]) -> Outcome:
    """What stands on disk, against what should; ``errors`` are those of this run."""
    done, failed, missing = 0, [], 0
    for arm, name in matrix.expected():
        folder = matrix.store.cell(arm, name)
        if folder.done:
            done += 1
        elif (arm, name) in errors:
            failed.append((arm, name, errors[arm, name]))
        elif folder.failed:
            failed.append((arm, name, folder.json("error.json")["error"]))
        else:
            missing += 1
    return Outcome(done, failed, missing)


def _note_death(end: Ended[Cell], folder: CellFolder) -> str:
    """Why a cell failed; written down here where its process was killed, or could not write."""
    if folder.failed:
        return str(folder.json("error.json")["error"])
    how = f"by signal {end.signal}" if end.signal else "without a word"
    mend = "out of memory?" if end.signal == signal.SIGKILL else "see log.txt"
    error = end.error or (
        f"its process ended {how} ({mend}); the same command goes on from its checkpoint"
    )
    with suppress(CellError):  # the disk may be full, and the other cells go on
        folder.write("error.json", {
            "error": error, "where": f"{end.job.arm}/{end.job.name}", "traceback": None,
            "step": None,
        })  # fmt: skip
    return error


def _set_threads(threads: int) -> None:
    """Numerical libraries read these when a process starts."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
