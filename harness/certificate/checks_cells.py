"""Which cells there are, and that nothing was changed in them after they were written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.certificate.design import Design
from harness.certificate.evidence import BASE, CELL_NAME, PLACEBO, Cell, Evidence
from harness.certificate.finding import Violation, violation
from harness.store import chain_breaks


def check_matrix(evidence: Evidence, design: Design) -> Iterator[Violation]:
    """Exactly the promised cells, each finished."""
    yield from _arms(design)
    found = {(cell.arm, cell.name): cell for cell in evidence.cells}
    for arm, name in sorted(design.cells - found.keys()):
        yield violation(
            "matrix", f"runs/{arm}/{name}", "run.json", "a cell", None,
            "the spec asks for this cell, and it is not there",
        )  # fmt: skip
    for key, cell in found.items():
        if key not in design.cells:
            yield violation(
                "matrix", cell.id, "run.json", "no such cell", cell.name,
                "the spec asks for no such cell: effort that other arms did not get",
            )  # fmt: skip
        elif not (cell.path / "done.json").exists():
            failed = (cell.path / "error.json").exists()
            why = "the cell failed" if failed else "the cell is not finished"
            found_now = "error.json" if failed else None
            yield violation("matrix", cell.id, "done.json", "status done", found_now, why)
        elif cell.run is not None:
            yield from _named(cell, cell.run.model_dump(), design)


def _arms(design: Design) -> Iterator[Violation]:
    named = set(design.arm_names.values())
    for arm in sorted(set(design.lock.arms) - named):
        yield violation(
            "matrix", (), f"spec.lock.yaml: arms.{arm}", list(design.spec.arms), arm,
            "the locked spec names no such arm",
        )  # fmt: skip
    for name in design.spec.arms:
        if name not in design.arm_names:
            yield violation(
                "matrix", (), "spec.lock.yaml: spec.arms", sorted(design.lock.arms), name,
                "the lock holds no parts for this arm",
            )  # fmt: skip


def _named(cell: Cell, run: dict[str, Any], design: Design) -> Iterator[Violation]:
    """A cell is what its folder says."""
    match = CELL_NAME.fullmatch(cell.name)
    assert match is not None  # the name is one of the matrix
    expected = {
        "arm": cell.arm,
        "kind": "seed" if cell.trial is None else "trial",
        "trial": cell.trial,
        "seed": cell.seed,
        "placebo_of": design.spec.controls.placebo if cell.arm == PLACEBO else None,
    }
    for key, value in expected.items():
        if run[key] != value:
            if key == "placebo_of" and value and run[key] == design.placebo_arm:
                continue  # by the name in the results rather than the spec's
            yield violation(
                "matrix", cell.id, f"run.json: {key}", value, run[key],
                "the record is of another cell than its folder's name says",
            )  # fmt: skip


def check_records(evidence: Evidence, design: Design) -> Iterator[Violation]:
    """Nothing edited, cut or left out since it was written."""
    for cell in evidence.cells:
        yield from _chains(cell)
        if cell.steps is not None:
            yield from _numbering(cell)
        if cell.done is not None and cell.steps is not None:
            yield from _totals(cell)


def _chains(cell: Cell) -> Iterator[Violation]:
    for name, lines in (("steps.jsonl", cell.raw_steps), ("evals.jsonl", cell.raw_evals)):
        for index in chain_breaks(list(lines)):
            yield violation(
                "records", cell.id, f"{name} line {index + 1}: chain",
                "the hash of this line and those before it", lines[index].get("chain"),
                "the line was changed after it was written, or one before it was taken away",
            )  # fmt: skip
    if cell.done is None:
        return
    for name, key, lines in (
        ("steps.jsonl", "last_chain", cell.raw_steps),
        ("evals.jsonl", "evals_chain", cell.raw_evals),
    ):
        last = lines[-1].get("chain") if lines else None
        recorded = getattr(cell.done, key) or None
        if recorded != last:
            yield violation(
                "records", cell.id, f"done.json: {key}", last, recorded,
                f"{name} does not end with the line that the run ended with",
            )  # fmt: skip


def _numbering(cell: Cell) -> Iterator[Violation]:
    assert cell.steps is not None
    for index, step in enumerate(cell.steps, 1):
        if step.step != index:
            yield violation(
                "records", cell.id, f"steps.jsonl line {index}: step", index, step.step,
                "steps are not numbered 1, 2, …",
            )  # fmt: skip
            break
    if cell.arm == BASE or cell.timing is None:
        return
    timed = [line.step for line in cell.timing]
    if timed != list(range(1, len(cell.steps) + 1)):
        yield violation(
            "records", cell.id, "timing.jsonl: step", f"1..{len(cell.steps)}",
            f"{len(timed)} lines", "timing.jsonl does not have one line per training step",
        )  # fmt: skip
    seconds = [line.total_seconds for line in cell.timing]
    for index in range(1, len(seconds)):
        if seconds[index] < seconds[index - 1]:
            yield violation(
                "records", cell.id, f"timing.jsonl line {index + 1}: total_seconds",
                f">= {seconds[index - 1]}", seconds[index], "cumulative seconds went back",
            )  # fmt: skip


def _totals(cell: Cell) -> Iterator[Violation]:
    assert cell.steps is not None
    assert cell.done is not None
    if cell.done.steps != len(cell.steps):
        yield violation(
            "records", cell.id, "done.json: steps", len(cell.steps), cell.done.steps,
            "the run ended after another number of steps than it recorded",
        )  # fmt: skip
    if not cell.steps:
        return
    last = cell.steps[-1]
    for key, value in last.spent.model_dump().items():
        found = getattr(cell.done.spent, key)
        if found != value:
            yield violation(
                "records", cell.id, f"done.json: spent.{key}", value, found,
                "the total is not that of the last step",
            )  # fmt: skip
    if cell.done.flops != last.flops:
        yield violation(
            "records", cell.id, "done.json: flops", last.flops, cell.done.flops,
            "the FLOPs by role are not those of the last step",
        )  # fmt: skip
