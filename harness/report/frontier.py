"""Reward against KL, from stored evaluations: every arm's points, and what is read off them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.report.load import Cell, Experiment
from harness.report.scores import curve, final_line
from harness.report.tables import Table, fixed, signed
from harness.stats.best_of_n import BestOfN, best_of_n
from harness.stats.frontier import (
    Interval,
    Point,
    band,
    equal_numbers,
    gold,
    hypervolume,
    proxy,
    reward_at,
)
from harness.stats.gao import GaoFit, fit

Show = Callable[[float | None, int], str]
BEST_OF = "best_of_n"
FRONTIER = ("frontier_", "envelope_", "gao_")  # how the names of its tables and figures begin
CONTROLS = ("base", "placebo")
DISTANCES = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)  # square roots of the KL at which arms are compared


@dataclass(frozen=True)
class Frontier:
    """Every arm's points on one test set, over all cases.

    Attributes:
        test: the test set.
        arms: arm -> its points, equal in number.
        dropped: arm -> points left out to make the numbers equal.
        base_gold, base_proxy: mean rewards of the untrained base.
        reference: best-of-n from the base's own samples, by rising n.
    """

    test: str
    arms: Mapping[str, Sequence[Point]]
    dropped: Mapping[str, int]
    base_gold: float
    base_proxy: float
    reference: Sequence[BestOfN]

    @property
    def limit(self) -> float:
        """The KL that every arm reached: areas end there, so that none is extrapolated."""
        return min(max(p.kl for p in points) for points in self.arms.values())


def frontiers(cases: Sequence[tuple[str, Experiment]]) -> list[Frontier]:
    """The frontier of each test set, where evaluations hold both rewards.

    Args:
        cases: name and experiment of each strength of the penalty; one for a plain experiment.
    """
    tests = dict.fromkeys(name for _, e in cases for name in e.spec["data"]["test"])
    return [found for test in tests if (found := _frontier(cases, test)) is not None]


def _frontier(cases: Sequence[tuple[str, Experiment]], test: str) -> Frontier | None:
    points: dict[str, list[Point]] = {}
    base: list[Mapping[str, Any]] = []
    split = f"test.{test}"
    for case, experiment in cases:
        for arm in experiment.shown:
            for cell in experiment.seed_cells(arm):
                if arm == CONTROLS[0]:
                    line = final_line(cell, split) or final_line(cell, test)
                    base += [line] if line is not None and _scored(line) else []
                elif arm not in CONTROLS:
                    points.setdefault(arm, []).extend(_points(case, cell, split))
    points = {arm: found for arm, found in points.items() if found}
    if not points or not base:
        return None
    equal = equal_numbers(points)
    proxies, golds = ([p[name] for line in base for p in line["problems"]]
                      for name in ("proxy", "gold"))  # fmt: skip
    samples = min(map(len, proxies))
    sizes = [n for k in range(12) if (n := 2**k) <= samples]
    return Frontier(
        test,
        equal,
        {arm: len(points[arm]) - len(equal[arm]) for arm in points},
        float(np.mean([np.mean(g) for g in golds])),
        float(np.mean([np.mean(p) for p in proxies])),
        [best_of_n(proxies, golds, n) for n in sizes],
    )


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


# -- tables ----------------------------------------------------------------------------------------


def frontier_tables(found: Sequence[Frontier]) -> list[Table]:
    """What each arm earns at a KL, the area below its frontier, and Gao's curve."""
    return [table for f in found for table in (_rewards(f), _areas(f), _gao(f))]


def _rewards(f: Frontier) -> Table:
    """Gold and proxy at fixed d, each with its interval over runs."""
    rows, records = [], []
    for arm, points in f.arms.items():
        for name, value in (("gold", gold), ("proxy", proxy)):
            row = [arm, name]
            for d in DISTANCES:
                one = band(points, lambda drawn, d=d, v=value: reward_at(drawn, d * d, v), 500)
                row.append(_shown(one))
                records.append({"arm": arm, "reward": name, "d": d, "kl": d * d, "mean": one.value,
                                "low": one.low, "high": one.high})  # fmt: skip
            rows.append(row)
    for name in ("gold", "proxy"):
        kls = [b.sampled_kl for b in f.reference]
        values = [getattr(b, name) for b in f.reference]
        row = [BEST_OF, name]
        for d in DISTANCES:
            inside = kls[0] <= d * d <= kls[-1]
            at = float(np.interp(d * d, kls, values)) if inside else None
            row.append(signed(at, 2) if at is not None else "–")
            records.append({"arm": BEST_OF, "reward": name, "d": d, "kl": d * d, "mean": at})
        rows.append(row)
    return Table(
        f"frontier_{f.test}",
        f"Reward at equal distance from the base, on {f.test}",
        "d is the square root of the sequence KL (sum of k1 over fresh samples, nats). Values of "
        "the least-squares rising fit of reward on KL over all checkpoints and strengths, with "
        "95 % intervals over runs within each strength; –: outside what the arm reached. "
        f"Base: gold {signed(f.base_gold, 2)}, proxy {signed(f.base_proxy, 2)}. {_numbers(f)}",
        ("arm", "reward", *(f"d = {d:g}" for d in DISTANCES)),
        rows,
        records=records,
        labels=2,
    )


