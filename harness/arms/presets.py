"""What the defaults of popular libraries are: arms to compare with, not algorithms of a paper.

An arm holds what an algorithm defines. Learning rates, temperatures, epochs, minibatches, group
sizes and truncated importance weights of an inference engine are the experiment's; docs/arms.md
lists what each library would set there.
"""

from harness.arms.grpo import GRPO
from harness.arms.ppo import PPO
from harness.parts.advantage import GAE
from harness.parts.aggregate import TokenMean
from harness.parts.clip import PPOClip
from harness.parts.critic import Critic
from harness.parts.kl import KLInReward, NoKL
from harness.parts.scale import GroupStd, Whiten

TRL_GRPO = GRPO.but(
    "trl_grpo",
    source="TRL GRPOConfig's defaults (f2cd577): loss_type dapo, beta 0, ddof 1, eps 1e-4",
    kl=NoKL(),
    scale=GroupStd(eps=1e-4, ddof=1),
    aggregate=TokenMean(),
)

VERL_GRPO = GRPO.but(
    "verl_grpo",
    source="verl's defaults for adv_estimator=grpo (1dda039): token mean, dual clip 3, no KL",
    kl=NoKL(),
    scale=GroupStd(eps=1e-6, ddof=1),
    clip=PPOClip(clip_low=0.2, clip_high=0.2, dual_clip=3.0),
    aggregate=TokenMean(),
)

VERL_PPO = PPO.but(
    "verl_ppo",
    source="verl's defaults for adv_estimator=gae (1dda039): no KL, lambda 1, dual clip 3",
    kl=NoKL(),
    advantage=GAE(gae_lambda=1.0, critic=Critic(value_clip=0.5, init="fresh_head", warmup_steps=0)),
    clip=PPOClip(clip_low=0.2, clip_high=0.2, dual_clip=3.0),
)

OPENRLHF_PPO = PPO.but(
    "openrlhf_ppo",
    source="OpenRLHF's defaults (3c3be62): k1 in the reward at 0.01, clamped to 10, lambda 1",
    kl=KLInReward(kl_coef=0.01, estimator="k1", clamp=10.0),
    advantage=GAE(gae_lambda=1.0, critic=Critic(value_clip=0.5, init="fresh_head", warmup_steps=0)),
    scale=Whiten(eps=1e-8, ddof=0),
)
