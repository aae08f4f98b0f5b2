"""An arm: one algorithm under test, as a value made of parts, and the mathematics of its update."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from harness.combinations import least_group, refusals
from harness.errors import InputError
from harness.identity import tree
from harness.parts.advantage import Advantage
from harness.parts.aggregate import Aggregate, TokenMean
from harness.parts.clip import Clip
from harness.parts.critic import Critic, SharedHead, ValueModel
from harness.parts.exclude import Exclude
from harness.parts.imitate import Imitate
from harness.parts.kl import KL
from harness.parts.ratio import Ratio
from harness.parts.reward import GoldReward
from harness.parts.sampling import Sampling
from harness.parts.scale import Scale
from harness.parts.shaping import Shaping
from harness.types import Batch, Experience, Minibatch, Tokens, zero_padding

Stats = dict[str, Tensor]
KINDS: dict[str, type] = {
    "sampling": Sampling,
    "exclude": Exclude,
    "kl": KL,
    "advantage": Advantage,
    "scale": Scale,
    "ratio": Ratio,
    "clip": Clip,
    "aggregate": Aggregate,
    "imitate": Imitate,
    "reward": GoldReward,
}
OPTIONAL = ("exclude", "scale", "imitate", "reward")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Twelve parts, each saying one thing that the algorithm does; all else is the experiment's.

    Attributes:
        name: what the spec, the tables and the plots call it.
        source: the paper, with its section, that the parts are taken from.
        sampling: completions per prompt, and which groups are kept.
        shaping: task score -> shaped score, in order.
        exclude: completions that the loss leaves out; None for none.
        kl: the penalty toward the reference: none, in the reward, or in the loss.
        advantage: rewards -> advantages; carries the critic if it needs one.
        scale: what advantages are divided by, in the group or the batch; None for nothing.
        ratio: pi over pi_old or the engine's policy, per token or per completion.
        clip: ratio, advantage -> surrogate objective.
        aggregate: each token's share of the loss.
        imitate: a likelihood term on good completions beside the surrogate; None for none.
        reward: whose scores it trains on; None for those of the experiment.

    Raises:
        InputError: a part of the wrong kind, or parts that do not go together.
    """

    name: str
    source: str
    sampling: Sampling
    shaping: tuple[Shaping, ...] = ()
    exclude: Exclude | None = None
    kl: KL
    advantage: Advantage
    scale: Scale | None
    ratio: Ratio
    clip: Clip
    aggregate: Aggregate
    imitate: Imitate | None = None
    reward: GoldReward | None = None

    def __post_init__(self) -> None:
        for name, kind in KINDS.items():
            part = getattr(self, name)
            absent = part is None and name in OPTIONAL
            if not absent and not isinstance(part, kind):
                raise InputError(
                    f"arm {self.name!r}: {name} is {part!r}; give a {kind.__name__} "
                    f"(harness/parts/{kind.__module__.rpartition('.')[2]}.py)"
                )
        if not isinstance(self.shaping, tuple) or not all(
            isinstance(rule, Shaping) for rule in self.shaping
        ):
            raise InputError(
                f"arm {self.name!r}: shaping is {self.shaping!r}; give a tuple of Shaping"
            )
        for line in refusals(
            sampling=self.sampling, shaping=self.shaping, exclude=self.exclude, kl=self.kl,
            advantage=self.advantage, scale=self.scale, ratio=self.ratio, clip=self.clip,
            aggregate=self.aggregate, imitate=self.imitate,
        ):  # fmt: skip
            raise InputError(f"arm {self.name!r}: {line}")

    @property
    def critic(self) -> ValueModel | None:
        """What predicts returns: a model of its own, or a head on the policy's trunk."""
        return self.advantage.critic

    @property
    def separate_critic(self) -> Critic | None:
        """The critic where it is a model with weights and an optimizer of its own."""
        return self.critic if isinstance(self.critic, Critic) else None

    @property
    def shared_head(self) -> SharedHead | None:
        """The value head where it sits on the policy's trunk."""
        return self.critic if isinstance(self.critic, SharedHead) else None

    @property
    def critic_warmup_steps(self) -> int:
        """Rollout batches at the start on which the policy stands still."""
        return self.separate_critic.warmup_steps if self.separate_critic else 0

    def group_size(self, control: int) -> int:
        """Completions per prompt: the arm's own where its definition says so, else the control."""
        return self.sampling.group_size or control

    def check(self, completions_per_prompt: int) -> None:
        """Refuse a group too small for the baseline or its scale.

        Raises:
            InputError: a part needs more completions per prompt than it would get.
        """
        size = self.group_size(completions_per_prompt)
        for part in (self.advantage, self.scale):
            if part is not None and size < least_group(part):
                whose = "the arm sets" if self.sampling.group_size else "the spec gives"
                raise InputError(
                    f"arm {self.name!r}: {type(part).__name__} needs at least "
                    f"{least_group(part)} completions per prompt, {whose} {size}; "
                    f"raise sampling.completions_per_prompt"
                )

    @torch.no_grad()
    def credit(self, x: Experience, *, kl_coef: float, max_new_tokens: int, warmup: bool) -> Batch:
        """Assign credit: score -> shaped score -> per-token rewards -> advantages and returns.

        Raises:
            InputError: a part returned something of another shape than its signature says.
        """
        score = x.score.to(x.old_logprobs.dtype)
        for shape in self.shaping:
            score = shape(score, x, max_new_tokens)
            self._expect(score, x.score.shape, "shaping", shape, "a score")
        old, ref, values = (
            None if field is None else zero_padding(field, x.mask)
            for field in (x.old_logprobs, x.ref_logprobs, x.values)
        )
        assert old is not None
        penalty = self.kl.in_reward(old, ref)
        if isinstance(penalty, Tensor):
            self._expect(penalty, x.mask.shape, "kl", self.kl, "a penalty")
        rewards = zero_padding(_placed(score, x) - kl_coef * penalty, x.mask)
        x = dataclasses.replace(x, values=values)
        advantages, returns = self._assign(rewards, x)
        if warmup and self.critic is not None:
            returns = self.advantage.monte_carlo(rewards, x.mask)
        if self.scale is not None:
            advantages = self.scale(advantages, rewards, x.mask, x.group)
            self._expect(advantages, x.mask.shape, "scale", self.scale, "advantages")
        advantages = zero_padding(advantages, x.mask)
        returns = None if returns is None else zero_padding(returns, x.mask)
        keep = torch.ones_like(x.finished)
        if self.exclude is not None:
            keep = self.exclude.keep(x)
            self._expect(keep, x.finished.shape, "exclude", self.exclude, "a choice")
        return x.extend(Batch, rewards=rewards, advantages=advantages, returns=returns, keep=keep)

    def _assign(self, rewards: Float[Tensor, "B T"], x: Experience) -> tuple[Tensor, Tensor | None]:
        """Advantages and returns, of the shape that they must have."""
        found = self.advantage.assign(rewards, x)
        if not isinstance(found, tuple) or len(found) != 2:
            raise InputError(
                f"arm {self.name!r}: advantage {type(self.advantage).__name__} returned a "
                f"{type(found).__name__}, expected a pair: advantages, and returns or None"
            )
        advantages, returns = found
        self._expect(advantages, x.mask.shape, "advantage", self.advantage, "advantages")
        if returns is not None:
            self._expect(returns, x.mask.shape, "advantage", self.advantage, "returns")
        return advantages, returns

    def _expect(
        self, found: object, shape: torch.Size, field: str, part: object, what: str
    ) -> None:
        """Refuse another shape than a part must return: it may broadcast, and mean nothing."""
        if isinstance(found, Tensor) and found.shape == shape:
            return
        form = f"of shape {list(found.shape)}" if isinstance(found, Tensor) else f"as {found!r}"
        raise InputError(
            f"arm {self.name!r}: {field} {type(part).__name__} returned {what} {form}, expected "
            f"{list(shape)} ({'completions, tokens' if len(shape) == 2 else 'completions'})"
        )

    def weigh(self, x: Batch, *, max_new_tokens: int) -> Minibatch:
        """Fix each token's share of the loss for one optimizer step."""
        some = self.exclude is not None and self.exclude.denominator == "kept"
        counted = x.mask[x.keep] if some else x.mask
        shares = self.aggregate(counted, max_new_tokens)
        self._expect(shares, counted.shape, "aggregate", self.aggregate, "weights")
        if some:
            weights = torch.zeros_like(x.mask, dtype=torch.float64)
            weights[x.keep] = shares
        else:
            weights = shares * (x.mask & x.keep[:, None])
        return x.extend(
            Minibatch,
            weights=weights,
            value_weights=TokenMean()(x.mask, max_new_tokens),
            imitation_weights=self.imitate.weights(x) if self.imitate else None,
        )

    def policy_loss(
        self,
        x: Minibatch,
        logprobs: Float[Tensor, "B T"],
        kl_coef: float,
        top_logprobs: Float[Tensor, "B T K"] | None = None,
    ) -> tuple[Float[Tensor, ""], Stats]:
        """The policy's loss on a minibatch, or on a micro-batch of it, and its diagnostics.

        ``top_logprobs`` are those of ``x.top_ids`` now, for a clip that compares distributions.

        Loss and diagnostics are weighted sums, so those of micro-batches add up. Tokens outside
        the loss (padding, excluded completions) are zeroed first: their weight of 0 would not
        stop a NaN or an overflowing ratio.
        """
        weights = x.weights.to(logprobs.dtype)
        live = x.mask & x.keep[:, None]
        moved = zero_padding(logprobs.detach() - x.old_logprobs, x.mask)
        anchored = x.old_logprobs if self.ratio.anchor == "old" else x.behaviour_logprobs
        logprobs, anchor = zero_padding(logprobs, live), zero_padding(anchored, live)
        ref = None if x.ref_logprobs is None else zero_padding(x.ref_logprobs, live)
        advantages = zero_padding(x.advantages, live)
        ratio = self.ratio(logprobs, anchor, x.mask)
        self._expect(ratio, x.mask.shape, "ratio", self.ratio, "a ratio")
        tokens = _tokens(x, live, logprobs, anchor, top_logprobs)
        objective, clipped = self.clip(ratio, advantages, tokens)
        self._expect(objective, x.mask.shape, "clip", self.clip, "an objective")
        surrogate = -(weights * objective).sum()
        loss, stats = surrogate, {"loss/surrogate": surrogate.detach()}
        kl = self.kl.in_loss(logprobs, ref)
        if kl is not None:
            self._expect(kl, x.mask.shape, "kl", self.kl, "a penalty")
            penalty = kl_coef * (weights * kl).sum()
            loss, stats["loss/kl"] = loss + penalty, penalty.detach()
        if self.imitate is not None:
            assert x.imitation_weights is not None
            nll = -self.imitate.coef * (x.imitation_weights.to(logprobs) * logprobs).sum()
            loss, stats["loss/imitation"] = loss + nll, nll.detach()
        # Token sums: the learner divides by the minibatch's tokens once all are in.
        clipped = clipped & live
        stats["sum/clip_fraction_high"] = (clipped & (advantages > 0)).sum()
        stats["sum/clip_fraction_low"] = (clipped & (advantages < 0)).sum()
        stats["sum/approx_kl"] = (moved.expm1() - moved).sum()
        return loss, stats

    def value_loss(self, x: Minibatch, values: Float[Tensor, "B T"]) -> Float[Tensor, ""]:
        """The critic's loss on a minibatch, or on a micro-batch of it."""
        assert self.critic is not None
        assert x.values is not None
        assert x.returns is not None
        per_token = self.critic.loss(
            zero_padding(values, x.mask),
            zero_padding(x.values, x.mask),
            zero_padding(x.returns, x.mask),
        )
        return (x.value_weights.to(values.dtype) * per_token).sum()

    def but(self, name: str, source: str | None = None, **changes: Any) -> Arm:
        """This arm with some parts exchanged, under a new name."""
        source = source or f"{self.name} with {', '.join(changes)} changed"
        return dataclasses.replace(self, name=name, source=source, **changes)


