"""A ragged batch in float64 with everything that an arm may ask for, and the arm's update on it.

The policy is a table of logits of the next token by the token before, so that log-probs of sampled
and of recorded top tokens belong to one distribution, and gradients reach parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.arm import Arm
from harness.combinations import least_group
from harness.types import Batch, Experience, Minibatch, zero_padding

VOCABULARY = 24
LIMIT = 7  # tokens a completion may have
GROUPS, SIZE = 4, 3
FLOATS = ("old_logprobs", "ref_logprobs", "values", "behaviour_logprobs", "step_scores")


@dataclass(frozen=True)
class Scene:
    """An experience, and the policy and the critic some updates later."""

    x: Experience
    table: Tensor  # [VOCABULARY, VOCABULARY]
    values: Tensor  # [B, T]; padding may hold anything

    def select(self, rows: Tensor) -> Scene:
        return Scene(self.x.select(rows), self.table, self.values[rows])


def completions_per_prompt(arm: Arm, default: int = SIZE) -> int:
    """The arm's own number, or one that its parts can work with."""
    return arm.sampling.group_size or max(default, needed(arm))


def needed(arm: Arm) -> int:
    """The fewest completions per prompt that the arm's parts can work with."""
    return max(least_group(part) for part in (arm.advantage, arm.scale) if part is not None)


def make_scene(arm: Arm, *, move: float = 0.1, flat: bool = False, seed: int = 0) -> Scene:
    """Groups that are mixed, all right, all wrong and mixed again.

    Args:
        move: how far the policy has gone since the rollout: std of the change of each logit.
        flat: completions of a group are alike in score, length and end, so that no shaping tells
            them apart.
    """
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*shape, generator=rng, dtype=torch.float64)

    size = completions_per_prompt(arm)
    groups = GROUPS if size > 1 else GROUPS * SIZE
    B = groups * size
    group = torch.arange(groups).repeat_interleave(size)
    lengths = torch.randint(1, LIMIT + 1, (B,), generator=rng)
    lengths[0] = LIMIT  # one completion is cut, whatever was drawn
    correct, bonus = _verdicts(group, flat=flat)
    if flat:
        lengths = (2 + group % (LIMIT - 2)).clamp(max=LIMIT - 1)
    mask = torch.arange(LIMIT) < lengths[:, None]
    ids = torch.randint(VOCABULARY, (B, LIMIT), generator=rng)
    score = correct.double() + bonus
    old, now = normal(VOCABULARY, VOCABULARY), normal(VOCABULARY, VOCABULARY, scale=move)
    ends, steps = _steps(mask, group, rng, flat=flat)
    x = Experience(
        prompt_ids=ids[:, :2],
        prompt_mask=torch.ones(B, 2, dtype=torch.bool),
        completion_ids=ids,
        mask=mask,
        group=group,
        score=score,
        bonus=bonus,
        correct=correct,
        finished=lengths < LIMIT,
        behaviour_logprobs=torch.zeros(B, LIMIT, dtype=torch.float64),
        step_ends=ends if arm.advantage.needs_steps else None,
        step_scores=steps if arm.advantage.needs_steps else None,
        old_logprobs=torch.zeros(B, LIMIT, dtype=torch.float64),
        ref_logprobs=None,
        values=normal(B, LIMIT, scale=0.5) + 0.4 if arm.critic is not None else None,
    )
    at_rollout = chosen(old, x)
    x = dataclasses.replace(
        x,
        old_logprobs=at_rollout,
        behaviour_logprobs=at_rollout,
        ref_logprobs=at_rollout + normal(B, LIMIT, scale=0.2) if arm.kl.needs_reference else None,
        **_recorded_top(arm, old, x),
    )
    later = normal(B, LIMIT, scale=0.3)
    values = later if x.values is None else x.values + later
    return Scene(x, old + now, values)


def _verdicts(group: Tensor, *, flat: bool) -> tuple[Tensor, Tensor]:
    """Group 1 is all right, group 2 all wrong; in the others every second one is right."""
    kind = group % GROUPS
    every_second = torch.arange(len(group)) % 2 == 0
    correct = (kind == 1) | ((kind != 2) & every_second)
    if flat:
        correct = kind % 2 == 1
    bonus = 0.1 * (torch.arange(len(group)) % 3 == 0).double() * ((kind == 0) | (kind == 3))
    return correct, torch.zeros_like(bonus) if flat else bonus


