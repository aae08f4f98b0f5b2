"""GRPO whose reference follows the policy (DeepSeekMath, arXiv:2402.03300 sec. 4.1.4, Alg. 1).

The algorithm's other half trains a reward model further on the policy's samples. A rule has
nothing to train, so that half does not apply.

DeepSeek-R1 replaces its reference every 400 of 10,400 steps, about 26 times. Runs here have tens of
steps, trials half as many: every 10 gives the longer ones several references and the shorter at
least one.
"""

from harness.arms.grpo import GRPO
from harness.parts.kl import KLInLoss, Refresh

GRPO_ITERATIVE = GRPO.but(
    "grpo_iterative",
    source="DeepSeekMath arXiv:2402.03300 sec. 4.1.4: the policy becomes the reference every N "
    "steps; no reward model to train",
    kl=KLInLoss(kl_coef=0.04, estimator="k3", refresh=Refresh(every=10)),
)
