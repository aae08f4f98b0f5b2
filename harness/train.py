"""The training loop. Every arm runs through this code; only the arm differs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness.collect import collect
from harness.cost.flops import Lengths
from harness.errors import CellError
from harness.identity import stream_seed
from harness.loop import Loop
from harness.models import ValueHead, scored
from harness.reference import PastPolicy
from harness.spec.schema import OptimizerSpec
from harness.types import Batch, Experience, Rollout


def train(loop: Loop, on_step: Callable[[dict[str, Any]], None]) -> None:
    """Sample, grade, score, credit, learn; until the budget is spent."""
    while not loop.finished:
        on_step(step(loop))


def step(loop: Loop) -> dict[str, Any]:
    """One rollout and the optimizer steps on it; its record."""
    loop.progress.step += 1
    loop.ledger.start_step()
    warmup = loop.progress.step <= loop.arm.critic_warmup_steps
    record: dict[str, Any] = {
        "step": loop.progress.step,
        "phase": "critic_warmup" if warmup else "train",
        "kl_coef": loop.progress.kl_coef,
    }
    refresh_reference(loop, record)
    rollout = collect(loop, record)
    if rollout is None:
        _note_empty(loop)
    else:
        loop.progress.collected_nothing = 0
        batch = observe(loop, rollout, record, warmup)
        learn(loop, batch, record, warmup)
    record["spent"] = loop.ledger.spent()
    record["flops"] = dict(loop.ledger.flops)
    record["lengths"] = loop.ledger.lengths
    return record


def refresh_reference(loop: Loop, record: dict[str, Any]) -> None:
    """Where the arm says so, make the policy its own reference before this step."""
    if loop.reference is None:
        return
    done, refresh = loop.progress.step - 1, loop.arm.kl.refresh
    if refresh is not None and refresh.due(done):
        assert isinstance(loop.reference, PastPolicy)
        loop.reference.refresh()
        loop.progress.reference_step = done
    record["reference_step"] = loop.progress.reference_step


EMPTY_STEPS = 20


def _note_empty(loop: Loop) -> None:
    loop.progress.collected_nothing += 1
    if loop.progress.collected_nothing >= EMPTY_STEPS:
        raise CellError(
            f"{EMPTY_STEPS} steps in a row found no group with both right and wrong completions: "
            "the task is too hard or too easy for dynamic sampling"
        )


def observe(loop: Loop, rollout: Rollout, record: dict[str, Any], warmup: bool) -> Batch:
    """Score the used completions under policy, reference and critic; then assign credit."""
    return credited(loop, scored_experience(loop, rollout), record, warmup)


def scored_experience(loop: Loop, rollout: Rollout) -> Experience:
    """A rollout under the run's models as they are now, which is charged."""
    micro, learner = loop.controls.optimizer.micro_batch, loop.learner
    lengths = whole_lengths(rollout)
    head = int(rollout.mask.sum())
    with loop.ledger.timing("score"):
        ref = values = None
        if learner.head is not None:
            old, values = scored(_both(learner.head), rollout, micro).unbind(1)
        else:
            old = scored(learner.policy.logprobs, rollout, micro)
        if loop.reference is not None:
            ref = scored(loop.reference.logprobs, rollout, micro)
        if learner.critic is not None:
            values = scored(learner.critic.values, rollout, micro)
    critic = learner.critic  # a head's values come with the policy's pass
    for role, present in (("policy", old), ("reference", ref), ("critic", critic)):
        if present is not None:
            loop.ledger.charge_score(role, lengths, head)
    return rollout.extend(Experience, old_logprobs=old, ref_logprobs=ref, values=values)


def credited(loop: Loop, experience: Experience, record: dict[str, Any], warmup: bool) -> Batch:
    """The experience with the arm's credit, and with it the next penalty coefficient."""
    batch = loop.arm.credit(
        experience,
        kl_coef=loop.progress.kl_coef,
        max_new_tokens=loop.controls.sampling.max_new_tokens,
        warmup=warmup,
    )
    record |= _credit_record(batch)
    if "gold_mean" in record:  # what is right is then relative to the group
        record["accuracy"] = None
    if record["kl_to_reference"] is not None:
        loop.progress.kl_coef = loop.arm.kl.next_coef(
            loop.progress.kl_coef, record["kl_to_reference"], len(batch)
        )
    return batch


def _both(head: ValueHead) -> Callable[[Rollout], Tensor]:
    """Log-probs and values of one forward pass, stacked: [B, 2, T]."""

    def score(x: Rollout) -> Tensor:
        logprobs, _, values = head.with_logprobs(x)
        return torch.stack([logprobs, values.to(logprobs)], 1)

    return score


