"""The training loop. Every arm runs through this code; only the arm differs."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from harness.arm import Arm
from harness.cost.flops import Generation, Lengths
from harness.data import PromptStream, StreamHash
from harness.errors import CellError
from harness.identity import stream_seed
from harness.learner import Learner
from harness.ledger import Ledger
from harness.models import Reference, ValueHead, scored
from harness.reference import PastPolicy
from harness.rewards.maths import Verdict
from harness.rewards.steps import StepJudge, steps_record
from harness.samplers.sampler import Decoding, Drawn, Sampler
from harness.spec.schema import BudgetSpec, OptimizerSpec, SamplingSpec
from harness.types import Batch, Experience, Rollout, group_range, group_sum


class Judge(Protocol):
    """Turns completions into verdicts and scores."""

    def __call__(
        self, indices: list[int], drawn: Drawn, seed: int
    ) -> tuple[list[Verdict], Tensor, Tensor, Tensor]:
        """Verdicts, and per completion: score, bonus and correct."""
        ...


@dataclass(frozen=True)
class Controls:
    """What the experiment pins for the loop, equal for all arms."""

    seed: int
    sampling: SamplingSpec
    optimizer: OptimizerSpec
    budget: BudgetSpec

    @property
    def decoding(self) -> Decoding:
        s = self.sampling
        return Decoding(s.temperature, s.top_p, s.max_new_tokens, s.stop)


@dataclass
class Progress:
    """Where a run stands: with the weights, all that a checkpoint must hold."""

    step: int = 0
    cursor: int = 0
    kl_coef: float = 0.0
    optimizer_steps: int = 0
    policy_steps: int = 0  # those that moved the policy: all but the critic's warm-up
    collected_nothing: int = 0
    reference_step: int = 0  # whose policy the reference is; 0 is the base
    stream: StreamHash = field(default_factory=lambda: StreamHash(1))


@dataclass
class Loop:
    """The parts of one run, built once."""

    arm: Arm
    controls: Controls
    learner: Learner
    reference: Reference | None
    sampler: Sampler
    prompts: PromptStream
    judge: Judge
    ledger: Ledger
    progress: Progress
    step_judge: StepJudge | None = None  # where the arm rewards steps

    @property
    def finished(self) -> bool:
        budget = self.controls.budget
        return self.ledger.spent_in(budget.unit) >= budget.limit

    @property
    def decoding(self) -> Decoding:
        """The controls' decoding, and what this arm asks to be recorded of it."""
        return dataclasses.replace(
            self.controls.decoding,
            record_top=self.arm.clip.top_k or 0,
            mixing=self.arm.sampling.mixing,
        )

    @property
    def share_spent(self) -> float:
        budget = self.controls.budget
        return min(self.ledger.spent_in(budget.unit) / budget.limit, 1.0)


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


