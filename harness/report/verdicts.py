"""The verdicts on the declared comparisons, and what keeps one from being claimed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.errors import counted
from harness.report.load import Experiment
from harness.report.scores import Metric, TestScores
from harness.report.tables import fixed, interval, number
from harness.spec.verdict import NAMED
from harness.stats.bootstrap import Floats
from harness.stats.effects import NO_SPREAD, crossed_half_width
from harness.stats.power import seeds_for, superiority_power, tost_power
from harness.stats.verdict import Label, Verdict, judge_family

MIN_SEEDS = 5  # with fewer nothing is claimed, whatever the p-value
DEFAULT = {"margin": 0.02}  # where none was declared; whatever follows from it is exploratory
EVERY_TEST = "all"
IN_ADVANCE = "declared in advance"
NOT_DECLARED = "exploratory: no margin was declared in advance"


@dataclass(frozen=True)
class Terms:
    """What is asked, by which arms' own names, and since when.

    Attributes:
        tests: the test sets' names; all where empty.
        margin: the smallest difference that matters, as a share.
        power: what the design must reach.
        pairs: (arm, control): the difference is the first less the second.
        seeds: those that the declaration counts on.
        status: ``IN_ADVANCE``, or why it is exploratory.
    """

    metric: Metric
    tests: tuple[str, ...]
    margin: float
    alpha: float
    power: float
    pairs: tuple[tuple[str, str], ...]
    seeds: tuple[int, ...]
    status: str

    @property
    def in_advance(self) -> bool:
        return self.status == IN_ADVANCE


@dataclass(frozen=True)
class Judged:
    """A comparison's verdict.

    Attributes:
        found: by the seeds, on this test set's problems, adjusted for the family.
        wide, wide_tost: intervals at 1 - alpha and 1 - 2 alpha over seeds and problems.
        power_difference, power_equivalence: of this design, at the spread that was seen and at the
            strictest of Holm's levels: to show a difference as large as the margin, and to show
            equivalence where there is no difference. None where no spread was seen.
        seeds_difference, seeds_equivalence: how many would reach the wanted power.
        withheld: why a label that the p-values give is not claimed; empty where it is.
    """

    terms: Terms
    test: str
    arm: str
    control: str
    found: Verdict
    problems: int
    wide: tuple[float, float]
    wide_tost: tuple[float, float]
    power_difference: float | None
    power_equivalence: float | None
    seeds_difference: int | None
    seeds_equivalence: int | None
    withheld: tuple[str, ...]

    @property
    def label(self) -> Label:
        """The verdict that may be claimed."""
        return "inconclusive" if self.withheld else self.found.label

    @property
    def name(self) -> str:
        return f"{self.arm} − {self.control}"


def all_terms(experiment: Experiment) -> list[Terms]:
    """What was declared in advance, and, where it was amended since or never was, what counts now.

    The second is exploratory. What was promised is always answered, whatever came after it.
    """
    declared, now = experiment.declared.get("verdict"), experiment.spec.get("verdict")
    found = []
    if declared:
        found.append(_terms(experiment, experiment.declared, declared, IN_ADVANCE))
    touching = [
        (amendment["number"], path)
        for amendment in experiment.amendments
        for path in amendment["changes"]
        if path.partition(".")[0] in ("verdict", "seeds", "arms", "baseline")
    ]
    if touching and now:
        what = ", ".join(f"{path} (amendment {number})" for number, path in touching)
        status = f"exploratory: changed after cells had run: {what}"
        found.append(_terms(experiment, experiment.spec, now, status))
    if not found:
        found.append(_terms(experiment, experiment.spec, now or DEFAULT, NOT_DECLARED))
    return found


def _terms(
    experiment: Experiment, spec: Mapping[str, Any], verdict: Mapping[str, Any], status: str
) -> Terms:
    named: dict[str, str] = dict(zip(experiment.spec["arms"], experiment.arms, strict=False))
    # Of a long ladder without a declaration its ends, and not all of the arms between.
    arms = experiment.drawn if status == NOT_DECLARED else None
    return terms_of(spec, verdict, status, named, arms)


def terms_of(
    spec: Mapping[str, Any],
    verdict: Mapping[str, Any],
    status: str = IN_ADVANCE,
    named: Mapping[str, str] | None = None,
    among: Sequence[str] | None = None,
) -> Terms:
    """A spec's verdict with its family spelt out.

    Args:
        named: an arm as the spec writes it -> its own name; as written where it is not there.
        among: the arms that the baseline may be compared with; all where None.
    """

    def own(arm: str) -> str:
        return (named or {}).get(arm, arm)

    arms = [own(arm) for arm in spec["arms"] if among is None or own(arm) in among]
    baseline, family = own(spec.get("baseline") or spec["arms"][0]), verdict.get("family", NAMED)
    pairs = (
        [(arm, baseline) for arm in arms if arm != baseline]
        if family == NAMED
        else [(own(a), own(b)) for a, b in family]
    )
    kind, _, k = verdict.get("metric", "avg").partition("@")
    test = verdict.get("test", EVERY_TEST)
    return Terms(
        metric=Metric(kind, int(k) if k else None),
        tests=() if test == EVERY_TEST else (test,),
        margin=verdict["margin"],
        alpha=verdict.get("alpha", 0.05),
        power=verdict.get("power", 0.8),
        pairs=tuple(pairs),
        seeds=tuple(spec["seeds"]),
        status=status,
    )


def judged(experiment: Experiment, scores: Sequence[TestScores], terms: Terms) -> list[Judged]:
    """Every comparison of the declared family, over all its test sets; adjusted together.

    A comparison without a finished seed counts in the family, and is left out of what is returned.
    """
    gaps: dict[tuple[str, str, str], Floats | None] = {}
    for test in scores:
        if terms.tests and test.name not in terms.tests:
            continue
        for arm, control in terms.pairs:
            gaps[test.name, arm, control] = paired_gaps(test, arm, control, terms)
    if not any(gap is not None for gap in gaps.values()):
        return []
    family = judge_family(
        {"/".join(key): np.zeros(1) if g is None else g.mean(axis=1) for key, g in gaps.items()},
        terms.margin,
        terms.alpha,
    )
    return [
        _judged(terms, key, gap, family["/".join(key)])
        for key, gap in gaps.items()
        if gap is not None
    ]


def paired_gaps(
    test: TestScores, arm: str, control: str, terms: Terms, metric: Metric | None = None
) -> Floats | None:
    """(seeds x problems) differences over the declared seeds that both arms finished.

    By the declared metric, or another.
    """
    ours, theirs, metric = test.arms.get(arm), test.arms.get(control), metric or terms.metric
    if ours is None or theirs is None or metric not in test.metrics:
        return None
    place = test.metrics.index(metric)
    shared = [s for s in terms.seeds if s in ours.seeds and s in theirs.seeds]
    if not shared:
        return None
    mine = ours.values[place, [ours.seeds.index(s) for s in shared]]
    return mine - theirs.values[place, [theirs.seeds.index(s) for s in shared]]


def _judged(terms: Terms, key: tuple[str, str, str], gaps: Floats, found: Verdict) -> Judged:
    by_seed, level = gaps.mean(axis=1), terms.alpha / found.family
    wide, wide_tost = (_wide(gaps, tail) for tail in (terms.alpha, 2 * terms.alpha))
    powers: tuple[float | None, float | None] = (None, None)
    needed: tuple[int | None, int | None] = (None, None)
    if len(by_seed) > 1 and np.ptp(by_seed) >= NO_SPREAD:
        sd, n = float(by_seed.std(ddof=1)), len(by_seed)
        powers = (
            superiority_power(n, sd, terms.margin, level),
            tost_power(n, sd, terms.margin, alpha=level),
        )
        needed = (
            seeds_for(sd, effect=terms.margin, power=terms.power, alpha=level),
            seeds_for(sd, margin=terms.margin, power=terms.power, alpha=level),
        )
    test, arm, control = key
    return Judged(
        terms, test, arm, control, found, gaps.shape[1], wide, wide_tost, *powers, *needed,
        tuple(_reasons(terms, found, wide, wide_tost, powers[0])),
    )  # fmt: skip


def _wide(gaps: Floats, tail: float) -> tuple[float, float]:
    """The interval at 1 - tail over seeds and problems; boundless where there is one of each."""
    if gaps.size == 1:
        return -math.inf, math.inf
    mean, half = float(gaps.mean()), float(crossed_half_width(gaps[None], 1 - tail)[0])
    return mean - half, mean + half


def _reasons(
    terms: Terms,
    found: Verdict,
    wide: tuple[float, float],
    wide_tost: tuple[float, float],
    power: float | None,
) -> list[str]:
    """Why the label that the p-values give is not claimed."""
    if found.label == "inconclusive":
        return []
    reasons = []
    if found.seeds < MIN_SEEDS:
        reasons.append(f"{counted(found.seeds, 'seed')}, fewer than {MIN_SEEDS}")
    if found.seeds < len(terms.seeds):
        reasons.append(f"{len(terms.seeds) - found.seeds} of {len(terms.seeds)} seeds are missing")
    if found.label == "equivalent":
        if not -terms.margin < wide_tost[0] <= wide_tost[1] < terms.margin:
            reasons.append(
                "few problems: on others like these it may be larger, "
                f"{interval(*wide_tost, sign=True)}"
            )
        return reasons
    if wide[0] <= 0 <= wide[1]:
        reasons.append(
            f"few problems: on others like these it may be 0, {interval(*wide, sign=True)}"
        )
    # A difference that lies wholly beyond the margin needs no power to see one as small as it.
    if not found.beyond_margin and power is not None and power < terms.power:
        reasons.append(f"power {fixed(power, 2)} to see the margin, wanted {number(terms.power)}")
    return reasons
