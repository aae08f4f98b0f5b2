"""What is read off reward against KL: tables, and a sentence on each arm's over-optimisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from harness.errors import counted
from harness.report.frontier import BEST_OF, Frontier, Reference
from harness.report.tables import NOTHING, Table, fixed, signed
from harness.stats.frontier import (
    BANDWIDTH,
    Interval,
    Point,
    Value,
    gold,
    hypervolume,
    jackknife,
    proxy,
    reward_interval,
)
from harness.stats.gao import D_MIN, Form, GaoFit, fit
from harness.stats.over_optimisation import AfterPeak, after_peak

Show = Callable[[float | None, int], str]
DISTANCES = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0)  # d at which arms are compared
HELD = (
    "95 % intervals are over runs within each strength (stratified jackknife, Student's t); the "
    "test problems and the reward model are the same for all and are held."
)


def frontier_tables(found: Sequence[Frontier]) -> list[Table]:
    """Rewards at equal d, areas, what lies beyond the gold reward's peak, and Gao's curves."""
    return [t for f in found for t in (_rewards(f), _areas(f), _peaks(f), _gao(f))]


def _shown(one: Interval, digits: int = 2, show: Show = signed) -> str:
    if one.value is None:
        return NOTHING
    if one.low is None:
        return show(one.value, digits)
    return f"{show(one.value, digits)} [{show(one.low, digits)}, {show(one.high, digits)}]"


def _rewards(f: Frontier) -> Table:
    """Gold, proxy and the gap at fixed d, each with its interval over runs."""
    rows, records = [], []
    reached = max(p.d for points in f.arms.values() for p in points)
    distances = [d for d in DISTANCES if d <= reached]
    rewards: dict[str, Value] = {"gold": gold, "proxy": proxy, "gap": _gap(f)}
    for arm, points in f.arms.items():
        for name, value in rewards.items():
            row = [arm, name]
            for d in distances:
                one = reward_interval(points, d, value)
                row.append(_shown(one))
                records.append({"arm": arm, "reward": name, "d": d, "kl": d * d, "mean": one.value,
                                "low": one.low, "high": one.high})  # fmt: skip
            rows.append(row)
    for name in rewards:
        row = [BEST_OF, name]
        for d in distances:
            at = _reference_at(f, d, name)
            row.append(signed(at, 2))
            records.append({"arm": BEST_OF, "reward": name, "d": d, "kl": d * d, "mean": at})
        rows.append(row)
    return Table(
        f"frontier_{f.test}",
        f"Reward at equal distance from the base, on {f.test}",
        "d is the square root of the sequence KL (sum of k1 over fresh samples, nats). Values of a "
        f"local linear regression of reward on d within {BANDWIDTH:g} of it (tricube weights) over "
        f"all checkpoints and strengths. {HELD} {NOTHING}: no points of the arm on both sides near "
        "this d, or of one run only. gap: how much farther the proxy has risen than the gold, each "
        "less the base's mean and in standard "
        f"deviations of the base's samples. Base: gold {signed(f.base_gold, 2)}, proxy "
        f"{signed(f.base_proxy, 2)}. {_numbers(f)}",
        ("arm", "reward", *(f"d = {d:g}" for d in distances)),
        rows,
        records=records,
        labels=2,
    )


def _gap(f: Frontier) -> Value:
    """Proxy's gain less gold's, in standard deviations of the base's samples."""

    def gap(point: Point) -> float:
        return _gain(point.proxy, f.base_proxy, f.proxy_sd) - _gain(
            point.gold, f.base_gold, f.gold_sd
        )

    return gap


def _gain(value: float, base: float, sd: float) -> float:
    return (value - base) / sd if sd > 0 else 0.0


def _reference_at(f: Frontier, d: float, name: str) -> float | None:
    """Best-of-n at a d, linear between its n; None beyond the largest."""
    ds = [r.d for r in f.reference]
    if not ds[0] <= d <= ds[-1]:
        return None
    of_gold, of_proxy = (
        float(np.interp(d, ds, [getattr(r.pooled, kind) for r in f.reference]))
        for kind in ("gold", "proxy")
    )
    gap = _gap(f)(Point("", "", d * d, of_proxy, of_gold))
    return {"gold": of_gold, "proxy": of_proxy, "gap": gap}[name]


