"""The value model: what it starts from, how it learns, what it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from harness.knobs import knob


@dataclass(frozen=True)
class ValueModel:
    """What predicts returns, and its loss."""

    value_clip: float | None = 0.2

    def loss(
        self,
        values: Float[Tensor, "B T"],
        old_values: Float[Tensor, "B T"],
        returns: Float[Tensor, "B T"],
    ) -> Float[Tensor, "B T"]:
        """0.5 * max((V - R)^2, (clip(V, V_old -/+ c) - R)^2) per token."""
        error = (values - returns).square()
        if self.value_clip is None:
            return error / 2
        near = old_values + (values - old_values).clamp(-self.value_clip, self.value_clip)
        return torch.maximum(error, (near - returns).square()) / 2


@dataclass(frozen=True)
class SharedHead(ValueModel):
    """A scalar head on the policy's own trunk, trained by the policy's optimizer.

    One forward pass gives log-probs and values, and the value loss, times ``value_coef`` (TRL and
    N+ 0.1), moves the policy's trunk. Cheaper than a critic, and another algorithm: the gradients
    of the two losses meet. It has no warm-up, for the trunk cannot learn values alone.

    Attributes:
        value_clip: as for a critic.
        value_coef: weight of the value loss beside the policy's.
        init: ``policy``: V = 0; ``fresh_head``: a head drawn from N(0, 1/(hidden+1)).
    """

    version: ClassVar[int] = 1
    value_coef: float = knob(0.1, low=0.01, high=1.0, log=True)
    init: Literal["policy", "fresh_head"] = "policy"


@dataclass(frozen=True)
class Critic(ValueModel):
    """A value model of the policy's size, with weights and an optimizer of its own.

    Attributes:
        learning_rate: the critic's own; verl and OpenRLHF use about ten times the policy's.
        value_clip: how far a value may move from its rollout value before the loss stops
            rewarding it (TRL and N+ 0.2, verl and OpenRLHF 0.5); None for no clip.
        init: ``policy``: the policy's trunk with a zero head; ``fresh_head``: the policy's trunk
            with a head drawn from N(0, 1/(hidden+1)) (N+); ``reward_model``: the reward model's
            trunk and head (InstructGPT).
        warmup_steps: rollout batches at the start on which only the critic learns, from
            Monte-Carlo returns (VC-PPO, arXiv:2503.01491). They are charged like all others.
    """

    version: ClassVar[int] = 1
    learning_rate: float = knob(1e-3, low=2e-4, high=5e-3, log=True)
    init: Literal["policy", "fresh_head", "reward_model"] = "policy"
    warmup_steps: int = knob(2, choices=(0, 2, 4))
