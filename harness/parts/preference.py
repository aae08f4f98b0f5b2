"""What an arm learns from pairs of a chosen and a rejected completion (DPO, arXiv:2305.18290)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from harness.errors import InputError
from harness.knobs import knob
from harness.parts.kl import KL


@dataclass(frozen=True)
class KLInPreference(KL):
    """The pull to the reference inside a preference loss (eq. 7).

    ``kl_coef``: the paper's beta, of the KL-constrained problem that the loss solves; the reference
    is the base. The paper tries 0.05 to 5.
    """

    version: ClassVar[int] = 1
    kl_coef: float = knob(0.1, low=0.05, high=5.0, log=True)

    def __post_init__(self) -> None:
        if self.kl_coef <= 0:
            raise InputError(f"kl.kl_coef is {self.kl_coef}; a preference loss needs it above 0")

    @property
    def needs_reference(self) -> bool:
        return True

    @property
    def initial_coef(self) -> float:
        return self.kl_coef


@dataclass(frozen=True)
class SigmoidLoss:
    """-log sigmoid(beta [(log pi - log ref)(chosen) - (log pi - log ref)(rejected)]) (eq. 7).

    Log-probs are those of whole completions: sums over their tokens, never divided by lengths.
    """

    version: ClassVar[int] = 1

    def margin(
        self, chosen: Float[Tensor, "N"], rejected: Float[Tensor, "N"], beta: float
    ) -> Float[Tensor, "N"]:
        """By how much the chosen completion's implicit reward is above the rejected one's.

        Args:
            chosen, rejected: log pi - log ref of the completions, in nats.
            beta: ``KLInPreference.kl_coef``.
        """
        return beta * (chosen - rejected)

    def __call__(
        self, chosen: Float[Tensor, "N"], rejected: Float[Tensor, "N"], beta: float
    ) -> Float[Tensor, "N"]:
        """The loss of each pair; arguments as of ``margin``."""
        return -logsigmoid(self.margin(chosen, rejected, beta))