def _numbers(f: Frontier) -> str:
    count = len(next(iter(f.arms.values())))
    left = "".join(f"; {n} of {arm} left out" for arm, n in f.dropped.items() if n)
    again = "".join(
        f" {counted(n, 'run')} of {arm} left out: another case has the same."
        for arm, n in f.repeated.items()
    )
    return f"Each arm has {counted(count, 'point')}{left}.{again}"


def _areas(f: Frontier) -> Table:
    rows, records = [], []
    limit = f.limit
    for arm, points in f.arms.items():
        area = jackknife(points, lambda some: hypervolume(some, limit, f.base_gold) / limit)
        within = sum(p.kl <= limit for p in points)
        top = max(points, key=gold)
        last = max(points, key=lambda p: p.kl)
        rows.append([arm, _shown(area), str(within), signed(top.gold, 2), fixed(top.kl, 1),
                     signed(last.gold, 2), signed(last.proxy, 2), fixed(last.kl, 1)])  # fmt: skip
        records.append({"arm": arm, "area": area.value, "low": area.low, "high": area.high,
                        "limit": limit, "points_within": within, "best_gold": top.gold,
                        "best_gold_kl": top.kl, "farthest_gold": last.gold,
                        "farthest_proxy": last.proxy, "farthest_kl": last.kl})  # fmt: skip
    return Table(
        f"frontier_area_{f.test}",
        f"What the frontier of each arm encloses, on {f.test}",
        f"Area: mean over KL budgets from 0 to {limit:.2f} nats, which every arm reached, of the "
        "best gold reward within the budget, less the base's. It is the envelope of the points "
        f"within that KL, and higher for more of them. {HELD} The best checkpoint is chosen on the "
        "test set by its gold reward and is optimistic; the farthest is the one with the largest "
        "KL.",
        ("arm", "area", "points within", "best gold (optimistic)", "KL of the best",
         "gold farthest out", "proxy farthest out", "KL farthest out"),
        rows,
        records=records,
    )  # fmt: skip


# -- over-optimisation -----------------------------------------------------------------------------


def _peaks(f: Frontier) -> Table:
    rows, records = [], []
    for arm, points in f.arms.items():
        found, reach = after_peak(points), max(p.d for p in points)
        rows.append([
            arm, fixed(reach, 2),
            NOTHING if found.peak.value is None else _shown(found.peak, 2, fixed),
            str(found.runs), _shown(found.gold), _shown(found.proxy), _verdict(found),
        ])  # fmt: skip
        records.append({
            "arm": arm, "reach_d": reach, "peak_d": found.peak.value, "peak_low": found.peak.low,
            "peak_high": found.peak.high, "runs_beyond": found.runs,
            "gold_change": found.gold.value, "gold_low": found.gold.low,
            "gold_high": found.gold.high, "proxy_change": found.proxy.value,
            "proxy_low": found.proxy.low, "proxy_high": found.proxy.high,
            "over_optimised": found.over_optimised,
        })  # fmt: skip
    return Table(
        f"frontier_peak_{f.test}",
        f"Beyond the peak of the gold reward, on {f.test}",
        "Peak: where the local fit of the gold reward is highest, if short of the farthest d. "
        "Changes: means over the runs that went farther, each from its own checkpoint nearest to "
        "the peak of the other runs to its farthest, with 95 % t intervals over these runs; so no "
        "checkpoint is chosen by its own reward. Over-optimised: the gold interval lies below 0 "
        "and the proxy's above; not corrected for the number of arms. A curve that only levels off "
        "has a highest place too, so a peak alone says little, and its own interval is rough.",
        ("arm", "reached d", "gold peaks at d", "runs beyond", "change of gold", "change of proxy",
         "over-optimised"),
        rows,
        records=records,
    )  # fmt: skip


def _verdict(found: AfterPeak) -> str:
    if found.over_optimised:
        return "yes"
    return "no peak" if found.peak.value is None else "not shown"


def over_optimisation(f: Frontier) -> list[str]:
    """A sentence on each arm: where its gold reward peaks while the proxy rises, or that not."""
    return [_sentence(arm, points) for arm, points in f.arms.items()]


