"""The lines that a cell leaves, typed: what a proof needs must be there, finite and of its type.

Diagnostics may be added to a line freely. What a run *is* and what it *used* may not: an unknown
key in ``run.json``, ``effective`` or ``protocol`` is a quantity that no check looks at.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from harness.spec.schema import RangeSpec

Number = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
# Strict models take no list for a tuple, and JSON has only lists.
AnswerClass = Annotated[tuple[str, PositiveInt, bool], Field(strict=False)]


class Open(BaseModel):
    """A line that may hold more than is named here."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", populate_by_name=True)


class Closed(BaseModel):
    """A record of which every key is known."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class Spent(Open):
    """Totals since the start of the run."""

    prompts: NonNegativeInt
    completions: NonNegativeInt
    prompt_tokens: NonNegativeInt
    completion_tokens: NonNegativeInt
    tokens: NonNegativeInt
    updates: NonNegativeInt
    reward_calls: NonNegativeInt
    steps_graded: NonNegativeInt = 0
    flops: Amount


class Budget(Closed):
    unit: str
    limit: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    evaluate_at: list[Number]


class Shapes(Closed):
    policy: dict[str, Any] | None
    critic: dict[str, Any] | None = None
    reference: dict[str, Any] | None = None
    reward_model: dict[str, Any] | None = None


class Run(Closed):
    """``run.json``."""

    format: Annotated[int, Field(ge=1, le=1)]  # a Literal would take true for 1
    arm: str
    origin: str
    kind: Literal["trial", "seed"]
    trial: NonNegativeInt | None
    seed: int
    parts: dict[str, Any] | None
    declared_parts: dict[str, Any] | None
    settings: dict[str, float | int | str]
    controls: dict[str, Any]
    budget: Budget | None
    hashes: dict[str, str]
    shapes: Shapes
    placebo_of: str | None


class Prompts(Open):
    drawn: NonNegativeInt
    cursor: NonNegativeInt
    stream: dict[str, str]


class Dropped(Open):
    groups: NonNegativeInt
    completions: NonNegativeInt


class WorkedSteps(Open):
    """Of all sampled completions, where the arm rewards steps."""

    graded: NonNegativeInt
    per_completion: Amount
    right_share: Share | None


class Noise(Open):
    """Of all sampled completions: how many verdicts of each kind, and how many told otherwise.

    ``added_rms``: the root mean square of what was added to the scores, where the spec adds any.
    """

    right: NonNegativeInt
    right_turned: NonNegativeInt
    wrong: NonNegativeInt
    wrong_turned: NonNegativeInt
    added_rms: Number | None = None


class Effective(Closed):
    """What a step really used."""

    learning_rate: Amount
    critic_learning_rate: Amount | None = None
    temperature: Number
    top_p: Number
    max_new_tokens: int
    epochs: int
    minibatches: int
    gradient_steps: NonNegativeInt
    completions_per_prompt: PositiveInt
    weight_sum: list[Amount] | None  # None where another library's trainer weighs the tokens


class Step(Open):
    """A line of ``steps.jsonl``.

    What may be null is what some step cannot have: a loss where nothing was trained, a KL without
    a reference. The ``effective`` check asks for each where it applies.
    """

    step: PositiveInt
    phase: Literal["train", "critic_warmup"]
    prompts: Prompts
    spent: Spent
    flops: dict[str, Amount]
    lengths: dict[str, dict[str, Any]]
    outcomes: dict[str, NonNegativeInt]
    dropped: Dropped
    used: NonNegativeInt
    length_mean: Amount
    truncated_share: Share
    entropy: Number
    zero_variance_share: Share
    worked_steps: WorkedSteps | None = None
    noise: Noise | None = None
    mixed_share: Share | None = None
    kl_coef: Number | None
    accuracy: Share | None = None
    score_mean: Number | None = None
    gold_mean: Number | None = None  # of all sampled, under a learned reward
    proxy_mean: Number | None = None
    reward_mean: Number | None = None
    kl_to_reference: Number | None = None
    reference_step: NonNegativeInt | None = None
    engine_gap: Amount | None = None
    surrogate: Number | None = Field(None, alias="loss/surrogate")
    kl: Number | None = Field(None, alias="loss/kl")
    imitation: Number | None = Field(None, alias="loss/imitation")
    policy_loss: Number | None = Field(None, alias="loss/policy")
    value_loss: Number | None = Field(None, alias="loss/value")
    clip_fraction_high: Share | None = None
    clip_fraction_low: Share | None = None
    approx_kl: Number | None = None
    grad_norm: Amount | None = None
    critic_grad_norm: Amount | None = None
    explained_variance: Number | None = None
    first_ratio_error: Amount | None = None
    advantage_gap: Amount | None = None
    effective: Effective | None = None
    chain: str


class Pairs(Closed):
    """Preference pairs that a step read, and where in their stream it ended."""

    read: PositiveInt
    cursor: PositiveInt
    count: PositiveInt  # in the data
    sha256: str  # of the data
    stream: dict[str, str]


class OfflineUsed(Closed):
    """What a step of an arm that learns from pairs really used."""

    learning_rate: Amount
    betas: list[Number]
    eps: Amount
    weight_decay: Amount
    max_grad_norm: Amount
    gradient_steps: PositiveInt
    pairs_per_gradient_step: PositiveInt
    loss_type: list[str]
    label_smoothing: Amount


class OfflineStep(Step):
    """A step of an arm that learns from pairs: what belongs to a rollout is not there."""

    phase: Literal["offline"]  # type: ignore[assignment]
    prompts: Prompts = Prompts(drawn=0, cursor=0, stream={})
    outcomes: dict[str, NonNegativeInt] = Field(default_factory=dict)
    dropped: Dropped = Dropped(groups=0, completions=0)
    used: NonNegativeInt = 0
    length_mean: Amount = 0.0
    truncated_share: Share = 0.0
    entropy: Number = 0.0
    zero_variance_share: Share = 0.0
    pairs: Pairs
    offline: OfflineUsed
    preference_accuracy: Share
    preference_margin: Number
    loss_gap: Amount


class Protocol(Closed):
    """How an evaluation was done."""

    samples: PositiveInt
    temperature: Number
    top_p: Number
    max_new_tokens: PositiveInt
    seed: int
    greedy: bool
    stop: list[str] | None = None


class Problem(Open):
    """One problem's result."""

    id: str
    level: str | None
    subject: str | None
    n: NonNegativeInt
    correct: NonNegativeInt
    answers: list[AnswerClass]
    unparsed: NonNegativeInt
    outcomes: dict[str, NonNegativeInt]
    greedy: bool | None
    length_mean: Amount
    truncated: NonNegativeInt
    gold: list[Number] | None = None  # of each sample, under a learned reward
    proxy: list[Number] | None = None


