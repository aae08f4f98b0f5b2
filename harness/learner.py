"""The only object that writes weights: one optimizer step from one minibatch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from harness.arm import Arm
from harness.errors import CellError, DivergedError
from harness.models import Critic, Policy, ValueHead, trim
from harness.optimizer import MasterAdamW
from harness.spec.schema import OptimizerSpec
from harness.types import Minibatch

RATIO_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.1}


class Learner:
    """Policy and critic with their optimizers.

    The two have separate optimizers and separate gradient-norm limits, so the critic's gradient
    never scales the policy's.
    """

    def __init__(
        self,
        arm: Arm,
        policy: Policy,
        critic: Critic | None,
        optimizer: OptimizerSpec,
        head: ValueHead | None = None,
    ) -> None:
        self.arm, self.policy, self.critic, self.spec = arm, policy, critic, optimizer
        self.head = head
        trained = (
            policy.model if head is None else nn.ModuleDict({"trunk": policy.model, "head": head})
        )
        self.policy_optimizer = MasterAdamW(trained, optimizer, optimizer.learning_rate)
        self.critic_optimizer = None
        if critic is not None:
            assert arm.separate_critic is not None
            rate = arm.separate_critic.learning_rate
            self.critic_optimizer = MasterAdamW(critic, optimizer, rate)

    def update(
        self,
        minibatch: Minibatch,
        *,
        kl_coef: float,
        rate: float,
        critic_rate: float,
        warmup: bool,
        first: bool,
    ) -> dict[str, float]:
        """One optimizer step. How it is cut into micro-batches changes neither it nor its stats.

        Args:
            minibatch: the rows of this step.
            kl_coef: the penalty's coefficient in force.
            rate: factor on the policy's learning rate (warm-up and schedule).
            critic_rate: factor on the critic's.
            warmup: the policy stands still, only the critic learns.
            first: no update has touched the policy since the rollout, so every ratio must be 1.

        Raises:
            DivergedError: a loss or gradient that is not finite.
            CellError: a first ratio away from 1.
        """
        totals: dict[str, float] = defaultdict(float)
        worst = 0.0
        for rows in torch.arange(len(minibatch)).split(self.spec.micro_batch):
            x = trim(minibatch.select(rows.to(minibatch.mask.device)))
            if not warmup:
                worst = max(worst, self._policy_backward(x, kl_coef, totals))
            if self.critic is not None:
                loss = self.arm.value_loss(x, self.critic.values(x))
                loss.backward()
                totals["loss/value"] += loss.item()
        self._check_finite(totals)
        if first and not warmup:
            self._check_ratio(worst)
            totals["first_ratio_error"] = worst
        if not warmup:
            totals["grad_norm"] = self._step(
                self.policy_optimizer, self.spec.learning_rate * rate, "policy"
            )
        if self.critic_optimizer is not None:
            assert self.arm.separate_critic is not None
            rate = self.arm.separate_critic.learning_rate * critic_rate
            totals["critic_grad_norm"] = self._step(self.critic_optimizer, rate, "critic")
        tokens = max(int(minibatch.mask.sum()), 1)
        return {
            name.removeprefix("sum/"): value / (tokens if name.startswith("sum/") else 1)
            for name, value in totals.items()
        }

    def _policy_backward(self, x: Minibatch, kl_coef: float, totals: dict[str, float]) -> float:
        """Add this micro-batch's gradient and statistics; the largest |ratio - 1|."""
        values = None
        if self.head is not None:
            logprobs, top, values = self.head.with_logprobs(x)
        else:
            logprobs, top = self.policy.logprobs_and_top(x)
        loss, stats = self.arm.policy_loss(x, logprobs, kl_coef, top)
        totals["loss/policy"] += loss.item()
        if values is not None:
            assert self.arm.shared_head is not None
            value_loss = self.arm.value_loss(x, values)
            totals["loss/value"] += value_loss.item()
            loss = loss + self.arm.shared_head.value_coef * value_loss
        loss.backward()
        for name, value in stats.items():
            totals[name] += float(value)
        gap = torch.where(x.mask, logprobs.detach() - x.old_logprobs, 0.0)
        return float(gap.abs().max().expm1())

    def _step(self, optimizer: MasterAdamW, rate: float, who: str) -> float:
        parameters = optimizer.gather()
        norm = float(nn.utils.clip_grad_norm_(parameters, self.spec.max_grad_norm))
        if not math.isfinite(norm):
            raise DivergedError(f"the {who}'s gradient is {norm}; lower the learning rate")
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.scatter()
        optimizer.zero_grad(set_to_none=True)
        return norm

    def _check_finite(self, totals: dict[str, float]) -> None:
        for name, value in totals.items():
            if not math.isfinite(value):
                raise DivergedError(
                    f"{name} is {value}; lower the learning rate, or look at the reward"
                )

    def _check_ratio(self, worst: float) -> None:
        dtype = next(self.policy.model.parameters()).dtype
        if worst > RATIO_TOLERANCE[dtype]:
            raise CellError(
                f"ratio differs from 1 by {worst:.3g} before any update: the log-probs of the "
                "rollout and of the update do not agree"
            )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Everything that training changes, by name: trained weights and optimizer moments."""
        yield from self.policy_optimizer.tensors("policy")
        if self.critic_optimizer is not None:
            yield from self.critic_optimizer.tensors("critic")

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Put back what ``tensors`` gave."""
        self.policy_optimizer.restore("policy", tensors)
        if self.critic_optimizer is not None:
            self.critic_optimizer.restore("critic", tensors)