def _tokens(
    x: Minibatch,
    live: Bool[Tensor, "B T"],
    logprobs: Float[Tensor, "B T"],
    anchor: Float[Tensor, "B T"],
    top: Float[Tensor, "B T K"] | None,
) -> Tokens:
    if top is None or x.top_ids is None or x.top_logprobs is None:
        return Tokens(mask=live, logprobs=logprobs, anchor_logprobs=anchor)
    return Tokens(
        mask=live,
        logprobs=logprobs,
        anchor_logprobs=anchor,
        top_logprobs=top.masked_fill(~live[:, :, None], 0.0),
        anchor_top_logprobs=x.top_logprobs.masked_fill(~live[:, :, None], 0.0),
        sampled_in_top=(x.top_ids == x.completion_ids[:, :, None]).any(2),
    )


def _placed(score: Float[Tensor, "B"], x: Experience) -> Float[Tensor, "B T"]:
    """The score as rewards: what was paid along the way where it was paid, the rest at the end.

    Their sum is the score in any case. Advantages that compare completions see the sum alone, those
    that look at tokens (GAE, returns to go) see when it came.
    """
    if x.paid is None:
        return at_last_token(score, x.mask)
    paid = zero_padding(x.paid.to(score), x.mask)
    return paid + at_last_token(score - paid.sum(1), x.mask)


def at_last_token(score: Float[Tensor, "B"], mask: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """The score on each completion's last sampled token, 0 elsewhere."""
    last = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(1) - 1
    rewards = torch.zeros(mask.shape, dtype=score.dtype, device=score.device)
    rewards[torch.arange(len(score), device=score.device), last.clamp(min=0)] = score
    return zero_padding(rewards, mask)


_LABELS = ("name", "source")
PARTS = tuple(f.name for f in dataclasses.fields(Arm) if f.name not in _LABELS)


def parts(arm: Arm) -> dict[str, Any]:
    """The arm's parts as plain JSON: what is compared, hashed and printed.

    A subclass of ``Arm`` may change the mathematics itself, so its name is among them, and the
    fields that it adds. ``reward`` is among them where it is not the experiment's.
    """
    names = (f.name for f in dataclasses.fields(arm) if f.name not in _LABELS)
    found = {name: tree(getattr(arm, name)) for name in names}
    if arm.reward is None:
        del found["reward"]
    return found if type(arm) is Arm else found | {"arm": type(arm).__name__}
