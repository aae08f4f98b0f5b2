"""That noise on the reward was as much as the spec says, for every arm alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scipy.special import gammainccinv, gammaincinv

from harness.certificate.design import Design
from harness.certificate.evidence import PLACEBO, Cell, Evidence
from harness.certificate.finding import MISSING, Violation, violation
from harness.certificate.records import Noise, Step

SURELY = 6.5  # standard errors that chance passes once in 10^10
RARELY = 1e-10


def noise_as_declared(evidence: Evidence, design: Design) -> Iterator[Violation]:
    """Every arm was told otherwise as often as the spec says, and none where it says nothing."""
    noise = design.spec.reward.noise
    for cell, _, steps in design.sampling_cells(evidence):
        found = [step.noise for step in steps if step.noise is not None]
        if noise is None or design.learned or cell.arm == PLACEBO:
            if found:
                yield violation(
                    "graded", cell.id, "steps.jsonl: noise", None, len(found),
                    "verdicts were turned where the spec turns none",
                )  # fmt: skip
            continue
        if len(found) != len(steps):
            yield violation(
                MISSING, cell.id, "steps.jsonl: noise", len(steps), len(found),
                "how many verdicts were turned is not recorded in every step",
            )  # fmt: skip
            continue
        yield from _noise_counts(cell, steps)
        for kind, turned, share in (
            ("right", "right_turned", noise.right_told_wrong),
            ("wrong", "wrong_turned", noise.wrong_told_right),
        ):
            n = sum(getattr(one, kind) for one in found)
            x = sum(getattr(one, turned) for one in found)
            if abs(x - n * share) > SURELY * (n * share * (1 - share) + 1) ** 0.5:
                yield violation(
                    "graded", cell.id, f"steps.jsonl: noise.{turned}", round(n * share), x,
                    f"of {n} {kind} verdicts another share was turned than the spec says",
                )  # fmt: skip

        yield from _added(cell, found, noise.sigma)


def _noise_counts(cell: Cell, steps: Sequence[Step]) -> Iterator[Violation]:
    """The verdicts that noise was put on are those of the completions that were graded."""
    for line, step in enumerate(steps, 1):
        assert step.noise is not None
        right, graded = step.outcomes.get("correct", 0), sum(step.outcomes.values())
        for key, expected, found in (
            ("right", right, step.noise.right), ("wrong", graded - right, step.noise.wrong),
        ):  # fmt: skip
            if expected != found:
                yield violation(
                    "graded", cell.id, f"steps.jsonl line {line}: noise.{key}", expected, found,
                    "noise was put on other verdicts than those that were graded",
                )  # fmt: skip


def _added(cell: Cell, found: Sequence[Noise], sigma: float) -> Iterator[Violation]:
    """What was added to scores has the declared spread: its square sum over sigma^2 is chi^2."""
    recorded = [one for one in found if one.added_rms is not None]
    if len(recorded) != (len(found) if sigma else 0):
        yield violation(
            MISSING if sigma else "graded", cell.id, "steps.jsonl: noise.added_rms",
            len(found) if sigma else 0, len(recorded),
            "how much was added to scores is not recorded in the steps in which the spec adds any",
        )  # fmt: skip
        return
    n = sum(one.right + one.wrong for one in recorded)
    if not n:
        return
    x = sum((one.right + one.wrong) * ((one.added_rms or 0) / sigma) ** 2 for one in recorded)
    if not 2 * gammaincinv(n / 2, RARELY) <= x <= 2 * gammainccinv(n / 2, RARELY):
        yield violation(
            "graded", cell.id, "steps.jsonl: noise.added_rms", sigma, sigma * (x / n) ** 0.5,
            f"what was added to {n} scores has another spread than the spec says",
        )  # fmt: skip
