"""From completions to scores: the verdict's worth and the format term, or a placebo's shuffle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from harness.rewards.maths import MathGrader, Verdict
from harness.samplers.sampler import Drawn
from harness.spec.schema import RewardSpec
from harness.tasks.task import Problem

JUDGE_VERSION = 1


class Judge(Protocol):
    """Turns completions into verdicts and scores."""

    def __call__(
        self, indices: list[int], drawn: Drawn, seed: int
    ) -> tuple[list[Verdict], Tensor, Tensor, Tensor]:
        """Verdicts, and per completion: score, bonus and correct."""
        ...


def make_grader(spec: RewardSpec) -> MathGrader:
    """The grader of a spec; its processes start only when an answer needs them."""
    return MathGrader(
        workers=spec.workers,
        timeout_seconds=spec.timeout_seconds,
        memory_mb=spec.memory_mb,
        answer_format=spec.answer_format,
    )


def blind_order(count: int, seed: int) -> list[int]:
    """Whose verdict each completion of a placebo gets: a shuffle that looks at none of them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(count, generator=generator).tolist()


def reward_identity(spec: RewardSpec) -> dict[str, object]:
    """What a reward is pinned by: its rule's versions and what a verdict is worth."""
    noise: dict[str, object] = {}
    if spec.noise is not None:
        noise["noise"] = spec.noise.model_dump(mode="json")
    if spec.dense is not None:
        noise["dense"] = spec.dense.model_dump(mode="json")
    return noise | {
        "grader": MathGrader.version,
        "judge": JUDGE_VERSION,
        "answer_format": spec.answer_format,
        "correct": spec.correct,
        "wrong": spec.wrong,
        "format": spec.format,
    }


@dataclass(frozen=True)
class MathsJudge:
    """``correct`` or ``wrong`` by the verdict, plus ``format`` where an answer was found.

    A grader time-out or error scores like a wrong answer, but keeps its own outcome, which every
    step records and the report shows.
    """

    grader: MathGrader
    problems: Sequence[Problem]
    spec: RewardSpec
    placebo: bool = False

    def __call__(
        self, indices: list[int], drawn: Drawn, seed: int
    ) -> tuple[list[Verdict], Tensor, Tensor, Tensor]:
        verdicts = self.grader.grade(
            [self.problems[i].answer for i in indices], drawn.texts, drawn.finished.tolist()
        )
        order = list(range(len(verdicts)))
        if self.placebo:
            order = blind_order(len(verdicts), seed)
        judged = [verdicts[i] for i in order]
        correct = torch.tensor([v.correct for v in judged])
        bonus = torch.tensor([self.spec.format * (v.extracted is not None) for v in judged])
        value = torch.where(correct, self.spec.correct, self.spec.wrong)
        return verdicts, (value + bonus).float(), bonus.float(), correct
