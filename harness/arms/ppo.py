"""Proximal policy optimization (arXiv:1707.06347) as used for RLHF (InstructGPT, 2203.02155)."""

from harness.arm import Arm
from harness.parts.advantage import GAE
from harness.parts.aggregate import TokenMean
from harness.parts.clip import PPOClip
from harness.parts.critic import Critic
from harness.parts.kl import KLInReward
from harness.parts.ratio import TokenRatio
from harness.parts.sampling import FixedGroups
from harness.parts.scale import Whiten

PPO = Arm(
    name="ppo",
    source="PPO arXiv:1707.06347 sec. 3; InstructGPT arXiv:2203.02155 eq. 2; N+ arXiv:2403.17031",
    sampling=FixedGroups(),
    kl=KLInReward(kl_coef=0.05, estimator="k1"),
    advantage=GAE(gamma=1.0, gae_lambda=1.0, critic=Critic(learning_rate=1e-3, value_clip=0.2)),
    scale=Whiten(),
    ratio=TokenRatio(),
    clip=PPOClip(clip_low=0.2, clip_high=0.2),
    aggregate=TokenMean(),
)

PPO_UNGROUPED = PPO.but(
    "ppo_ungrouped",
    source="PPO with one completion for each of many prompts, as InstructGPT ran it",
    sampling=FixedGroups(group_size=1),
)
