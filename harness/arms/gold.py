"""Arms for a learned reward: on the gold one behind it (arXiv:2305.18290 sec. 6.1), on scores."""

from harness.arms.dapo import DAPO
from harness.arms.grpo import GRPO
from harness.arms.ppo import PPO
from harness.parts.reward import GoldReward
from harness.parts.shaping import OverlongPenalty

PPO_GOLD = PPO.but("ppo_gold", source="ppo on the gold reward", reward=GoldReward())
GRPO_GOLD = GRPO.but("grpo_gold", source="grpo on the gold reward", reward=GoldReward())
DAPO_SCORE = DAPO.but(
    "dapo_score",
    source="dapo on a score, which is not made a sign",
    shaping=(OverlongPenalty(cache_share=0.2),),
)
