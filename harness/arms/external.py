"""TRL's own trainers as arms, each told to compute what its parts say.

They check our loop against an independent one. TRL's own defaults are another matter: ``presets``.
"""

from harness.arms.grpo import GRPO
from harness.external.arm import ExternalArm, TRLLoop
from harness.parts.advantage import LeaveOneOut
from harness.parts.kl import KLInReward
from harness.parts.ratio import ProductRatio
from harness.parts.scale import GroupStd

TRL_GRPO_TRAINER = ExternalArm.of(
    GRPO,
    "trl_grpo_trainer",
    source="grpo in TRL's GRPOTrainer, whose std has ddof 1 and eps 1e-4",
    loop=TRLLoop("GRPOTrainer"),
    scale=GroupStd(eps=1e-4, ddof=1),
)

TRL_RLOO_TRAINER = ExternalArm.of(
    GRPO,
    "trl_rloo_trainer",
    source="TRL's RLOOTrainer: the others' mean as baseline, a clipped product of ratios",
    loop=TRLLoop("RLOOTrainer"),
    kl=KLInReward(kl_coef=0.03, estimator="k1"),
    advantage=LeaveOneOut(),
    scale=None,
    ratio=ProductRatio(),
)
