"""Completions left out of the loss, and what the loss is then divided by."""

from __future__ import annotations

from dataclasses import fields
from typing import Literal

import pytest
import torch

from harness.arm import Arm
from harness.arms import ARMS
from harness.parts.aggregate import Aggregate, FixedLength, SequenceMean, TokenMean
from harness.parts.exclude import Unfinished, ZeroVariance
from harness.types import Batch


def batch(lengths: list[int], **given: torch.Tensor) -> Batch:
    """A batch of these lengths; fields that no weight depends on are zeros."""
    width = max(lengths)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    zeros = torch.zeros(len(lengths), width, dtype=torch.float64)
    blank = {f.name: zeros for f in fields(Batch)}
    blank["group"] = torch.zeros(len(lengths), dtype=torch.long)
    return Batch(**{**blank, "mask": mask, **given})


@pytest.mark.parametrize(
    ("key", "aggregate", "denominator"),
    [
        ("seq_mean_over_all_B", SequenceMean(), "all"),
        ("seq_mean_over_kept", SequenceMean(), "kept"),
        ("token_mean_kept", TokenMean(), "kept"),
        ("constant_over_all_B", FixedLength(), "all"),
    ],
)
def test_overlong_filter(
    golden, key: str, aggregate: Aggregate, denominator: Literal["all", "kept"]
):
    v = golden("overlong_filter_denominator")
    rows = v["inputs"]["per_token_loss"]
    finished = torch.tensor(v["inputs"]["keep_sequence"], dtype=torch.bool)
    rule = Unfinished(denominator=denominator)
    x = batch([len(r) for r in rows], finished=finished)
    x = batch([len(r) for r in rows], finished=finished, keep=rule.keep(x))
    arm: Arm = ARMS["dapo"].but("filtered", exclude=rule, aggregate=aggregate)
    weights = arm.weigh(x, max_new_tokens=v["inputs"]["max_len"]).weights
    losses = torch.zeros(x.mask.shape, dtype=torch.float64)
    losses[x.mask] = torch.tensor([loss for r in rows for loss in r], dtype=torch.float64)
    assert (weights * losses).sum().item() == pytest.approx(v["expected"][key], abs=v["tolerance"])
    assert weights[~finished].eq(0).all()


def test_a_minibatch_of_excluded_completions_weighs_nothing():
    for denominator in ("all", "kept"):
        rule = Unfinished(denominator=denominator)
        x = batch([2, 3], keep=torch.zeros(2, dtype=torch.bool))
        arm = ARMS["dapo"].but("filtered", exclude=rule)
        assert arm.weigh(x, max_new_tokens=4).weights.tolist() == [[0.0] * 3] * 2


def test_zero_variance_keeps_or_drops_whole_groups():
    score = torch.tensor([1.0, 0.0, 0.3, 0.3, 0.5, 0.5 + 1e-9], dtype=torch.float64)
    x = batch([1] * 6, score=score, group=torch.tensor([0, 0, 1, 1, 2, 2]))
    assert ZeroVariance().keep(x).tolist() == [True, True, False, False, False, False]
    assert ZeroVariance(tolerance=0.0).keep(x).tolist() == [True] * 2 + [False] * 2 + [True] * 2


@pytest.mark.parametrize(("denominator", "completions"), [("kept", 2), ("all", 4)])
def test_what_a_filtered_group_leaves_to_the_others(
    denominator: Literal["all", "kept"], completions: int
):
    """Of two groups of two the second agrees; the loss is averaged over 2 completions, or all 4."""
    rule = ZeroVariance(denominator=denominator)
    score, group = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
    keep = rule.keep(batch([1, 4, 2, 2], score=score, group=group))
    x = batch([1, 4, 2, 2], score=score, group=group, keep=keep)
    arm = ARMS["grpo_filtered"].but("filtered", exclude=rule)
    weights = arm.weigh(x, max_new_tokens=4).weights
    assert weights.sum(1).tolist() == pytest.approx([1 / completions] * 2 + [0.0, 0.0])
    assert weights[1].tolist() == pytest.approx([1 / completions / 4] * 4)
