"""Process supervision: advantages from the scores of worked steps."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
import torch

from harness.arms.grpo import GRPO
from harness.arms.process import GRPO_PROCESS
from harness.errors import InputError
from harness.parts.kl import KLInReward
from harness.parts.process import ProcessSupervision
from harness.parts.scale import BatchStd, GroupStd, Whiten
from harness.parts.shaping import OverlongPenalty
from harness.types import Experience

EXACT = ProcessSupervision(eps=0.0)  # as the vectors have it


def experience(
    scores: list[list[float]],
    ends: list[list[int]],
    lengths: list[int] | None = None,
    group: list[int] | None = None,
    verdicts: list[float] | None = None,
) -> Experience:
    """Completions with steps of these scores, ending at these tokens (counted from 1)."""
    lengths = lengths or [row[-1] for row in ends]
    B, T = len(scores), max(lengths)
    mask = torch.arange(T) < torch.tensor(lengths)[:, None]
    step_ends = torch.zeros(B, T, dtype=torch.bool)
    step_scores = torch.zeros(B, T, dtype=torch.float64)
    for i, (row, at) in enumerate(zip(scores, ends, strict=True)):
        for score, end in zip(row, at, strict=True):
            step_ends[i, end - 1], step_scores[i, end - 1] = True, score
    score = torch.tensor(verdicts or [0.0] * B, dtype=torch.float64)
    zeros = torch.zeros(B, T, dtype=torch.float64)
    return Experience(
        prompt_ids=mask.long(),
        prompt_mask=mask,
        completion_ids=mask.long(),
        mask=mask,
        group=torch.tensor(group or [0] * B),
        score=score,
        bonus=torch.zeros_like(score),
        correct=score > 0,
        finished=torch.ones(B, dtype=torch.bool),
        behaviour_logprobs=zeros,
        step_ends=step_ends,
        step_scores=step_scores,
        old_logprobs=zeros,
        ref_logprobs=zeros,
        values=None,
    )


def advantages(part: ProcessSupervision, x: Experience) -> list[list[float]]:
    found, returns = part.assign(torch.zeros(x.mask.shape, dtype=torch.float64), x)
    assert returns is None
    assert found[~x.mask].eq(0).all()
    return [row[real].tolist() for row, real in zip(found, x.mask, strict=True)]


def normalised(part: ProcessSupervision, scores: list[list[float]]) -> list[list[float]]:
    flat = torch.tensor([s for row in scores for s in row], dtype=torch.float64)
    found = part.normalise(flat, torch.zeros(len(flat), dtype=torch.long)).tolist()
    return [[found.pop(0) for _ in row] for row in scores]


def test_three_steps(golden):
    vector = golden("grpo_process_supervision_3step")
    given, expected, slack = vector["inputs"], vector["expected"], vector["tolerance"]
    scores, ends = given["step_rewards"], given["step_end_token_index_1based"]
    x = experience(scores, ends, given["lengths"])
    for ddof, name in ((given["ddof"], "token_advantages"), (1, "token_advantages_ddof1")):
        found = advantages(dataclasses.replace(EXACT, ddof=ddof), x)
        for row, right in zip(found, expected[name], strict=True):
            assert row == pytest.approx(right, abs=slack)
    for row, right in zip(normalised(EXACT, scores), expected["normalised"], strict=True):
        assert row == pytest.approx(right, abs=slack)
    # The shipped eps is that much of the std, and no more.
    mine = advantages(ProcessSupervision(), x)[0][0]
    std = expected["std"]
    assert mine == pytest.approx(expected["token_advantages"][0][0] * std / (std + 1e-6), rel=1e-12)


def test_steps_that_score_the_same_push_nothing(golden):
    vector = golden("grpo_process_equal_steps_edge")
    scores = vector["inputs"]["step_rewards"]
    assert vector["expected"]["token_advantages_all_zero"]
    for part in (EXACT, ProcessSupervision(), dataclasses.replace(EXACT, ddof=1)):
        found = advantages(part, experience(scores, [[1, 3], [1, 2, 4]]))
        assert found == [[0.0] * 3, [0.0] * 4]
    # Also where the mean of equal numbers is not that number.
    assert advantages(EXACT, experience([[0.1], [0.1, 0.1]], [[2], [1, 2]])) == [[0.0] * 2] * 2


def test_many_steps_weigh_more(golden):
    vector = golden("grpo_process_step_count_bias")
    given, expected, slack = vector["inputs"], vector["expected"], vector["tolerance"]
    part = dataclasses.replace(EXACT, ddof=given["ddof"])
    scores = given["step_rewards"]
    for row, right in zip(normalised(part, scores), expected["normalised"], strict=True):
        assert row == pytest.approx(right, abs=slack)
    found = advantages(part, experience(scores, [[1, 2, 3, 4], [4]]))
    assert [row[0] for row in found] == pytest.approx(expected["first_token_advantages"], abs=slack)


def test_a_token_sums_the_steps_that_end_at_it_or_later():
    """Steps end at tokens 2 and 4 of 6; scores 1, 0 | 1, 1: mean 3/4, std sqrt(3)/4."""
    x = experience([[1.0, 0.0], [1.0, 1.0]], [[2, 4], [1, 3]], [6, 3])
    up, down = 1 / math.sqrt(3), -math.sqrt(3)
    first, second = advantages(EXACT, x)
    assert first == pytest.approx([up + down, up + down, down, down, 0, 0], abs=1e-12)
    assert first[4:] == [0, 0]  # after the last step: nothing, exactly
    assert second == pytest.approx([2 * up, up, up], abs=1e-12)


def test_each_group_is_normalised_by_itself():
    one = experience([[1.0, 0.0], [1.0, 1.0]], [[2, 4], [1, 3]], [4, 4])
    both = experience(
        [[1.0, 0.0], [5.0], [1.0, 1.0], [9.0]], [[2, 4], [4], [1, 3], [4]], [4] * 4,
        group=[7, 3, 7, 3],
    )  # fmt: skip
    alone, mixed = advantages(EXACT, one), advantages(EXACT, both)
    assert mixed[0] == pytest.approx(alone[0], abs=1e-12)
    assert mixed[2] == pytest.approx(alone[1], abs=1e-12)
    assert mixed[1] == pytest.approx([-1.0] * 4, abs=1e-12)


def test_completions_without_steps():
    x = experience([[1.0, 0.0], []], [[1, 2], []], [2, 3])
    assert advantages(EXACT, x) == [[0.0, -1.0], [0.0] * 3]
    assert advantages(EXACT, experience([[], []], [[], []], [2, 3])) == [[0.0] * 2, [0.0] * 3]
    for ddof in (0, 1):  # a single step has no spread
        alone = experience([[1.0], []], [[2], []], [2, 3])
        assert advantages(dataclasses.replace(EXACT, ddof=ddof), alone) == [[0.0] * 2, [0.0] * 3]


def test_what_stands_beside_the_steps_is_not_read():
    """Neither scores where no step ends, nor ends on padding, nor the verdict."""
    x = experience([[1.0, 0.0], [1.0]], [[1, 2], [2]], [2, 3])
    assert x.step_ends is not None
    assert x.step_scores is not None
    dirty = dataclasses.replace(
        x,
        step_ends=x.step_ends | ~x.mask,
        step_scores=x.step_scores.masked_fill(~x.step_ends, math.nan),
        score=torch.tensor([100.0, -3.0], dtype=torch.float64),
    )
    assert advantages(EXACT, dirty) == advantages(EXACT, x)
    given = {"kl_coef": 0.04, "max_new_tokens": 3, "warmup": False}
    clean, other = (GRPO_PROCESS.credit(y, **given) for y in (x, dirty))
    assert torch.equal(clean.advantages, other.advantages)
    assert clean.advantages.any()
    with pytest.raises(TypeError, match="call assign"):
        EXACT(x.step_scores, x.mask, x.group, None)


def test_one_step_each_is_grpo():
    """A single step at the end that scores what the verdict does: the group's z-score."""
    verdicts = [1.0, 0.0, 0.0, 1.0, 1.0]
    lengths = [3, 1, 4, 2, 5]
    x = experience([[v] for v in verdicts], [[n] for n in lengths], verdicts=verdicts)
    given = {"kl_coef": 0.04, "max_new_tokens": 5, "warmup": False}
    mine, grpo = (arm.credit(x, **given).advantages for arm in (GRPO_PROCESS, GRPO))
    torch.testing.assert_close(mine, grpo, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shaping": (OverlongPenalty(),)}, "OverlongPenalty shapes the completion's score"),
        ({"kl": KLInReward()}, "a KL in the reward penalises nothing; take KLInLoss"),
        ({"scale": GroupStd()}, "GroupStd divides by the std of the completions' returns"),
        ({"scale": BatchStd()}, "set scale to None"),
    ],
)
def test_what_steps_would_leave_unread_is_refused(changes, words):
    with pytest.raises(InputError, match=re.escape(words)) as caught:
        GRPO_PROCESS.but("mine", **changes)
    assert str(caught.value).startswith("arm 'mine': ")
    assert GRPO_PROCESS.but("mine", scale=Whiten()).scale is not None


def test_the_arm_is_grpo_but_for_credit():
    from harness.arm import parts
    from harness.identity import difference

    assert difference(parts(GRPO), parts(GRPO_PROCESS)).keys() == {"advantage", "scale"}
    with pytest.raises(InputError, match="needs at least 2 completions"):
        GRPO_PROCESS.check(1)
