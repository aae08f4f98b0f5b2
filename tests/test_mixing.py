"""N-GRPO: mixed embeddings while sampling, and the same inputs again in training."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from harness.arm import parts
from harness.arms.grpo import GRPO
from harness.arms.n_grpo import N_GRPO
from harness.arms.ppo import PPO
from harness.errors import InputError
from harness.identity import difference
from harness.models import Policy
from harness.parts.mixing import NeighbourMixing, mixed, neighbour_mixture
from harness.parts.sampling import FixedGroups
from harness.samplers.sampler import Decoding
from harness.train import step
from harness.types import Rollout
from tests.tiny import as_rollout, make_loop, sampler, tiny_model

PLAIN = Decoding(temperature=0.7, top_p=1.0, max_new_tokens=12)
PROMPTS = [[4, 5, 6], [7, 8], [9]]


def drawn(share: float):
    decoding = dataclasses.replace(PLAIN, mixing=NeighbourMixing(neighbours=3, share=share))
    return sampler(tiny_model()).draw(PROMPTS, 4, decoding, 11)


def replayed(found, temperature: float = 0.7) -> tuple[Rollout, torch.Tensor]:
    x = dataclasses.replace(
        as_rollout(found, 4), mixed_ids=found.mixed_ids, mixed_weights=found.mixed_weights
    )
    return x, Policy(tiny_model(), temperature).logprobs(x)


def test_the_mixture(golden):
    v = golden("ngrpo_neighbor_mixing")
    x, expected = v["inputs"], v["expected"]
    table = torch.tensor(x["embeddings"], dtype=torch.float64)
    logits = torch.tensor([x["logits"]], dtype=torch.float64)
    ids, weights = neighbour_mixture(logits, table, x["tau"], x["k"])
    assert ids[0, 0].item() == expected["anchor"]
    assert ids[0].tolist() == expected["candidates"]
    assert weights[0].tolist() == pytest.approx(expected["weights"], rel=1e-6)
    got = mixed(torch.zeros(1, 1, 2, dtype=torch.float64), table[ids][None], weights[None])
    assert got[0, 0].tolist() == pytest.approx(expected["mixed_embedding"], rel=1e-6)


def test_a_published_average_is_what_its_columns_give(golden):
    v = golden("ngrpo_table_arithmetic")
    for name, scores in v["inputs"]["aime25_amc23_math500_pass32"].items():
        assert sum(scores) / 3 == pytest.approx(v["expected"][name], abs=v["tolerance"])


def test_the_arm_is_grpo_but_for_what_is_fed():
    found = difference(parts(GRPO), parts(N_GRPO))
    assert found.keys() == {"sampling.mixing"}


def test_a_share_of_none_changes_no_bit():
    plain = sampler(tiny_model()).draw(PROMPTS, 4, PLAIN, 11)
    found = drawn(0.0)
    assert torch.equal(found.completion_ids, plain.completion_ids)
    assert torch.equal(found.logprobs, plain.logprobs)
    assert found.mixed_weights is not None
    assert found.mixed_weights.eq(0).all()


def test_the_first_token_is_sampled_alike_whatever_is_mixed_later():
    plain = sampler(tiny_model()).draw(PROMPTS, 4, PLAIN, 11)
    found = drawn(1.0)
    assert torch.equal(found.completion_ids[:, 0], plain.completion_ids[:, 0])
    assert not torch.equal(found.logprobs[:, :5], plain.logprobs[:, :5])


def test_a_share_is_a_share():
    found = drawn(0.3)
    assert found.mixed_weights is not None
    fed_back = found.mask.clone()
    fed_back[:, -1] = False
    total = found.mixed_weights.sum(2)
    assert ((total - 1).abs() < 1e-6).logical_or(total == 0).all()
    assert 0.1 < float((total[fed_back] > 0).double().mean()) < 0.5


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_training_scores_the_inputs_that_were_fed(share):
    """The log-probs of the rollout again, from whole sequences instead of a cache."""
    found = drawn(share)
    x, logprobs = replayed(found)
    torch.testing.assert_close(logprobs.detach(), found.logprobs, rtol=0, atol=2e-5)
    plain = Policy(tiny_model(), 0.7).logprobs(dataclasses.replace(x, mixed_ids=None))
    assert float((plain.detach() - found.logprobs).abs().max()) > 1e-2


def test_the_gradient_reaches_the_neighbours():
    decoding = dataclasses.replace(PLAIN, mixing=NeighbourMixing(share=1.0), max_new_tokens=5)
    model, found = tiny_model(), sampler(tiny_model()).draw([[9]], 1, decoding, 11)
    x, _ = replayed(found)
    Policy(model, 0.7).logprobs(x).sum().backward()
    gradient = model.get_input_embeddings().weight.grad
    assert gradient is not None
    assert found.mixed_ids is not None
    assert found.mixed_weights is not None
    fed = set(found.completion_ids[:, :-1][found.mask[:, :-1]].tolist()) | {9}
    only_mixed = set(found.mixed_ids[found.mixed_weights > 0].tolist()) - fed
    assert only_mixed, "the draw shows no neighbour that was not sampled too"
    for token in only_mixed:
        assert gradient[token].abs().max() > 0


def test_a_step_of_the_loop():
    """Ratio 1 at the first minibatch is asserted by the learner itself."""
    arm = N_GRPO.but("often", sampling=FixedGroups(mixing=NeighbourMixing(share=0.5)))
    record = step(make_loop(arm))
    assert record["first_ratio_error"] < 1e-4
    assert record["engine_gap"] < 1e-4


def test_a_critic_would_judge_other_inputs():
    with pytest.raises(InputError, match="'both': a critic would judge other inputs"):
        PPO.but("both", sampling=FixedGroups(mixing=NeighbourMixing()))
