"""A part that returns another shape than it promises is named, with both shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from harness.arm import Arm
from harness.arms.grpo import GRPO
from harness.errors import InputError
from harness.parts.advantage import Advantage
from harness.parts.aggregate import Aggregate
from harness.parts.clip import Clip
from harness.parts.exclude import Exclude
from harness.parts.kl import KLInLoss, KLInReward
from harness.parts.ratio import Ratio
from harness.parts.scale import Scale
from harness.parts.shaping import Shaping
from harness.types import Experience, completion_return

B, T = 4, 4  # equal, so that a wrong [B] broadcasts to [B, T] and nothing else would say so


def experience() -> Experience:
    ids, score = torch.zeros(B, T, dtype=torch.long), torch.tensor([1.0, 0.0, 0.0, 1.0])
    old = torch.full((B, T), -1.0)
    return Experience(
        prompt_ids=ids, prompt_mask=ids == 0, completion_ids=ids, mask=ids == 0,
        group=torch.zeros(B, dtype=torch.long), score=score, bonus=0 * score, correct=score > 0,
        finished=score >= 0, behaviour_logprobs=old, old_logprobs=old, ref_logprobs=old - 0.1,
        values=None,
    )  # fmt: skip


def whole_update(arm: Arm) -> None:
    batch = arm.credit(experience(), kl_coef=0.1, max_new_tokens=T, warmup=False)
    minibatch = arm.weigh(batch, max_new_tokens=T)
    arm.policy_loss(minibatch, minibatch.old_logprobs, 0.1)


def part(base: type, method: str, returned: Any) -> Any:
    """A part of a kind whose one method returns this, whatever it is asked."""

    class Odd(base):
        version: ClassVar[int] = 1

    setattr(Odd, method, lambda self, *given: returned(*given) if callable(returned) else returned)
    Odd.__abstractmethods__ = frozenset()
    return dataclass(frozen=True)(Odd)()


ROW, COLUMN = torch.zeros(B), torch.zeros(B, T)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("advantage", part(Advantage, "__call__", (ROW, None)),
         r"advantage Odd returned advantages of shape \[4\], expected \[4, 4\] \(completions, tok"),
        ("advantage", part(Advantage, "__call__", (COLUMN, ROW)), r"Odd returned returns of shape"),
        ("advantage", part(Advantage, "__call__", COLUMN), "returned a Tensor, expected a pair"),
        ("advantage", part(Advantage, "__call__", (None, None)), "returned advantages as None"),
        ("scale", part(Scale, "__call__", ROW), r"scale Odd returned advantages of shape \[4\]"),
        ("shaping", (part(Shaping, "__call__", COLUMN),),
         r"shaping Odd returned a score of shape \[4, 4\], expected \[4\] \(completions\)"),
        ("exclude", part(Exclude, "keep", COLUMN > 0), r"exclude Odd returned a choice of shape"),
        ("kl", part(KLInReward, "in_reward", ROW), r"kl Odd returned a penalty of shape \[4\]"),
        ("kl", part(KLInLoss, "in_loss", ROW), r"kl Odd returned a penalty of shape \[4\]"),
        ("aggregate", part(Aggregate, "__call__", ROW), r"aggregate Odd returned weights of shape"),
        ("ratio", part(Ratio, "__call__", ROW), r"ratio Odd returned a ratio of shape \[4\]"),
        ("clip", part(Clip, "__call__", (ROW, COLUMN > 0)), r"clip Odd returned an objective of"),
    ],
)  # fmt: skip
def test_a_wrong_shape_is_named_with_its_arm_and_part(field: str, value: Any, message: str):
    arm = GRPO.but("mine", **{field: value})
    with pytest.raises(InputError, match=rf"^arm 'mine': .*{message}"):
        whole_update(arm)


def test_the_right_shape_is_taken():
    def centred(rewards, mask, group, values):
        total = completion_return(rewards, mask)
        return (total - total.mean())[:, None] * mask, None

    whole_update(GRPO.but("mine", advantage=part(Advantage, "__call__", centred)))
