"""Reward against KL, from stored evaluations: every arm's points, and what is read off them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.report.load import Cell, Experiment
from harness.report.scores import curve, final_line
from harness.stats.best_of_n import BestOfN, best_of_n
from harness.stats.effects import t_interval
from harness.stats.frontier import Interval, Point, equal_numbers

BEST_OF = "best_of_n"
FRONTIER = ("frontier_", "envelope_", "gao_")  # how the names of its tables and figures begin
CONTROLS = ("base", "placebo")
LARGEST = 12  # best of n for n below 2 to this power


@dataclass(frozen=True)
class Reference:
    """Best of n of the base: pooled, and each reward's interval over evaluations of the base."""

    pooled: BestOfN
    gold: Interval
    proxy: Interval

    @property
    def d(self) -> float:
        """The square root of its KL by ranks."""
        return max(self.pooled.sampled_kl, 0.0) ** 0.5


@dataclass(frozen=True)
class Frontier:
    """Every arm's points on one test set, over all cases.

    Attributes:
        test: the test set.
        arms: arm -> its points, equal in number.
        dropped: arm -> points left out to make the numbers equal.
        repeated: arm -> runs left out because another case has the very same.
        base_gold, base_proxy: mean rewards of the untrained base.
        gold_sd, proxy_sd: standard deviations of its single samples.
        reference: best-of-n from the base's own samples, by rising n.
    """

    test: str
    arms: Mapping[str, Sequence[Point]]
    dropped: Mapping[str, int]
    repeated: Mapping[str, int]
    base_gold: float
    base_proxy: float
    gold_sd: float
    proxy_sd: float
    reference: Sequence[Reference]

    @property
    def limit(self) -> float:
        """The KL that every arm reached: areas end there, so that none is extrapolated."""
        return min(max(p.kl for p in points) for points in self.arms.values())


def frontiers(cases: Sequence[tuple[str, Experiment]]) -> list[Frontier]:
    """The frontier of each test set, where evaluations hold both rewards.

    None of a test set for which cases differ in model, reward model or problems: their rewards are
    not on one scale.

    Args:
        cases: name and experiment of each strength of the penalty; one for a plain experiment.
    """
    tests = dict.fromkeys(name for _, e in cases for name in e.spec["data"]["test"])
    return [
        found
        for test in tests
        if len({_scale(experiment, test) for _, experiment in cases}) == 1
        and (found := _frontier(cases, test)) is not None
    ]


def _scale(experiment: Experiment, test: str) -> str:
    """What both rewards and the KL are measured with; points of two scales are not pooled."""
    spec = experiment.spec
    learned = spec["reward"].get("learned")
    return json.dumps([spec["model"], learned, spec["data"]["test"].get(test)], sort_keys=True)


def _frontier(cases: Sequence[tuple[str, Experiment]], test: str) -> Frontier | None:
    runs: dict[str, list[list[Point]]] = {}
    repeated: dict[str, int] = {}
    base: list[Mapping[str, Any]] = []
    split = f"test.{test}"
    for case, experiment in cases:
        for arm in experiment.shown:
            for cell in experiment.seed_cells(arm):
                if arm == CONTROLS[0]:
                    line = final_line(cell, split) or final_line(cell, test)
                    base += [line] if line is not None and _scored(line) else []
                elif arm not in CONTROLS and (run := list(_points(case, cell, split))):
                    known = runs.setdefault(arm, [])
                    if any(_measured(run) == _measured(other) for other in known):
                        repeated[arm] = repeated.get(arm, 0) + 1
                    else:
                        known.append(run)
    if not runs or not base:
        return None
    points = {arm: [p for run in found for p in run] for arm, found in runs.items()}
    equal = equal_numbers(points)
    proxies, golds = _base_samples(base)
    every_gold, every_proxy = (
        np.concatenate([s for line in lines for s in line]) for lines in (golds, proxies)
    )
    return Frontier(
        test,
        equal,
        {arm: len(points[arm]) - len(equal[arm]) for arm in points},
        repeated,
        float(every_gold.mean()),
        float(every_proxy.mean()),
        float(every_gold.std(ddof=1)),
        float(every_proxy.std(ddof=1)),
        _references(proxies, golds),
    )


def _measured(run: Sequence[Point]) -> list[tuple[float, float, float]]:
    """What was measured of a run: two runs that agree in all of it are one, pooled twice."""
    return [(p.kl, p.proxy, p.gold) for p in run]


Samples = list[list[list[float]]]  # of each evaluation of the base, each problem's samples


def _base_samples(base: Sequence[Mapping[str, Any]]) -> tuple[Samples, Samples]:
    """Proxy and gold of the base's evaluations, each distinct one once."""
    found: list[tuple[list[list[float]], list[list[float]]]] = []
    for line in base:
        one = (
            [list(p["proxy"]) for p in line["problems"]],
            [list(p["gold"]) for p in line["problems"]],
        )
        if one not in found:
            found.append(one)
    return [proxy for proxy, _ in found], [gold for _, gold in found]


def _references(proxies: Samples, golds: Samples) -> list[Reference]:
    samples = min(len(problem) for line in proxies for problem in line)
    found = []
    for n in (2**k for k in range(LARGEST) if 2**k <= samples):
        each = [best_of_n(p, g, n) for p, g in zip(proxies, golds, strict=True)]
        pooled = best_of_n(
            [p for line in proxies for p in line], [g for line in golds for g in line], n
        )
        found.append(Reference(
            pooled,
            Interval(pooled.gold, *t_interval(np.array([b.gold for b in each]))),
            Interval(pooled.proxy, *t_interval(np.array([b.proxy for b in each]))),
        ))  # fmt: skip
    return found


def _scored(line: Mapping[str, Any]) -> bool:
    return bool(line.get("problems")) and line["problems"][0].get("gold") is not None


def _points(case: str, cell: Cell, split: str) -> Iterator[Point]:
    for line in curve(cell, split) or curve(cell, split.removeprefix("test.")):
        if not _scored(line) or line.get("kl_to_base") is None:
            continue
        means = {
            name: float(np.mean([np.mean(p[name]) for p in line["problems"]]))
            for name in ("proxy", "gold")
        }
        distance = line["kl_to_base"]
        yield Point(
            f"{case}/{cell.folder}", case, float(distance["mean"]), means["proxy"], means["gold"],
            distance.get("se"),
        )  # fmt: skip