def _numbers(f: Frontier) -> str:
    count = len(next(iter(f.arms.values())))
    left = {arm: n for arm, n in f.dropped.items() if n}
    more = "".join(f"; {n} of {arm} left out" for arm, n in left.items())
    return f"Each arm has {count} points{more}."


def _shown(one: Interval, digits: int = 2, show: Show = signed) -> str:
    if one.value is None:
        return "–"
    if one.low is None:
        return show(one.value, digits)
    return f"{show(one.value, digits)} [{show(one.low, digits)}, {show(one.high, digits)}]"


def _areas(f: Frontier) -> Table:
    rows, records = [], []
    limit = f.limit
    for arm, points in f.arms.items():
        area = band(points, lambda drawn: hypervolume(drawn, limit, f.base_gold) / limit, 500)
        top = max(points, key=gold)
        last = max(points, key=lambda p: p.kl)
        rows.append([arm, _shown(area), signed(top.gold, 2), fixed(top.kl, 1),
                     signed(last.gold, 2), signed(last.proxy, 2), fixed(last.kl, 1)])  # fmt: skip
        records.append({"arm": arm, "area": area.value, "low": area.low, "high": area.high,
                        "limit": limit, "best_gold": top.gold, "best_gold_kl": top.kl,
                        "farthest_gold": last.gold, "farthest_proxy": last.proxy,
                        "farthest_kl": last.kl})  # fmt: skip
    return Table(
        f"frontier_area_{f.test}",
        f"What the frontier of each arm encloses, on {f.test}",
        f"Area: mean over KL budgets from 0 to {limit:.2f} nats, which every arm reached, of the "
        "best gold reward within the budget, less the base's; 95 % interval over runs. The best "
        "checkpoint is chosen on the test set by its gold reward and is optimistic; the farthest "
        "is the one with the largest KL.",
        ("arm", "area", "best gold (optimistic)", "its KL", "gold farthest out",
         "proxy farthest out", "its KL "),
        rows,
        records=records,
    )  # fmt: skip


def gao_fit(f: Frontier, points: Sequence[Point]) -> GaoFit | None:
    """The curve of reinforcement learning through an arm's gold rewards."""
    return fit("rl", [p.d for p in points], [p.gold for p in points], f.base_gold)


def _gao(f: Frontier) -> Table:
    rows, records = [], []
    for arm, points in f.arms.items():
        found = gao_fit(f, points)
        if found is None:
            rows.append([arm, *["–"] * 6])
            continue
        where = band(points, lambda drawn: _peak_at(f, drawn), 500)
        top = found.peak
        rows.append([
            arm, fixed(found.alpha, 3), fixed(found.beta, 3), fixed(found.r2, 2),
            _shown(where, 2, fixed),
            signed(top[1], 2) if top else "–",
            "yes" if found.over_optimised else "not within reach",
        ])  # fmt: skip
        records.append({"arm": arm, "alpha": found.alpha, "beta": found.beta, "r2": found.r2,
                        "points": found.points, "reach": found.reach, "peak_d": where.value,
                        "low": where.low, "high": where.high, "height": top[1] if top else None,
                        "over_optimised": found.over_optimised})  # fmt: skip
    return Table(
        f"gao_{f.test}",
        f"Gao's curve through the gold reward, on {f.test}",
        "Gold less the base's = d (alpha − beta log d), least squares over checkpoints with "
        "d ≥ 0.3 (Gao et al., arXiv:2210.10760, sec. 3.2); its peak with a 95 % interval over "
        "runs, and whether it lies within the largest d that the arm reached: beyond it gold falls "
        "while the proxy may still rise.",
        ("arm", "alpha", "beta", "R²", "peak at d", "gain at the peak", "gold falls again"),
        rows,
        records=records,
    )


def _peak_at(f: Frontier, points: Sequence[Point]) -> float | None:
    found = gao_fit(f, points)
    top = found.peak if found else None
    return top[0] if top and top[0] < 100 else None


def over_optimisation(f: Frontier) -> list[str]:
    """A sentence on each arm whose gold reward falls again within what was measured."""
    sentences = []
    for arm, points in f.arms.items():
        found = gao_fit(f, points)
        if found is None or found.peak is None or not found.over_optimised:
            continue
        where = band(points, lambda drawn: _peak_at(f, drawn), 500)
        far = max(points, key=lambda p: p.kl)
        near = min(points, key=lambda p: abs(p.d - found.peak[0]))  # type: ignore[index]
        if far.proxy <= near.proxy:
            continue
        sentences.append(
            f"{arm}: by Gao's curve the gold reward is highest at d = {_shown(where, 1, fixed)}; "
            f"from the checkpoint next to it (KL {near.kl:.1f}) to the farthest (KL {far.kl:.1f}) "
            f"the proxy goes from {near.proxy:+.2f} to {far.proxy:+.2f} and the gold from "
            f"{near.gold:+.2f} to {far.gold:+.2f}."
        )
    return sentences
