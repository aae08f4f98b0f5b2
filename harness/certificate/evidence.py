"""Reads a results folder for the audit. Whatever is not there or not readable becomes a violation.

Files are parsed here and not by the store, which forgives what a resumed run mends: a line cut
short, a file not there yet. A finished cell has neither.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from harness.amendments import applied
from harness.certificate.finding import MISSING, Violation, violation
from harness.certificate.records import (
    Diverged,
    Done,
    Evaluation,
    Lock,
    OfflineStep,
    Run,
    Step,
    Timing,
)
from harness.errors import InputError
from harness.spec.load import read_yaml
from harness.spec.schema import ExperimentSpec
from harness.store import stored_bytes

M = TypeVar("M", bound=BaseModel)
LOCK = "spec.lock.yaml"
BASE, PLACEBO = "base", "placebo"
MAX_GAPS = 5  # of one file; the rest would say the same
CELL_NAME = re.compile(r"trial-(?P<trial>\d{3,})-seed-(?P<trial_seed>-?\d+)|seed-(?P<seed>-?\d+)")


@dataclass(frozen=True)
class Cell:
    """What one cell left, as far as it could be read; None where it could not."""

    arm: str
    name: str
    path: Path
    run: Run | None
    steps: tuple[Step, ...] | None
    evals: tuple[Evaluation, ...] | None
    done: Done | None
    diverged: Diverged | None
    timing: tuple[Timing, ...] | None
    environment: Mapping[str, Any] | None
    raw_run: Mapping[str, Any]
    raw_steps: tuple[dict[str, Any], ...]
    raw_evals: tuple[dict[str, Any], ...]

    @property
    def id(self) -> str:
        return f"runs/{self.arm}/{self.name}"

    @property
    def trial(self) -> int | None:
        """The trial's number, from the folder's name; None for a final seed."""
        match = CELL_NAME.fullmatch(self.name)
        return int(match["trial"]) if match and match["trial"] else None

    @property
    def seed(self) -> int | None:
        """The seed, from the folder's name."""
        match = CELL_NAME.fullmatch(self.name)
        return int(match["seed"] or match["trial_seed"]) if match else None


@dataclass(frozen=True)
class Evidence:
    """A results folder as the audit sees it.

    Attributes:
        lock, spec: with amendments put in.
        raw_lock: the file as it stands.
    """

    lock: Lock | None
    spec: ExperimentSpec | None
    cells: tuple[Cell, ...]
    gaps: tuple[Violation, ...]
    plugins: Mapping[str, str] = field(default_factory=dict)  # file of plugins/ -> its SHA-256
    raw_lock: Mapping[str, Any] = field(default_factory=dict)

    def trained(self) -> Iterator[tuple[Cell, Run, tuple[Step, ...]]]:
        """The cells that train and whose run and steps could be read."""
        for cell in self.cells:
            if cell.arm != BASE and cell.run is not None and cell.steps is not None:
                yield cell, cell.run, cell.steps


def read_evidence(results: Path) -> Evidence:
    """Everything that the checks look at; never raises on what it finds."""
    gaps: list[Violation] = []
    lock, spec, raw_lock = _read_lock(results, gaps)
    folders = [f for f in _folders(results / "runs") for f in _folders(f)]
    cells = tuple(_read_cell(folder, gaps) for folder in folders)
    if not cells:
        gaps.append(violation(MISSING, (), "runs", "cells", 0, "there is no cell to audit"))
    return Evidence(lock, spec, cells, tuple(gaps), _plugins(results), raw_lock)


