"""Which groups are used."""

from __future__ import annotations

import pytest
import torch

from harness.parts.sampling import DynamicSampling, FixedGroups
from tests.rules import z_score


def rows_of(groups: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    correct = torch.tensor([score > 0 for group in groups for score in group])
    index = torch.tensor([i for i, group in enumerate(groups) for _ in group])
    return correct, index


def test_dynamic_sampling_keeps_mixed_groups(golden):
    v = golden("dapo_dynamic_sampling_filter")
    groups = v["inputs"]["rewards"]
    assert [sum(r > 0 for r in group) for group in groups] == v["inputs"]["correct_counts"]
    keep = DynamicSampling().keep(*rows_of(groups))
    size = v["inputs"]["G"]
    assert keep.view(-1, size).tolist() == [[k] * size for k in v["expected"]["keep"]]
    assert DynamicSampling().resamples
    assert not FixedGroups().resamples
    assert FixedGroups().keep(*rows_of(groups)).all()


def test_zero_variance_is_dropped(golden):
    v = golden("grpo_adv_zero_variance_with_eps")
    keep = DynamicSampling().keep(*rows_of([v["inputs"]["rewards"]]))
    assert keep.any().item() is v["expected"]["group_kept_by_filter"]


def test_the_filter_looks_at_accuracy_and_not_at_the_shaped_reward(golden):
    v = golden("dapo_filter_on_shaped_reward_differs")
    accuracy, overlong = v["inputs"]["accuracy_rewards"], v["inputs"]["overlong"]
    shaped = [a + o for a, o in zip(accuracy, overlong, strict=True)]
    assert shaped == v["expected"]["shaped"]
    keep = DynamicSampling().keep(*rows_of([accuracy]))
    assert keep.any().item() is v["expected"]["keep_by_accuracy"]
    # The shaped reward does vary, and would have been learnt from.
    column = torch.tensor(shaped, dtype=torch.float64)[:, None]
    group = torch.zeros(len(shaped), dtype=torch.long)
    advantages, _ = z_score()(column, torch.ones_like(column, dtype=torch.bool), group, None)
    assert (advantages != 0).any().item() is v["expected"]["keep_by_shaped_std"]


def test_how_often_a_group_is_dropped(golden):
    """Every possible number of correct completions as one group, weighed by its probability."""
    v = golden("zero_variance_group_probability")
    dropped, sampled = v["expected"]["p_zero_variance"], v["expected"]
    for j, size in enumerate(v["inputs"]["G"]):
        counts = torch.arange(size + 1)
        correct = (torch.arange(size) < counts[:, None]).flatten()
        keep = DynamicSampling().keep(correct, counts.repeat_interleave(size))[::size]
        for i, p in enumerate(v["inputs"]["p"]):
            binomial = torch.distributions.Binomial(size, torch.tensor(p, dtype=torch.float64))
            chance = binomial.log_prob(counts.double()).exp()
            assert chance[~keep].sum().item() == pytest.approx(dropped[i][j], abs=1e-9)
            cost = 1 / chance[keep].sum().item()
            expected = sampled["expected_groups_sampled_per_kept"][i][j]
            assert cost == pytest.approx(expected, rel=v["tolerance"])