def collect(loop: Loop, record: dict[str, Any]) -> Rollout | None:
    """Sample and grade until the batch is full; groups that the arm drops are charged too."""
    sampling, arm = loop.controls.sampling, loop.arm
    size = arm.group_size(sampling.completions_per_prompt)
    wanted = sampling.prompts_per_step * sampling.completions_per_prompt // size
    kept: list[Rollout] = []
    seen: list[Rollout] = []
    outcomes: Counter[str] = Counter()
    stream: dict[str, str] = {}
    drawn_before = loop.progress.cursor
    rounds = getattr(arm.sampling, "max_rounds", 1) if arm.sampling.resamples else 1
    for round_ in range(rounds):
        missing = wanted - sum(len(r) for r in kept) // size
        if missing <= 0 or (round_ > 0 and loop.finished):
            break
        rollout, verdicts = _draw(loop, missing, size, round_, stream)
        outcomes.update(v.outcome.value for v in verdicts)
        seen.append(rollout)
        keep = arm.sampling.keep(rollout.correct, rollout.group)
        if keep.any():
            kept.append(rollout.select(keep.nonzero().squeeze(1)))
    everything = join(seen)
    used = sum(len(r) for r in kept)
    dropped = len(everything) - used
    record |= _sampling_record(everything) | {
        "prompts": {
            "drawn": loop.progress.cursor - drawn_before,
            "cursor": loop.progress.cursor,
            "stream": stream,
        },
        "outcomes": dict(outcomes),
        "dropped": {"groups": dropped // size, "completions": dropped},
        "used": used,
        "completions_per_prompt": size,
    }
    return join(kept) if kept else None


def _draw(
    loop: Loop, count: int, size: int, round_: int, stream: dict[str, str]
) -> tuple[Rollout, list[Verdict]]:
    """One sampling round: ``count`` prompts of the stream, ``size`` completions each."""
    progress, seed = loop.progress, loop.controls.seed
    indices = loop.prompts.take(progress.cursor, count)
    problems = loop.prompts.prompts
    draw_seed = stream_seed(seed, "sampling", progress.step, round_)
    with loop.ledger.timing("sample"):
        drawn = loop.sampler.draw(
            [problems.prompts[i] for i in indices], size, loop.decoding, draw_seed
        )
    rows = [i for i in indices for _ in range(size)]
    grade_seed = stream_seed(seed, "grade", progress.step, round_)
    with loop.ledger.timing("grade"):
        verdicts, score, bonus, correct = loop.judge(rows, drawn, grade_seed)
        steps = _judge_steps(loop, rows, drawn, grade_seed)
    if not bool(torch.isfinite(score).all()):
        row = int((~torch.isfinite(score)).nonzero()[0])
        raise CellError(f"the reward of problem {problems.problems[rows[row]].id!r} is not finite")
    stream |= progress.stream.add([problems.problems[i].id for i in indices])
    prompt_lengths = [len(problems.prompts[i]) for i in rows]
    lengths = drawn.mask.sum(1).tolist()
    drawing = Generation.of(prompt_lengths, lengths, shared_by=size, searched=drawn.searched)
    loop.ledger.charge_generation("policy", drawing)
    loop.ledger.charge(
        prompts=count,
        completions=len(rows),
        reward_calls=len(rows),
        prompt_tokens=sum(prompt_lengths) // size,
        completion_tokens=sum(lengths),
    )
    device = drawn.mask.device
    group = torch.arange(count, device=device).repeat_interleave(size) + progress.cursor
    progress.cursor += count
    rollout = Rollout(
        prompt_ids=drawn.prompt_ids,
        prompt_mask=drawn.prompt_mask,
        completion_ids=drawn.completion_ids,
        mask=drawn.mask,
        group=group,
        score=score.to(device),
        bonus=bonus.to(device),
        correct=correct.to(device),
        finished=drawn.finished,
        behaviour_logprobs=drawn.logprobs,
        top_ids=drawn.top_ids,
        top_logprobs=drawn.top_logprobs,
        mixed_ids=drawn.mixed_ids,
        mixed_weights=drawn.mixed_weights,
        **steps,
    )
    return rollout, verdicts


def _judge_steps(loop: Loop, rows: list[int], drawn: Drawn, seed: int) -> dict[str, Tensor]:
    """The rollout's fields on worked steps; none where the arm does not reward steps."""
    if not loop.arm.advantage.needs_steps:
        return {}
    assert loop.step_judge is not None
    steps = loop.step_judge(rows, drawn, seed)
    loop.ledger.charge(steps_graded=int(steps.ends.sum()))
    return {"step_ends": steps.ends, "step_scores": steps.scores}


def join(rollouts: list[Rollout]) -> Rollout:
    """Rollouts of different paddings as one."""
    if len(rollouts) == 1:
        return rollouts[0]
    S = max(r.prompt_ids.shape[1] for r in rollouts)
    T = max(r.mask.shape[1] for r in rollouts)
    columns: dict[str, list[Tensor]] = {}
    for r in rollouts:
        for name, value in vars(r).items():
            if value is None:
                continue
            if name in ("prompt_ids", "prompt_mask"):
                value = torch.nn.functional.pad(value, (S - value.shape[1], 0))
            elif value.dim() >= 2:
                tail = (0, 0) * (value.dim() - 2)
                value = torch.nn.functional.pad(value, (*tail, 0, T - value.shape[1]))
            columns.setdefault(name, []).append(value)
    return Rollout(**{name: torch.cat(values) for name, values in columns.items()})


def _sampling_record(x: Rollout) -> dict[str, Any]:
    """Facts of all sampled completions, dropped ones included."""
    lengths = x.mask.sum(1)
    groups = len(torch.unique(x.group))
    size = group_sum(torch.ones_like(x.score), x.group)
    flat = (group_range(x.score, x.group) == 0).to(x.score) / size
    steps: dict[str, Any] = {} if x.step_ends is None else {"worked_steps": steps_record(x)}
    if x.mixed_weights is not None:
        fed_back = int(x.mask.sum()) - len(x)
        steps["mixed_share"] = int(x.mixed_weights.any(2).sum()) / max(fed_back, 1)
    return steps | {
        "length_mean": float(lengths.double().mean()),
        "truncated_share": float((~x.finished).double().mean()),
        "entropy": float(-x.behaviour_logprobs[x.mask].double().mean()),
        "zero_variance_share": float(flat.sum()) / groups,
    }


def observe(loop: Loop, rollout: Rollout, record: dict[str, Any], warmup: bool) -> Batch:
    """Score the used completions under policy, reference and critic; then assign credit."""
    micro, learner = loop.controls.optimizer.micro_batch, loop.learner
    lengths = _lengths(rollout)
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
    experience = rollout.extend(Experience, old_logprobs=old, ref_logprobs=ref, values=values)
    batch = loop.arm.credit(
        experience,
        kl_coef=loop.progress.kl_coef,
        max_new_tokens=loop.controls.sampling.max_new_tokens,
        warmup=warmup,
    )
    record |= _credit_record(batch)
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


def _lengths(x: Rollout) -> Lengths:
    return Lengths.of((x.prompt_mask.sum(1) + x.mask.sum(1)).tolist())


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
        "accuracy": float(x.correct.double().mean()),
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
    lengths, head = _lengths(batch), int(batch.mask.sum())
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
