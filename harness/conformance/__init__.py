"""Checks that an arm is what it says: for those that ship and for a plugin's.

Everything is done on the arm's own methods and in float64, on batches made up here: a ragged one
(``scene``), and all that a policy small enough to write down can draw (``enumerated``).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.arm import Arm
from harness.conformance.declared import check_knobs, check_parts
from harness.conformance.exact import (
    check_ascent,
    check_estimator,
    check_expected_update,
    check_imitation,
    check_kl_gradient,
)
from harness.conformance.finding import (
    Finding,
    NotApplicableError,
    Outcome,
    Verdict,
    failed,
    not_applicable,
)
from harness.conformance.gradients import (
    check_finite_differences,
    check_first_minibatch,
    check_zero_variance,
)
from harness.conformance.invariance import (
    check_gaps,
    check_micro_batches,
    check_padding,
    check_row_order,
    check_world_size,
)
from harness.conformance.shapes import check_shapes
from harness.errors import InputError
from harness.external.arm import ExternalArm, OfflineArm

__all__ = ["CHECKS", "Finding", "Outcome", "Report", "check_arm", "run_check"]

CHECKS: dict[str, Callable[[Arm], Verdict]] = {
    "parts": check_parts,
    "knobs": check_knobs,
    "shapes": check_shapes,
    "padding": check_padding,
    "gaps": check_gaps,
    "micro_batches": check_micro_batches,
    "row_order": check_row_order,
    "world_size": check_world_size,
    "finite_differences": check_finite_differences,
    "first_minibatch": check_first_minibatch,
    "zero_variance": check_zero_variance,
    "estimator": check_estimator,
    "ascent": check_ascent,
    "expected_update": check_expected_update,
    "imitation": check_imitation,
    "kl_gradient": check_kl_gradient,
}
STATIC = ("parts", "knobs")  # those that run no part


@dataclass(frozen=True)
class Report:
    """What every check says of one arm."""

    arm: str
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """No check fails; one that does not apply is no failure."""
        return not any(f.outcome is Outcome.FAILED for f in self.findings)

    def count(self, outcome: Outcome) -> int:
        return sum(f.outcome is outcome for f in self.findings)


def check_arm(arm: Arm) -> Report:
    """Run every check on an arm. A part that raises fails the check; nothing is raised here.

    Where shapes are wrong the checks after it would all say the same, and are not run.
    """
    findings: list[Finding] = []
    broken = False
    with _one_thread():
        for name, check in CHECKS.items():
            if broken and name not in STATIC:
                verdict = not_applicable("not run, as shapes failed")
            elif isinstance(arm, (ExternalArm, OfflineArm)) and name not in STATIC:
                verdict = not_applicable(f"{arm.loop.trainer} computes it, and not the parts")
            else:
                verdict = run_check(check, arm)
            findings.append(Finding(name, verdict.outcome, verdict.detail))
            broken = broken or (name == "shapes" and verdict.outcome is Outcome.FAILED)
    return Report(arm.name, tuple(findings))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Tensors of a few numbers are slower on many threads, and much slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_check(check: Callable[[Arm], Verdict], arm: Arm) -> Verdict:
    """One check's verdict; what a part raises is a failure with its place."""
    try:
        return check(arm)
    except NotApplicableError as reason:
        return not_applicable(str(reason))
    except InputError as error:
        return failed(str(error))
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        last = [f for f in frames if "site-packages" not in f.filename][-1]  # a part, not torch
        message = " ".join(str(error).split())
        return failed(
            f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {message}"
        )
