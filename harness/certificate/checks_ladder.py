"""That a declared ladder is one: each rung a single axis from the last, and a whole factorial."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from harness.axes import Axis, axes, factorial
from harness.certificate.design import Design
from harness.certificate.evidence import LOCK, Evidence
from harness.certificate.finding import Violation, violation


def check_ladder(evidence: Evidence, design: Design) -> Iterator[Violation]:
    """By the locked parts, which are those that ran where the check of the arms holds."""
    ladder = design.spec.ladder
    if ladder is None:
        return
    taken: dict[str, Counter[str]] = {}
    for name in ("forward", "reverse"):
        rungs = _rungs(design, ladder.lists.get(name, ()))
        taken[name] = Counter()
        for number, (a, b) in enumerate(pairwise(rungs), 1):
            found = [axis.path for axis in axes(rungs[a], rungs[b])]
            taken[name].update(found)
            if len(found) != 1:
                yield violation(
                    "ladder", (), f"{LOCK}: spec.ladder.{name}.{number}", "one axis",
                    found, f"{b} is not one step from {a}",
                )  # fmt: skip
    if ladder.forward and ladder.reverse and taken["forward"] != taken["reverse"]:
        yield violation(
            "ladder", (), f"{LOCK}: spec.ladder.reverse", sorted(taken["forward"].elements()),
            sorted(taken["reverse"].elements()), "the ways there and back exchange other axes",
        )  # fmt: skip
    if ladder.factorial:
        try:
            factorial(_rungs(design, ladder.factorial))
        except ValueError as error:
            yield violation(
                "ladder", (), f"{LOCK}: spec.ladder.factorial",
                "every combination of two arms' parts", list(ladder.factorial), str(error),
            )  # fmt: skip


def named_axes(design: Design) -> dict[str, list[dict[str, Any]]]:
    """The ladders' steps for the certificate: from which arm to which, along which axis."""
    ladder = design.spec.ladder
    lists: Mapping[str, Sequence[str]] = {} if ladder is None else ladder.lists
    return {
        name: [
            {"from": a, "to": b, "axes": [_plain(x) for x in axes(rungs[a], rungs[b])]}
            for a, b in pairwise(rungs)
        ]
        for name in ("forward", "reverse")
        if (rungs := _rungs(design, lists.get(name, ())))
    }


def _rungs(design: Design, names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Locked parts by the arms' own names; KeyError for an arm that the lock lacks."""
    own = [design.arm_names[name] for name in names]
    return {name: design.lock.arms[name].parts for name in own}


def _plain(axis: Axis) -> dict[str, Any]:
    return {"path": axis.path, "before": axis.before, "after": axis.after}
