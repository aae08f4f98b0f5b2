"""PPO with its value head on the policy's trunk, as older libraries have it."""

from harness.arms.ppo import PPO
from harness.parts.advantage import GAE
from harness.parts.critic import SharedHead

PPO_SHARED_HEAD = PPO.but(
    "ppo_shared_head",
    source="ppo with a scalar head on the policy's trunk (TRL's AutoModelForCausalLMWithValueHead)",
    advantage=GAE(gamma=1.0, gae_lambda=1.0, critic=SharedHead(value_clip=0.2, value_coef=0.1)),
)
