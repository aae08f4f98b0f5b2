"""Two small changes to GRPO that papers make in passing."""

from harness.arms.grpo import GRPO
from harness.parts.aggregate import TokenMean
from harness.parts.exclude import ZeroVariance
from harness.parts.kl import NoKL
from harness.parts.scale import BatchStd

GRPO_FILTERED = GRPO.but(
    "grpo_filtered",
    source="grpo without groups whose scores all agree; the loss is divided by the rest",
    exclude=ZeroVariance(tolerance=1e-6, denominator="kept"),
)

LITE_PPO = GRPO.but(
    "lite_ppo",
    source="Lite PPO arXiv:2508.08221: group mean, batch std, token mean; no KL",
    kl=NoKL(),
    scale=BatchStd(eps=1e-6, ddof=0),
    aggregate=TokenMean(),
)
