"""Steps of completions: at which token each ends, and whether it is right.

For arms that reward steps (process supervision). The task splits and judges the text
(``TaskSource.steps``); this file finds the tokens, and refuses tasks that cannot judge steps. In an
environment the turns are the steps, and it has scored them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from harness.arm import Arm
from harness.errors import InputError
from harness.identity import stream_seed
from harness.rewards.judge import blind_order
from harness.samplers.sampler import Drawn
from harness.spec.schema import ExperimentSpec
from harness.tasks import TASKS
from harness.tasks.task import Problem, StepGrader
from harness.types import Rollout


def step_grader(spec: ExperimentSpec, arm: Arm) -> StepGrader | None:
    """The training task's step grader, where the arm or a dense reward needs one; else None.

    Raises:
        InputError: steps of a task are needed that cannot judge them.
    """
    task = TASKS.get(spec.data.train.task)
    if task is None or not steps_needed(spec, arm):  # an unknown task is refused elsewhere
        return None
    assert arm.advantage is not None
    if task.environment is not None:
        return None  # which scores its turns itself
    if task.steps is None:
        who = f"arm {arm.name!r}" if arm.advantage.needs_steps else "reward.dense"
        able = " or ".join(sorted(name for name, t in TASKS.items() if t.steps or t.environment))
        raise InputError(
            f"{who} rewards each worked step, and task {task.name!r} (data.train.task) "
            f"can judge final answers alone; train on {able}, or take it out"
        )
    return task.steps


def steps_needed(spec: ExperimentSpec, arm: Arm) -> bool:
    """Whether the arm or a dense reward asks for scores along the way; not of given pairs."""
    if arm.advantage is None:
        return False
    return arm.advantage.needs_steps or spec.reward.dense is not None


@dataclass(frozen=True)
class Steps:
    """The steps of a batch of completions.

    Attributes:
        ends: True on the last token of each step.
        scores: there, 1 for a right step and 0 for a wrong one; 0 elsewhere.
    """

    ends: Bool[Tensor, "B T"]
    scores: Float[Tensor, "B T"]


@dataclass(frozen=True)
class StepJudge:
    """Finds and judges the steps of completions.

    Attributes:
        grader: the task's.
        problems: what the indices of a call refer to.
        tokenizer: the model's.
        placebo: scores are those of other completions' steps.
        paid: steps are paid for, so that a placebo must be blind to how many there are.
    """

    grader: StepGrader
    problems: Sequence[Problem]
    tokenizer: PreTrainedTokenizerBase
    placebo: bool = False
    paid: bool = False
    _texts: dict[int, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __call__(self, indices: list[int], drawn: Drawn, seed: int) -> Steps:
        """The steps of the completions drawn for the problems at ``indices``."""
        lengths = drawn.mask.sum(1).tolist()
        found = [
            self.of_tokens(self.problems[i].question, ids[:n])
            for i, ids, n in zip(indices, drawn.completion_ids.tolist(), lengths, strict=True)
        ]
        return _placed(found, drawn, seed if self.placebo else None, self.paid)

    def of_tokens(self, question: str, ids: Sequence[int]) -> dict[int, float]:
        """A completion's steps: index of the token that ends each -> its score.

        The token with a separator's last character belongs to the step before it, and the last
        step has whatever follows, the end token included. Where one token ends several steps they
        are one, right if all are. A completion cut right after a separator has no further step.
        """
        text, until = self._spell(ids)
        pieces = text.split(self.grader.separator)
        verdicts = self.grader(question, text)
        if len(verdicts) != len(pieces):
            raise ValueError(f"{len(verdicts)} verdicts on {len(pieces)} steps of {text!r}")
        steps: dict[int, float] = {}
        at = 0
        for piece, right in zip(pieces[:-1], verdicts[:-1], strict=True):
            at += len(piece) + len(self.grader.separator)
            token = bisect_left(until, at)
            steps[token] = min(float(right), steps.get(token, 1.0))
        last = len(ids) - 1
        if last >= 0 and (pieces[-1] or last not in steps):
            steps[last] = min(float(verdicts[-1]), steps.get(last, 1.0))
        return steps

    def _spell(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """The text, and how many of its characters are there after each token."""
        text = self._text(ids)
        for token in {*ids} - self._texts.keys():
            self._texts[token] = self._text([token])
        until = [0]
        for token in ids:
            until.append(until[-1] + len(self._texts[token]))
        if "".join(self._texts[token] for token in ids) != text:  # tokens that join otherwise
            until = [len(self._text(ids[:n])) for n in range(len(ids) + 1)]
            for n in reversed(range(len(ids))):  # half a character may be spelt as two
                until[n] = min(until[n], until[n + 1])
        return text, until[1:]

    def _text(self, ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text if isinstance(text, str) else "".join(text)


@dataclass(frozen=True)
class TurnJudge:
    """The turns of episodes as steps, with the environment's scores; fields as of ``StepJudge``."""

    placebo: bool = False
    paid: bool = False

    def __call__(self, indices: list[int], drawn: Drawn, seed: int) -> Steps:
        """The turns of the completions drawn for the problems at ``indices``."""
        assert drawn.turns is not None
        return _placed(list(drawn.turns), drawn, seed if self.placebo else None, self.paid)