def _plugins(results: Path) -> dict[str, str]:
    """What cannot be read is not there: the check asks for each copy by its name."""
    found: dict[str, str] = {}
    for path in (results / "plugins").glob("*"):
        with suppress(OSError):
            found[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError:
        return []


def _read_lock(
    results: Path, gaps: list[Violation]
) -> tuple[Lock | None, ExperimentSpec | None, dict[str, Any]]:
    try:
        tree = read_yaml(results / LOCK)
        _refuse_infinite(tree)
    except (InputError, OSError, ValueError, RecursionError) as error:
        gaps.append(violation(MISSING, (), LOCK, "a lock", _line(error), "it cannot be read"))
        return None, None, {}
    if _typed(Lock, tree, "", LOCK, gaps) is None:
        return None, None, {}
    try:
        amended = applied(tree)
    except (AttributeError, TypeError) as error:  # a change below what is no mapping
        gaps.append(violation(
            MISSING, (), f"{LOCK}: amendments", "changes of keys", _line(error),
            "an amendment cannot be put in",
        ))  # fmt: skip
        return None, None, {}
    lock = _typed(Lock, amended, "", LOCK, gaps)
    spec = _typed(ExperimentSpec, amended["spec"], "", f"{LOCK}: spec", gaps)
    return lock, spec, tree


def _read_cell(folder: Path, gaps: list[Violation]) -> Cell:
    arm, name = folder.parent.name, folder.name
    where = f"runs/{arm}/{name}"
    found: list[Violation] = []
    raw_run = _json(folder / "run.json", where, found)
    raw_done = _json(folder / "done.json", where, found)
    # A diverged trial ends where it stood: no evaluation, perhaps not one whole step.
    diverged = name.startswith("trial-") and (raw_done or {}).get("status") == "diverged"
    environment = _json(folder / "environment.json", where, found)
    trains = arm != BASE and not diverged
    raw_steps = _lines(folder / "steps.jsonl", where, found, required=trains)
    raw_evals = _lines(folder / "evals.jsonl", where, found, required=not diverged)
    timing = _lines(folder / "timing.jsonl", where, found, required=not diverged)
    if trains:
        _json(folder / "memory.json", where, found)
    cell = Cell(
        arm=arm,
        name=name,
        path=folder,
        run=None if raw_run is None else _typed(Run, raw_run, where, "run.json", found),
        steps=_typed_lines(_step_model, raw_steps, where, "steps.jsonl", found),
        evals=_typed_lines(lambda _: Evaluation, raw_evals, where, "evals.jsonl", found),
        done=None
        if raw_done is None or diverged
        else _typed(Done, raw_done, where, "done.json", found),
        diverged=_typed(Diverged, raw_done, where, "done.json", found) if diverged else None,
        timing=_typed_lines(
            lambda _: Timing,
            None if timing is None else [t for t in timing if "evaluation" not in t],
            where,
            "timing.jsonl",
            found,
        ),
        environment=environment,
        raw_run=raw_run or {},
        raw_steps=tuple(raw_steps or ()),
        raw_evals=tuple(raw_evals or ()),
    )
    gaps.extend(found)
    return cell


def _json(path: Path, where: str, gaps: list[Violation]) -> dict[str, Any] | None:
    return _guarded(path, where, gaps, lambda text: _object(text))


def _lines(
    path: Path, where: str, gaps: list[Violation], required: bool = True
) -> list[dict[str, Any]] | None:
    if not required and not path.exists():
        return []
    return _guarded(path, where, gaps, _split)


def _split(text: str) -> list[dict[str, Any]]:
    if text and not text.endswith("\n"):
        raise ValueError("the last line is cut short")
    found = []
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            found.append(_object(line))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
    return found


def _guarded(path: Path, where: str, gaps: list[Violation], parse: Callable[[str], Any]) -> Any:
    try:
        return parse(stored_bytes(path).decode("utf-8"))
    except FileNotFoundError:
        gaps.append(violation(MISSING, where, path.name, "a file", None, "it does not exist"))
    except (OSError, ValueError, RecursionError) as error:
        gaps.append(violation(MISSING, where, path.name, "JSON", _line(error), "it cannot be read"))
    return None


def _object(text: str) -> dict[str, Any]:
    value = json.loads(
        text,
        parse_constant=_refuse_constant,
        parse_float=_finite,
        object_pairs_hook=_unique,
    )
    if not isinstance(value, dict):
        raise ValueError(f"an object was expected, found {type(value).__name__}")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number that can be compared")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large for a number")
    return value


def _refuse_infinite(tree: Any) -> None:
    """YAML knows ``.nan`` and ``.inf``."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            _refuse_infinite(value)
    elif isinstance(tree, list):
        for value in tree:
            _refuse_infinite(value)
    elif isinstance(tree, float) and not math.isfinite(tree):
        raise ValueError(f"{tree} is not a number that can be compared")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(k for k, _ in pairs if [name for name, _ in pairs].count(k) > 1)
        raise ValueError(f"key {twice!r} stands twice")
    return found


def _typed(model: type[M], tree: Any, where: str, key: str, gaps: list[Violation]) -> M | None:
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        for problem in error.errors(include_url=False)[:MAX_GAPS]:
            path = ".".join(str(part) for part in problem["loc"])
            absent = problem["type"] == "missing"
            gaps.append(
                violation(
                    MISSING,
                    where or (),
                    f"{key}: {path}" if path else key,
                    "a known key" if problem["type"] == "extra_forbidden" else "a sound value",
                    None if absent else _plain(problem.get("input")),
                    "the key is missing" if absent else problem["msg"],
                )
            )
        return None


def _step_model(line: Mapping[str, Any]) -> type[Step]:
    """The record that a line of steps.jsonl says it is."""
    return OfflineStep if line.get("phase") == "offline" else Step


def _typed_lines(
    model_of: Callable[[dict[str, Any]], type[M]],
    lines: list[dict[str, Any]] | None,
    where: str,
    name: str,
    gaps: list[Violation],
) -> tuple[M, ...] | None:
    if lines is None:
        return None
    found: list[Violation] = []
    typed = [
        _typed(model_of(line), line, where, f"{name} line {number}", found)
        for number, line in enumerate(lines, 1)
    ]
    gaps.extend(found[:MAX_GAPS])
    whole = tuple(line for line in typed if line is not None)
    return whole if len(whole) == len(lines) else None


def _plain(value: Any) -> Any:
    """The value, or its text where it is large or not JSON."""
    plain = value is None or isinstance(value, (bool, int, float, str))
    return value if plain else type(value).__name__


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
