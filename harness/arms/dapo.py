"""Decoupled clip and dynamic sampling policy optimization (DAPO, arXiv:2503.14476)."""

from harness.arms.grpo import GRPO
from harness.parts.aggregate import TokenMean
from harness.parts.clip import PPOClip
from harness.parts.exclude import Unfinished
from harness.parts.kl import NoKL
from harness.parts.sampling import DynamicSampling
from harness.parts.shaping import OverlongPenalty, SignedScore

DAPO = GRPO.but(
    "dapo",
    source="DAPO arXiv:2503.14476 eq. 8-13, with the soft overlong punishment",
    sampling=DynamicSampling(),
    shaping=(SignedScore(), OverlongPenalty(cache_share=0.2)),
    kl=NoKL(),
    clip=PPOClip(clip_low=0.2, clip_high=0.28),
    aggregate=TokenMean(),
)

DAPO_FILTERED = DAPO.but(
    "dapo_overlong_filter",
    source="dapo with overlong filtering (sec. 3.4) in place of the soft punishment",
    shaping=(SignedScore(),),
    exclude=Unfinished(denominator="kept"),
)
