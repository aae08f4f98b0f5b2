"""Whether a design can show what its verdict asks, from a pilot or an assumed spread.

Nothing is promised that the numbers do not carry: without a pilot and without an assumed spread the
power is unknown, and that is what is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import InputError, counted, suggest
from harness.report.load import Cell, Experiment, load_experiment
from harness.report.scores import AVG, Metric, TestScores, final_scores
from harness.report.table_verdict import points
from harness.report.tables import fixed, number
from harness.report.verdicts import MIN_SEEDS, paired_gaps, terms_of
from harness.spec.schema import ExperimentSpec
from harness.stats.power import (
    Noise,
    noise_from,
    power_of,
    problems_for,
    seeds_for,
    superiority_power,
    tost_power,
)

MOST_PROBLEMS = 100_000  # where the search for enough problems gives up


@dataclass(frozen=True)
class ComparisonPower:
    """What a design can show of one comparison.

    Attributes:
        sd: of a seed's mean difference on the design's problems and samples.
        basis: where ``sd`` is from.
        difference, equivalence: chance to show a difference as large as the margin, and to
            show equivalence where there is none, on these problems.
        difference_beyond, equivalence_beyond: the same for problems like these; None where only a
            spread over seeds is assumed.
        seeds_difference, seeds_equivalence: fewest seeds for the wanted power, on these problems.
        problems_difference, problems_equivalence: fewest problems with which the declared seeds
            show it for problems like these; None where no number does, or it is not known.
    """

    test: str
    arm: str
    control: str
    basis: str
    sd: float
    seeds: int
    problems: int
    difference: float
    equivalence: float
    difference_beyond: float | None
    equivalence_beyond: float | None
    seeds_difference: int | None
    seeds_equivalence: int | None
    problems_difference: int | None
    problems_equivalence: int | None


@dataclass(frozen=True)
class DesignPower:
    """What the declared design can show.

    Attributes:
        refusals: sentences; empty where all that is declared can be shown with the wanted power.
    """

    margin: float | None
    wanted: float | None
    alpha_each: float | None
    comparisons: tuple[ComparisonPower, ...]
    refusals: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def design_power(
    spec: ExperimentSpec, problems: Mapping[str, int], pilot: Path | None
) -> DesignPower:
    """The power of a spec's design.

    Args:
        problems: how many each test set has.
        pilot: a results folder with finished seeds, or tuning trials, of the arms compared.

    Raises:
        InputError: a pilot that tells nothing about these arms.
    """
    verdict = spec.verdict
    if verdict is None:
        why = "no verdict is declared, so no difference can be promised: add verdict: {margin: ...}"
        return DesignPower(None, None, None, (), (why,))
    pairs = terms_of(spec.model_dump(mode="json"), verdict.model_dump(mode="json")).pairs
    tests = [t for t in problems if verdict.test in ("all", t)]
    level = verdict.alpha / max(1, len(pairs) * len(tests))
    found: list[ComparisonPower] = []
    notes: list[str] = []
    experiment = load_experiment(pilot) if pilot else None
    for test in tests:
        for arm, control in pairs:
            noise, basis = _noise(spec, experiment, test, arm, control)
            if noise is not None:
                found.append(_power(spec, noise, basis, level, test, arm, control, problems[test]))
    if experiment is not None and not found:
        raise InputError(
            f"{experiment.path}: a pilot needs two finished seeds, or tuning trials, of the arms "
            f"compared ({', '.join(' − '.join(p) for p in pairs)}); it has "
            f"{', '.join(experiment.arms)}.{suggest(pairs[0][0], experiment.arms) if pairs else ''}"
        )
    if any("trials" in one.basis for one in found):
        notes.append(
            "trials differ in their settings, so their spread is wider than that of seeds: the "
            "figures err to the safe side, by much where a setting was bad"
        )
    pilots = [one for one in found if one.basis != ASSUMED]
    if pilots and len(experiment.seeds if experiment else ()) < 10:
        notes.append(
            "a spread from few seeds is uncertain: from 5 the true one may be 0.6 to 2.9 times as "
            "large"
        )
    refusals = tuple(_refusals(spec, found, len(pairs) * len(tests)))
    return DesignPower(verdict.margin, verdict.power, level, tuple(found), refusals, tuple(notes))


ASSUMED = "assumed (verdict.assumed_sd)"


def _noise(
    spec: ExperimentSpec, pilot: Experiment | None, test: str, arm: str, control: str
) -> tuple[Noise | None, str]:
    """Components of a difference's spread, and where they are from."""
    verdict = spec.verdict
    assert verdict is not None
    if pilot is None:
        if verdict.assumed_sd is None:
            return None, ""
        return Noise(seed=verdict.assumed_sd, interaction=0.0, within=0.0), ASSUMED
    terms = terms_of(pilot.spec, verdict.model_dump(mode="json"))
    scores = next((t for t in final_scores(pilot) if t.name == test), None)
    if scores is not None:
        gaps = paired_gaps(scores, arm, control, terms)
        if gaps is not None and len(gaps) > 1:
            within = _within(scores, arm, terms.metric) + _within(scores, control, terms.metric)
            noise = noise_from(gaps, within, scores.samples)
            return noise, f"{counted(len(gaps), 'seed')} of {pilot.path.name}"
    return _noise_of_trials(pilot, arm, control)


