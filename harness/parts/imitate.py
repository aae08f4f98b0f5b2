"""A likelihood term on completions that were right, beside the surrogate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from harness.types import Batch


@dataclass(frozen=True)
class Imitate:
    """``coef`` times the negative log-likelihood of correct completions (VAPO, 2504.05118).

    The mean is over the tokens of the correct completions of the optimizer batch; without any, the
    term is 0.
    """

    version: ClassVar[int] = 1
    coef: float = 0.1

    def weights(self, x: Batch) -> Float[Tensor, "B T"]:
        """Each token's share: 1 / (tokens of correct completions) on those, 0 elsewhere."""
        good = (x.mask & x.correct[:, None] & x.keep[:, None]).double()
        return good / good.sum().clamp(min=1)
