"""PPO and GRPO on the gold reward behind a learned one (arXiv:2305.18290 sec. 6.1, PPO-GT)."""

from harness.arms.grpo import GRPO
from harness.arms.ppo import PPO
from harness.parts.reward import GoldReward

PPO_GOLD = PPO.but("ppo_gold", source="ppo on the gold reward", reward=GoldReward())
GRPO_GOLD = GRPO.but("grpo_gold", source="grpo on the gold reward", reward=GoldReward())
