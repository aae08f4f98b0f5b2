"""Equal tuning, judged on validation, and its winner retrained."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from harness.certificate.compare import MEAN_TOLERANCE, close, equal, look_up
from harness.certificate.design import Design
from harness.certificate.evidence import BASE, PLACEBO, Cell, Evidence
from harness.certificate.finding import MISSING, Violation, violation
from harness.certificate.records import Evaluation
from harness.identity import stream_seed
from harness.knobs import first_value
from harness.spec.schema import TuningSpec

Trials = dict[int, list[Cell]]
# A power of a ratio: the last digits depend on the machine's libm.
DRAW_TOLERANCE = 1e-12


def check_tuning(evidence: Evidence, design: Design) -> Iterator[Violation]:
    """The final seeds run the trial that validation judged best, at equal effort for all arms."""
    tuning = design.spec.tuning
    if tuning is None:
        return
    trials: dict[str, Trials] = defaultdict(lambda: defaultdict(list))
    for cell in evidence.cells:
        if cell.trial is not None and cell.arm in design.lock.arms:
            trials[cell.arm][cell.trial].append(cell)
            yield from _judged(cell, tuning)
    for arm, of_arm in sorted(trials.items()):
        yield from _defaults(of_arm.get(0, []), design)
        yield from _dimensions(arm, of_arm, design)
        yield from _one_setting(of_arm)
        yield from _winner(arm, of_arm, evidence, tuning)
    if tuning.sampler == "paired":
        yield from _paired(trials, design)
        for cell in evidence.cells:
            if cell.arm in design.lock.arms:
                yield from _drawn(cell, tuning, design)


def metric(line: Evaluation, select: str) -> float | None:
    """Avg@n or greedy accuracy of one evaluation; None where it cannot be computed.

    Summed in the order of the problems, as the selection does it: equal scores are then equal
    floats, and the tie goes to the same trial.
    """
    values: list[float] = []
    for problem in line.problems:
        if select == "greedy":
            if problem.greedy is None:
                return None
            values.append(float(problem.greedy))
        elif problem.n == 0:
            return None
        else:
            values.append(problem.correct / problem.n)
    return sum(values) / len(values)


def _validation(cell: Cell) -> Evaluation | None:
    lines = [e for e in cell.evals or () if e.split == "validation" and e.purpose == "tuning"]
    return lines[0] if len(lines) == 1 else None


def _judged(cell: Cell, tuning: TuningSpec) -> Iterator[Violation]:
    """A trial is judged once, on validation, by the metric the spec names."""
    if cell.diverged is not None or cell.evals is None or cell.done is None:
        return
    for number, line in enumerate(cell.evals, 1):
        for key, expected in (("split", "validation"), ("purpose", "tuning")):
            if getattr(line, key) != expected:
                yield violation(
                    "tuning", cell.id, f"evals.jsonl line {number}: {key}", expected,
                    getattr(line, key), "a trial may look at validation alone",
                )  # fmt: skip
    chosen, line = cell.done.selected_metric, _validation(cell)
    value = None if line is None else metric(line, tuning.select)
    if chosen is None or value is None:
        yield violation(
            MISSING, cell.id, "done.json: selected_metric", tuning.select,
            None if chosen is None else chosen.value,
            "the trial's score, or the one evaluation it follows from, is not there",
        )  # fmt: skip
        return
    if chosen.name != tuning.select:
        yield violation(
            "tuning", cell.id, "done.json: selected_metric.name", tuning.select, chosen.name,
            "the trial was judged by another metric",
        )  # fmt: skip
    if not close(chosen.value, value, MEAN_TOLERANCE, MEAN_TOLERANCE):
        yield violation(
            "tuning", cell.id, "done.json: selected_metric.value", value, chosen.value,
            "the score is not that of the stored evaluation",
        )  # fmt: skip


def _defaults(cells: list[Cell], design: Design) -> Iterator[Violation]:
    for cell in cells:
        spaces = design.spaces(cell.arm) if cell.arm in design.lock.arms else {}
        for path, value in (cell.run.settings if cell.run else {}).items():
            tree: Any = design.controls if path in design.shared else design.locked_parts(cell)
            default = look_up(tree, path)
            if path in spaces:
                default = first_value(default, spaces[path].range())
            if not equal(default, value):
                yield violation(
                    "tuning", cell.id, f"run.json: settings.{path}", default, value,
                    "trial 0 is the arm's own defaults",
                )  # fmt: skip


def _dimensions(arm: str, trials: Trials, design: Design) -> Iterator[Violation]:
    """Every trial sets the same knobs, the shared ones among them."""
    knobs = design.lock.arms[arm].knobs
    expected = None if knobs is None else set(knobs) | set(design.spaces(arm))
    for trial in sorted(trials):
        for cell in trials[trial]:
            if cell.run is None:
                continue
            found = set(cell.run.settings)
            expected = expected if expected is not None else found | design.shared
            if found != expected:
                yield violation(
                    "tuning", cell.id, "run.json: settings", sorted(expected), sorted(found),
                    "the trials of an arm do not set the same knobs, and all of them",
                )  # fmt: skip


def _one_setting(trials: Trials) -> Iterator[Violation]:
    for cells in trials.values():
        runs = [(cell, cell.run.settings) for cell in cells if cell.run is not None]
        for cell, found in runs[1:]:
            if not equal(runs[0][1], found):
                yield violation(
                    "tuning", (runs[0][0].id, cell.id), "run.json: settings", runs[0][1], found,
                    "one trial has different settings on its tuning seeds",
                )  # fmt: skip


def _paired(trials: dict[str, Trials], design: Design) -> Iterator[Violation]:
    """Trial k of every arm tries the same values of the shared controls."""
    first: dict[tuple[int, str], tuple[Cell, Any]] = {}
    for of_arm in trials.values():
        for trial, cells in of_arm.items():
            for cell in cells:
                for path in sorted(design.shared) if cell.run else ():
                    assert cell.run is not None
                    value = cell.run.settings.get(path, look_up(design.controls, path))
                    other, expected = first.setdefault((trial, path), (cell, value))
                    if not equal(expected, value):
                        yield violation(
                            "tuning", (other.id, cell.id), f"run.json: settings.{path}",
                            expected, value, f"trial {trial} of two arms is not paired",
                        )  # fmt: skip


def paired_quantile(seed: int, path: str, trial: int, trials: int) -> float:
    """Where in its range trial 1, 2, … draws a setting: by its name, for every arm alike.

    A Latin hypercube: the range in as many slices as drawn trials, one draw from each.
    """
    slices = max(trials - 1, 1)
    generator = np.random.default_rng(stream_seed(seed, "tuning", path))
    order, jitter = generator.permutation(slices), generator.random(slices)
    index = (trial - 1) % slices
    return float((order[index] + jitter[index]) / slices)


def _drawn(cell: Cell, tuning: TuningSpec, design: Design) -> Iterator[Violation]:
    """The settings are the sampler's draws, not somebody's choice."""
    if not cell.trial or cell.run is None:
        return
    spaces = design.spaces(cell.arm)
    for path, value in cell.run.settings.items():
        if path not in spaces:
            continue
        quantile = paired_quantile(tuning.sampler_seed, path, cell.trial, tuning.trials)
        expected = spaces[path].range().at(quantile)
        numbers = isinstance(expected, float) and isinstance(value, (int, float))
        if not (close(expected, float(value), DRAW_TOLERANCE) if numbers  # type: ignore[arg-type]
                else equal(expected, value)):  # fmt: skip
            yield violation(
                "tuning", cell.id, f"run.json: settings.{path}", expected, value,
                f"the setting is not what the sampler draws for trial {cell.trial}",
            )  # fmt: skip


def best_trial(trials: Trials, tuning: TuningSpec) -> int | None:
    """The trial with the best validation score over its seeds, the earliest of equals.

    A trial that diverged on a seed is worse than any score; None where a score is not known.
    """
    scores: dict[int, float] = {}
    for trial in range(tuning.trials):
        cells = trials.get(trial, [])
        if len(cells) != len(tuning.seeds):
            return None
        if any(cell.diverged is not None for cell in cells):
            scores[trial] = -math.inf
            continue
        lines = [_validation(cell) for cell in cells]
        values = [None if line is None else metric(line, tuning.select) for line in lines]
        known = [value for value in values if value is not None]
        if len(known) != len(cells):
            return None
        scores[trial] = sum(known) / len(known)
    return max(scores, key=lambda trial: (scores[trial], -trial))


def _winner(
    arm: str, trials: Trials, evidence: Evidence, tuning: TuningSpec
) -> Iterator[Violation]:
    final = [c for c in evidence.cells if c.arm == arm and c.trial is None and c.run is not None]
    best = best_trial(trials, tuning)
    winner = next((c for c in trials.get(best, []) if c.run), None) if best is not None else None
    if winner is None or winner.run is None:
        yield violation(
            MISSING, [c.id for c in final], "run.json: settings", "a best trial", None,
            f"the trials of {arm} cannot be compared, so no setting can be shown to be chosen",
        )  # fmt: skip
        return
    for cell in final:
        assert cell.run is not None
        if not equal(winner.run.settings, cell.run.settings):
            yield violation(
                "tuning", cell.id, "run.json: settings", winner.run.settings, cell.run.settings,
                f"the settings are not those of the best trial on validation, {winner.name}",
            )  # fmt: skip


def check_controls(evidence: Evidence, design: Design) -> Iterator[Violation]:
    """``base`` spent nothing, and ``placebo`` is its arm but for what a verdict is."""
    of_arm = {(c.arm, c.seed): c for c in evidence.cells if c.trial is None}
    for cell in evidence.cells:
        if cell.arm == BASE:
            yield from _base(cell)
        if cell.arm != PLACEBO or cell.run is None:
            continue
        model = of_arm.get((design.arm_of(cell), cell.seed))
        if model is None or model.run is None:
            yield violation(
                MISSING, cell.id, "run.json", "the arm it imitates", design.placebo_arm,
                "there is no readable cell of the arm and seed that the placebo imitates",
            )  # fmt: skip
            continue
        for key in ("parts", "settings"):
            expected, found = getattr(model.run, key), getattr(cell.run, key)
            if not equal(expected, found):
                yield violation(
                    "controls", (model.id, cell.id), f"run.json: {key}", expected, found,
                    "the placebo is not its arm",
                )  # fmt: skip


def _base(cell: Cell) -> Iterator[Violation]:
    if cell.raw_steps:
        yield violation(
            "controls", cell.id, "steps.jsonl", "no steps", len(cell.raw_steps),
            "the base was trained",
        )  # fmt: skip
    spents = [("done.json", cell.done.spent)] if cell.done else []
    spents += [(f"evals.jsonl line {n}", e.spent) for n, e in enumerate(cell.evals or (), 1)]
    for where, spent in spents:
        for key, value in spent.model_dump().items():
            if value:
                yield violation(
                    "controls", cell.id, f"{where}: spent.{key}", 0, value,
                    "the base spends nothing",
                )  # fmt: skip
    if cell.run is not None and cell.run.settings:
        yield violation(
            "controls", cell.id, "run.json: settings", {}, cell.run.settings,
            "the base has nothing to set",
        )  # fmt: skip
