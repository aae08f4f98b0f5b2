"""Noise on a reward: as much as declared, the same for all arms, and never in what is judged."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from harness.arms import ARMS
from harness.rewards.judge import MathsJudge, reward_identity
from harness.rewards.noise import NoisyJudge, turned_record
from harness.samplers.sampler import Drawn
from harness.spec.reward import NoiseSpec
from harness.spec.schema import RewardSpec
from harness.train import step

sys.path.insert(0, str(Path(__file__).parent))
from tiny import Rule, make_loop, prompt_set

COUNT = 4000


def drawn(right: int = COUNT // 2) -> Drawn:
    """Completions of problem 0, of which the first ``right`` are right."""
    zeros = torch.zeros(COUNT, 1)
    return Drawn(
        zeros.long(), zeros.bool(), zeros.long(), zeros.bool(), torch.ones(COUNT).bool(), zeros,
        tuple("0" if i < right else "-" for i in range(COUNT)),
    )  # fmt: skip


def judge(reward: RewardSpec, **noise: float) -> NoisyJudge:
    plain = MathsJudge(Rule(), prompt_set(12).problems, reward)  # type: ignore[arg-type]
    return NoisyJudge(plain, NoiseSpec(**noise), reward.correct - reward.wrong)


@pytest.mark.parametrize(
    ("noise", "right_turned", "wrong_turned"),
    [
        ({"flip": 0.2}, 0.2, 0.2),
        ({"false_negative": 0.3}, 0.3, 0.0),
        ({"false_positive": 0.1}, 0.0, 0.1),
        ({"flip": 0.1, "false_negative": 0.5}, 0.55, 0.1),
        ({}, 0.0, 0.0),
    ],
)
def test_verdicts_are_turned_as_often_as_declared(
    noise: dict[str, float], right_turned: float, wrong_turned: float
):
    verdicts, score, bonus, told = judge(RewardSpec(correct=2.0, wrong=-1.0), **noise)(
        [0] * COUNT, drawn(), seed=3
    )
    true = torch.tensor([v.correct for v in verdicts])
    assert int(true.sum()) == COUNT // 2  # the record stays the truth
    counts = turned_record(verdicts, told)
    assert counts["right"] == counts["wrong"] == COUNT // 2
    for name, share in (("right_turned", right_turned), ("wrong_turned", wrong_turned)):
        spread = (share * (1 - share) / (COUNT // 2)) ** 0.5
        assert abs(counts[name] / (COUNT // 2) - share) <= 4 * spread, name
    assert torch.equal(score, torch.where(told, 2.0, -1.0) + bonus)


def test_gaussian_noise_has_the_declared_spread_and_no_mean():
    reward = RewardSpec()
    _, plain, _, before = judge(reward)([0] * COUNT, drawn(), seed=3)
    _, noisy, _, after = judge(reward, sigma=0.5)([0] * COUNT, drawn(), seed=3)
    added = (noisy - plain).double()
    assert torch.equal(before, after)
    assert abs(float(added.mean())) < 4 * 0.5 / COUNT**0.5
    assert float(added.std()) == pytest.approx(0.5, rel=4 / (2 * COUNT) ** 0.5)


def test_the_same_rows_are_hit_whatever_was_written():
    """Two arms of a seed meet the same noise, though their completions differ."""
    noisy = judge(RewardSpec(), flip=0.25, sigma=0.1)
    turned = []
    for right in (COUNT, 0):
        verdicts, _, _, told = noisy([0] * COUNT, drawn(right), seed=11)
        turned.append(told != torch.tensor([v.correct for v in verdicts]))
    assert torch.equal(*turned)
    _, _, _, other = noisy([0] * COUNT, drawn(0), seed=12)
    assert not torch.equal(other, turned[1])


def test_a_step_records_the_truth_and_trains_on_what_was_told():
    run, other = make_loop(ARMS["grpo"]), make_loop(ARMS["grpo"])
    noisy = replace(
        other, judge=NoisyJudge(other.judge, NoiseSpec(false_negative=1.0, false_positive=1.0), 1.0)
    )
    plain, turned = step(run), step(noisy)
    assert turned["outcomes"] == plain["outcomes"]
    assert turned["accuracy"] == plain["accuracy"]
    assert turned["score_mean"] == pytest.approx(1 - plain["score_mean"])
    assert turned["noise"]["right_turned"] == turned["noise"]["right"]
    assert turned["noise"]["wrong_turned"] == turned["noise"]["wrong"] > 0
    assert "noise" not in plain


def test_groups_are_dropped_by_what_was_told():
    """A filter sees the noisy verdicts, as it would a noisy grader's."""
    run = make_loop(ARMS["dapo"], sampling={"completions_per_prompt": 8})
    everything = NoisyJudge(run.judge, NoiseSpec(false_negative=1.0), 1.0)  # none is ever right
    record = step(replace(run, judge=everything))
    assert record["used"] == 0
    assert record["dropped"]["completions"] == record["spent"]["completions"] > 0


def test_noise_is_part_of_the_reward():
    quiet, loud = RewardSpec(), RewardSpec(noise=NoiseSpec(flip=0.1))
    assert reward_identity(quiet) != reward_identity(loud)
    assert "noise" not in quiet.model_dump()
    with pytest.raises(ValidationError, match="less than or equal to 1"):
        NoiseSpec(flip=1.5)
