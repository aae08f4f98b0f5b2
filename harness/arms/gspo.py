"""Group sequence policy optimization (GSPO, arXiv:2507.18071)."""

from harness.arms.grpo import GRPO
from harness.parts.clip import PPOClip
from harness.parts.kl import NoKL
from harness.parts.ratio import SequenceRatio

GSPO = GRPO.but(
    "gspo",
    source="GSPO arXiv:2507.18071: the ratio of whole completions, with a clip range of its own",
    kl=NoKL(),
    ratio=SequenceRatio(),
    clip=PPOClip(clip_low=3e-4, clip_high=4e-4),
)
