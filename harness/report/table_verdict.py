"""The verdict on each declared comparison, as a table and in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, get_args

from harness.errors import counted
from harness.report.load import MANY, Experiment
from harness.report.scores import TestScores
from harness.report.tables import NOTHING, Table, fixed, interval, number, signed
from harness.report.verdicts import MIN_SEEDS, Judged, Terms, all_terms, judged
from harness.stats.verdict import Label

UNITS = {"flops": "FLOPs"}


def verdict_table(experiment: Experiment, scores: Sequence[TestScores]) -> Table:
    """Each comparison of each declaration; the one made in advance first."""
    rows, records, sources = [], [], set()
    declarations = all_terms(experiment)
    for terms in declarations:
        for one in judged(experiment, scores, terms):
            rows.append(_row(one, experiment, scores, status=len(declarations) > 1))
            records.append(_record(one))
            test = next(t for t in scores if t.name == one.test)
            sources |= {*test.arms[one.arm].folders, *test.arms[one.control].folders}
    first = declarations[0]
    margin = f"{points(first.margin)}, {first.status}"
    return Table(
        name="verdict",
        title=f"Verdicts at a margin of {margin}",
        note="Points of a hundred, paired by seed; intervals and p over seeds, on these problems. "
        "equivalent: the difference is shown to be within the margin (two one-sided t tests). "
        "better, worse: a difference is shown, and not shown to be within the margin. inconclusive "
        "is not equal. The first two p are adjusted over the family by Holm; the sign-flip p is "
        "exact and is not. Power at the spread that was seen: to show a difference of the margin / "
        f"equivalence where there is none. Withheld: what the p-values say, not claimed with fewer "
        f"than {MIN_SEEDS} seeds, where it holds for these problems alone, or where the design is "
        "too weak to see the margin (what it finds is then more often chance, and too large).",
        columns=(*(("declared",) if len(declarations) > 1 else ()), *_columns(first)),
        rows=rows,
        records=records,
        labels=5 if len(declarations) > 1 else 4,
        sources=sorted(sources),
    )


def _columns(terms: Terms) -> tuple[str, ...]:
    wide, narrow = (round(100 * (1 - k * terms.alpha)) for k in (1, 2))
    return (
        "test set", "comparison", "verdict", "withheld", "seeds", "difference",
        f"{narrow} % interval", f"{wide} % interval", "p equivalence", "p difference",
        "p sign-flip", "power",
    )  # fmt: skip


def _row(
    one: Judged, experiment: Experiment, scores: Sequence[TestScores], *, status: bool
) -> list[str]:
    found = one.found
    withheld = f"{found.label}: {'; '.join(one.withheld)}" if one.withheld else NOTHING
    powers = (one.power_difference, one.power_equivalence)
    declared = "in advance" if one.terms.in_advance else "exploratory"
    return [
        *([declared] if status else []),
        f"{one.test}, {metric_label(one.terms, scores)}",
        one.name,
        _marked(one),
        withheld,
        str(found.seeds),
        signed(100 * found.mean),
        _interval(found.interval_tost),
        _interval(found.interval),
        _p(found.p_equivalence_adjusted),
        _p(found.p_difference_adjusted),
        _p(found.p_sign_flip),
        NOTHING if powers[0] is None else " / ".join(fixed(p, 2) for p in powers),
    ]


def _marked(one: Judged) -> str:
    return one.label if one.terms.in_advance else f"{one.label} (exploratory)"


def _interval(pair: tuple[float, float] | None) -> str:
    return NOTHING if pair is None else interval(*pair, sign=True)


def _p(value: float | None) -> str:
    return "< 0.0001" if value is not None and value < 1e-4 else fixed(value, 4)


def _record(one: Judged) -> dict[str, Any]:
    found = one.found
    low, high = found.interval or (None, None)
    low_tost, high_tost = found.interval_tost or (None, None)
    return {
        "test": one.test, "metric": one.terms.metric.name, "k": one.terms.metric.k,
        "arm": one.arm, "control": one.control, "status": one.terms.status,
        "label": one.label, "by_p_values": found.label, "withheld": "; ".join(one.withheld),
        "margin": found.margin, "alpha": found.alpha, "family": found.family,
        "seeds": found.seeds, "problems": one.problems, "difference": found.mean,
        "low": low, "high": high, "low_tost": low_tost, "high_tost": high_tost,
        "low_over_problems": one.wide[0], "high_over_problems": one.wide[1],
        "p_equivalence": found.p_equivalence,
        "p_equivalence_adjusted": found.p_equivalence_adjusted,
        "p_difference": found.p_difference,
        "p_difference_adjusted": found.p_difference_adjusted,
        "p_sign_flip": found.p_sign_flip, "smallest_p": found.smallest_p,
        "power_difference": one.power_difference, "power_equivalence": one.power_equivalence,
        "seeds_for_difference": one.seeds_difference,
        "seeds_for_equivalence": one.seeds_equivalence,
    }  # fmt: skip


def metric_label(terms: Terms, scores: Sequence[TestScores]) -> str:
    samples = min((t.samples for t in scores), default=0)
    return terms.metric.label(samples)


def points(share: float) -> str:
    """A margin in points of a hundred."""
    value = number(100 * share)
    return f"{value} point{'s' * (value != '1')}"


def verdict_sentences(experiment: Experiment, scores: Sequence[TestScores]) -> list[str]:
    """The verdicts in words, a paragraph for each declaration and test set."""
    found = []
    for terms in all_terms(experiment):
        whole = judged(experiment, scores, terms)
        for test in dict.fromkeys(one.test for one in whole):
            of_test = [one for one in whole if one.test == test]
            where = f"on {test} by {metric_label(terms, scores)}"
            unit = experiment.spec["budget"]["unit"]
            opening = (
                f"At equal {UNITS.get(unit, unit)}, {where}, "
                f"with a margin of {points(terms.margin)} {_since(terms)}: "
            )
            found.append(opening + " ".join(_told(of_test)))
    return found


def _since(terms: Terms) -> str:
    if terms.in_advance:
        return "declared in advance"
    return f"that is {terms.status}" if "amendment" in terms.status else (
        "(no margin was declared in advance, so this is exploratory)"
    )  # fmt: skip


def _told(verdicts: Sequence[Judged]) -> list[str]:
    """A sentence for each that is claimed, and one for all that are not; of many, their numbers."""
    if len(verdicts) > MANY:
        counts = Counter(one.label for one in verdicts)
        listed = ", ".join(f"{counts[label]} {label}" for label in get_args(Label) if counts[label])
        return [f"Of {len(verdicts)} comparisons {listed}: see the table."]
    claimed = [_claim(one) for one in verdicts if one.label != "inconclusive"]
    open_ = [one for one in verdicts if one.label == "inconclusive"]
    if not open_:
        return claimed
    listed = "; ".join(_open(one) for one in open_)
    return [*claimed, f"Inconclusive, which is not equal: {listed}."]


def _claim(one: Judged) -> str:
    found = one.found
    after = f"adjusted p = {_p_text(_decisive(one))}"
    over = f" over {counted(found.family, 'comparison')}" if found.family > 1 else ""
    if one.label == "equivalent":
        level = round(100 * (1 - 2 * found.alpha))
        also = f", though not 0 (p = {_p_text(found.p_difference_adjusted)})"
        return (
            f"{one.arm} and {one.control} are equivalent within {points(found.margin)} "
            f"({level} % interval {_interval(found.interval_tost)}, {after}{over})"
            f"{also if found.differs else ''}."
        )
    level = round(100 * (1 - found.alpha))
    return (
        f"{one.arm} is {one.label} than {one.control} by {fixed(100 * abs(found.mean))} points "
        f"({level} % interval {_interval(found.interval)}, {after}{over})."
    )


def _decisive(one: Judged) -> float | None:
    found = one.found
    equal = one.label == "equivalent"
    return found.p_equivalence_adjusted if equal else found.p_difference_adjusted


def _p_text(value: float | None) -> str:
    return NOTHING if value is None else number(value, 2)


def _open(one: Judged) -> str:
    """What is known of an open comparison, and what would decide it."""
    found = one.found
    text = f"{one.name} {signed(100 * found.mean)}"
    if found.interval is not None:
        level = round(100 * (1 - found.alpha))
        text += f" ({level} % interval {_interval(found.interval)})"
    if one.withheld:
        text += f", not claimed as {found.label}: {'; '.join(one.withheld)}"
    return f"{text}; {_needed(one)}"


def _needed(one: Judged) -> str:
    """How many seeds would decide, at the spread that was seen."""
    shows = {
        "a difference of the margin": one.seeds_difference,
        "equivalence": one.seeds_equivalence,
    }
    shown = [f"{max(n, MIN_SEEDS)} seeds would show {what}" for what, n in shows.items() if n]
    if not shown:
        return "too little was seen to tell what would decide it"
    return f"at this spread {' and '.join(shown)}"