class Distance(Open):
    mean: Number
    se: Amount | None
    n: NonNegativeInt


class Evaluation(Open):
    """A line of ``evals.jsonl``."""

    at: Share
    step: NonNegativeInt
    spent: Spent
    split: str
    purpose: Literal["curve", "final", "tuning"]
    protocol: Protocol
    problems_sha256: str
    problems: list[Problem] = Field(min_length=1)
    entropy: Number | None
    kl_to_base: Distance | None
    chain: str


class Metric(Open):
    name: str
    value: Number


class Done(Open):
    """``done.json``."""

    spent: Spent
    flops: dict[str, Amount]
    steps: NonNegativeInt
    last_chain: str | None
    evals_chain: str | None
    status: Literal["done"]
    selected_metric: Metric | None = None


class Diverged(Open):
    """``done.json`` of a tuning trial whose training went out of bounds."""

    status: Literal["diverged"]
    reason: str


class Timing(Open):
    """A training line of ``timing.jsonl``."""

    step: PositiveInt
    seconds: dict[str, Amount]
    total_seconds: Amount


class LockedArm(Open):
    named: str | None = None  # as the spec has it; None is by its own name
    origin: str
    source: str
    parts: dict[str, Any]
    knobs: dict[str, RangeSpec | None] | None = None


class Change(Closed):
    old: Any
    new: Any


class Added(Closed):
    """What the lock promises of seeds and arms that an amendment adds."""

    arms: dict[str, LockedArm]
    streams: dict[str, dict[str, str]]


class Amendment(Closed):
    """What was declared anew after the lock was written; ``chain`` as in a line of a cell."""

    number: PositiveInt
    time: str
    why: Annotated[str, Field(min_length=1)]
    cells_begun: NonNegativeInt
    cells_done: NonNegativeInt
    changes: Annotated[dict[str, Change], Field(min_length=1)]
    adds: Added
    chain: str


class Lock(Open):
    """``spec.lock.yaml``, with its amendments put in."""

    format: Annotated[int, Field(ge=1, le=1)]
    spec: dict[str, Any]
    arms: dict[str, LockedArm] = Field(min_length=1)
    hashes: dict[str, str] = Field(min_length=1)
    streams: dict[str, dict[str, str]]
    evaluation_problems: dict[str, str]
    amendments: list[Amendment] = Field(default_factory=list)
