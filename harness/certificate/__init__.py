"""The certificate: that two arms of a results folder differ in what they declare, and in nothing
else.

Reads what the cells recorded and the lock; computes again what can be computed again. Loads no
torch. It fails closed: evidence that is missing, unreadable or inconsistent is a violation, and so
is a check that could not be carried out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.certificate.checks_amendments import check_amendments
from harness.certificate.checks_cells import check_matrix, check_records
from harness.certificate.checks_consumption import check_budget, check_graded, check_prompts
from harness.certificate.checks_evaluation import check_evaluation
from harness.certificate.checks_flops import check_flops
from harness.certificate.checks_identity import check_arms, check_hashes, check_pinned
from harness.certificate.checks_ladder import check_ladder, named_axes
from harness.certificate.checks_offline import (
    check_nothing_sampled,
    check_offline_effective,
    check_pair_flops,
    check_pairs,
)
from harness.certificate.checks_tuning import check_controls, check_tuning
from harness.certificate.checks_update import check_effective
from harness.certificate.design import Design
from harness.certificate.evidence import LOCK, Evidence, read_evidence
from harness.certificate.external import external_arms
from harness.certificate.finding import MISSING, Check, Violation, violation
from harness.identity import difference
from harness.store import write_json

__all__ = ["Certificate", "Check", "Violation", "audit", "write_certificate"]

FORMAT = 1
CERTIFICATE = "certificate.json"


Find = Callable[[Evidence, Design], Iterator[Violation]]


@dataclass(frozen=True)
class Rule:
    """A check: its name, what holds when it passes, and how it looks."""

    name: str
    proves: str
    find: Find


def both(sampling: Find, offline: Find) -> Find:
    """A check of arms that sample and, in its place, of arms that learn from pairs."""

    def find(evidence: Evidence, design: Design) -> Iterator[Violation]:
        yield from sampling(evidence, design)
        yield from offline(evidence, design)

    return find


RULES = (
    Rule("matrix",
         "There is one finished cell for each arm and seed, control and tuning trial that the "
         "locked spec asks for, and no other.", check_matrix),
    Rule("records",
         "No line was edited, cut or taken away after it was written, and totals are those of the "
         "last line.", check_records),
    Rule("pinned",
         "Every control has the locked value in every cell, but for settings that tuning may make; "
         "all train one model.", check_pinned),
    Rule("arms",
         "Every cell ran its arm's locked parts, changed by nothing but declared knobs.",
         check_arms),
    Rule("hashes",
         "Data, model, tokenizer, reward, code, plugin files (of which copies are kept) and "
         "library versions are the same in all cells.",
         check_hashes),
    Rule("prompts",
         "Every run of one seed drew the same prompts in the same order, from the first on.",
         both(check_prompts, check_pairs)),
    Rule("graded",
         "Every completion was graded once by the pinned reward, in groups of the declared size, "
         "and used or charged as dropped.", both(check_graded, check_nothing_sampled)),
    Rule("budget",
         "Every run of a kind had the same budget, stopped at the first step that spent it, and "
         "its totals agree with each other.", check_budget),
    Rule("flops",
         "The FLOPs charged follow from the recorded lengths and model shapes, and the lengths "
         "from the tokens; every model that an arm needs was charged.",
         both(check_flops, check_pair_flops)),
    Rule("effective",
         "Every step used the pinned decoding, learning rate, epochs and KL coefficient, and the "
         "loss is the sum of its declared terms.",
         both(check_effective, check_offline_effective)),
    Rule("tuning",
         "Every arm had the same trials, judged on validation alone, and its final seeds run the "
         "best of them.", check_tuning),
    Rule("evaluation",
         "All arms answered the same problems under the same protocol at the same shares of the "
         "budget, and every sample is accounted for.", check_evaluation),
    Rule("controls",
         "The base was not trained, and the placebo is its arm but for the verdict.",
         check_controls),
    Rule("ladder",
         "Each rung of a declared ladder differs from the last in exactly one axis, and a declared "
         "factorial has every combination of its axes, once.", check_ladder),
    Rule("amendments",
         "What was declared anew after the lock was written is recorded in order, with its time "
         "and reason, and changes nothing that a cell computes.", check_amendments),
)  # fmt: skip
EVIDENCE = "Every file, line and key that a proof needs is there and readable."


@dataclass(frozen=True)
class Certificate:
    """What the audit found.

    Attributes:
        certified: every check was carried out and none found a violation.
        cells: how many cells were read.
        checks: each rule, and whether it holds.
        violations: each broken rule, in the order of the checks.
        declared_differences: arm -> path among the parts -> (baseline's, arm's).
        settings: arm -> the settings its final seeds run with.
        diverged: tuning trials that ended in a number that is not finite; they count as trials, and
            as the worst.
        ladder: each ladder's steps: from which arm to which, along which axis.
        external: arms that another library's trainer trains -> their loop, and what of them is not
            proven.
    """

    certified: bool
    cells: int
    checks: tuple[Check, ...]
    violations: tuple[Violation, ...]
    declared_differences: dict[str, dict[str, tuple[Any, Any]]]
    settings: dict[str, dict[str, Any]]
    diverged: tuple[str, ...]
    ladder: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    external: dict[str, dict[str, Any]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON, the same for the same results."""
        return {
            "format": FORMAT,
            "certified": self.certified,
            "cells": self.cells,
            "checks": [vars(check) for check in self.checks],
            "violations": [v.to_json() for v in self.violations],
            "declared_differences": {
                arm: {path: list(pair) for path, pair in paths.items()}
                for arm, paths in self.declared_differences.items()
            },
            "settings": self.settings,
            "diverged": list(self.diverged),
        } | {
            name: found
            for name, found in (("ladder", self.ladder), ("external", self.external))
            if found
        }


