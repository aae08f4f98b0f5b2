"""A results folder as values: the spec that was locked, and every cell, finished or not."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from harness.amendments import applied, late, promised
from harness.errors import InputError
from harness.spec.load import read_yaml
from harness.store import CellFolder, read_json

Status = Literal["done", "failed", "unfinished", "missing"]
CONTROL_ARMS = ("base", "placebo")
MANY = 8  # arms: of more, curves and sentences cannot name each one
_CELL_NAME = re.compile(
    r"^(?:trial-(?P<trial>\d+)(?:-seed-(?P<tuning_seed>-?\d+))?|seed-(?P<seed>-?\d+))$"
)


@dataclass(frozen=True)
class Cell:
    """One arm under one seed, or one tuning trial, as it stands on disk.

    Attributes:
        folder: relative to the results folder; where every number of the cell comes from.
        status: ``unfinished`` has begun, with neither ``done.json`` nor ``error.json``.
        trial: None for a final seed.
    """

    arm: str
    name: str
    folder: str
    kind: Literal["seed", "trial"]
    seed: int | None
    trial: int | None
    status: Status
    run: Mapping[str, Any] = field(default_factory=dict)
    steps: Sequence[Mapping[str, Any]] = ()
    evals: Sequence[Mapping[str, Any]] = ()
    timing: Sequence[Mapping[str, Any]] = ()
    memory: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    done: Mapping[str, Any] = field(default_factory=dict)
    error: Mapping[str, Any] = field(default_factory=dict)

    @property
    def spent(self) -> Mapping[str, float]:
        """Totals in every unit, so far as the cell came."""
        if self.done.get("spent"):
            return self.done["spent"]
        return self.steps[-1]["spent"] if self.steps else {}

    @property
    def flops(self) -> Mapping[str, float]:
        """FLOPs by ``role/phase``, so far as the cell came."""
        if self.done.get("flops"):
            return self.done["flops"]
        return self.steps[-1].get("flops", {}) if self.steps else {}


@dataclass(frozen=True)
class Experiment:
    """What the report is made from.

    Attributes:
        spec: as locked, with amendments put in.
        lock: the same for all of the lock, and the amendments themselves.
        declared: the spec as it stood when the first cell began.
        amendments: those made after that, in order.
        arms: the arms under test, in the spec's order.
        cells: every expected cell and every one found, in the order arm, trials, seeds.
        certificate: None where no audit has been made.
    """

    path: Path
    spec: Mapping[str, Any]
    lock: Mapping[str, Any]
    arms: tuple[str, ...]
    cells: tuple[Cell, ...]
    certificate: Mapping[str, Any] | None
    declared: Mapping[str, Any] = field(default_factory=dict)
    amendments: Sequence[Mapping[str, Any]] = ()

    @property
    def name(self) -> str:
        return str(self.spec.get("name", self.path.name))

    @property
    def baseline(self) -> str:
        named = dict(zip(self.spec["arms"], self.arms, strict=False))
        return named.get(self.spec.get("baseline"), self.arms[0])

    @property
    def ladder(self) -> dict[str, tuple[str, ...]]:
        """The lists of arms that the spec's ladder names (forward, ...), by the arms' own names."""
        named = {str(a): own for a, own in zip(self.spec["arms"], self.arms, strict=False)}
        lists = self.spec.get("ladder") or {}
        return {
            key: tuple(named[a] if a in named else str(a) for a in arms)
            for key, arms in lists.items()
            if arms
        }

    @property
    def controls(self) -> tuple[str, ...]:
        """The control arms that the spec asks for or that are on disk: base, placebo."""
        asked = self.spec.get("controls") or {}
        there = {c.arm for c in self.cells}
        return tuple(a for a in CONTROL_ARMS if asked.get(a) or a in there)

    @property
    def shown(self) -> tuple[str, ...]:
        """Controls first, then the arms: the order of every table and figure."""
        return self.controls + self.arms

    @property
    def drawn(self) -> tuple[str, ...]:
        """Those of ``shown`` that curves and sentences name: all, or the ends of a long ladder."""
        ends = {arm for arms in self.ladder.values() for arm in (arms[0], arms[-1])}
        if len(self.arms) <= MANY or not ends:
            return self.shown
        return self.controls + tuple(arm for arm in self.arms if arm in ends)

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(self.spec["seeds"])

    def seed_cells(self, arm: str, *, done: bool = True) -> list[Cell]:
        """An arm's cells of the final seeds; only finished ones unless told otherwise."""
        cells = [c for c in self.cells if c.arm == arm and c.kind == "seed"]
        return [c for c in cells if c.status == "done"] if done else cells

    def trial_cells(self, arm: str) -> list[Cell]:
        return [c for c in self.cells if c.arm == arm and c.kind == "trial"]


