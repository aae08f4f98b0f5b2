"""What a check of an arm says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True)
class Verdict:
    """``detail`` holds the figures, or the reason why there are none."""

    outcome: Outcome
    detail: str


@dataclass(frozen=True)
class Finding:
    """A check's name and its verdict."""

    check: str
    outcome: Outcome
    detail: str


class NotApplicableError(Exception):
    """A check finds that it does not apply; the message says why."""


def passed(detail: str) -> Verdict:
    return Verdict(Outcome.PASSED, detail)


def failed(detail: str) -> Verdict:
    return Verdict(Outcome.FAILED, detail)


def not_applicable(reason: str) -> Verdict:
    return Verdict(Outcome.NOT_APPLICABLE, reason)


def within(tolerance: float, worst: float, what: str) -> Verdict:
    """Passed where the worst gap found is within the tolerance; a NaN never is."""
    text = f"{what} {worst:.1e}"
    return passed(text) if worst <= tolerance else failed(f"{text}, allowed {tolerance:.0e}")
