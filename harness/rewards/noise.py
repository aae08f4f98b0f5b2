"""Calibrated noise on a reward: what a grader that errs, or a labeller who wavers, tells an arm.

Verdicts are turned first, then Gaussian noise is added to the score. Which are turned depends on
(seed, step, round, row) alone, so arms of one seed whose batches have one shape meet the same noise
in the same places. What is recorded, evaluated and selected by stays the true verdict; what the arm
is told, its rules for dropping groups included, is the noisy one, as a real grader's would be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.identity import stream_seed
from harness.rewards.judge import Judge
from harness.rewards.maths import Verdict
from harness.samplers.sampler import Drawn
from harness.spec.reward import NoiseSpec

VERSION = 1


@dataclass(frozen=True)
class NoisyJudge:
    """A judge whose verdicts and scores are disturbed before an arm sees them.

    Attributes:
        judge: whose scores.
        spec: how much noise, of which kind.
        gain: what a verdict is worth: the score of a right one less that of a wrong one; None for
            a judge of scores, whose verdicts cannot be turned.
        placebo: the judge is blind already, so how often it errs is not recorded.
        wrong: what a wrong verdict scores.
    """

    judge: Judge
    spec: NoiseSpec
    gain: float | None
    placebo: bool = False
    wrong: float = 0.0

    def __call__(
        self, indices: list[int], drawn: Drawn, seed: int
    ) -> tuple[list[Verdict], Tensor, Tensor, Tensor]:
        verdicts, score, bonus, correct = self.judge(indices, drawn, seed)
        generator = torch.Generator().manual_seed(stream_seed(seed, "noise"))
        luck = torch.rand(len(score), generator=generator, dtype=torch.float64)
        shift = torch.randn(len(score), generator=generator, dtype=torch.float64)
        if self.gain is not None:
            told = self._turned(correct, luck.to(correct.device))
            score = score + self.gain * (told.to(score) - correct.to(score))
            correct = told
        score = score + self.spec.sigma * shift.to(score)
        return verdicts, score, bonus, correct

    def _turned(self, correct: Tensor, luck: Tensor) -> Tensor:
        missed = luck < self.spec.right_told_wrong
        praised = luck < self.spec.wrong_told_right
        return torch.where(correct, ~missed, praised)

    def record(
        self, verdicts: Sequence[Verdict], score: Tensor, bonus: Tensor, told: Tensor
    ) -> dict[str, Any]:
        """What was done to the true verdicts: read off what the arm was told, not off the luck.

        Args:
            verdicts: the true ones.
            score, bonus, told: ``[B]``, as this judge gave them.
        """
        if self.placebo or self.gain is None:
            return {}
        found = turned_record(verdicts, told)
        if self.spec.sigma:
            added = (score - bonus).double() - (self.wrong + self.gain * told.double())
            found["added_rms"] = float(added.square().mean().sqrt())
        return {"noise": found}


def turned_record(verdicts: Sequence[Verdict], told: Tensor) -> dict[str, Any]:
    """How many true verdicts of each kind an arm was told otherwise."""
    true = torch.tensor([v.correct for v in verdicts])
    told = told.cpu()
    return {
        "right": int(true.sum()),
        "right_turned": int((true & ~told).sum()),
        "wrong": int((~true).sum()),
        "wrong_turned": int((~true & told).sum()),
    }
