"""An arm's expected update on an enumerable policy: a sum over every batch that can be drawn."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.arm import Arm
from harness.conformance.enumerated import World, batches
from harness.conformance.finding import NotApplicableError
from harness.conformance.scene import needed
from harness.types import Experience

LIMIT = 8  # the length limit that shaping and aggregation read; no completion comes near it
MOST = 5  # completions a batch may have, for all batches to be enumerable in a moment


@dataclass(frozen=True)
class Expected:
    """The expected update of one optimizer step.

    Attributes:
        update: by the policy's logits: the direction of descent on the loss, expected.
        batches: how many there are.
        kept: the probability that sampling keeps a batch; the update is that of kept ones.
    """

    update: Tensor
    batches: int
    kept: float


def everyone(
    arm: Arm, world: World, score: Tensor | None = None, values: Tensor | None = None
) -> Experience:
    """All completions of a world as rows of one experience, with what the arm asks for.

    Each is one worked step that scores what the completion scores. ``score`` None is the verdict.
    """
    N, T = world.ids.shape
    old = world.logprobs(world.logits)
    score = world.right.double() if score is None else score
    last = torch.arange(T) == world.lengths[:, None] - 1
    top = world.logits.log_softmax(1)[world.node].topk(
        min(arm.clip.top_k or 1, world.logits.shape[1]), 2
    )
    steps, recorded = arm.advantage.needs_steps, arm.clip.top_k is not None
    return Experience(
        prompt_ids=torch.zeros(N, 1, dtype=torch.long),
        prompt_mask=torch.ones(N, 1, dtype=torch.bool),
        completion_ids=world.ids,
        mask=world.mask,
        group=torch.zeros(N, dtype=torch.long),
        score=score,
        bonus=torch.zeros(N, dtype=torch.float64),
        correct=world.right,
        finished=torch.ones(N, dtype=torch.bool),
        behaviour_logprobs=old,
        step_ends=last if steps else None,
        step_scores=last * score[:, None] if steps else None,
        top_ids=top.indices if recorded else None,
        top_logprobs=top.values if recorded else None,
        old_logprobs=old,
        ref_logprobs=world.logprobs(world.ref_logits) if arm.kl.needs_reference else None,
        values=(some_values(world) if values is None else values) if arm.critic else None,
    )


def some_values(world: World) -> Tensor:
    """[N, T]: what a critic that knows nothing may say, one number for each prefix."""
    of_prefix = 0.4 + 0.5 * torch.sin(2.1 * torch.arange(len(world.logits), dtype=torch.float64))
    return of_prefix[world.node].masked_fill(~world.mask, 0.0)


def shaped(arm: Arm, world: World) -> Tensor:
    """[N]: the score of each completion after the arm's shaping: what the arm maximises."""
    x = everyone(arm, world)
    score = x.score
    for rule in arm.shaping:
        score = rule(score, x, LIMIT)
    return score


def expected_update(
    arm: Arm,
    world: World,
    *,
    rows: int,
    kl_coef: float = 0.0,
    score: Tensor | None = None,
    values: Tensor | None = None,
) -> Expected:
    """The mean of the arm's first update over all batches of ``rows``, by their probability.

    A batch is one group; for an arm that sets one completion a prompt, as many prompts, all alike.
    """
    x = everyone(arm, world, score, values)
    alone = arm.sampling.group_size == 1
    group = torch.arange(rows) if alone else torch.zeros(rows, dtype=torch.long)
    total = torch.zeros(world.mask.shape, dtype=torch.float64)
    kept, count = 0.0, 0
    for chosen, probability in batches(world.probabilities(world.logits), rows):
        drawn = dataclasses.replace(x.select(torch.tensor(chosen)), group=group)
        count += 1
        if not bool(arm.sampling.keep(drawn.correct, group).all()):
            continue
        kept += probability
        for row, gradient in zip(chosen, first_gradient(arm, drawn, kl_coef), strict=True):
            total[row] -= probability * gradient
    return Expected(world.by_parameters(total / kept), count, kept)


def batch_rows(arm: Arm, default: int) -> int:
    """Completions of an enumerated batch: the default, or what the arm's parts need.

    Raises:
        NotApplicableError: they need too many.
    """
    if needed(arm) > MOST:
        raise NotApplicableError(
            f"it needs {needed(arm)} completions per prompt, too many to enumerate"
        )
    return max(default, needed(arm))


def first_gradient(arm: Arm, x: Experience, kl_coef: float) -> Tensor:
    """[B, T]: the loss's gradient by each log-prob, before any update has been made."""
    batch = arm.credit(x, kl_coef=kl_coef, max_new_tokens=LIMIT, warmup=False)
    minibatch = arm.weigh(batch, max_new_tokens=LIMIT)
    now = x.old_logprobs.clone().requires_grad_()
    loss, _ = arm.policy_loss(minibatch, now, kl_coef, x.top_logprobs)
    (gradient,) = torch.autograd.grad(loss, now)
    return gradient


def share_of(update: Tensor, exact: Tensor) -> tuple[float, float]:
    """How many times the exact gradient an update is along it, and the angle in degrees."""
    along = float((update * exact).sum() / (exact * exact).sum())
    # From the remainder: the cosine of a small angle is 1 to all digits.
    aside = float((update - along * exact).norm() / exact.norm())
    return along, math.degrees(math.atan2(aside, along))


def gap(update: Tensor, expected: Tensor) -> float:
    """The norm of the difference over the norm of what was expected."""
    return float((update - expected).norm() / expected.norm())
