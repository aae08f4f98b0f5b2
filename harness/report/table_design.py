"""Tables of what was compared: how the arms differ, what was pinned, how they were tuned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harness.errors import counted
from harness.report.load import Cell, Experiment
from harness.report.tables import NOTHING, Table, percent, setting

_HEAD = ("part", "version")
_KL_COEF = "kl.kl_coef"


def design_tables(experiment: Experiment) -> list[Table]:
    """``arms``, ``controls``, ``tuning`` (where there was any) and ``failures``."""
    tables = [arms_table(experiment), controls_table(experiment)]
    if experiment.lock.get("data"):
        tables.append(data_table(experiment))
    if experiment.spec.get("tuning"):
        tables.append(tuning_table(experiment))
    return [*tables, failures_table(experiment)]


def arms_table(experiment: Experiment) -> Table:
    """Part by part; what differs from the baseline is marked."""
    arms = experiment.arms + tuple(a for a in experiment.controls if a == "placebo")
    leaves = {arm: part_leaves(parts_of(experiment, arm)) for arm in arms}
    tuned = {arm: set(chosen_settings(experiment, arm)) for arm in arms}
    paths = sorted({path for found in leaves.values() for path in found})
    reference = leaves[experiment.baseline]
    how = "tuned" if experiment.spec.get("tuning") else "set"
    other_penalty = {arm for arm in arms if _other_penalty(experiment, arm)}
    rows, records = [], []
    for path in paths:
        row = [path]
        for arm in arms:
            value = leaves[arm].get(path, NOTHING)
            differs = value != reference.get(path, NOTHING)
            knob = f" ({how})" if path in tuned[arm] else ""
            foreign = path == _KL_COEF and arm in other_penalty
            row.append(f"{'≠ ' if differs else ''}{value}{knob}{' †' if foreign else ''}")
            records.append(
                {"part": path, "arm": arm, "value": value, "differs": differs}
                | {"comparable": not foreign}
            )
        rows.append(row)
    return Table(
        name="arms",
        title="The arms, part by part",
        note=f"As run{' after tuning' if how == 'tuned' else ''}. ≠ marks what differs from "
        f"{experiment.baseline}; {NOTHING}: the arm has no such field. All else is pinned: see the "
        "controls." + _penalty_note(experiment, other_penalty),
        columns=("part", *arms),
        rows=rows,
        records=records,
        labels=1 + len(arms),
        sources=[c.folder for arm in arms for c in experiment.seed_cells(arm, done=False)[:1]],
    )


def _other_penalty(experiment: Experiment, arm: str) -> bool:
    """Whether an arm's KL coefficient weighs another kind of penalty than the baseline's."""
    mine, its = (parts_of(experiment, a).get("kl") or {} for a in (arm, experiment.baseline))
    both = "kl_coef" in mine and "kl_coef" in its
    return both and any(mine.get(key) != its.get(key) for key in ("part", "module"))


def _penalty_note(experiment: Experiment, arms: set[str]) -> str:
    if not arms:
        return ""
    return (
        f" † weighs another penalty than {experiment.baseline}'s kl_coef: the two numbers are not "
        "comparable; compare the KL to the base at the end of training."
    )


def parts_of(experiment: Experiment, arm: str) -> Mapping[str, Any]:
    """An arm's parts as run; as locked where no cell of it has begun."""
    for cell in experiment.seed_cells(arm, done=False):
        if cell.run.get("parts"):
            return cell.run["parts"]
    if arm == "placebo":
        arm = str((experiment.spec.get("controls") or {}).get("placebo"))
    locked = (experiment.lock.get("arms") or {}).get(arm) or {}
    return locked.get("parts") or {}


def chosen_settings(experiment: Experiment, arm: str) -> Mapping[str, Any]:
    """The knobs as set for an arm's final seeds."""
    for cell in experiment.seed_cells(arm, done=False):
        if cell.run.get("settings"):
            return cell.run["settings"]
    return {}


