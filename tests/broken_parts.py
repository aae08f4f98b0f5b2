"""Parts with one thing wrong each, as a plugin's author might write them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from harness.arm import Arm
from harness.errors import InputError
from harness.knobs import knob
from harness.parts.advantage import Advantage, GroupBaseline
from harness.parts.aggregate import Aggregate
from harness.parts.clip import Clip, NoClip
from harness.parts.exclude import Exclude
from harness.parts.kl import KLInLoss
from harness.parts.ratio import TokenRatio
from harness.parts.sampling import Sampling
from harness.types import completion_return, group_mean


@dataclass(frozen=True)
class Scores(Advantage):
    """Some function of the scores, by group; broken in the ways below."""

    version: ClassVar[int] = 1
    min_group: ClassVar[int] = 2
    kind: str = "right"

    def __call__(self, rewards: Any, mask: Any, group: Any, values: Any) -> Any:
        total = completion_return(rewards, mask)
        centred = total - group_mean(total, group)
        found = {
            "right": centred,
            "lowers": -centred,
            "ignores the group": total - 0.3,
            "is nothing": 0 * centred,
            "is not a number": centred / 0 * 0,
            "looks at its neighbour": total - total.roll(1),
            "has lost a dimension": centred,
        }
        if self.kind == "raises":
            raise ValueError("this one\nraises")
        advantage = found[self.kind]
        return (advantage if "lost" in self.kind else advantage[:, None] * mask), None


@dataclass(frozen=True)
class OddClip(Clip):
    version: ClassVar[int] = 1
    kind: str = "right"

    def __call__(self, ratio: Any, advantages: Any, x: Any) -> Any:
        plain, cut = ratio * advantages, torch.zeros_like(ratio, dtype=torch.bool)
        if self.kind == "stops the gradient":
            plain = plain.detach()
        if self.kind == "centres over the micro-batch":
            plain = plain - (plain.sum() / x.mask.sum()) * x.mask
        if self.kind == "cuts at once":
            cut = ratio <= 1
        if self.kind == "doubles":
            plain = 2 * plain
        if self.kind == "adds a constant":
            plain = plain + 0.1
        if self.kind == "has a gradient of its own":
            plain = Tilted.apply(plain)
        return plain, cut


class Tilted(torch.autograd.Function):
    """The identity, with a gradient that is not its slope where a number is above a bound."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return torch.where(x.abs() > 1.5, 1.001 * gradient, gradient)


@dataclass(frozen=True)
class TwiceRatio(TokenRatio):
    version: ClassVar[int] = 1

    def __call__(self, logprobs: Any, anchor_logprobs: Any, mask: Any) -> Any:
        return torch.where(mask, 2.0, 1.0) * super().__call__(logprobs, anchor_logprobs, mask)


@dataclass(frozen=True)
class OverColumns(Aggregate):
    """Divides by the columns of the batch, padding and all."""

    version: ClassVar[int] = 1

    def __call__(self, mask: Any, max_new_tokens: int) -> Any:
        return mask.double() / mask.numel()


@dataclass(frozen=True)
class OnPadding(Aggregate):
    version: ClassVar[int] = 1

    def __call__(self, mask: Any, max_new_tokens: int) -> Any:
        return torch.full(mask.shape, 1 / mask.numel(), dtype=torch.float64)


@dataclass(frozen=True)
class Everything(Exclude):
    version: ClassVar[int] = 1

    def keep(self, x: Any) -> Any:
        return torch.zeros_like(x.finished)


@dataclass(frozen=True)
class Splitting(Sampling):
    version: ClassVar[int] = 1

    def keep(self, correct: Any, group: Any) -> Any:
        return correct


@dataclass(frozen=True)
class Upwards(KLInLoss):
    """A penalty turned round: it pays for leaving the reference."""

    version: ClassVar[int] = 1

    def in_loss(self, logprobs: Any, ref_logprobs: Any) -> Any:
        found = super().in_loss(logprobs, ref_logprobs)
        assert found is not None
        return -found


@dataclass(frozen=True, kw_only=True)
class WithEntropy(Arm):
    """A bonus that no part declares."""

    def policy_loss(self, x: Any, logprobs: Any, kl_coef: float, top_logprobs: Any = None) -> Any:
        loss, stats = super().policy_loss(x, logprobs, kl_coef, top_logprobs)
        return loss + 0.01 * torch.where(x.mask, logprobs, 0.0).sum(), stats


# --- parts that are no values, and knobs that are none ------------------------------------------


class Undecorated(GroupBaseline):
    version: ClassVar[int] = 1
    bias: float = 0.5


@dataclass(frozen=True)
class Unversioned(Clip):
    def __call__(self, ratio: Any, advantages: Any, x: Any) -> Any:
        return NoClip()(ratio, advantages, x)


@dataclass(frozen=True)
class Listed(GroupBaseline):
    version: ClassVar[int] = 1
    weights: list[float] = field(default_factory=lambda: [1.0])


@dataclass(frozen=True)
class Unwritten(GroupBaseline):
    version: ClassVar[int] = 1
    rule: Any = max


@dataclass(frozen=True)
class Outside(GroupBaseline):
    version: ClassVar[int] = 1
    strength: float = knob(2.0, low=0.1, high=1.0)


@dataclass(frozen=True)
class Bounded(GroupBaseline):
    version: ClassVar[int] = 1
    strength: float = knob(0.5, low=0.1, high=1.0)

    def __post_init__(self) -> None:
        if self.strength > 0.9:
            raise InputError("strength is at most 0.9")
