"""What the score becomes before credit is assigned."""

from __future__ import annotations

import pytest
import torch

from harness.parts.shaping import OverlongPenalty, SignedScore, UnfinishedPenalty, overlong_penalty
from harness.types import Rollout


def rollout(lengths: list[int], correct: list[bool], bonus: float, finished: bool) -> Rollout:
    width = max(*lengths, 1)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    verdict = torch.tensor(correct)
    return Rollout(
        prompt_ids=ids[:, :1],
        prompt_mask=mask[:, :1],
        completion_ids=ids,
        mask=mask,
        group=torch.zeros(len(lengths), dtype=torch.long),
        score=verdict.double() + bonus,
        bonus=torch.full((len(lengths),), bonus, dtype=torch.float64),
        correct=verdict,
        finished=torch.full((len(lengths),), finished),
        behaviour_logprobs=torch.zeros(len(lengths), width, dtype=torch.float64),
    )


def test_soft_overlong_punishment(golden):
    v = golden("dapo_soft_overlong_penalty")
    lengths = torch.tensor(v["inputs"]["lengths"], dtype=torch.float64)
    limit, cache = v["inputs"]["L_max"], v["inputs"]["L_cache"]
    got = overlong_penalty(lengths, limit, cache)
    assert got.tolist() == pytest.approx(v["expected"]["penalty"], abs=v["tolerance"])
    # Up to the limit, which no sampled completion exceeds, verl's form without a floor agrees.
    inside = [
        p for p, n in zip(v["expected"]["unclamped_verl_form"], lengths, strict=True) if n <= limit
    ]
    assert got[: len(inside)].tolist() == pytest.approx(inside, abs=v["tolerance"])


def test_the_penalty_is_added_to_the_score_at_a_share_of_the_limit():
    """Limit 100, cache 20: 80 tokens are free, 90 cost half, 100 cost 1."""
    x = rollout([0, 80, 90, 100], [True] * 4, bonus=0.0, finished=True)
    assert OverlongPenalty(cache_share=0.2)(x.score, x, 100).tolist() == [1.0, 1.0, 0.5, 0.0]


def test_signed_score_keeps_the_bonus():
    x = rollout([3, 3], [True, False], bonus=0.25, finished=True)
    assert SignedScore()(x.score, x, 8).tolist() == [1.25, -0.75]


def test_missing_eos_rules(golden):
    v = golden("missing_eos_rules")
    x, expected = v["inputs"], v["expected"]
    score = torch.tensor([x["score"]], dtype=torch.float64)
    cut = rollout([4], [True], bonus=0.0, finished=x["has_eos"])
    subtract = UnfinishedPenalty(value=-x["penalty"], replace=False)(score, cut, 4)
    assert subtract.item() == pytest.approx(expected["trl_subtract"], abs=v["tolerance"])
    replace = UnfinishedPenalty(value=x["replace_value"], replace=True)(score, cut, 4)
    assert replace.item() == expected["nplus_replace"]
    ended = rollout([4], [True], bonus=0.0, finished=True)
    assert UnfinishedPenalty()(score, ended, 4).item() == expected["none"]