def whole_lengths(x: Rollout) -> Lengths:
    """Prompt plus completion of each row, as scoring and training read them."""
    return Lengths.of((x.prompt_mask.sum(1) + x.present.sum(1)).tolist())


def _credit_record(x: Batch) -> dict[str, Any]:
    gap = (x.old_logprobs - x.behaviour_logprobs).abs()[x.mask]
    kl = None
    if x.ref_logprobs is not None:
        kl = float(((x.old_logprobs - x.ref_logprobs) * x.mask).sum(1).double().mean())
    explained = None
    if x.returns is not None:
        assert x.values is not None
        returns, error = x.returns[x.mask].double(), (x.returns - x.values)[x.mask].double()
        spread = float(returns.var(unbiased=False))
        explained = 1 - float(error.var(unbiased=False)) / spread if spread > 0 else None
    return {
        "accuracy": float((x.correct if x.truth is None else x.truth).double().mean()),
        "score_mean": float(x.score.double().mean()),
        "reward_mean": float((x.rewards * x.mask).sum(1).double().mean()),
        "engine_gap": float(gap.double().mean()),
        "kl_to_reference": kl,
        "explained_variance": explained,
        "kept_in_loss": int(x.keep.sum()),
    }


def learn(loop: Loop, batch: Batch, record: dict[str, Any], warmup: bool) -> None:
    """Epochs x minibatches of optimizer steps on one credited batch."""
    spec, progress = loop.controls.optimizer, loop.progress
    limit = loop.controls.sampling.max_new_tokens
    stats: list[dict[str, float]] = []
    weight_sums: list[float] = []
    rates: list[tuple[float, float]] = []
    share = loop.share_spent
    with loop.ledger.timing("update"):
        for epoch in range(spec.epochs):
            for rows in _order(len(batch), spec, loop.controls.seed, progress.step, epoch):
                minibatch = loop.arm.weigh(
                    batch.select(rows.to(batch.mask.device)), max_new_tokens=limit
                )
                rates.append(
                    (
                        rate_factor(spec, progress.policy_steps, share),
                        rate_factor(spec, progress.optimizer_steps, share),
                    )
                )
                stats.append(
                    loop.learner.update(
                        minibatch,
                        kl_coef=record["kl_coef"],
                        rate=rates[-1][0],
                        critic_rate=rates[-1][1],
                        warmup=warmup,
                        first=not stats,
                    )
                )
                weight_sums.append(float(minibatch.weights.sum()))
                progress.optimizer_steps += 1
                progress.policy_steps += not warmup
                loop.ledger.charge(updates=1)
        loop.sampler.load(loop.learner.policy.model)
    lengths, head = whole_lengths(batch), int(batch.mask.sum())
    for role, trained in (("policy", not warmup), ("critic", loop.learner.critic is not None)):
        if trained:
            loop.ledger.charge_train(role, lengths, head, spec.epochs)
    record |= _mean(stats)
    record["effective"] = {
        "learning_rate": spec.learning_rate * rates[0][0],
        "critic_learning_rate": (
            loop.arm.separate_critic.learning_rate * rates[0][1]
            if loop.arm.separate_critic
            else None
        ),
        "temperature": loop.controls.decoding.temperature,
        "top_p": loop.controls.decoding.top_p,
        "max_new_tokens": limit,
        "epochs": spec.epochs,
        "minibatches": len(stats) // spec.epochs,
        "gradient_steps": len(stats),
        "completions_per_prompt": record["completions_per_prompt"],
        "weight_sum": weight_sums,
    }


def rate_factor(spec: OptimizerSpec, steps: int, share_spent: float) -> float:
    """Factor on a learning rate: warm-up over its own model's steps, schedule over the budget.

    The policy's warm-up begins with the policy's first step: if the critic's warm-up used it up,
    arms with a critic would start at the full rate and the others would not.
    """
    warm = min(1.0, (steps + 1) / spec.warmup_steps) if spec.warmup_steps else 1.0
    if spec.schedule == "linear":
        return warm * (1.0 - share_spent)
    if spec.schedule == "cosine":
        return warm * 0.5 * (1.0 + math.cos(math.pi * share_spent))
    return warm


def _order(count: int, spec: OptimizerSpec, seed: int, step_: int, epoch: int) -> list[Tensor]:
    """The rows of each minibatch of an epoch, shuffled by a stream of their own."""
    generator = torch.Generator().manual_seed(stream_seed(seed, "order", step_, epoch))
    return list(
        torch.randperm(count, generator=generator).tensor_split(min(spec.minibatches, count))
    )


def _mean(stats: list[dict[str, float]]) -> dict[str, float]:
    """Means over optimizer steps; what only some report, over those."""
    names = sorted({name for s in stats for name in s})
    return {
        name: sum(s[name] for s in stats if name in s) / sum(1 for s in stats if name in s)
        for name in names
    }
