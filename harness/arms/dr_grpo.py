"""GRPO without its two biases (Dr. GRPO, arXiv:2503.20783)."""

from harness.arms.grpo import GRPO
from harness.parts.aggregate import FixedLength
from harness.parts.kl import NoKL

DR_GRPO = GRPO.but(
    "dr_grpo",
    source="Dr. GRPO arXiv:2503.20783: no std, a constant denominator, no KL",
    scale=None,
    kl=NoKL(),
    aggregate=FixedLength(),
)