def load_experiment(results: Path) -> Experiment:
    """Read a results folder.

    Raises:
        InputError: no such folder, no lock in it, or a file that is not what it should be.
    """
    if not results.is_dir():
        raise InputError(f"results folder {results} does not exist; run the experiment first")
    lock_file = results / "spec.lock.yaml"
    lock = read_yaml(lock_file)
    spec = lock.get("spec") if isinstance(lock, dict) else None
    if not isinstance(spec, dict) or not spec.get("arms") or not spec.get("seeds"):
        raise InputError(f"{lock_file}: key 'spec' with arms and seeds is missing; run again")
    try:
        declared, amendments, lock = promised(lock)["spec"], late(lock), applied(lock)
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(
            f"{lock_file}: an amendment cannot be read ({error!r}); restore the file"
        ) from error
    spec = lock["spec"]
    arms = _arm_names(spec, lock)
    certificate = results / "certificate.json"
    return Experiment(
        path=results,
        spec=spec,
        lock=lock,
        arms=arms,
        cells=_cells(results, spec, arms),
        certificate=read_json(certificate) if certificate.exists() else None,
        declared=declared,
        amendments=amendments,
    )


def _arm_names(spec: Mapping[str, Any], lock: Mapping[str, Any]) -> tuple[str, ...]:
    """The arms' own names in the spec's order; a spec may say ``module:NAME``."""
    named = {arm.get("named", name): name for name, arm in (lock.get("arms") or {}).items()}
    return tuple(dict.fromkeys(named.get(name, name) for name in spec["arms"]))


def _cells(results: Path, spec: Mapping[str, Any], arms: Sequence[str]) -> tuple[Cell, ...]:
    found = {}
    for folder in sorted((results / "runs").glob("*/*")):
        if folder.is_dir() and (cell := _read_cell(results, folder)) is not None:
            found[(cell.arm, cell.kind, cell.trial, cell.seed)] = cell
    expected = _expected(spec, arms)
    cells = [found.pop(key, None) or _missing(*key) for key in expected]
    order = {arm: place for place, arm in enumerate((*CONTROL_ARMS, *arms))}

    def place(cell: Cell) -> tuple[Any, ...]:
        kind = 0 if cell.kind == "trial" else 1
        trial, seed = cell.trial or 0, cell.seed or 0
        return order.get(cell.arm, len(order)), cell.arm, kind, trial, seed, cell.name

    return tuple(sorted([*cells, *found.values()], key=place))


def _expected(
    spec: Mapping[str, Any], arms: Sequence[str]
) -> list[tuple[str, Literal["seed", "trial"], int | None, int | None]]:
    controls = spec.get("controls") or {}
    with_seeds = [a for a in CONTROL_ARMS if controls.get(a)] + list(arms)
    keys: list[Any] = [(arm, "seed", None, seed) for arm in with_seeds for seed in spec["seeds"]]
    if tuning := spec.get("tuning"):
        keys += [
            (arm, "trial", trial, seed)
            for arm in arms
            for trial in range(tuning["trials"])
            for seed in tuning["seeds"]
        ]
    return keys


def _missing(arm: str, kind: Literal["seed", "trial"], trial: int | None, seed: int | None) -> Cell:
    name = f"seed-{seed}" if kind == "seed" else f"trial-{trial:03d}-seed-{seed}"
    return Cell(arm, name, f"runs/{arm}/{name}", kind, seed, trial, "missing")


def _read_cell(results: Path, path: Path) -> Cell | None:
    folder = CellFolder(path)

    def optional(name: str) -> Any:
        return folder.json(name) if (path / name).exists() else {}

    run, error, match = optional("run.json"), optional("error.json"), _CELL_NAME.match(path.name)
    if not run and not error:
        return None
    named = match.groupdict() if match else {}
    seed = run.get("seed", named.get("seed") or named.get("tuning_seed"))
    trial = run.get("trial", named.get("trial"))
    kind = run.get("kind") or ("trial" if trial is not None else "seed")
    status: Status = "done" if folder.done else "failed" if folder.failed else "unfinished"
    return Cell(
        arm=run.get("arm", path.parent.name),
        name=path.name,
        folder=path.relative_to(results).as_posix(),
        kind="trial" if kind == "trial" else "seed",
        seed=None if seed is None else int(seed),
        trial=None if trial is None else int(trial),
        status=status,
        run=run,
        steps=folder.lines("steps.jsonl"),
        evals=folder.lines("evals.jsonl"),
        timing=folder.lines("timing.jsonl"),
        memory=optional("memory.json"),
        environment=optional("environment.json"),
        done=optional("done.json"),
        error=error,
    )
