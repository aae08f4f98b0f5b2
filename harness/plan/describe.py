"""A plan as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from harness.cost.memory import KINDS, MemoryItem, by_role
from harness.errors import counted
from harness.plan.power import DesignPower
from harness.plan.value import ArmPlan, CellPlan, Plan

PREFIXES = ((1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
WORDS = ("cells", "role", "space", "from")  # columns of text; numbers stand to the right
SHORT_HOURS = 2
LARGE = 1e4  # counts below it are written out


def describe(plan: Plan, console: Console) -> None:
    """Print a plan: model, cells, work, memory, time, data, tuning, assumptions, warnings."""
    unit = plan.budget["unit"]
    console.print(f"[bold]{plan.name}[/bold]: {plan.question}")
    console.print(
        f"model {plan.model['name']} ({_short(plan.model['parameters'])} parameters, "
        f"{plan.model['dtype']}), budget {_short(plan.budget['limit'])} {unit} a run, "
        f"{counted(plan.cells, 'cell')}"
    )
    for table in (_cells(plan), _work(plan), _flops(plan), _memory(plan), _tuning(plan)):
        if table is not None:
            console.print()
            console.print(table)
    console.print()
    console.print(_data(plan))
    for split in plan.data:
        for note in split.notes:
            console.print(f"  {split.name}: {note}", markup=False)
    console.print()
    _time(plan, console)
    console.print(f"\n[bold]assumed[/bold] ({len(plan.assumptions)})")
    for line in plan.assumptions:
        console.print(f"  {line}", markup=False)
    console.print(f"\n[bold]to know before running[/bold] ({len(plan.warnings)})")
    for line in plan.warnings:
        console.print(f"  {line}", markup=False)


def describe_power(power: DesignPower, console: Console) -> None:
    """Print what the design can show, and what it cannot be counted on to show."""
    if power.comparisons:
        rows = [
            (
                f"{one.test}: {one.arm} − {one.control}", f"{100 * one.sd:.2f}",
                f"{one.difference:.2f} / {one.equivalence:.2f}",
                _pair(one.difference_beyond, one.equivalence_beyond),
                _pair(one.seeds_difference, one.seeds_equivalence),
                _pair(one.problems_difference, one.problems_equivalence), one.basis,
            )
            for one in power.comparisons
        ]  # fmt: skip
        columns = ("comparison", "sd, points", "power", "other problems", "seeds needed",
                   "problems needed", "from")  # fmt: skip
        margin = f"{100 * (power.margin or 0):g} points, level {power.alpha_each:.3g} each"
        title = f"Power to show a difference of the margin / equivalence: margin {margin}"
        console.print()
        console.print(_table(title, columns, rows))
    console.print(f"\n[bold]not promised[/bold] ({len(power.refusals)})")
    for line in (*power.refusals, *(f"note: {note}" for note in power.notes)):
        console.print(f"  {line}", markup=False)


def _pair(a: float | None, b: float | None) -> str:
    shown = ("–" if v is None else f"{v:,}" if isinstance(v, int) else f"{v:.2f}" for v in (a, b))
    return " / ".join(shown)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        words = i == 0 or column in WORDS
        table.add_column(column, justify="left" if words else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _cells(plan: Plan) -> Table:
    rows = []
    for arm in plan.arms:
        for cell in arm.cells:
            steps = f"{cell.steps:,}"
            if cell.warmup_steps:
                steps += f" ({cell.warmup_steps} warm-up)"
            rows.append(
                (
                    arm.name, counted(cell.cells, cell.kind), steps,
                    _short(cell.training.prompts), _short(cell.training.completions),
                    _short(cell.training.prompt_tokens + cell.training.completion_tokens),
                    _short(cell.training.total_flops), f"{cell.evaluations}",
                    _short(cell.evaluation.completions), _duration(cell.seconds),
                )
            )  # fmt: skip
    columns = ("arm", "cells", "steps", "prompts", "completions", "tokens", "FLOPs", "evaluations",
               "their completions", "time")  # fmt: skip
    return _table("One cell of each kind", columns, rows)


def _work(plan: Plan) -> Table:
    rows = [(a.name, *_amounts(a)) for a in plan.arms]
    total = (
        _short(plan.training.prompts), _short(plan.training.completions),
        _short(plan.training.prompt_tokens), _short(plan.training.completion_tokens),
        _short(plan.training.total_flops), _short(plan.evaluation.completions),
        _short(plan.evaluation.total_flops), _duration(sum(a.seconds for a in plan.arms)),
    )  # fmt: skip
    columns = ("arm", "prompts", "completions", "prompt tok.", "completion tok.", "FLOPs",
               "eval. completions", "eval. FLOPs", "time")  # fmt: skip
    return _table("All cells", columns, [*rows, ("all", *total)])


def _amounts(arm: ArmPlan) -> tuple[str, ...]:
    t, e = arm.total, arm.evaluation
    return (
        _short(t.prompts), _short(t.completions), _short(t.prompt_tokens),
        _short(t.completion_tokens), _short(t.total_flops), _short(e.completions),
        _short(e.total_flops), _duration(arm.seconds),
    )  # fmt: skip


def _flops(plan: Plan) -> Table | None:
    trained = [arm for arm in plan.arms if arm.step is not None]
    if not trained:
        return None
    keys = sorted({key for arm in trained for key in (arm.step.flops or {})})  # type: ignore[union-attr]
    rows = []
    for arm in trained:
        assert arm.step is not None
        flops, whole = arm.step.flops or {}, arm.step.total_flops
        shares = [f"{flops[k] / whole:.0%}" if k in flops else "" for k in keys]
        rows.append((arm.name, _short(whole), *shares))
    return _table("FLOPs of one step, by role and phase", ("arm", "total", *keys), rows)


def _memory(plan: Plan) -> Table | None:
    rows = []
    for arm in plan.arms:
        if arm.memory is None:
            continue
        roles = by_role(MemoryItem(**item) for item in arm.memory["items"])
        for i, (role, kinds) in enumerate(roles.items()):
            peak = _bytes(arm.memory["peak"]) if i == 0 else ""
            held = [_bytes(kinds[k]) if k in kinds else "" for k in KINDS]
            rows.append((arm.name if i == 0 else "", peak, role, *held))
    if not rows:
        return None
    available, what = plan.memory_available
    title = f"Predicted memory of one cell, bytes (there are {_bytes(available)} of {what})"
    return _table(title, ("arm", "peak", "role", *KINDS), rows)


def _tuning(plan: Plan) -> Table | None:
    rows = []
    for arm in plan.arms:
        cell: CellPlan | None = arm.cell("trial")
        if cell is None:
            continue
        paths = ", ".join(f"{path} {_range(r)}" for path, r in arm.space.items())
        rows.append((arm.name, f"{cell.cells}", f"{len(arm.space)}", f"{arm.knobs}", paths))
    if not rows:
        return None
    return _table("Tuning, selected on validation",
                  ("arm", "trials", "dimensions", "own knobs", "space"), rows)  # fmt: skip


def _range(r: dict[str, object]) -> str:
    if r["choices"] is not None:
        return "{" + ", ".join(map(str, r["choices"])) + "}"  # type: ignore[call-overload]
    return f"{r['low']:g}..{r['high']:g}{' log' if r['log'] else ''}"


def _data(plan: Plan) -> Table:
    rows = []
    for split in plan.data:
        mark = "" if split.prompt_counted else "~"
        found = split.contamination
        seen = "" if found is None else f"{len(found['exact'])} / {found['flagged']}"
        rows.append(
            (
                split.name, f"{split.problems:,}", f"{mark}{split.prompt_mean:.0f}",
                f"{mark}{split.prompt_longest}", seen, (split.file_sha256 or split.sha256)[:12],
                split.source,
            )
        )  # fmt: skip
    columns = ("data", "problems", "prompt tok.", "longest", "in training: equal / similar",
               "sha256", "from")  # fmt: skip
    return _table("Data", columns, rows)


def _time(plan: Plan, console: Console) -> None:
    time = plan.time
    walls = ", ".join(
        f"{_duration(hours * 3600)} with {width} at once"
        for width, hours in time.wall_hours.items()
    )
    label = "measured" if time.measured else "assumed"
    whole = f"{time.hours:,.0f} {time.unit}"
    if time.hours < SHORT_HOURS:
        whole = f"{time.hours * 60:,.0f} {time.unit.replace('hours', 'minutes')}"
    console.print(f"[bold]time[/bold] ({label} speed): {whole}; on the clock {walls}")
    console.print(
        f"smallest p of a sign-flip test with {plan.seeds} paired seeds: {plan.smallest_p:.3g}"
    )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:,.1f} h"


def _short(value: float) -> str:
    if abs(value) < LARGE:
        return f"{value:,.0f}"
    size, letter = next(p for p in PREFIXES if abs(value) >= p[0])
    return f"{value / size:.3g} {letter}"


def _bytes(value: float) -> str:
    return f"{value / 1e9:.2f} GB" if value >= 1e8 else f"{value / 1e6:.1f} MB"
