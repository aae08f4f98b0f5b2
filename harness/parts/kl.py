"""The penalty toward the reference: none, in the reward, or in the loss.

Estimators of KL(pi || ref) from samples of pi (Schulman 2020), with r = ref / pi:
k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r. As a *loss*, k1 has zero expected gradient,
k2 that of KL(pi || ref) and k3 that of KL(ref || pi); in the *reward*, k1 gives KL(pi || ref).
k3_k2 has k3's value with k2's gradient (verl's "k3+").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from harness.errors import InputError
from harness.knobs import knob

Estimator = Literal["k1", "k2", "k3", "k3_k2"]


def estimate_kl(
    estimator: str, logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Per-token KL(pi || ref), in nats."""
    delta = logprobs - ref_logprobs
    if estimator == "k1":
        return delta
    if estimator == "k2":
        return delta.square() / 2
    if estimator == "k3":
        # exp(-delta) - 1 loses every digit of a small KL in float32, and can turn negative.
        return torch.expm1(-delta) + delta
    if estimator == "k3_k2":
        k2, k3 = delta.square() / 2, torch.expm1(-delta) + delta
        return k2 + (k3 - k2).detach()
    raise InputError(f"KL estimator {estimator!r} is none of k1, k2, k3, k3_k2")


@dataclass(frozen=True)
class AdaptiveKL:
    """Ziegler et al. 2019 (arXiv:1909.08593): steer the coefficient towards a target KL."""

    version: ClassVar[int] = 1
    target: float = 6.0  # sequence KL, nats
    horizon: float = 10_000.0  # completions

    def next_coef(self, coef: float, observed: float, completions: int) -> float:
        error = min(max(observed / self.target - 1.0, -0.2), 0.2)
        return coef * (1.0 + error * completions / self.horizon)


@dataclass(frozen=True)
class Refresh:
    """When the policy becomes its own reference (DeepSeekMath, arXiv:2402.03300 sec. 4.1.4).

    ``every``: steps (rollout batches, a critic's warm-up among them) between two replacements; the
    first reference is the base. DeepSeek-R1 replaces it every 400 of 10,400 steps (2501.12948).
    """

    version: ClassVar[int] = 1
    every: int = knob(10, choices=(5, 10, 20))

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1:
            raise InputError(f"kl.refresh.every is {self.every!r}; give a number of steps from 1")

    def due(self, done: int) -> bool:
        """Whether the reference is replaced once so many steps are done."""
        return done > 0 and done % self.every == 0


@dataclass(frozen=True)
class KL:
    """No penalty unless a subclass says so; the coefficient in force is the loop's state."""

    @property
    def needs_reference(self) -> bool:
        return False

    @property
    def refresh(self) -> Refresh | None:
        """When the reference is replaced; None where it stays the base."""
        return None

    @property
    def initial_coef(self) -> float:
        return 0.0

    def in_reward(
        self, old_logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"] | None
    ) -> Float[Tensor, "B T"] | float:
        """Per-token KL to be taken off the reward, before the coefficient."""
        return 0.0

    def in_loss(
        self, logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"] | None
    ) -> Float[Tensor, "B T"] | None:
        """Per-token KL to be added to the loss, before the coefficient."""
        return None

    def next_coef(self, coef: float, observed: float, completions: int) -> float:
        """The coefficient of the next step, given this step's mean sequence KL (k1)."""
        return coef


@dataclass(frozen=True)
class NoKL(KL):
    """No penalty, and no reference model in memory."""

    version: ClassVar[int] = 1


@dataclass(frozen=True)
class Penalty(KL):
    """A penalty of ``kl_coef`` times a per-token estimate, fixed or steered by a controller.

    ``clamp`` bounds each token's estimate to [-clamp, clamp] (OpenRLHF and verl: 10); None leaves
    it as it is. ``refresh`` replaces the reference now and then; None keeps the base.
    """

    kl_coef: float = knob(0.05, low=1e-3, high=0.2, log=True)
    estimator: Estimator = "k1"
    controller: AdaptiveKL | None = None
    clamp: float | None = None
    refresh: Refresh | None = None  # type: ignore[assignment]

    @property
    def needs_reference(self) -> bool:
        return True

    @property
    def initial_coef(self) -> float:
        return self.kl_coef

    def next_coef(self, coef: float, observed: float, completions: int) -> float:
        if self.controller is None:
            return coef
        return self.controller.next_coef(coef, observed, completions)

    def _estimate(
        self, logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"] | None
    ) -> Float[Tensor, "B T"]:
        assert ref_logprobs is not None
        kl = estimate_kl(self.estimator, logprobs, ref_logprobs)
        return kl if self.clamp is None else kl.clamp(-self.clamp, self.clamp)


@dataclass(frozen=True)
class KLInReward(Penalty):
    """``-kl_coef * KL`` in each token's reward, without gradient (InstructGPT eq. 2)."""

    version: ClassVar[int] = 2

    def in_reward(
        self, old_logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"] | None
    ) -> Float[Tensor, "B T"] | float:
        return self._estimate(old_logprobs, ref_logprobs)


@dataclass(frozen=True)
class KLInLoss(Penalty):
    """``kl_coef * KL`` added to each token's loss (DeepSeekMath, arXiv:2402.03300 eq. 3-4)."""

    version: ClassVar[int] = 2
    kl_coef: float = knob(0.04, low=1e-3, high=0.2, log=True)
    estimator: Estimator = "k3"

    def in_loss(
        self, logprobs: Float[Tensor, "B T"], ref_logprobs: Float[Tensor, "B T"] | None
    ) -> Float[Tensor, "B T"] | None:
        return self._estimate(logprobs, ref_logprobs)
