"""The curves of over-optimisation (Gao, Schulman and Hilton, arXiv:2210.10760).

With d = sqrt(KL to the base) and R measured from the base's own reward: R = d (alpha - beta d) for
best-of-n, R = d (alpha - beta log d) for reinforcement learning. Both are linear in alpha and beta.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from harness.stats.bootstrap import Floats

Form = Literal["bon", "rl"]
D_MIN = 0.3  # the slope of the second form is infinite at 0, so nearer points are not fitted
FARTHEST = 10.0  # log of a peak; one beyond e^10 nats is none
LEAST = 4  # points: two parameters, and something to judge them by


@dataclass(frozen=True)
class GaoFit:
    """A fitted curve.

    Attributes:
        form: ``bon`` or ``rl``.
        r2: share of the variance of R explained.
        points: how many were fitted.
        reach: the largest d among them.
    """

    form: Form
    alpha: float
    beta: float
    r2: float
    points: int
    reach: float

    def at(self, d: float | Floats) -> Floats:
        """R at d; 0 at the base."""
        return curve(self.form, self.alpha, self.beta, d)

    @property
    def peak(self) -> tuple[float, float] | None:
        """Where R is largest, and how large; None where the curve rises without end."""
        return peak(self.form, self.alpha, self.beta)

    @property
    def over_optimised(self) -> bool:
        """Whether the peak lies inside what was measured."""
        found = self.peak
        return found is not None and found[0] < self.reach


def curve(form: Form, alpha: float, beta: float, d: float | Floats) -> Floats:
    """R at d (sec. 3.2); 0 at d = 0."""
    x = np.asarray(d, dtype=np.float64)
    if form == "bon":
        return x * (alpha - beta * x)
    safe = np.where(x > 0, x, 1.0)
    return np.where(x > 0, x * (alpha - beta * np.log(safe)), 0.0)


def peak(form: Form, alpha: float, beta: float) -> tuple[float, float] | None:
    """Position and height of the maximum for d > 0; None where there is none.

    bon: d = alpha / (2 beta), height alpha^2 / (4 beta). rl: d = exp(alpha / beta - 1), height
    beta d.
    """
    if beta <= 0 or (form == "bon" and alpha <= 0):
        return None
    if form == "bon":
        return alpha / (2 * beta), alpha * alpha / (4 * beta)
    power = alpha / beta - 1
    if power > FARTHEST:
        return None
    at = float(np.exp(power))
    return at, beta * at


def fit(form: Form, d: Sequence[float], reward: Sequence[float], base: float) -> GaoFit | None:
    """Least squares of a form.

    Args:
        form: which.
        d: square roots of the KL.
        reward: the rewards there.
        base: the reward of the base, from which R is measured.

    Returns:
        None where fewer than ``LEAST`` points lie beyond ``D_MIN``, or all at one d.
    """
    x, y = np.asarray(d, dtype=np.float64), np.asarray(reward, dtype=np.float64) - base
    far = x >= D_MIN
    x, y = x[far], y[far]
    if len(x) < LEAST or np.ptp(x) == 0:
        return None
    second = -x * x if form == "bon" else -x * np.log(x)
    (alpha, beta), *_ = np.linalg.lstsq(np.column_stack([x, second]), y, rcond=None)
    error = float(((curve(form, alpha, beta, x) - y) ** 2).sum())
    spread = float(((y - y.mean()) ** 2).sum())
    r2 = 1 - error / spread if spread > 0 else 0.0
    return GaoFit(form, float(alpha), float(beta), r2, len(x), float(x.max()))