def audit(results: Path) -> Certificate:
    """Check a results folder against its lock. Never raises on what it finds there."""
    evidence = read_evidence(results)
    found = list(evidence.gaps)
    design = Design.of(evidence)
    carried_out: set[str] = set()
    if design is not None:
        for rule in RULES:
            try:
                found += list(rule.find(evidence, design))
                carried_out.add(rule.name)
            except Exception as error:  # fail closed: a check that stumbles proves nothing
                found.append(
                    violation(
                        MISSING,
                        (),
                        rule.name,
                        "a check carried out",
                        f"{type(error).__name__}: {error}",
                        f"the check {rule.name} could not be carried out",
                    )
                )
    elif not found:
        found.append(violation(MISSING, (), LOCK, "a lock", None, "there is nothing to check by"))
    violations = _summarised(found)
    broken = {v.check for v in violations}
    external = {} if design is None else external_arms(design)
    checks = [Check(MISSING, EVIDENCE, MISSING not in broken)]
    checks += [
        Check(
            rule.name, _proves(rule, external),
            rule.name in carried_out and rule.name not in broken,
        )
        for rule in RULES
    ]  # fmt: skip
    return Certificate(
        certified=not violations and all(check.passed for check in checks),
        cells=len(evidence.cells),
        checks=tuple(checks),
        violations=violations,
        declared_differences={} if design is None else _declared(design),
        settings={} if design is None else _settings(evidence, design),
        diverged=tuple(cell.id for cell in evidence.cells if cell.diverged is not None),
        ladder=named_axes(design) if design is not None and "ladder" in carried_out else {},
        external=external,
    )


def _proves(rule: Rule, external: Mapping[str, Any]) -> str:
    """What a rule shows, less what it does not show of arms that another trainer trains."""
    less = [arm for arm, found in external.items() if rule.name in found["checks"]]
    if not less:
        return rule.proves
    return f"{rule.proves} Of {', '.join(less)} it shows less: see external."


def write_certificate(results: Path) -> Certificate:
    """Audit, and write ``certificate.json``."""
    certificate = audit(results)
    write_json(results / CERTIFICATE, certificate.to_json())
    return certificate


def _summarised(found: list[Violation]) -> tuple[Violation, ...]:
    """In the order of the checks; a rule broken on many lines of one file is told once."""
    first: dict[tuple[Any, ...], Violation] = {}
    more: dict[tuple[Any, ...], int] = {}
    for v in found:
        group = (v.check, v.cells, re.sub(r" line \d+|\.\d+$|\[[^]]*\]", "", v.key))
        if group in first:
            more[group] = more.get(group, 0) + 1
        else:
            first[group] = v
    order = [MISSING, *(rule.name for rule in RULES)]
    told = [
        replace(v, message=f"{v.message}, and {more[group]} more like it") if group in more else v
        for group, v in first.items()
    ]
    return tuple(sorted(told, key=lambda v: (order.index(v.check), v.cells)))


def _declared(design: Design) -> dict[str, dict[str, tuple[Any, Any]]]:
    baseline = design.lock.arms.get(design.baseline or "")
    if baseline is None:
        return {}
    return {
        name: difference(baseline.parts, arm.parts)
        for name, arm in sorted(design.lock.arms.items())
        if name != design.baseline
    }


def _settings(evidence: Evidence, design: Design) -> dict[str, dict[str, Any]]:
    return {
        cell.arm: dict(cell.run.settings)
        for cell in evidence.cells
        if cell.run is not None and cell.trial is None and cell.arm in design.lock.arms
    }
