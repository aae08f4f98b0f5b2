"""Clipped importance weights (CISPO, MiniMax-M1, arXiv:2506.13585).

The paper's upper bound is not disclosed: 5 is ScaleRL's, and a knob of the clip.
"""

from harness.arms.grpo import GRPO
from harness.parts.aggregate import TokenMean
from harness.parts.clip import CISPOClip
from harness.parts.kl import NoKL
from harness.parts.sampling import DynamicSampling
from harness.parts.shaping import OverlongPenalty

CISPO = GRPO.but(
    "cispo",
    source="CISPO, MiniMax-M1 arXiv:2506.13585: weights bounded from above alone; dynamic "
    "sampling and length penalty as there",
    sampling=DynamicSampling(),
    shaping=(OverlongPenalty(cache_share=0.2),),
    kl=NoKL(),
    clip=CISPOClip(clip_low=None, clip_high=4.0),
    aggregate=TokenMean(),
)
