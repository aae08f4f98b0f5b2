"""Which cells an experiment has, which are done, and which can run now."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from harness.arm import Arm
from harness.job import BASE, PLACEBO, Cell, Context
from harness.store import CellFolder, ResultStore, write_json
from harness.tune import choose, propose

State = Literal["done", "failed", "running", "ready", "waiting"]


@dataclass(frozen=True)
class Trials:
    """An arm's tuning: proposals so far, and the scores of the finished first trials."""

    settings: tuple[dict[str, Any], ...]
    scores: tuple[float | None, ...]
    complete: bool

    @property
    def chosen(self) -> dict[str, Any]:
        return self.settings[choose(self.scores)]


class Matrix:
    """The cells of an experiment against what stands on disk."""

    def __init__(self, context: Context) -> None:
        self.context, self.spec = context, context.spec
        self.store = ResultStore(context.results)
        found = context.arms()
        self.arms: dict[str, Arm] = {name: f.arm for name, f in found.items()}
        self.imitated = context.imitated(found)
        self.named = dict(zip(found, self.spec.arms, strict=True))  # as the spec has them

    def folder(self, cell: Cell) -> CellFolder:
        return self.store.cell(cell.arm, cell.name)

    def trials(self, arm: str) -> Trials | None:
        """Where an arm's tuning stands; None without tuning."""
        plan = self.spec.tuning
        if plan is None:
            return None
        scores: list[float | None] = []
        for number in range(plan.trials):
            found = [self._score(arm, number, seed) for seed in plan.seeds]
            if any(f is _UNKNOWN for f in found):
                break
            known = [f for f in found if isinstance(f, float)]
            scores.append(sum(known) / len(known) if len(known) == len(found) else None)
        settings = propose(self.spec, self.arms[arm], scores)
        return Trials(tuple(settings), tuple(scores), len(scores) == plan.trials)

    def _score(self, arm: str, number: int, seed: int) -> Any:
        folder = self.folder(self._trial(arm, number, seed, {}))
        if not folder.done:
            return _UNKNOWN
        done = folder.json("done.json")
        return None if done["status"] == "diverged" else float(done["selected_metric"]["value"])

    def _trial(self, arm: str, number: int, seed: int, settings: dict[str, Any]) -> Cell:
        assert self.spec.tuning is not None
        limit = self.spec.budget.limit * self.spec.tuning.budget_fraction
        return Cell(arm, "trial", seed, limit, tuple(settings.items()), number)

    def known(self) -> list[Cell]:
        """Every cell whose settings are determined, interleaved over arms: first trials, then
        seeds; so that an experiment stopped half-way is still balanced."""
        columns = [list(self._cells_of(arm)) for arm in self.arms]
        if self.spec.controls.base:
            columns.insert(0, [Cell(BASE, "seed", seed, 0.0) for seed in self.spec.seeds])
        if self.imitated:
            columns.append(list(self._seeds_of(PLACEBO, self.imitated)))
        order = {"trial": 0, "seed": 1}
        ranked = [
            (order[cell.kind], index, column, cell)
            for column, cells in enumerate(columns)
            for index, cell in enumerate(cells)
        ]
        return [cell for *_, cell in sorted(ranked, key=lambda item: item[:3])]

    def _cells_of(self, arm: str) -> Iterator[Cell]:
        trials = self.trials(arm)
        if trials is not None:
            assert self.spec.tuning is not None
            for number, settings in enumerate(trials.settings):
                for seed in self.spec.tuning.seeds:
                    yield self._trial(arm, number, seed, settings)
        yield from self._seeds_of(arm, arm)

    def _seeds_of(self, arm: str, like: str) -> Iterator[Cell]:
        trials = self.trials(like)
        if trials is not None and not trials.complete:
            return
        by_hand = self.spec.settings.get(self.named[like], {})
        settings = tuple(trials.chosen.items()) if trials else tuple(by_hand.items())
        for seed in self.spec.seeds:
            yield Cell(arm, "seed", seed, self.spec.budget.limit, settings)

    def expected(self) -> list[tuple[str, str]]:
        """Every cell there will be, by arm and name, settled or not."""
        names: list[tuple[str, str]] = []
        plan = self.spec.tuning
        for arm in self.arms:
            if plan is not None:
                for number in range(plan.trials):
                    names += [(arm, self._trial(arm, number, s, {}).name) for s in plan.seeds]
        controls = [BASE] if self.spec.controls.base else []
        controls += [PLACEBO] if self.spec.controls.placebo else []
        for arm in (*controls, *self.arms):
            names += [(arm, Cell(arm, "seed", seed, 0.0).name) for seed in self.spec.seeds]
        return names

    def write_tuning(self, arm: str) -> None:
        """``tuning/<arm>.json``: every trial with its score, and the choice."""
        trials = self.trials(arm)
        if trials is None or not trials.complete:
            return
        best = choose(trials.scores)
        write_json(
            self.context.results / "tuning" / f"{arm}.json",
            {
                "select": f"validation/{self.spec.tuning.select}",  # type: ignore[union-attr]
                "chosen": best,
                "trials": [
                    {"trial": number, "settings": settings, "score": score}
                    for number, (settings, score) in enumerate(
                        zip(trials.settings, trials.scores, strict=True)
                    )
                ],
            },
        )

    def share_done(self, folder: CellFolder) -> float:
        """How much of its budget a cell has spent, from its last step; 0 before the first."""
        if folder.done:
            return 1.0
        line = last_line(folder)
        if line is None or not (folder.path / "run.json").exists():
            return 0.0
        budget = folder.json("run.json")["budget"]
        if budget is None or budget["unit"] not in line["spent"]:
            return 0.0
        return min(line["spent"][budget["unit"]] / budget["limit"], 1.0)


_UNKNOWN = object()
TAIL = 1 << 16


def last_line(folder: CellFolder) -> dict[str, Any] | None:
    """The last whole line of ``steps.jsonl``, read from its end."""
    path = folder.path / "steps.jsonl"
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - TAIL))
        lines = file.read().split(b"\n")[:-1]
    try:
        return json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
