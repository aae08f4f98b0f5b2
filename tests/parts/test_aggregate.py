"""Each token's share of the loss."""

from __future__ import annotations

import pytest
import torch

from harness.parts.aggregate import FixedLength, SequenceMean, TokenMean


def ragged(rows: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses, right-padded with a number that would be seen, and their mask."""
    width = max(map(len, rows))
    losses = torch.tensor([r + [1e6] * (width - len(r)) for r in rows], dtype=torch.float64)
    mask = torch.arange(width) < torch.tensor([len(r) for r in rows])[:, None]
    return losses, mask


def test_ragged_batch(golden):
    v = golden("aggregation_ragged_batch")
    losses, mask = ragged(v["inputs"]["per_token_loss"])
    limit, expected = v["inputs"]["max_len"], v["expected"]
    weights = {
        "seq_mean_token_mean": SequenceMean()(mask, limit),
        "token_mean": TokenMean()(mask, limit),
        "constant_normaliser_B_times_L": FixedLength()(mask, limit),
    }
    for key, w in weights.items():
        assert (w * losses).sum().item() == pytest.approx(expected[key], abs=v["tolerance"])
    per_row = expected["token_weight_seq_mean"]
    assert weights["seq_mean_token_mean"][:, 0].tolist() == pytest.approx(per_row)
    assert weights["token_mean"][0, 0].item() == expected["token_weight_token_mean"]
    fixed = weights["constant_normaliser_B_times_L"]
    assert fixed[0, 0].item() == expected["token_weight_constant"]
    # The sum without its constant is the fixed-length rule at a limit of one token.
    summed = (FixedLength()(mask, 1) * losses).sum().item()
    assert summed == pytest.approx(expected["seq_mean_token_sum"], abs=v["tolerance"])


def test_micro_batches_keep_the_global_mean(golden):
    v = golden("aggregation_microbatch_token_mean_pitfall")
    losses, mask = ragged(v["inputs"]["per_token_loss"])
    weights = TokenMean()(mask, 10)
    parts = [(weights[rows] * losses[rows]).sum().item() for rows in v["inputs"]["microbatches"]]
    assert sum(parts) == pytest.approx(v["expected"]["global_token_mean"], abs=v["tolerance"])
    # Weighing each micro-batch by itself is the pitfall, and another number.
    alone = [
        (TokenMean()(mask[rows], 10) * losses[rows]).sum().item()
        for rows in v["inputs"]["microbatches"]
    ]
    assert alone == pytest.approx(v["expected"]["per_microbatch"], abs=v["tolerance"])
    assert sum(alone) / 2 == pytest.approx(v["expected"]["average_of_microbatches"])


def test_dapo_divides_by_the_batch_and_not_by_the_group(golden):
    v = golden("aggregation_dapo_per_group_vs_global")
    losses, mask = ragged(v["inputs"]["per_token_loss"])
    whole = (TokenMean()(mask, 10) * losses).sum().item()
    assert whole == pytest.approx(v["expected"]["global_token_mean"], abs=v["tolerance"])
    group = torch.tensor(v["inputs"]["groups"])
    each = [(TokenMean()(mask[group == g], 10) * losses[group == g]).sum() for g in (0, 1)]
    per_group = torch.stack(each).mean().item()
    assert per_group == pytest.approx(v["expected"]["mean_over_groups_of_group_token_mean"])


@pytest.mark.parametrize("part", [TokenMean(), SequenceMean(), FixedLength()])
def test_no_rows_and_empty_rows_weigh_nothing(part):
    assert part(torch.zeros(0, 3, dtype=torch.bool), 3).sum().item() == 0.0
    weights = part(torch.zeros(2, 3, dtype=torch.bool), 3)
    assert weights.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("part", [TokenMean(), SequenceMean()])
def test_a_single_token_carries_the_whole_loss(part):
    assert part(torch.tensor([[True, False]]), 2).tolist() == [[1.0, 0.0]]
