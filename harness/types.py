"""The tensors that flow through a step, and nothing else.

Shape letters, used everywhere:
    B  completions in the batch (prompts x group size; a group's rows are adjacent)
    S  prompt length, left-padded
    T  completion length, right-padded; between turns it holds what an environment wrote

A record gains fields as it moves down the pipeline, so a field that exists is always filled:

    Rollout --(models)--> Experience --(arm.credit)--> Batch --(arm.weigh)--> Minibatch

Padding may hold anything, NaN included. ``Arm`` zeroes it before a part sees a tensor, and again
in what a part returns.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

R = TypeVar("R", bound="Rows")


@dataclass(frozen=True)
class Rows:
    """A record whose tensors share their first dimension."""

    def __len__(self) -> int:
        return len(getattr(self, dataclasses.fields(self)[0].name))

    def select(self: R, rows: Tensor) -> R:
        """These rows of every field."""
        return dataclasses.replace(
            self,
            **{
                f.name: value[rows]
                for f in dataclasses.fields(self)
                if isinstance(value := getattr(self, f.name), Tensor)
            },
        )

    def extend(self, record: type[R], **fields: Any) -> R:
        """This record with more fields, as the next record of the pipeline."""
        mine = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return record(**mine, **fields)

    def to(self: R, device: torch.device | str) -> R:
        """The record on another device."""
        return dataclasses.replace(
            self,
            **{
                f.name: value.to(device)
                for f in dataclasses.fields(self)
                if isinstance(value := getattr(self, f.name), Tensor)
            },
        )


@dataclass(frozen=True, kw_only=True)
class Rollout(Rows):
    """What the sampler drew and how the task judged it."""

    prompt_ids: Int[Tensor, "B S"]
    prompt_mask: Bool[Tensor, "B S"]
    completion_ids: Int[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]  # True on sampled tokens, the end-of-sequence token included
    group: Int[Tensor, "B"]  # which prompt a row answers
    score: Float[Tensor, "B"]  # the verdict and its bonus, before any shaping
    bonus: Float[Tensor, "B"]  # the part of the score that is not the verdict (a format term)
    correct: Bool[Tensor, "B"]  # the verdict itself
    finished: Bool[Tensor, "B"]  # stopped by itself, rather than cut at the length limit
    behaviour_logprobs: Float[Tensor, "B T"]  # under the engine that sampled
    truth: Bool[Tensor, "B"] | None = None  # the verdict where `correct` is a noisy one
    # Only where an environment answers the policy's turns: True on what it wrote, which is read and
    # never sampled. ``mask`` is False there, so that no loss, penalty, length or mean has it.
    given: Bool[Tensor, "B T"] | None = None
    # Only where a part of the arm asks for them:
    step_ends: Bool[Tensor, "B T"] | None = None  # last token of each worked step
    step_scores: Float[Tensor, "B T"] | None = None  # the step's score, on its last token
    paid: Float[Tensor, "B T"] | None = None  # the part of the score that is paid along the way
    top_ids: Int[Tensor, "B T K"] | None = None  # the engine's K likeliest tokens
    top_logprobs: Float[Tensor, "B T K"] | None = None  # and their log-probs under it
    mixed_ids: Int[Tensor, "B T K"] | None = None  # tokens mixed as the input in place of token t
    mixed_weights: Float[Tensor, "B T K"] | None = None  # in these shares; 0 where t itself was

    @property
    def present(self) -> Bool[Tensor, "B T"]:
        """Where there is a token at all, sampled or given: what models attend to."""
        return self.mask if self.given is None else self.mask | self.given


@dataclass(frozen=True, kw_only=True)
class Experience(Rollout):
    """A rollout as the models see it, before the first update."""

    old_logprobs: Float[Tensor, "B T"]
    ref_logprobs: Float[Tensor, "B T"] | None  # None when the arm has no KL penalty
    values: Float[Tensor, "B T"] | None  # None when the arm has no critic


@dataclass(frozen=True, kw_only=True)
class Batch(Experience):
    """An experience with its credit assigned."""

    rewards: Float[Tensor, "B T"]  # after shaping and the KL penalty
    advantages: Float[Tensor, "B T"]
    returns: Float[Tensor, "B T"] | None  # the critic's targets
    keep: Bool[Tensor, "B"]  # False where the arm leaves a completion out of the loss


@dataclass(frozen=True, kw_only=True)
class Minibatch(Batch):
    """The rows of one optimizer step, with each token's share of the loss."""

    weights: Float[Tensor, "B T"]
    value_weights: Float[Tensor, "B T"]
    imitation_weights: Float[Tensor, "B T"] | None = None  # each token's share of the NLL term


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """What a clip rule may look at beside ratio and advantage. Padding is 0."""

    mask: Bool[Tensor, "B T"]
    logprobs: Float[Tensor, "B T"]  # under the policy now, with gradient
    anchor_logprobs: Float[Tensor, "B T"]  # under the ratio's denominator
    top_logprobs: Float[Tensor, "B T K"] | None = None  # of the K tokens, now
    anchor_top_logprobs: Float[Tensor, "B T K"] | None = None  # and under the engine
    sampled_in_top: Bool[Tensor, "B T"] | None = None  # whether the sampled token is one of the K


def zero_padding(x: Float[Tensor, "B T"], real: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """x where ``real``, 0 elsewhere, whatever stood there: ``x * real`` would keep a NaN.

    No gradient flows to the places that are zeroed.
    """
    return x.masked_fill(~real, 0.0)


def group_sum(x: Float[Tensor, "B"], group: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Each row's group total."""
    groups, index = torch.unique(group, return_inverse=True)
    totals = torch.zeros(len(groups), dtype=x.dtype, device=x.device)
    return totals.index_add(0, index, x)[index]


def group_mean(x: Float[Tensor, "B"], group: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Each row's group mean."""
    return group_sum(x, group) / group_sum(torch.ones_like(x), group)


def group_range(x: Float[Tensor, "B"], group: Int[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Largest minus smallest value of each row's group: exactly 0 where all are equal."""
    groups, index = torch.unique(group, return_inverse=True)
    empty = torch.zeros(len(groups), dtype=x.dtype, device=x.device)
    high = empty.scatter_reduce(0, index, x, "amax", include_self=False)
    low = empty.scatter_reduce(0, index, x, "amin", include_self=False)
    return (high - low)[index]


def completion_return(
    rewards: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B"]:
    """The sum of a completion's rewards."""
    return zero_padding(rewards, mask).sum(1)
