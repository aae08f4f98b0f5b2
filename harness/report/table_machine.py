"""Tables of what the machine held and how long it took: memory by role, seconds by phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.report.load import Cell, Experiment
from harness.report.table_spent import begun, seed_folders
from harness.report.tables import Table, fixed, size


def machine_tables(experiment: Experiment) -> list[Table]:
    """``memory``, and, measured, ``memory_measured`` and ``seconds``."""
    return [
        memory_table(experiment, "predicted"),
        memory_table(experiment, "measured"),
        seconds_table(experiment),
    ]


def memory_bytes(experiment: Experiment, which: str) -> dict[str, dict[tuple[str, str], float]]:
    """Arm -> (role, kind) -> bytes, the largest over finished seeds."""
    found: dict[str, dict[tuple[str, str], float]] = {}
    for arm in experiment.shown:
        for cell in experiment.seed_cells(arm):
            for item in cell.memory.get(which) or []:
                key, part = (item["role"], item["kind"]), found.setdefault(arm, {})
                part[key] = max(part.get(key, 0), item["bytes"])
    return found


def memory_by_role(experiment: Experiment, which: str) -> dict[str, dict[str, float]]:
    """Arm -> role -> bytes held at the peak: what stays, and the largest turn of one model.

    Items without a phase stay throughout (``harness.cost.memory.peak_bytes``). The largest over
    finished seeds.
    """
    found: dict[str, dict[str, float]] = {}
    for arm in experiment.shown:
        for cell in experiment.seed_cells(arm):
            held = _held_at_peak(cell.memory.get(which) or [])
            if sum(held.values()) > sum(found.get(arm, {}).values()):
                found[arm] = held
    return found


def _held_at_peak(items: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    held: dict[str, float] = {}
    turns: dict[tuple[str, str], float] = {}
    for item in items:
        role, phase = item["role"], item.get("phase")
        if phase is None:
            held[role] = held.get(role, 0) + item["bytes"]
        else:
            turns[role, phase] = turns.get((role, phase), 0) + item["bytes"]
    if turns:
        role, phase = max(turns, key=lambda t: (turns[t], t[0] == "policy", t))
        held[role] = held.get(role, 0) + turns[role, phase]
    return held


def memory_table(experiment: Experiment, which: str) -> Table:
    """Bytes by role and kind, predicted or measured."""
    found = memory_bytes(experiment, which)
    keys = sorted({key for part in found.values() for key in part})
    arms = [a for a in experiment.shown if a in found]
    rows = [[*key, *(size(found[a].get(key)) for a in arms)] for key in keys]
    records: list[dict[str, Any]] = [
        {"arm": a, "role": role, "kind": kind, "bytes": found[a].get((role, kind))}
        for a in arms
        for role, kind in keys
    ]
    measured = which == "measured"
    peaks = {a: _peak(experiment, a, measured) for a in arms}
    if arms:
        rows.append(["all", "peak", *(size(peaks[a]) for a in arms)])
    records += [{"arm": a, "role": "all", "kind": "peak", "bytes": peaks[a]} for a in arms]
    return Table(
        name="memory_measured" if measured else "memory",
        title="Memory, measured" if measured else "Memory, predicted",
        note="Largest over finished seeds, by model role and kind. "
        + (
            "The peak is of the process while training, above what it held before, and depends "
            "on the machine and its allocator."
            if measured
            else "From shapes and the longest prompt and completion allowed. Kinds do not all "
            "stand at one time, so the peak is less than their sum."
        ),
        columns=("role", "kind", *arms),
        rows=rows,
        records=records,
        labels=2,
        measured=measured,
        sources=seed_folders(experiment),
    )


def _peak(experiment: Experiment, arm: str, measured: bool) -> float | None:
    if not measured:
        return sum(memory_by_role(experiment, "predicted").get(arm, {}).values())
    peaks = [(c.memory.get("peak") or {}).get("bytes") for c in experiment.seed_cells(arm)]
    return max((p for p in peaks if p is not None), default=None)


def seconds_table(experiment: Experiment) -> Table:
    """Seconds by phase of a step, and of evaluation."""
    rows, records, phases = [], [], ("sample", "grade", "score", "update")
    for cell in begun(experiment):
        spent = _seconds_by_phase(cell)
        by_phase = {p: spent.get(p, 0.0) for p in phases}
        total = training_seconds(cell)
        evaluation = sum(t["seconds"] for t in cell.timing if "evaluation" in t)
        records.append(
            {"arm": cell.arm, "cell": cell.name, "training": total, "evaluation": evaluation}
            | by_phase
        )
        if cell.kind == "seed":
            shown = [fixed(v, 1) for v in (total, *by_phase.values(), evaluation)]
            rows.append([cell.arm, cell.name, *shown])
    return Table(
        name="seconds",
        title="Seconds, measured",
        note="Wall-clock seconds of this machine; training leaves out evaluation and start-up.",
        columns=("arm", "cell", "training", *phases, "evaluation"),
        rows=rows,
        records=records,
        labels=2,
        measured=True,
        sources=[c.folder for c in begun(experiment)],
    )


def _seconds_by_phase(cell: Cell) -> dict[str, float]:
    """Totals: lines hold each step's seconds or, adding up to the total, running sums."""
    lines = [t for t in cell.timing if "step" in t and t.get("seconds")]
    if not lines:
        return {}
    last = lines[-1]["seconds"]
    if abs(sum(last.values()) - lines[-1].get("total_seconds", 0.0)) < 1e-6:
        return dict(last)
    return {phase: sum(t["seconds"].get(phase, 0.0) for t in lines) for phase in last}


def training_seconds(cell: Cell, step: int | None = None) -> float | None:
    """Cumulative training seconds at a step, or at the last one."""
    times = {t["step"]: t.get("total_seconds") for t in cell.timing if "step" in t}
    if not times:
        return None
    return times.get(max(times) if step is None else step)