def make_step_judge(
    spec: ExperimentSpec,
    arm: Arm,
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    *,
    placebo: bool,
) -> StepJudge | TurnJudge | None:
    """What scores the training task's steps or turns, where they are needed; else None.

    Raises:
        InputError: steps of a task are needed that cannot judge them.
    """
    paid = spec.reward.dense is not None
    grader = step_grader(spec, arm)
    if grader is not None:
        return StepJudge(grader, problems, tokenizer, placebo=placebo, paid=paid)
    return TurnJudge(placebo, paid) if steps_needed(spec, arm) else None


def _placed(found: list[dict[int, float]], drawn: Drawn, blind: int | None, paid: bool) -> Steps:
    """Steps as tensors; ``blind``: the seed by which others' scores are taken, for a placebo."""
    if blind is not None:
        found = (_sums_of_others if paid else _of_others)(found, blind)
    ends = torch.zeros(drawn.mask.shape, dtype=torch.bool)
    scores = torch.zeros(drawn.mask.shape)
    for row, steps in enumerate(found):
        for token, score in steps.items():
            ends[row, token], scores[row, token] = True, score
    return Steps(ends.to(drawn.mask.device), scores.to(drawn.mask.device))


def steps_record(x: Rollout) -> dict[str, Any]:
    """How many steps there are in a rollout, and the share that is right, as the arm is told."""
    assert x.step_ends is not None
    assert x.step_scores is not None
    scores = x.step_scores[x.step_ends].double()
    return {
        "graded": len(scores),
        "per_completion": len(scores) / len(x),
        "right_share": float(scores.mean()) if len(scores) else None,
    }


def _of_others(found: list[dict[int, float]], seed: int) -> list[dict[int, float]]:
    """Each completion's own steps with scores of the completion whose verdict it got.

    The other may have more steps or fewer, so each step takes the score of one of them at random:
    neither how many steps there are nor where a step stands then tells what it scored.
    """
    generator = torch.Generator().manual_seed(stream_seed(seed, "steps"))
    judged = []
    for mine, other in zip(found, blind_order(len(found), seed), strict=True):
        theirs = list(found[other].values()) or [0.0]
        picks = torch.randint(len(theirs), (len(mine),), generator=generator).tolist()
        judged.append({token: theirs[pick] for token, pick in zip(mine, picks, strict=True)})
    return judged


def _sums_of_others(found: list[dict[int, float]], seed: int) -> list[dict[int, float]]:
    """Each completion's own steps sharing the sum that another completion scored.

    With the scores of others' steps instead, a completion of more steps would be paid more: a
    placebo would learn to write steps.
    """
    judged = []
    for mine, other in zip(found, blind_order(len(found), seed), strict=True):
        share = sum(found[other].values()) / max(len(mine), 1)
        judged.append(dict.fromkeys(mine, share))
    return judged
