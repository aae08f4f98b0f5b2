"""A learned reward: a fixed gold scorer that nobody trains on, and the model learned from it.

The verdict on a completion is the gold scorer's alone: it is *right* where its gold score reaches
``success``. What an arm trains on is the model's score (the proxy), unless the arm is one that is
given the gold reward. Both are recorded for every completion that is evaluated, and their means for
every training step, so that a proxy that rises while the gold falls is seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from harness.rewards.judge import blind_order
from harness.rewards.maths import Outcome, Verdict
from harness.samplers.sampler import Drawn
from harness.tasks.task import Problem

JUDGE_VERSION = 1
SCORE_DIGITS = 6  # of a stored score
ABOVE, BELOW = "above", "below"  # the two classes of a majority vote


class GoldScorer(Protocol):
    """A fixed reward; the same texts always score the same."""

    version: ClassVar[int]  # raised when a completion would score otherwise

    def __call__(self, prompts: Sequence[str], completions: Sequence[str]) -> Sequence[float]:
        """The score of each completion of its prompt."""
        ...


class Scores(Protocol):
    """A reward model's reading of completions."""

    def score(
        self,
        prompt_ids: Int[Tensor, "B S"],
        prompt_mask: Bool[Tensor, "B S"],
        completion_ids: Int[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
        micro_batch: int,
    ) -> Float[Tensor, "B"]:
        """The score at each completion's last token, whatever the padding holds."""
        ...


@dataclass(frozen=True)
class ScoredVerdict(Verdict):
    """A verdict by the gold score, with both scores.

    Attributes:
        gold: the fixed scorer's value, on its own scale.
        proxy: the reward model's, of mean 0 and standard deviation 1 on the base's completions.
    """

    gold: float
    proxy: float


class LearnedGrader:
    """Scores completions by both rewards; as a context manager it has nothing to release.

    Args:
        gold: the fixed scorer.
        model: the reward model, on the device of the policy.
        success: the gold score from which a completion counts as right.
        micro_batch: completions that the model reads at once; moves memory, not numbers.
    """

    def __init__(
        self, gold: GoldScorer, model: Scores, *, success: float, micro_batch: int
    ) -> None:
        self.gold, self.model = gold, model
        self.success, self.micro_batch = success, micro_batch

    def __enter__(self) -> LearnedGrader:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def check_golds(self, ids: Sequence[str], golds: Sequence[str]) -> None:
        """There are no gold answers to check."""

    def assess(self, problems: Sequence[Problem], drawn: Drawn) -> list[ScoredVerdict]:
        """A verdict on each completion; ``problems`` has one entry per row of ``drawn``."""
        found = self.gold([p.question for p in problems], drawn.texts)
        gold = [round(float(g), SCORE_DIGITS) for g in found]  # judged as it is stored
        proxy = self.model.score(
            drawn.prompt_ids, drawn.prompt_mask, drawn.completion_ids, drawn.mask, self.micro_batch
        )
        return [
            ScoredVerdict(
                Outcome.CORRECT if g >= self.success else Outcome.WRONG,
                ABOVE if g >= self.success else BELOW, g, p,
            )
            for g, p in zip(gold, proxy.tolist(), strict=True)
        ]  # fmt: skip


@dataclass(frozen=True)
class LearnedJudge:
    """The proxy score as the reward; or the gold one, standardised like it.

    What an arm is told is *right* follows from the reward that it trains on, never from the gold
    score: a completion above its group's mean. Rules that drop groups without a contrast (DAPO's,
    filters) then drop those whose scores are all equal, as the rules' libraries do for scores
    that are no verdicts.

    Attributes:
        grader: scores.
        problems: what the indices of a call refer to.
        placebo: scores are those of other completions of the round.
        on_gold: train on the gold score instead.
        gold_mean, gold_std: of the base's completions, to put the gold score on the proxy's scale.
    """

    grader: LearnedGrader
    problems: Sequence[Problem]
    placebo: bool = False
    on_gold: bool = False
    gold_mean: float = 0.0
    gold_std: float = 1.0

    def __call__(
        self, indices: list[int], drawn: Drawn, seed: int
    ) -> tuple[list[Verdict], Tensor, Tensor, Tensor]:
        verdicts = self.grader.assess([self.problems[i] for i in indices], drawn)
        order = blind_order(len(verdicts), seed) if self.placebo else list(range(len(verdicts)))
        if self.on_gold:
            told = [(verdicts[i].gold - self.gold_mean) / self.gold_std for i in order]
        else:
            told = [verdicts[i].proxy for i in order]
        score = torch.tensor(told).float()
        return list(verdicts), score, torch.zeros_like(score), _above_mean(score, indices)


def _above_mean(score: Tensor, indices: Sequence[int]) -> Tensor:
    """Which scores are above the mean of their prompt's; none where all are equal."""
    total: dict[int, list[float]] = {}
    for index, value in zip(indices, score.tolist(), strict=True):
        total.setdefault(index, []).append(value)
    mean = torch.tensor([sum(total[i]) / len(total[i]) for i in indices])
    equal = torch.tensor([min(total[i]) == max(total[i]) for i in indices])
    return (score > mean) & ~equal


def learned_record(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Means of both rewards over everything that a step sampled; empty under a plain verdict."""
    scored = [v for v in verdicts if isinstance(v, ScoredVerdict)]
    if not scored:
        return {}
    return {
        "gold_mean": sum(v.gold for v in scored) / len(scored),
        "proxy_mean": sum(v.proxy for v in scored) / len(scored),
    }
