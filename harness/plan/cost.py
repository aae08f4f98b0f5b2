"""What one training step and one evaluation cost, from shapes and mean lengths.

The same formulas as the ledger's, fed with means in place of the lengths that were drawn. All
completions are taken to have the mean length, which leaves the variance out of the attention
squares; at these sizes that is a few per cent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from harness.arm import Arm
from harness.cost.flops import Generation, Lengths, forward, generate, train
from harness.cost.shape import ModelShape
from harness.external.arm import OfflineArm
from harness.ledger import convention
from harness.plan.cards import find_architecture
from harness.plan.lengths import PromptLengths
from harness.spec.schema import ExperimentSpec

Flops = dict[str, int]  # by role/phase


@dataclass(frozen=True)
class Amount:
    """Work in every unit that the ledger knows, but seconds.

    Attributes:
        prompts, completions, prompt_tokens, completion_tokens, updates: as in the ledger.
        flops: by ``role/phase``.
    """

    prompts: float = 0.0
    completions: float = 0.0
    prompt_tokens: float = 0.0
    completion_tokens: float = 0.0
    updates: float = 0.0
    flops: Mapping[str, float] | None = None

    @property
    def total_flops(self) -> float:
        return sum((self.flops or {}).values())

    def phase_flops(self, phase: str) -> float:
        """FLOPs of ``generate``, ``score`` or ``train`` over all roles."""
        return sum(n for key, n in (self.flops or {}).items() if key.endswith(f"/{phase}"))

    def __add__(self, other: Amount) -> Amount:
        mine, theirs = self.flops or {}, other.flops or {}
        return Amount(
            self.prompts + other.prompts,
            self.completions + other.completions,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.updates + other.updates,
            {k: mine.get(k, 0) + theirs.get(k, 0) for k in sorted({*mine, *theirs})},
        )

    def __mul__(self, times: float) -> Amount:
        return Amount(
            self.prompts * times,
            self.completions * times,
            self.prompt_tokens * times,
            self.completion_tokens * times,
            self.updates * times,
            {key: n * times for key, n in (self.flops or {}).items()},
        )

    def in_unit(self, unit: str) -> float:
        """The amount in a budget's unit; ``seconds`` is not among them."""
        if unit == "flops":
            return self.total_flops
        if unit == "tokens":
            return self.prompt_tokens + self.completion_tokens
        return float(getattr(self, unit))

    def to_json(self) -> dict[str, Any]:
        return {
            "prompts": round(self.prompts),
            "completions": round(self.completions),
            "prompt_tokens": round(self.prompt_tokens),
            "completion_tokens": round(self.completion_tokens),
            "updates": round(self.updates),
            "flops": round(self.total_flops),
            "flops_by_role_and_phase": {k: round(n) for k, n in (self.flops or {}).items()},
        }


def shapes_of(spec: ExperimentSpec, arm: Arm, config: Mapping[str, Any]) -> dict[str, ModelShape]:
    """The models that an arm holds, by role."""
    lora = spec.model.lora
    adapters: dict[str, Any] = {}
    if lora is not None:
        adapters = {"lora_rank": lora.rank, "lora_targets": lora.target_modules}
    shapes = {"policy": ModelShape.from_config(config, **adapters)}
    if arm.kl.needs_reference:
        own = adapters if arm.kl.refresh is not None else {}
        shapes["reference"] = ModelShape.from_config(config, trained=False, **own)
    if arm.separate_critic is not None:
        shapes["critic"] = ModelShape.from_config(
            config, scalar_head=True, head_bias=True, **adapters
        )
    scored = arm.reward is None and not isinstance(arm, OfflineArm)
    if spec.reward.learned is not None and scored:
        own = config if spec.reward.learned.model.init == "base" else reward_config(spec)
        shapes["reward_model"] = ModelShape.from_config(own, scalar_head=True, trained=False)
    return shapes


def reward_config(spec: ExperimentSpec) -> Mapping[str, Any]:
    """The configuration of a reward model that does not start from the base."""
    assert spec.reward.learned is not None
    start = spec.reward.learned.model
    model = spec.model.model_copy(update={"name": start.init, "revision": start.revision})
    return find_architecture(model).config


def resamples(arm: Arm) -> bool:
    """Whether the arm draws again where groups are dropped; an offline arm draws nothing."""
    return not isinstance(arm, OfflineArm) and arm.sampling.resamples


def generation_of(
    prompts: PromptLengths, groups: float, size: int, completion: float
) -> Generation:
    """Sampling ``size`` completions of ``completion`` tokens for each of ``groups`` prompts."""
    rows, decoded = groups * size, max(completion + prompts.given - 1, 0)
    return Generation(
        prefill=Lengths(
            round(groups), round(groups * prompts.mean), round(groups * prompts.square)
        ),
        sampled=round(rows * completion),
        decoded=round(rows * decoded),
        contexts=round(rows * (prompts.mean * decoded + decoded * (decoded + 1) / 2)),
        given=round(rows * prompts.given),
    )


