"""REINFORCE++ and its form with a group baseline (arXiv:2501.03262)."""

from harness.arms.ppo import PPO
from harness.parts.advantage import GroupBaseline, ReturnToGo
from harness.parts.kl import KLInLoss, KLInReward
from harness.parts.scale import Whiten

REINFORCE_PP = PPO.but(
    "reinforce_pp",
    source="REINFORCE++ arXiv:2501.03262: no critic, returns-to-go whitened over the batch",
    kl=KLInReward(kl_coef=0.01, estimator="k1"),
    advantage=ReturnToGo(gamma=1.0),
    scale=Whiten(eps=1e-8, ddof=0),
)

REINFORCE_PP_BASELINE = REINFORCE_PP.but(
    "reinforce_pp_baseline",
    source="REINFORCE++-baseline arXiv:2501.03262: group mean, then batch whitening; k2 loss",
    kl=KLInLoss(kl_coef=0.01, estimator="k2"),
    advantage=GroupBaseline(),
)