def _within(scores: TestScores, arm: str, metric: Metric) -> float:
    """Variance that one sample of the arm leaves, over its cells; 0 for all but Avg."""
    if metric != AVG:
        return 0.0  # not linear in the samples: their noise stays in the interaction
    share = scores.arms[arm].values[scores.metrics.index(AVG)]
    n = scores.samples
    return float((share * (1 - share)).mean() * n / max(1, n - 1))


def _noise_of_trials(pilot: Experiment, arm: str, control: str) -> tuple[Noise | None, str]:
    """From the tuning trials of both arms, paired by number: an upper bound."""
    trials = {name: _trials(pilot, name) for name in (arm, control)}
    shared = sorted(trials[arm].keys() & trials[control].keys())
    if len(shared) < 2:
        return None, ""
    ids = list(trials[arm][shared[0]])
    rows = [[trials[arm][key][i][0] - trials[control][key][i][0] for i in ids] for key in shared]
    samples = min(trials[arm][key][i][1] for key in shared for i in ids)
    shares = [trials[name][key][i][0] for name in (arm, control) for key in shared for i in ids]
    within = 2 * float(np.mean([s * (1 - s) for s in shares])) * samples / max(1, samples - 1)
    basis = f"{counted(len(shared), 'trial')} of {pilot.path.name}, on validation"
    return noise_from(np.array(rows), within, samples), basis.replace("1 trial ", "1 trials ")


def _trials(pilot: Experiment, arm: str) -> dict[tuple[int, int], dict[str, tuple[float, int]]]:
    found = {}
    for cell in pilot.trial_cells(arm):
        line = _validation(cell)
        if line is not None and cell.trial is not None and cell.seed is not None:
            found[cell.trial, cell.seed] = {
                p["id"]: (p["correct"] / p["n"], p["n"]) for p in line["problems"]
            }
    return found


def _validation(cell: Cell) -> Mapping[str, Any] | None:
    lines = [e for e in cell.evals if e["split"] == "validation"]
    return lines[-1] if lines else None


def _power(
    spec: ExperimentSpec,
    noise: Noise,
    basis: str,
    level: float,
    test: str,
    arm: str,
    control: str,
    problems: int,
) -> ComparisonPower:
    verdict, seeds, samples = spec.verdict, len(spec.seeds), spec.evaluation.samples
    assert verdict is not None
    margin, sd = verdict.margin, noise.sd(problems, samples)
    asked: tuple[dict[str, Any], ...] = ({"effect": margin}, {"margin": margin})
    wanted = {"power": verdict.power, "alpha": level}
    here = [0.0, 0.0]
    beyond: list[float | None] = [None, None]
    more: list[int | None] = [None, None]
    if seeds > 1:
        here = [superiority_power(seeds, sd, margin, level) if sd else 1.0,
                tost_power(seeds, sd, margin, alpha=level) if sd else 1.0]  # fmt: skip
        if basis != ASSUMED:
            beyond = [
                power_of(noise, seeds, problems, samples, random=True, alpha=level, **claim)
                for claim in asked
            ]
            more = [
                problems_for(noise, seeds, samples, random=True, most=MOST_PROBLEMS, **wanted,
                             **claim)
                for claim in asked
            ]  # fmt: skip
    needed = [seeds_for(sd, **wanted, **claim) if sd else 2 for claim in asked]
    return ComparisonPower(
        test, arm, control, basis, sd, seeds, problems, here[0], here[1], beyond[0], beyond[1],
        needed[0], needed[1], more[0], more[1],
    )  # fmt: skip


def _refusals(
    spec: ExperimentSpec, found: list[ComparisonPower], comparisons: int
) -> Iterator[str]:
    """What the design cannot be said to show, and what would mend it."""
    verdict = spec.verdict
    assert verdict is not None
    margin = points(verdict.margin)
    if len(spec.seeds) < MIN_SEEDS:
        yield (
            f"{counted(len(spec.seeds), 'seed')}: the report claims nothing with fewer than "
            f"{MIN_SEEDS}"
        )
    if len(found) < comparisons:
        missing = comparisons - len(found)
        yield (
            f"the spread of {counted(missing, 'comparison')} is not known, and nothing is "
            "promised: give --pilot RESULTS with finished seeds or tuning trials, or set "
            "verdict.assumed_sd"
        )
    for one in found:
        for what, here, beyond, seeds, problems in (
            (f"a difference of {margin}", one.difference, one.difference_beyond,
             one.seeds_difference, one.problems_difference),
            (f"equivalence within {margin}", one.equivalence, one.equivalence_beyond,
             one.seeds_equivalence, one.problems_equivalence),
        ):  # fmt: skip
            name = f"{one.arm} − {one.control} on {one.test}"
            if here < verdict.power:
                mend = f"it takes {counted(seeds, 'seed')}" if seeds else "no number of seeds will"
                yield (
                    f"{name}: {counted(one.seeds, 'seed')} cannot be counted on to show {what} "
                    f"(power {fixed(here, 2)}, wanted {number(verdict.power)}); {mend}"
                )
            elif beyond is not None and beyond < verdict.power:
                mend = (
                    f"it takes {counted(problems, 'problem')}"
                    if problems
                    else "it takes more seeds"
                )
                yield (
                    f"{name}: {counted(one.problems, 'problem')} cannot be counted on to show "
                    f"{what} beyond themselves (power {fixed(beyond, 2)}); {mend}"
                )