def _sentence(arm: str, points: Sequence[Point]) -> str:
    found, reach = after_peak(points), max(p.d for p in points)
    if found.peak.value is None:
        return (
            f"{arm}: the gold reward does not peak within the d = {reach:.1f} that was reached, so "
            "no over-optimisation is shown."
        )
    start = f"{arm}: the gold reward is highest at d = {_shown(found.peak, 1, fixed)}"
    if found.gold.value is None:
        return f"{start}, but no run went beyond the peak of the others: nothing is shown."
    change = (
        f"from there to the farthest checkpoint (mean of {counted(found.runs, 'run')}) gold "
        f"changes by {_shown(found.gold)} and proxy by {_shown(found.proxy)}"
    )
    if found.over_optimised:
        return f"{start}; {change}: the proxy is over-optimised."
    return f"{start}, but {change}: over-optimisation is not shown."


# -- Gao's curves ----------------------------------------------------------------------------------


def gao_fit(f: Frontier, points: Sequence[Point], form: Form = "rl") -> GaoFit | None:
    """Gao's curve of a form through an arm's gold rewards."""
    return fit(form, [p.d for p in points], [p.gold for p in points], f.base_gold)


def reference_points(reference: Sequence[Reference]) -> list[Point]:
    """Best-of-n as points, for its curve."""
    return [Point(BEST_OF, "", r.d**2, r.pooled.proxy, r.pooled.gold) for r in reference]


def _gao(f: Frontier) -> Table:
    rows, records = [], []
    fits: dict[str, tuple[Form, Sequence[Point]]] = {a: ("rl", p) for a, p in f.arms.items()}
    for arm, (form, points) in {**fits, BEST_OF: ("bon", reference_points(f.reference))}.items():
        found = gao_fit(f, points, form)
        if found is None:
            rows.append([arm, form, *[NOTHING] * 6])
            continue
        alpha, beta, log_d, height = (
            jackknife(points, lambda some, read=read, form=form: read(gao_fit(f, some, form)))
            for read in (_alpha, _beta, _log_peak, _height)
        )
        at = Interval(*(None if x is None else float(np.exp(x))
                        for x in (log_d.value, log_d.low, log_d.high)))  # fmt: skip
        inside = found.over_optimised
        rows.append([
            arm, form, _shown(alpha, 3, fixed), _shown(beta, 3, fixed), fixed(found.r2, 2),
            fixed(found.reach, 2),
            _shown(at, 2, fixed) if inside else "beyond" if found.peak else "none",
            _shown(height) if inside else NOTHING,
        ])  # fmt: skip
        records.append({
            "arm": arm, "form": form, "alpha": alpha.value, "alpha_low": alpha.low,
            "alpha_high": alpha.high, "beta": beta.value, "beta_low": beta.low,
            "beta_high": beta.high, "r2": found.r2, "points": found.points, "reach": found.reach,
            "peak_d": at.value, "low": at.low, "high": at.high, "height": height.value,
            "height_low": height.low, "height_high": height.high, "peak_within_reach": inside,
        })  # fmt: skip
    return Table(
        f"gao_{f.test}",
        f"Gao's curves through the gold reward, on {f.test}",
        "Gold less the base's = d (alpha − beta log d) for the arms (rl), d (alpha − beta d) for "
        f"best-of-n (bon); least squares over points with d ≥ {D_MIN} (Gao et al., "
        f"arXiv:2210.10760, sec. 3.2). {HELD} The interval of a peak is of its logarithm. beyond: "
        "the curve has its peak farther out than anything measured, where it is extrapolated; "
        "such a peak is left out. Two parameters follow the whole path, so this peak may lie "
        "elsewhere than that of the local fit.",
        ("arm", "form", "alpha", "beta", "R²", "reached d", "peak at d", "gain at the peak"),
        rows,
        records=records,
        labels=2,
    )


def _alpha(found: GaoFit | None) -> float | None:
    return found.alpha if found else None


def _beta(found: GaoFit | None) -> float | None:
    return found.beta if found else None


def _log_peak(found: GaoFit | None) -> float | None:
    return float(np.log(found.peak[0])) if found and found.peak else None


def _height(found: GaoFit | None) -> float | None:
    return found.peak[1] if found and found.peak else None
