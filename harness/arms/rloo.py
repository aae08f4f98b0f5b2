"""REINFORCE with a leave-one-out baseline (RLOO, arXiv:2402.14740).

A completion is one action, whose log-prob is the sum over its tokens. The constant that the sum is
divided by is not the paper's; Adam absorbs it while the gradient limit does not bind.
"""

from harness.arms.grpo import GRPO
from harness.parts.advantage import LeaveOneOut
from harness.parts.aggregate import FixedLength
from harness.parts.clip import NoClip
from harness.parts.kl import KLInReward
from harness.parts.ratio import NoRatio

RLOO = GRPO.but(
    "rloo",
    source="RLOO arXiv:2402.14740: REINFORCE on whole completions, the others' mean as baseline",
    kl=KLInReward(kl_coef=0.03, estimator="k1"),
    advantage=LeaveOneOut(),
    scale=None,
    ratio=NoRatio(),
    clip=NoClip(),
    aggregate=FixedLength(),
)
