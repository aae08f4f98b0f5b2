"""What advantages are divided by."""

from __future__ import annotations

import math

import pytest
import torch

from harness.parts.advantage import GroupBaseline
from harness.parts.scale import BatchStd, Whiten


def whitened(part: Whiten, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return part(values, torch.zeros_like(values), mask, torch.zeros(len(values), dtype=torch.long))


@pytest.mark.parametrize("ddof", [0, 1])
def test_masked_whiten(golden, ddof):
    v = golden("masked_whiten")
    values = torch.tensor([v["inputs"]["values"]], dtype=torch.float64)
    mask = torch.tensor([v["inputs"]["mask"]], dtype=torch.bool)
    got = whitened(Whiten(eps=v["inputs"]["eps"], ddof=ddof), values, mask)
    assert got[mask].tolist() == pytest.approx(v["expected"][f"ddof{ddof}"], abs=v["tolerance"])
    assert got[~mask].tolist() == [0.0]


def test_the_mean_that_whitening_takes_off_is_a_second_baseline(golden):
    v = golden("masked_whiten")
    values = torch.tensor([v["inputs"]["values"]], dtype=torch.float64)
    mask = torch.tensor([v["inputs"]["mask"]], dtype=torch.bool)
    kept = (
        whitened(Whiten(eps=v["inputs"]["eps"], ddof=1), values, mask)[mask] + values[mask].mean()
    )
    assert kept.tolist() == pytest.approx(v["expected"]["ddof1_keep_mean"], abs=v["tolerance"])


def test_padding_is_not_read():
    values = torch.tensor([[1.0, float("nan")], [3.0, 1e30]])
    mask = torch.tensor([[True, False], [True, False]])
    got = whitened(Whiten(ddof=0, eps=0.0), values, mask)
    assert got.tolist() == [[-1.0, 0.0], [1.0, 0.0]]


def test_batch_std_takes_no_mean_off():
    """Returns 1, 0, 0, 3 of two groups, centred by group: +-.5 and -+1.5; their std is sqrt 1.5."""
    rewards = torch.tensor([[1.0], [0.0], [0.0], [3.0]], dtype=torch.float64)
    mask, group = torch.ones_like(rewards, dtype=torch.bool), torch.tensor([0, 0, 1, 1])
    centred, _ = GroupBaseline()(rewards, mask, group, None)
    got = BatchStd(eps=0.0, ddof=0)(centred, rewards, mask, group)
    expected = [value / math.sqrt(1.5) for value in (0.5, -0.5, -1.5, 1.5)]
    assert got[:, 0].tolist() == pytest.approx(expected)
    sample = BatchStd(eps=0.0, ddof=1)(centred, rewards, mask, group)
    assert sample[:, 0].tolist() == pytest.approx([e * math.sqrt(0.75) for e in expected])


def test_a_batch_without_variance_teaches_nothing():
    rewards = torch.full((4, 1), 0.1, dtype=torch.float64)
    mask, group = torch.ones_like(rewards, dtype=torch.bool), torch.tensor([0, 0, 1, 1])
    got = BatchStd()(rewards - 0.3, rewards, mask, group)
    assert got.tolist() == [[0.0]] * 4
