"""Divergence proximal policy optimization (DPPO, arXiv:2602.04879)."""

from harness.arms.dr_grpo import DR_GRPO
from harness.parts.divergence import KullbackLeibler, TotalVariation
from harness.parts.ratio import TokenRatio
from harness.parts.trust_region import DivergenceMask

DPPO_TV = DR_GRPO.but(
    "dppo_tv",
    source="DPPO arXiv:2602.04879: a mask by the binary total variation to the sampling policy",
    ratio=TokenRatio(anchor="behaviour"),
    clip=DivergenceMask(divergence=TotalVariation(), delta=0.15),
)

DPPO_KL = DPPO_TV.but(
    "dppo_kl",
    source="DPPO arXiv:2602.04879: a mask by the binary KL to the sampling policy",
    clip=DivergenceMask(divergence=KullbackLeibler(), delta=0.05),
)

DPPO_TOPK_TV = DPPO_TV.but(
    "dppo_topk_tv",
    source="DPPO arXiv:2602.04879: total variation over the 20 likeliest tokens",
    clip=DivergenceMask(divergence=TotalVariation(top_k=20), delta=0.15),
)
