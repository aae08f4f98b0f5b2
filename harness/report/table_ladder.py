"""Tables of a declared ladder: what each step changed and moved, and each axis's share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from harness.axes import Axis, axes
from harness.report.attribution import Attribution, attribute
from harness.report.load import Experiment
from harness.report.scores import AVG, Metric, TestScores, paired
from harness.report.table_design import parts_of
from harness.report.tables import (
    NOTHING,
    Table,
    fixed,
    in_percent,
    in_points,
    interval,
    setting,
)
from harness.stats.effects import Difference

WAYS = ("forward", "reverse")
_ENDS_NOTE = (
    "Percentage points, paired by seed and problem over the seeds that both finished, with the "
    "95 % t interval over seeds and problems and the t interval over the seeds' means alone. "
    "p: exact two-sided sign-flip test over seeds, not corrected for many comparisons."
)


@dataclass(frozen=True)
class Rung:
    """A rung of a ladder, and the step that leads to it from the one before.

    Attributes:
        way: ``forward`` or ``reverse``.
        changed: the axes of the step, in words; ``start`` for the first rung.
    """

    way: str
    number: int
    arm: str
    before: str | None
    changed: str


def ladder_rungs(experiment: Experiment) -> list[Rung]:
    """All rungs that the spec declares, forward first; what changed is read from the parts run."""
    found = []
    for way in WAYS:
        arms = experiment.ladder.get(way, ())
        if arms:
            found.append(Rung(way, 0, arms[0], None, "start"))
        for number, (before, arm) in enumerate(pairwise(arms), 1):
            steps = axes(parts_of(experiment, before), parts_of(experiment, arm))
            words = "; ".join(in_words(step, experiment.spec) for step in steps)
            found.append(Rung(way, number, arm, before, words or "nothing"))
    return found


def in_words(axis: Axis, spec: Mapping[str, Any]) -> str:
    """``gae_lambda: 0.95 → 1``; of two parts, their classes and what they call otherwise."""
    name = axis.path.rpartition(".")[2]
    pair = (axis.before, axis.after)
    if axis.path == "sampling.group_size":  # None leaves it to the control
        control = (spec.get("sampling") or {}).get("completions_per_prompt")
        pair = tuple(control if value is None else value for value in pair)
    before, after = (_part(value, other) for value, other in (pair, pair[::-1]))
    return f"{name}: {before} → {after}"


def _part(value: Any, other: Any) -> str:
    """A value; a part by its class, and by the names that it gives to what the other has too."""
    if isinstance(value, list):
        return " + ".join(_part(item, None) for item in value) or "none"
    if not isinstance(value, Mapping):
        return setting(value)
    shared = other if isinstance(other, Mapping) else {}
    apart = [
        inner
        for key, inner in sorted(value.items())
        if key not in ("part", "module") and isinstance(inner, str)
        if key in shared and shared[key] != inner
    ]
    return " ".join([str(value.get("part", value)), *apart])


def ladder_tables(experiment: Experiment, scores: Sequence[TestScores]) -> list[Table]:
    """``ladder`` and ``attribution``; none where the spec declares none."""
    tables = []
    if any(way in experiment.ladder for way in WAYS):
        tables.append(_ladder_table(experiment, scores))
    if "factorial" in experiment.ladder:
        tables.append(_attribution_table(experiment, scores))
    return tables


def _ladder_table(experiment: Experiment, scores: Sequence[TestScores]) -> Table:
    rows, records = [], []
    rungs = ladder_rungs(experiment)
    for test in scores:
        for rung in rungs:
            score = test.arms[rung.arm].estimates[AVG] if rung.arm in test.arms else None
            head = [test.name, rung.way, str(rung.number), rung.arm, rung.changed]
            rows.append([*head, in_percent(score), *_gap(step_to(test, rung).get(AVG))])
            records += _rung_records(test, rung)
    return Table(
        name="ladder",
        title="The ladder: one change at a time",
        note=f"{_label(scores)} in percent; a step is the difference to the rung above it. "
        + _ENDS_NOTE,
        columns=("test set", "way", "rung", "arm", "changed", "score", *_GAP),
        rows=rows,
        records=records,
        labels=5,
        sources=_sources(scores, [rung.arm for rung in rungs]),
    )


_GAP = ("difference", "interval", "seeds only", "p")


def _gap(found: Difference | None) -> list[str]:
    if found is None:
        return [NOTHING] * len(_GAP)
    low, high = found.estimate.low, found.estimate.high
    return [
        in_points(found),
        interval(low, high, sign=True),
        interval(found.t_low, found.t_high, sign=True),
        fixed(found.p, 4),
    ]


def step_to(test: TestScores, rung: Rung) -> Mapping[Metric, Difference]:
    """The paired differences to the rung before; empty for a first or an unfinished one."""
    if rung.before is None or rung.arm not in test.arms or rung.before not in test.arms:
        return {}
    return paired(test, rung.arm, rung.before)


def _rung_records(test: TestScores, rung: Rung) -> Iterator[dict[str, Any]]:
    if rung.arm not in test.arms:
        return
    steps = step_to(test, rung)
    for metric, score in test.arms[rung.arm].estimates.items():
        yield {
            "test": test.name, "metric": metric.name, "k": metric.k, "samples": test.samples,
            "way": rung.way, "rung": rung.number, "arm": rung.arm, "before": rung.before,
            "changed": rung.changed, "mean": score.mean, "low": score.low, "high": score.high,
            "seeds": score.seeds,
        } | _record("step", steps.get(metric))  # fmt: skip


def _record(name: str, found: Difference | None) -> dict[str, Any]:
    if found is None:
        keys = ("", "_low", "_high", "_t_low", "_t_high", "_p", "_by_seed")
        return dict.fromkeys((name + key for key in keys), None)
    return {
        name: found.estimate.mean,
        f"{name}_low": found.estimate.low,
        f"{name}_high": found.estimate.high,
        f"{name}_t_low": found.t_low,
        f"{name}_t_high": found.t_high,
        f"{name}_p": found.p,
        f"{name}_by_seed": " ".join(f"{round(d, 12):.6g}" for d in found.by_seed),
    }


def _attribution_table(experiment: Experiment, scores: Sequence[TestScores]) -> Table:
    rows, records = [], []
    for test in scores:
        found = attributed(experiment, test)
        if found is None:
            continue
        for kind, what, by_metric in _shares(experiment, found):
            seeds = str(len(found.seeds))
            rows.append([test.name, kind, what, seeds, *_gap(by_metric[AVG])])
            records += [
                {"test": test.name, "metric": m.name, "k": m.k, "samples": test.samples}
                | {"kind": kind, "axis": what, "seeds": len(found.seeds)}
                | _record("value", gap)
                for m, gap in by_metric.items()
            ]
    arms = experiment.ladder["factorial"]
    return Table(
        name="attribution",
        title=f"What of {arms[-1]} − {arms[0]} each axis accounts for",
        note=f"{_label(scores)}. A Shapley value is an axis's mean step over all orders in which "
        "the axes can be exchanged; the values sum to the total. A main effect is the mean over "
        "all other settings; an interaction of two axes is half of what the one's effect gains "
        "where the other is exchanged too. The largest interaction was picked for its size, "
        f"which its interval leaves out of account. {_ENDS_NOTE} The CSV holds every interaction "
        "and every metric.",
        columns=("test set", "value", "axis", "seeds", *_GAP),
        rows=[row for row in rows if row[1] != "interaction"],
        records=records,
        labels=3,
        sources=_sources(scores, arms),
    )


def attributed(experiment: Experiment, test: TestScores) -> Attribution | None:
    """``attribute``; None too where the arms make up no factorial, which the audit names."""
    try:
        return attribute(experiment, test)
    except ValueError:
        return None


def _shares(
    experiment: Experiment, found: Attribution
) -> Iterator[tuple[str, str, Mapping[Any, Difference]]]:
    """(kind, axis in words, difference by metric), in the order of the table."""
    first, last = found.design.ends
    words = axis_words(experiment, found)
    yield "total", f"{last} − {first}", found.total
    for axis in found.design.axes:
        yield "Shapley", words[axis], found.shapley[axis]
    for axis in found.design.axes:
        yield "main effect", words[axis], found.effects[frozenset({axis})]
    largest = found.largest_interaction(AVG)
    for chosen, by_metric in found.effects.items():
        if len(chosen) > 1:
            kind = "largest interaction" if chosen == largest else "interaction"
            yield kind, " × ".join(a for a in found.design.axes if a in chosen), by_metric


def axis_words(experiment: Experiment, found: Attribution) -> dict[str, str]:
    """Axis -> what is exchanged along it."""
    first, last = (parts_of(experiment, arm) for arm in found.design.ends)
    return {
        axis: in_words(Axis(axis, first.get(axis), last.get(axis)), experiment.spec)
        for axis in found.design.axes
    }


def _label(scores: Sequence[TestScores]) -> str:
    return scores[0].label(AVG) if scores else "Avg"


def _sources(scores: Sequence[TestScores], arms: Sequence[str]) -> list[str]:
    found = [f for t in scores for a in arms if a in t.arms for f in t.arms[a].folders]
    return list(dict.fromkeys(found))


def ladder_sentences(experiment: Experiment, scores: Sequence[TestScores]) -> list[str]:
    """The attribution in a sentence for each test set, or why there is none."""
    arms = experiment.ladder.get("factorial", ())
    found = []
    for test in scores if arms else ():
        unfinished = [arm for arm in arms if arm not in test.arms]
        if unfinished:
            found.append(
                f"On {test.name} no attribution yet: {len(unfinished)} of the {len(arms)} arms of "
                f"the factorial have no finished seed ({', '.join(unfinished[:4])}"
                f"{', ...' * (len(unfinished) > 4)})."
            )
            continue
        try:
            shares = attribute(experiment, test)
        except ValueError as error:
            found.append(f"On {test.name} no attribution: the arms are no full factorial: {error}.")
            continue
        found.append(
            f"On {test.name} the arms of the factorial share no finished seed, so there is no "
            "attribution."
            if shares is None
            else _in_a_sentence(experiment, test, shares)
        )
    return found


def _in_a_sentence(experiment: Experiment, test: TestScores, found: Attribution) -> str:
    first, last = found.design.ends
    words = axis_words(experiment, found)
    listed = "; ".join(f"{words[a]}: {_shown(found.shapley[a][AVG])}" for a in found.design.axes)
    text = (
        f"On {test.name}, {last} − {first} was {_shown(found.total[AVG])} points of "
        f"{test.label(AVG)} over {len(found.seeds)} seeds. Shapley values, which sum to it: "
        f"{listed}."
    )
    largest = found.largest_interaction(AVG)
    if largest is not None:
        pair = " × ".join(a for a in found.design.axes if a in largest)
        text += f" The largest interaction is {pair}, {_shown(found.effects[largest][AVG])}."
    return text


def _shown(gap: Difference) -> str:
    return f"{in_points(gap)} {interval(gap.estimate.low, gap.estimate.high, sign=True)}"