def lengths_of(prompts: PromptLengths, rows: float, completion: float) -> Lengths:
    """Whole sequences, as scoring and training read them."""
    completion += prompts.given
    squared = prompts.square + 2 * prompts.mean * completion + completion**2
    return Lengths(round(rows), round(rows * (prompts.mean + completion)), round(rows * squared))


def step_amount(
    spec: ExperimentSpec,
    arm: Arm,
    shapes: Mapping[str, ModelShape],
    prompts: PromptLengths,
    completion: float,
    *,
    warmup: bool,
    resampling: float = 1.0,
) -> Amount:
    """One step of an arm.

    Args:
        spec: the experiment.
        arm: the arm, as declared.
        shapes: its models, by role.
        prompts: of the training split.
        completion: mean completion length, tokens.
        warmup: the critic learns and the policy stands still.
        resampling: completions drawn for each one used; 1 where nothing is dropped.
    """
    sampling, optimizer, rule = spec.sampling, spec.optimizer, convention(spec.model)
    size = arm.group_size(sampling.completions_per_prompt)
    rows = sampling.prompts_per_step * sampling.completions_per_prompt
    if isinstance(arm, OfflineArm):  # reads as many completions of its data
        read, head = lengths_of(prompts, rows, completion), round(rows * completion)
        return Amount(
            updates=float(optimizer.minibatches),
            flops={
                "reference/score": forward(shapes["reference"], read, head, rule),
                "policy/train": train(shapes["policy"], read, head, epochs=1, convention=rule),
            },
        )
    drawn = rows * resampling if resamples(arm) else float(rows)
    groups = drawn / size
    drawing = generation_of(prompts, groups, size, completion)
    if arm.sampling.mixing is not None:  # at most: no anchor is searched for twice in a draw
        mixed = arm.sampling.mixing.share * drawing.decoded
        drawing = replace(drawing, searched=round(min(mixed, shapes["policy"].vocab)))
    lengths, head = lengths_of(prompts, rows, completion), round(rows * completion)
    flops: Flops = {"policy/generate": generate(shapes["policy"], drawing, rule)}
    for role, shape in shapes.items():
        if role == "reward_model":  # reads whatever is drawn, with its head on every token
            read = lengths_of(prompts, drawn, completion)
            flops[f"{role}/score"] = forward(shape, read, read.tokens, rule)
        else:
            flops[f"{role}/score"] = forward(shape, lengths, head, rule)
    for role in ("policy", "critic"):
        if role in shapes and not (role == "policy" and warmup):
            flops[f"{role}/train"] = train(
                shapes[role], lengths, head, epochs=optimizer.epochs, convention=rule
            )
    return Amount(
        prompts=groups,
        completions=drawn,
        prompt_tokens=groups * prompts.mean + drawn * prompts.given,
        completion_tokens=drawn * completion,
        updates=float(optimizer.epochs * min(optimizer.minibatches, rows)),
        flops=flops,
    )


def evaluation_amount(
    spec: ExperimentSpec,
    policy: ModelShape,
    reference: ModelShape,
    problems: Mapping[str, int],
    prompts: Mapping[str, PromptLengths],
    completion: float,
    samples: int,
) -> Amount:
    """One evaluation on some splits: samples, the greedy answer, and the KL to the base.

    Not charged to any budget, but it takes time.
    """
    rule, total = convention(spec.model), Amount()
    scored = min(spec.evaluation.curve_samples, samples)
    for split, count in problems.items():
        size = samples + int(spec.evaluation.greedy)
        kl = lengths_of(prompts[split], count * scored, completion)
        head = round(count * scored * completion)
        drawing = generation_of(prompts[split], count, size, completion)
        total += Amount(
            prompts=float(count),
            completions=float(count * size),
            prompt_tokens=count * (prompts[split].mean + size * prompts[split].given),
            completion_tokens=count * size * completion,
            flops={
                "policy/generate": generate(policy, drawing, rule),
                "policy/score": forward(policy, kl, head, rule),
                "reference/score": forward(reference, kl, head, rule),
            },
        )
    return total


def steps_within(limit: float, warmup_steps: int, warmup: float, full: float) -> int:
    """Steps until the budget is spent: a run stops after the step that reaches the limit.

    Args:
        limit: the budget.
        warmup_steps: steps at the start on which only the critic learns.
        warmup: what each of those costs, in the budget's unit.
        full: what every later step costs.
    """
    before = warmup_steps * warmup
    if limit <= before:
        return math.ceil(limit / warmup)
    # Division may leave a hair above a whole number of steps.
    return warmup_steps + math.ceil((limit - before) / full - 1e-9)
