"""Tables of what the cells spent and how training went."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from harness.report.load import Cell, Experiment
from harness.report.scores import final_line
from harness.report.tables import NOTHING, Table, budget, fixed, number, percent

UNITS = (
    "flops",
    "tokens",
    "prompt_tokens",
    "completion_tokens",
    "prompts",
    "completions",
    "reward_calls",
    "updates",
)
UNJUDGED = ("timeout", "error")
# key of steps.jsonl -> (what it is called, how it is shown)
DIAGNOSTICS: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "reward_mean": ("reward, used completions", lambda v: fixed(v, 3)),
    "length_mean": ("completion length, tokens", lambda v: fixed(v, 1)),
    "truncated_share": ("truncated, %", percent),
    "entropy": ("entropy, nats/token", lambda v: fixed(v, 3)),
    "zero_variance_share": ("groups without variance, %", percent),
    "clip_fraction_high": ("clipped above, %", lambda v: percent(v, 2)),
    "clip_fraction_low": ("clipped below, %", lambda v: percent(v, 2)),
    "approx_kl": ("KL of the step, nats/token", lambda v: number(v, 2)),
    "kl_to_reference": ("KL to reference, nats/completion", lambda v: fixed(v, 3)),
    "grad_norm": ("gradient norm", lambda v: number(v, 3)),
    "explained_variance": ("critic's explained variance", lambda v: fixed(v, 3)),
    "engine_gap": ("engine against trainer, |Δ log p|", lambda v: number(v, 2)),
}

OF_PAIRS: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "preference_accuracy": ("pairs in their order, %", percent),
    "preference_margin": ("margin of a pair, nats x β", lambda v: fixed(v, 3)),
    "loss/policy": ("loss", lambda v: fixed(v, 3)),
}


def spent_tables(experiment: Experiment) -> list[Table]:
    """``budget``, ``flops``, ``diagnostics`` and ``outcomes``."""
    return [
        budget_table(experiment),
        flops_table(experiment),
        diagnostics_table(experiment),
        outcomes_table(experiment),
    ]


def budget_table(experiment: Experiment) -> Table:
    """What each cell spent in every unit; trials stand in the CSV."""
    unit, limit = experiment.spec["budget"]["unit"], experiment.spec["budget"]["limit"]
    rows, records = [], []
    for cell in begun(experiment):
        spent, dropped = cell.spent, _dropped(cell)
        share = spent[unit] / limit if unit in spent else None
        steps = len(cell.steps)
        if cell.kind == "seed":
            counts = [number(spent.get(u)) for u in UNITS]
            gone = [number(dropped["groups"]), number(dropped["completions"])]
            rows.append([cell.arm, cell.name, number(steps), percent(share), *counts, *gone])
        records.append(
            {"arm": cell.arm, "cell": cell.name, "status": cell.status, "steps": steps}
            | {"share_of_limit": share}
            | {u: spent.get(u) for u in UNITS}
            | {f"dropped_{k}": v for k, v in dropped.items()}
        )
    return Table(
        name="budget",
        title="What each cell spent",
        note=f"The budget is {budget(experiment.spec)} a cell. Dropped groups were sampled, graded "
        "and charged, and not used. Tuning trials are in the CSV.",
        columns=(
            "arm",
            "cell",
            "steps",
            "of limit, %",
            *(u.replace("_", " ") for u in UNITS),
            "dropped groups",
            "dropped completions",
        ),
        rows=rows,
        records=records,
        labels=2,
        sources=[c.folder for c in begun(experiment)],
    )


def flops_shares(experiment: Experiment) -> dict[str, dict[str, float]]:
    """Arm -> role/phase -> FLOPs, mean over finished seeds."""
    shares = {}
    for arm in experiment.shown:
        cells = [c for c in experiment.seed_cells(arm) if c.flops]
        keys = sorted({k for c in cells for k in c.flops})
        if cells and keys:
            shares[arm] = {k: sum(c.flops.get(k, 0) for c in cells) / len(cells) for k in keys}
    return shares


def flops_table(experiment: Experiment) -> Table:
    """Where the FLOPs went, by role and phase."""
    shares = flops_shares(experiment)
    keys = sorted({k for found in shares.values() for k in found})
    rows, records = [], []
    for arm, found in shares.items():
        total = sum(found.values())
        rows.append(
            [
                arm,
                number(total),
                *(percent(found[k] / total) if k in found else NOTHING for k in keys),
            ]
        )
        records += [
            {
                "arm": arm,
                "role_phase": k,
                "flops": found.get(k, 0),
                "share": found.get(k, 0) / total,
            }
            for k in keys
        ]
    return Table(
        name="flops",
        title="Where the FLOPs went",
        note="Share in percent of a run's FLOPs by model role and phase, mean over finished seeds.",
        columns=("arm", "FLOPs a run", *keys),
        rows=rows,
        records=records,
        sources=seed_folders(experiment),
    )


def diagnostics_table(experiment: Experiment) -> Table:
    """Means over all training steps and over the last tenth of them, and the final KL to base."""
    arms = [a for a in experiment.shown if a != "base"]
    rows, records = [], []
    pairs = any("pairs" in s for arm in arms for c in experiment.seed_cells(arm) for s in c.steps)
    for key, (label, show) in (DIAGNOSTICS | (OF_PAIRS if pairs else {})).items():
        row = [label]
        for arm in arms:
            whole, last = mean_of_steps(experiment, arm, key)
            row.append(NOTHING if whole is None else f"{show(whole)} → {show(last)}")
            records.append({"diagnostic": key, "arm": arm, "all_steps": whole, "last_tenth": last})
        if set(row[1:]) != {NOTHING}:
            rows.append(row)
    for key, label in (("mean", "KL to base at the end"), ("entropy", "entropy at the end")):
        row = [f"{label}, {'nats/completion' if key == 'mean' else 'nats/token'}"]
        for arm in arms:
            value = (
                kl_to_base(experiment, arm) if key == "mean" else _final_entropy(experiment, arm)
            )
            row.append(fixed(value, 3))
            name = "final_kl_to_base" if key == "mean" else "final_entropy"
            records.append({"diagnostic": name, "arm": arm, "all_steps": None, "last_tenth": value})
        if set(row[1:]) != {NOTHING}:
            rows.append(row)
    return Table(
        name="diagnostics",
        title="How training went",
        note="Mean over all steps of training → mean over the last tenth, then over finished "
        "seeds; critic warm-up is left out. The last rows are of the final evaluation.",
        columns=("diagnostic", *arms),
        rows=rows,
        records=records,
        sources=seed_folders(experiment),
    )


def mean_of_steps(experiment: Experiment, arm: str, key: str) -> tuple[float | None, float | None]:
    """A diagnostic's mean over training steps, and over their last tenth, over finished seeds."""
    wholes, lasts = [], []
    for cell in experiment.seed_cells(arm):
        values = [s[key] for s in training_steps(cell) if s.get(key) is not None]
        if values:
            wholes.append(float(np.mean(values)))
            lasts.append(float(np.mean(values[-max(1, len(values) // 10) :])))
    return _mean(wholes), _mean(lasts)


def late_mean(experiment: Experiment, arm: str, key: str) -> float | None:
    """A diagnostic's mean over the last half of the training steps, over finished seeds."""
    means = []
    for cell in experiment.seed_cells(arm):
        steps = training_steps(cell)
        values = [s[key] for s in steps[len(steps) // 2 :] if s.get(key) is not None]
        if values:
            means.append(float(np.mean(values)))
    return _mean(means)


def training_steps(cell: Cell) -> list[Mapping[str, Any]]:
    """The steps in which the policy moved."""
    return [s for s in cell.steps if s.get("phase", "train") != "critic_warmup"]


def kl_to_base(experiment: Experiment, arm: str) -> float | None:
    """Sequence KL to the base at the final evaluation, mean over seeds and test sets, in nats."""
    return _mean(
        float(line["kl_to_base"]["mean"])
        for line in _final_lines(experiment, arm)
        if line.get("kl_to_base") and line["kl_to_base"].get("mean") is not None
    )


def _final_entropy(experiment: Experiment, arm: str) -> float | None:
    lines = _final_lines(experiment, arm)
    return _mean(float(e["entropy"]) for e in lines if e.get("entropy") is not None)


def _final_lines(experiment: Experiment, arm: str) -> list[Mapping[str, Any]]:
    return [
        line
        for cell in experiment.seed_cells(arm)
        for name in experiment.spec["data"]["test"]
        if (line := final_line(cell, f"test.{name}")) is not None
    ]


def outcome_counts(experiment: Experiment, arm: str) -> dict[str, dict[str, int]]:
    """``training`` and ``final`` -> outcome -> completions, over finished seeds."""
    found: dict[str, dict[str, int]] = {"training": {}, "final": {}}
    for cell in experiment.seed_cells(arm):
        _add(found["training"], (s.get("outcomes") or {} for s in cell.steps))
    for line in _final_lines(experiment, arm):
        _add(found["final"], (p.get("outcomes") or {} for p in line["problems"]))
    return found


def _add(total: dict[str, int], parts: Iterable[Mapping[str, int]]) -> None:
    for part in parts:
        for outcome, count in part.items():
            total[outcome] = total.get(outcome, 0) + count


def outcomes_table(experiment: Experiment) -> Table:
    """Verdicts told apart: a grader's time-out or error is not a wrong answer."""
    counts = {arm: outcome_counts(experiment, arm) for arm in experiment.shown}
    order = ("correct", "wrong", "no_answer", "truncated", "timeout", "error")
    seen = {o for found in counts.values() for part in found.values() for o in part}
    outcomes = [o for o in order if o in seen] + sorted(seen - set(order))
    rows, records = [], []
    for arm, found in counts.items():
        for when, part in found.items():
            total = sum(part.values())
            if not total:
                continue
            shares = [_outcome_share(o, part.get(o, 0), total) for o in outcomes]
            rows.append([arm, when, number(total), *shares])
            records += [
                {"arm": arm, "when": when, "outcome": o, "count": part.get(o, 0), "total": total}
                for o in outcomes
            ]
    return Table(
        name="outcomes",
        title="Outcomes of grading",
        note="Share of completions in percent, over finished seeds, dropped groups included; "
        "what the grader did not judge with its count. The CSV holds all counts.",
        columns=("arm", "when", "completions", *(o.replace("_", " ") for o in outcomes)),
        rows=rows,
        records=records,
        labels=2,
        sources=seed_folders(experiment),
    )


def _outcome_share(outcome: str, count: int, total: int) -> str:
    """In percent; what the grader did not judge shows its count, which must not round away."""
    share = percent(count / total)
    if not count or outcome not in UNJUDGED:
        return share
    return f"{'<0.1' if share == '0.0' else share} ({count})"


def _dropped(cell: Cell) -> dict[str, int]:
    parts = [s.get("dropped") or {} for s in cell.steps]
    return {key: sum(p.get(key, 0) for p in parts) for key in ("groups", "completions")}


def begun(experiment: Experiment) -> Sequence[Cell]:
    return [c for c in experiment.cells if c.steps]


def seed_folders(experiment: Experiment) -> list[str]:
    return [c.folder for arm in experiment.shown for c in experiment.seed_cells(arm)]


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None