def part_leaves(parts: Mapping[str, Any]) -> dict[str, str]:
    """Dotted path -> value; a part's own row holds its class."""
    return dict(_walk(parts, ""))


def _walk(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        if path and "part" in value:
            version = value.get("version")
            yield path, value["part"] + (f" v{version}" if version is not None else "")
        for key, inner in value.items():
            if not (path and key in _HEAD):
                yield from _walk(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and any(isinstance(v, Mapping) for v in value):
        yield path, " → ".join(str(v.get("part", v)) for v in value)
        for place, inner in enumerate(value):
            for sub, text in _walk(inner, f"{path}.{place}"):
                if sub != f"{path}.{place}":
                    yield sub, text
    else:
        yield path, setting(value)


def controls_table(experiment: Experiment) -> Table:
    """What every arm shares; a control that tuning set differently shows each arm's value."""
    arms = experiment.arms + tuple(a for a in experiment.controls if a == "placebo")
    values = {arm: _controls(experiment, arm) for arm in arms}
    paths = list(dict.fromkeys(p for arm in arms for p in values[arm]))
    rows = []
    for path in paths:
        by_arm = {arm: values[arm].get(path, NOTHING) for arm in arms}
        if len(set(by_arm.values())) == 1:
            rows.append([path, next(iter(by_arm.values())), "all arms"])
        else:
            tuned = all(path in chosen_settings(experiment, arm) for arm in arms)
            text = "; ".join(f"{arm} {value}" for arm, value in by_arm.items())
            rows.append([path, text, "tuned per arm" if tuned else "DIFFERS"])
    return Table(
        name="controls",
        title="What was pinned",
        note="Set once by the experiment. 'tuned per arm' marks a control that tuning was "
        "allowed to set for every arm; 'DIFFERS' marks one that should be equal and is not.",
        columns=("control", "value", "holds for"),
        rows=rows,
        labels=3,
        sources=["spec.lock.yaml"],
    )


def _controls(experiment: Experiment, arm: str) -> dict[str, str]:
    cells = [c for c in experiment.seed_cells(arm, done=False) if c.run.get("controls")]
    source = dict(cells[0].run["controls"]) if cells else _spec_controls(experiment)
    source["budget"] = experiment.spec["budget"]
    return dict(_walk(source, ""))


def _spec_controls(experiment: Experiment) -> dict[str, Any]:
    keys = ("model", "data", "reward", "sampling", "optimizer", "evaluation")
    return {key: experiment.spec.get(key) for key in keys}


def data_table(experiment: Experiment) -> Table:
    """Where each split is from, and how much of it also stands in the training split."""
    overlaps = experiment.lock.get("contamination") or {}
    rows = []
    order = ("train", "validation")
    splits = experiment.lock["data"]
    for name in sorted(splits, key=lambda n: (order.index(n) if n in order else 9, n)):
        data = splits[name]
        overlap = overlaps.get(name) or {}
        exact = overlap.get("exact")
        rows.append(
            [
                name,
                setting(data.get("problems")),
                str(data.get("from", NOTHING)),
                NOTHING if exact is None else str(len(exact)),
                setting(overlap["flagged"]) if "flagged" in overlap else NOTHING,
            ]
        )
    return Table(
        name="data",
        title="Data",
        note="Also in training: problems whose text stands in the training split too; flagged: "
        "those and others that share most of their word n-grams with one of its problems.",
        columns=("split", "problems", "from", "also in training", "flagged"),
        rows=rows,
        labels=3,
        sources=["spec.lock.yaml"],
    )


def tuning_table(experiment: Experiment) -> Table:
    """Every trial of every arm with its settings and validation score; the chosen one marked."""
    rows, records = [], []
    for arm in experiment.arms:
        chosen = dict(chosen_settings(experiment, arm))
        trials = experiment.trial_cells(arm)
        knobs = sorted({k for c in trials for k in c.run.get("settings", {})})
        picked = chosen_trial(trials, chosen)
        for cell in trials:
            settings = cell.run.get("settings", {})
            text = ", ".join(f"{k} = {setting(settings[k])}" for k in knobs if k in settings)
            score = validation_score(cell)
            mark = "chosen" if cell.trial is not None and cell.trial == picked else ""
            seed = str(cell.seed) if cell.seed is not None else NOTHING
            status = _trial_status(cell)
            shown = percent(score) if score is not None else status
            rows.append([arm, str(cell.trial), seed, text or NOTHING, shown, mark])
            records.append(
                {"arm": arm, "trial": cell.trial, "seed": cell.seed, "status": status}
                | {"validation": score, "chosen": mark == "chosen", "knobs": len(knobs)}
                | {k: setting(v) for k, v in sorted(settings.items())}
            )
    return Table(
        name="tuning",
        title="Tuning: every trial",
        note=f"{_effort(experiment)} Score in percent on validation, never on test. "
        "Trial 0 is the arm's own defaults. " + _knob_counts(experiment),
        columns=("arm", "trial", "seed", "settings", "validation", ""),
        rows=rows,
        records=records,
        labels=4,
        sources=[c.folder for arm in experiment.arms for c in experiment.trial_cells(arm)],
    )


def _effort(experiment: Experiment) -> str:
    tuning = experiment.spec["tuning"]
    return (
        f"Each arm: {counted(tuning['trials'], 'trial')} at {tuning['budget_fraction']:g} of the "
        f"budget, tuning seeds {setting(list(tuning['seeds']))}, chosen by "
        f"{tuning.get('select', 'avg')}."
    )


def _knob_counts(experiment: Experiment) -> str:
    counts = []
    for arm in experiment.arms:
        knobs = searched(experiment, arm)
        counts.append(f"{arm} {'not begun' if knobs is None else len(knobs)}")
    return f"Knobs tuned: {', '.join(counts)}; more knobs at equal trials is a handicap."


def searched(experiment: Experiment, arm: str) -> set[str] | None:
    """What an arm's trials set, by path; None before any has begun."""
    begun = [c for c in experiment.trial_cells(arm) if c.run]
    return {k for c in begun for k in c.run.get("settings", {})} if begun else None


def chosen_trial(trials: list[Cell], chosen: Mapping[str, Any]) -> int | None:
    """The first trial whose settings the final seeds ran with; None before any did."""
    if not chosen:
        return None
    return next((c.trial for c in trials if dict(c.run.get("settings", {})) == chosen), None)


def validation_score(cell: Cell) -> float | None:
    """What the trial was judged by; None for one that did not finish."""
    metric = cell.done.get("selected_metric") or {}
    return metric.get("value")


def _trial_status(cell: Cell) -> str:
    """``done``, ``diverged`` (which counts as a trial and scores worst), or why there is none."""
    return str(cell.done.get("status", cell.status)) if cell.status == "done" else cell.status


def failures_table(experiment: Experiment) -> Table:
    """Every expected cell that is not finished, and why."""
    rows = [
        [cell.arm, cell.name, cell.status, _why(cell)]
        for cell in experiment.cells
        if cell.status != "done"
    ]
    return Table(
        name="failures",
        title="Cells that are failed, unfinished or missing",
        note=f"{len(experiment.cells) - len(rows)} of {len(experiment.cells)} cells are finished. "
        "No unfinished cell enters a score, and none is left out of this list.",
        columns=("arm", "cell", "status", "why"),
        rows=rows,
        labels=4,
    )


def _why(cell: Cell) -> str:
    if cell.status == "failed":
        step = cell.error.get("step")
        at = f" (step {step})" if step is not None else ""
        return f"{cell.error.get('error', 'no error recorded')}{at}"
    if cell.status == "unfinished":
        return f"at step {cell.steps[-1]['step']}" if cell.steps else "begun, no step finished"
    return "not started"
