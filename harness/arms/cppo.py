"""Cumulative prefix-divergence policy optimization (CPPO, arXiv:2606.10968)."""

from harness.arms.filtered import GRPO_FILTERED
from harness.parts.aggregate import TokenMean
from harness.parts.divergence import TotalVariation
from harness.parts.kl import NoKL
from harness.parts.ratio import TokenRatio
from harness.parts.trust_region import AdaptiveBudget, FixedBudget, PrefixBudget

CPPO = GRPO_FILTERED.but(
    "cppo",
    source="CPPO arXiv:2606.10968 Alg. 1: prefix budget on top-20 total variation, adaptive",
    kl=NoKL(),
    ratio=TokenRatio(anchor="behaviour"),
    clip=PrefixBudget(divergence=TotalVariation(top_k=20), delta=0.15, budget=AdaptiveBudget()),
    aggregate=TokenMean(),
)

CPPO_FIXED = CPPO.but(
    "cppo_fixed",
    source="CPPO arXiv:2606.10968 with a fixed budget, as for post-trained models",
    clip=PrefixBudget(divergence=TotalVariation(top_k=20), delta=0.15, budget=FixedBudget()),
)

CPPO_BINARY = CPPO.but(
    "cppo_binary",
    source="CPPO as its released code has it: binary total variation, delta 0.2",
    clip=PrefixBudget(divergence=TotalVariation(), delta=0.2, budget=AdaptiveBudget()),
)
