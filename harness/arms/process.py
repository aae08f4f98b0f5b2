"""GRPO on worked steps: process supervision (DeepSeekMath, arXiv:2402.03300 sec. 4.1.3)."""

from harness.arms.grpo import GRPO
from harness.parts.process import ProcessSupervision

GRPO_PROCESS = GRPO.but(
    "grpo_process",
    source="DeepSeekMath arXiv:2402.03300 sec. 4.1.3: each worked step scored by a rule",
    advantage=ProcessSupervision(eps=1e-6, ddof=0),
    scale=None,
)
