"""The shipped arms say what their papers say; the worked plugin example does what it says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from harness.arm import parts
from harness.arms import ARMS, find_arms
from harness.arms.dapo import DAPO, DAPO_FILTERED
from harness.arms.grpo import GRPO
from harness.arms.ppo import PPO
from harness.identity import difference
from harness.parts.advantage import GAE, GroupBaseline
from harness.parts.sampling import DynamicSampling
from harness.types import Rollout
from tests.rules import tokens

ROOT = Path(__file__).parent.parent
OPO_FILE = ROOT / "examples/opo.py"


# What each arm has in memory beside the policy.
CRITIC = {"ppo", "ppo_ungrouped", "ppo_shared_head", "vc_ppo", "vapo", "verl_ppo", "openrlhf_ppo"}
REFERENCE = {
    "ppo", "ppo_ungrouped", "ppo_shared_head", "vc_ppo", "openrlhf_ppo",
    "reinforce_pp", "reinforce_pp_baseline", "rloo",
    "grpo", "grpo_clip_higher", "grpo_filtered", "grpo_process", "grpo_iterative", "n_grpo",
}  # fmt: skip
POLICY_ALONE = {
    "dr_grpo", "lite_ppo", "dapo", "dapo_overlong_filter", "gspo", "cispo",
    "dppo_tv", "dppo_kl", "dppo_topk_tv", "cppo", "cppo_fixed", "cppo_binary",
    "trl_grpo", "verl_grpo",
}  # fmt: skip


def test_what_ships():
    assert set(ARMS) == CRITIC | REFERENCE | POLICY_ALONE
    assert all(name == arm.name for name, arm in ARMS.items())


@pytest.mark.parametrize("arm", ARMS.values(), ids=ARMS.keys())
def test_every_arm_is_documented(arm):
    text = (ROOT / "docs/arms.md").read_text()
    assert f"`{arm.name}`" in text
    assert arm.source


def test_models_that_an_arm_asks_for():
    """A reference is loaded, and charged, only where a penalty reads it; a critic likewise."""
    assert {name for name, arm in ARMS.items() if arm.critic is not None} == CRITIC
    assert {name for name, arm in ARMS.items() if arm.kl.needs_reference} == REFERENCE
    assert PPO.critic_warmup_steps > 0
    assert GRPO.critic_warmup_steps == 0


def test_grpo_is_deepseekmaths_and_no_librarys():
    tree = parts(GRPO)
    assert tree["kl"] | {"version": 0} == {
        "part": "KLInLoss",
        "version": 0,
        "kl_coef": 0.04,
        "estimator": "k3",
        "clamp": None,
        "controller": None,
        "refresh": None,
    }
    assert tree["scale"]["ddof"] == 0
    assert tree["aggregate"]["part"] == "SequenceMean"
    assert tree["clip"]["dual_clip"] is None


def test_what_losses_on_a_fixed_batch_cannot_tell_of_an_arm():
    """Which groups are used, how long a critic learns alone, what a preset's critic starts from."""
    resampling = {name for name, arm in ARMS.items() if arm.sampling.resamples}
    assert resampling == {"dapo", "dapo_overlong_filter", "cispo"}
    left_out = {name: parts(arm)["exclude"] for name, arm in ARMS.items() if arm.exclude}
    assert left_out["grpo_filtered"] == {
        "part": "ZeroVariance", "version": 1, "denominator": "kept", "tolerance": 1e-6,
    }  # fmt: skip
    for name, steps in (("vc_ppo", 4), ("vapo", 4), ("verl_ppo", 0), ("openrlhf_ppo", 0)):
        assert ARMS[name].critic_warmup_steps == steps
    for name in ("verl_ppo", "openrlhf_ppo"):
        assert parts(ARMS[name])["advantage"]["critic"]["init"] == "fresh_head"
    assert parts(ARMS["openrlhf_ppo"])["kl"]["clamp"] == 10.0