def _steps(
    mask: Tensor, group: Tensor, rng: torch.Generator, *, flat: bool
) -> tuple[Tensor, Tensor]:
    """Every completion ends its last step with its last token; others end by chance."""
    last = torch.arange(mask.shape[1]) == mask.sum(1, keepdim=True) - 1
    ends = last | (mask & (torch.rand(mask.shape, generator=rng) < 0.3))
    scores = torch.randint(0, 2, mask.shape, generator=rng).double()
    if flat:
        scores = (group % 2).double()[:, None].expand_as(scores)
    return ends, torch.where(ends, scores, torch.zeros_like(scores))


def _before(x: Experience) -> Tensor:
    return torch.cat([x.prompt_ids[:, -1:], x.completion_ids[:, :-1]], 1)


def chosen(table: Tensor, x: Experience) -> Tensor:
    """Log-probs of the sampled tokens; 0 on padding."""
    full = table.log_softmax(1)[_before(x)]
    return zero_padding(full.gather(2, x.completion_ids[:, :, None])[:, :, 0], x.mask)


def top(table: Tensor, x: Experience) -> Tensor | None:
    """Log-probs of the recorded top tokens; None where none were recorded."""
    if x.top_ids is None:
        return None
    return table.log_softmax(1)[_before(x)].gather(2, x.top_ids)


def _recorded_top(arm: Arm, table: Tensor, x: Experience) -> dict[str, Tensor]:
    if arm.clip.top_k is None:
        return {}
    best = table.log_softmax(1)[_before(x)].topk(min(arm.clip.top_k, VOCABULARY), 2)
    return {"top_ids": best.indices, "top_logprobs": best.values}


# --- the update ----------------------------------------------------------------------------------


def credit(arm: Arm, x: Experience, kl_coef: float | None = None) -> Batch:
    """Advantages of a rollout batch, at the arm's own KL coefficient unless another is given."""
    coef = arm.kl.initial_coef if kl_coef is None else kl_coef
    return arm.credit(x, kl_coef=coef, max_new_tokens=LIMIT, warmup=False)


def weigh(arm: Arm, x: Experience, kl_coef: float | None = None) -> Minibatch:
    """The whole rollout batch as one minibatch."""
    return arm.weigh(credit(arm, x, kl_coef), max_new_tokens=LIMIT)


def losses(
    arm: Arm,
    x: Minibatch,
    logprobs: Tensor,
    values: Tensor,
    top_logprobs: Tensor | None,
    kl_coef: float | None = None,
) -> dict[str, Tensor]:
    """Losses, their gradients by each log-prob and each value, and the loss's statistics."""
    coef = arm.kl.initial_coef if kl_coef is None else kl_coef
    logprobs, values = logprobs.detach().requires_grad_(), values.detach().requires_grad_()
    loss, stats = arm.policy_loss(x, logprobs, coef, top_logprobs)
    found = {"loss": loss.detach(), "gradient": _gradient(loss, logprobs), **stats}
    if arm.critic is not None:
        value_loss = arm.value_loss(x, values)
        found |= {
            "value_loss": value_loss.detach(),
            "value_gradient": _gradient(value_loss, values),
        }
    return found


def update(arm: Arm, scene: Scene, x: Minibatch | None = None) -> dict[str, Tensor]:
    """What ``losses`` gives for the scene's policy and critic."""
    x = weigh(arm, scene.x) if x is None else x
    return losses(arm, x, chosen(scene.table, x), scene.values, top(scene.table, x))


def _gradient(loss: Tensor, by: Tensor) -> Tensor:
    if not loss.requires_grad:
        return torch.zeros_like(by)
    (found,) = torch.autograd.grad(loss, by, allow_unused=True)
    return torch.zeros_like(by) if found is None else found


# --- changes -------------------------------------------------------------------------------------


def change(x: Experience, rule: Callable[[Tensor], Tensor]) -> Experience:
    """The experience with a rule applied to each field of numbers per token."""
    fields = {n: rule(v) for n in FLOATS if (v := getattr(x, n)) is not None}
    return dataclasses.replace(x, **fields)


def shards(rows: int, cut: Sequence[int]) -> Iterator[Tensor]:
    """The rows of each share, given each row's share."""
    for share in sorted(set(cut)):
        yield torch.tensor([row for row in range(rows) if cut[row] == share])


def worst_gap(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference relative to the size of what it is of, and its name."""
    gaps = [(relative(found[name], expected[name]), name) for name in expected]
    return max(gaps, key=lambda gap: (gap[0] != gap[0], gap[0]))


def relative(found: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest expected number, or over 1e-3 if that is smaller."""
    if expected.numel() == 0:
        return 0.0
    gap = float((found - expected).abs().max())
    return gap / max(float(expected.abs().max()), 1e-3)
