"""Group relative policy optimization (DeepSeekMath, arXiv:2402.03300)."""

from harness.arm import Arm
from harness.parts.advantage import GroupBaseline
from harness.parts.aggregate import SequenceMean
from harness.parts.clip import PPOClip
from harness.parts.kl import KLInLoss
from harness.parts.ratio import TokenRatio
from harness.parts.sampling import FixedGroups
from harness.parts.scale import GroupStd

GRPO = Arm(
    name="grpo",
    source="DeepSeekMath arXiv:2402.03300 sec. 4.1, eq. 3-4",
    sampling=FixedGroups(),
    kl=KLInLoss(kl_coef=0.04, estimator="k3"),
    advantage=GroupBaseline(),
    scale=GroupStd(eps=1e-6, ddof=0),
    ratio=TokenRatio(),
    clip=PPOClip(clip_low=0.2, clip_high=0.2),
    aggregate=SequenceMean(),
)

GRPO_CLIP_HIGHER = GRPO.but(
    "grpo_clip_higher",
    source="grpo with DAPO's upper clip alone (arXiv:2503.14476 sec. 3.1)",
    clip=PPOClip(clip_low=0.2, clip_high=0.28),
)