def test_ppo_is_not_a_straw_man():
    assert isinstance(PPO.advantage, GAE)
    assert PPO.advantage.gamma == 1.0
    assert PPO.advantage.gae_lambda == 1.0
    assert parts(PPO)["kl"]["estimator"] == "k1"
    assert parts(PPO)["clip"] == parts(GRPO)["clip"]


def test_dapo_shapes_signs_and_then_length():
    """Limit 10, cache a fifth: correct at 9 tokens is 1 - .5, wrong at 10 is -1 - 1."""
    mask = torch.arange(10) < torch.tensor([[4], [9], [10]])
    ids, correct = torch.zeros(3, 10, dtype=torch.long), torch.tensor([True, True, False])
    x = Rollout(
        prompt_ids=ids,
        prompt_mask=mask,
        completion_ids=ids,
        mask=mask,
        group=ids[:, 0],
        score=correct.double(),
        bonus=torch.zeros(3, dtype=torch.float64),
        correct=correct,
        finished=torch.tensor([True, True, False]),
        behaviour_logprobs=torch.zeros(3, 10),
    )
    score = x.score
    for shape in DAPO.shaping:
        score = shape(score, x, 10)
    assert score.tolist() == [1.0, 0.5, -2.0]
    assert isinstance(DAPO.sampling, DynamicSampling)
    assert DAPO.exclude is None


def test_dapo_filters_or_punishes_the_overlong_but_not_both():
    assert difference(parts(DAPO), parts(DAPO_FILTERED)).keys() == {"shaping", "exclude"}
    assert DAPO_FILTERED.exclude is not None
    x = dataclasses.make_dataclass("Cut", ["finished"])(torch.tensor([True, False]))
    assert DAPO_FILTERED.exclude.keep(x).tolist() == [True, False]


# --- the worked example ---------------------------------------------------------------------------


def test_the_plugin_example_is_found_by_its_file():
    found = find_arms(["grpo", "opo"], [OPO_FILE])["opo"]
    assert found.origin == f"plugin {OPO_FILE}"
    changed = difference(parts(GRPO), parts(found.arm)).keys()
    assert changed == {"advantage", "scale", "kl", "aggregate", "clip"}
    assert len(OPO_FILE.read_text().splitlines()) < 40


def test_the_plugin_example_by_hand():
    """Returns 1, 0 with lengths 1, 3: baseline (1 + 0) / 4, not the plain mean of a half."""
    opo = find_arms(["opo"], [OPO_FILE])["opo"].arm
    mask = torch.tensor([[True, False, False], [True, True, True]])
    rewards = torch.tensor([[1.0, float("nan"), 9.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    group = torch.zeros(2, dtype=torch.long)
    advantages, returns = opo.advantage(rewards, mask, group, None)
    assert advantages.tolist() == [[0.75, 0.0, 0.0], [-0.25, -0.25, -0.25]]
    assert returns is None
    # The gradients of equal tokens cancel: lengths times advantages sum to 0 in every group.
    assert advantages.sum().item() == 0.0
    same_length = torch.ones(2, 3, dtype=torch.bool)
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    plain, _ = GroupBaseline()(rewards, same_length, group, None)
    assert torch.equal(opo.advantage(rewards, same_length, group, None)[0], plain)


def test_the_plugin_example_never_clips():
    opo = find_arms(["opo"], [OPO_FILE])["opo"].arm
    ratio = torch.tensor([[0.01, 1.0, 50.0]], dtype=torch.float64)
    for sign in (1.0, -1.0):
        objective, clipped = opo.clip(
            ratio, torch.full_like(ratio, sign), tokens(ratio.log(), torch.zeros_like(ratio))
        )
        assert objective.tolist() == (sign * ratio).tolist()
        assert not clipped.any()


def test_the_documentation_shows_the_example_as_it_is():
    assert OPO_FILE.read_text().strip() in (ROOT / "docs/arms.md").read_text()
