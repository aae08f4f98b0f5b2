"""What an experiment pins. One YAML file, one ``ExperimentSpec``; an unknown key is an error.

An arm says what its algorithm defines; everything else stands here once, equal for all arms.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from harness.errors import InputError
from harness.knobs import Range
from harness.spec.reward import DenseSpec, LearnedSpec, NoiseSpec
from harness.spec.strict import Strict
from harness.spec.verdict import CONTROLS, VerdictSpec

Unit = Literal["flops", "tokens", "completions", "updates", "seconds"]


class LoraSpec(Strict):
    """Low-rank adapters (peft) instead of full fine-tuning."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32, gt=0)
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"


class ModelSpec(Strict):
    """The base model: ``embedded/NAME``, a hub id with its revision, or a local folder."""

    name: str
    revision: str | None = None
    gguf_file: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    attention: Literal["eager", "sdpa", "flash_attention_2"] = "sdpa"
    pad_token: str | None = None  # for a tokenizer that has none
    gradient_checkpointing: bool = False
    lora: LoraSpec | None = None
    seed: int = 0  # of the embedded base's warm start


class SplitSpec(Strict):
    """One split of one task, of pinned content."""

    task: str
    split: str
    source: Literal["auto", "local", "hub", "generated"] = "auto"
    limit: int | None = Field(None, ge=1)
    offset: int = Field(default=0, ge=0)
    sha256: str | None = None
    seed: int = 0
    options: dict[str, Any] = Field(default_factory=dict)


class DataSpec(Strict):
    """Training, validation (tuning's only judge) and test problems, and how they are asked."""

    train: SplitSpec
    validation: SplitSpec
    test: dict[str, SplitSpec] = Field(min_length=1)
    prompt: str = "plain"  # a named template, or a text with {question}
    chat_template: bool = False
    max_prompt_tokens: int = Field(default=512, ge=1)
    contamination_ngram: int = Field(default=8, ge=2)


class RewardSpec(Strict):
    """What a completion's verdict is worth."""

    kind: Literal["maths", "learned"] = "maths"
    answer_format: Literal["auto", "boxed", "gsm8k", "last_number", "marker"] = "auto"
    correct: float = Field(default=1.0, ge=-1e6, le=1e6)
    wrong: float = Field(default=0.0, ge=-1e6, le=1e6)
    # Added where an answer in the asked-for form was found.
    format: float = Field(default=0.0, ge=-1e6, le=1e6)
    timeout_seconds: float = Field(default=5.0, gt=0)
    memory_mb: int = Field(default=1024, ge=64)
    workers: int = Field(default=1, ge=1)
    # Left out of the dump where it is absent: specs without one keep their hash.
    learned: LearnedSpec | None = Field(default=None, exclude_if=lambda found: found is None)
    noise: NoiseSpec | None = Field(default=None, exclude_if=lambda found: found is None)
    dense: DenseSpec | None = Field(default=None, exclude_if=lambda found: found is None)

    @model_validator(mode="after")
    def _ordered(self) -> RewardSpec:
        if (self.kind == "learned") != (self.learned is not None):
            raise ValueError("kind learned and a section learned go together; give both or none")
        if self.learned and self.noise and self.noise.turns:
            raise ValueError("noise on a learned reward is sigma: it has no verdicts to turn")
        if self.dense and (self.learned or self.noise):
            raise ValueError("dense pays verdicts on steps: leave learned and noise out")
        if self.correct <= self.wrong:
            raise ValueError(f"correct ({self.correct}) must be above wrong ({self.wrong})")
        return self


class SamplingSpec(Strict):
    """How training completions are drawn."""

    prompts_per_step: int = Field(ge=1)
    completions_per_prompt: int = Field(ge=1)
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_new_tokens: int = Field(ge=1)
    stop: tuple[str, ...] = ()
    engine: Literal["hf", "vllm"] = "hf"
    engine_batch: int = Field(
        default=1024, ge=1
    )  # sequences decoded at once; moves memory, not numbers

    @model_validator(mode="after")
    def _untruncated(self) -> SamplingSpec:
        if self.top_p != 1.0:
            raise ValueError(
                f"top_p {self.top_p}: training samples from the whole distribution, whose "
                "log-probs the ratio and the KL refer to; set 1.0 (evaluation.top_p is free)"
            )
        return self


class OptimizerSpec(Strict):
    """How a rollout becomes optimizer steps."""

    name: Literal["adamw"] = "adamw"
    learning_rate: float = Field(gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)  # optimizer steps
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # over the budget
    max_grad_norm: float = Field(default=1.0, gt=0)
    epochs: int = Field(default=1, ge=1)
    minibatches: int = Field(default=1, ge=1)
    micro_batch: int = Field(default=64, ge=1)  # completions; moves memory, not numbers


class BudgetSpec(Strict):
    """What a run may spend, and the shares of it at which it is evaluated."""

    unit: Unit
    limit: float = Field(gt=0)
    evaluate_at: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)

    @model_validator(mode="after")
    def _increasing(self) -> BudgetSpec:
        at = self.evaluate_at
        if not at or list(at) != sorted(set(at)) or at[0] <= 0 or at[-1] != 1.0:
            raise ValueError(f"evaluate_at {list(at)}: give rising shares in (0, 1] ending in 1.0")
        return self


class RangeSpec(Strict):
    """The values that tuning may try."""

    low: float | None = None
    high: float | None = None
    log: bool = False
    choices: tuple[float | int | str, ...] | None = None

    def range(self) -> Range:
        return Range(self.low, self.high, self.log, self.choices)

    @model_validator(mode="after")
    def _valid(self) -> RangeSpec:
        try:
            self.range()
        except InputError as error:
            raise ValueError(str(error)) from error
        return self


class TuningSpec(Strict):
    """Equal tuning effort: the same trials, at the same share of the budget, for every arm.

    Trial 0 is always the arm's own defaults. ``shared`` holds the controls that every arm may set
    (the learning rate); ``arms`` overrides an arm's declared knobs.
    """

    trials: int = Field(ge=1)
    budget_fraction: float = Field(gt=0, le=1)
    seeds: tuple[int, ...] = Field(min_length=1)
    samples: int = Field(default=4, ge=1)  # completions per validation problem
    select: Literal["avg", "greedy"] = "avg"  # on validation, never on test
    sampler: Literal["paired", "tpe"] = "paired"
    sampler_seed: int = 0
    shared: dict[str, RangeSpec] = Field(default_factory=dict)
    arms: dict[str, dict[str, RangeSpec]] = Field(default_factory=dict)


class EvaluationSpec(Strict):
    """The protocol of every evaluation; sampling is seeded, and equal for all arms of a seed."""

    samples: int = Field(ge=1)  # per test problem at the end of a run
    curve_samples: int = Field(default=4, ge=1)  # per test problem along the way
    k: tuple[int, ...] = (1, 2, 4, 8)
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    greedy: bool = True

    @model_validator(mode="after")
    def _enough_samples(self) -> EvaluationSpec:
        if not self.k or min(self.k) < 1 or list(self.k) != sorted(set(self.k)):
            raise ValueError(f"k {list(self.k)}: give rising whole numbers from 1")
        if max(self.k) > self.samples:
            raise ValueError(
                f"k {max(self.k)} is above samples {self.samples}: pass@k needs samples >= k, and "
                f"a steady estimate 2k; raise evaluation.samples to {2 * max(self.k)}"
            )
        return self


class ControlArmsSpec(Strict):
    """The two controls beside the arms: no training, and training on random reward.

    ``placebo`` names the arm it imitates: same parts, same chosen settings, but the verdicts are
    shuffled over each sampling round's completions, so that they are blind to what was written and
    yet as often right as the true ones.
    """

    base: bool = True
    placebo: str | None = None


class LadderSpec(Strict):
    """Which arms are the rungs of a ladder, and which make up a full factorial design.

    ``forward`` and ``reverse`` lead from one arm to another and back, each rung differing from the
    one before in one axis; ``factorial`` has every combination of two arms' parts, those two first
    and last. The audit checks all of it against the arms' parts.
    """

    forward: tuple[str, ...] = ()
    reverse: tuple[str, ...] = ()
    factorial: tuple[str, ...] = ()

    @property
    def lists(self) -> dict[str, tuple[str, ...]]:
        """Those that are given, by name."""
        found = {"forward": self.forward, "reverse": self.reverse, "factorial": self.factorial}
        return {name: arms for name, arms in found.items() if arms}

    @model_validator(mode="after")
    def _consistent(self) -> LadderSpec:
        if not self.lists:
            raise ValueError("give forward, reverse or factorial, or leave ladder out")
        for name, arms in self.lists.items():
            if len(arms) < 2 or len(set(arms)) != len(arms):
                raise ValueError(f"{name} {list(arms)}: give two arms or more, each once")
        if self.reverse and self.forward[:: max(1, len(self.forward) - 1)] != (
            self.reverse[-1], self.reverse[0],
        ):  # fmt: skip
            raise ValueError(
                f"reverse must lead from {self.forward[-1:]} to {self.forward[:1]}, the other way "
                f"than forward, found {self.reverse[0]} to {self.reverse[-1]}"
            )
        if len(self.factorial) & (len(self.factorial) - 1):
            raise ValueError(
                f"factorial has {len(self.factorial)} arms: k axes of two levels make 2^k"
            )
        return self


class RuntimeSpec(Strict):
    """What moves speed but no number beyond float rounding."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = Field(default=1, ge=1)
    checkpoint_every: int = Field(default=1, ge=1)  # training steps


class ExperimentSpec(Strict):
    """One experiment: one question, one file."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    question: str = Field(min_length=1)
    arms: tuple[str, ...] = Field(min_length=1)
    baseline: str | None = None  # the arm that paired differences refer to; default the first
    plugins: tuple[str, ...] = ()  # files that define arms, relative to the spec
    controls: ControlArmsSpec = Field(default_factory=ControlArmsSpec)
    # Left out of the dump where it is absent: specs without one keep their hash.
    ladder: LadderSpec | None = Field(default=None, exclude_if=lambda found: found is None)
    verdict: VerdictSpec | None = Field(default=None, exclude_if=lambda found: found is None)
    # Arm -> path -> value: knobs that are set by hand, and declared by it.
    settings: dict[str, dict[str, float | int | str]] = Field(
        default_factory=dict, exclude_if=lambda found: not found
    )
    seeds: tuple[int, ...] = Field(min_length=1)
    model: ModelSpec
    data: DataSpec
    reward: RewardSpec = Field(default_factory=RewardSpec)
    sampling: SamplingSpec
    optimizer: OptimizerSpec
    budget: BudgetSpec
    tuning: TuningSpec | None = None
    evaluation: EvaluationSpec
    runtime: RuntimeSpec = Field(default_factory=RuntimeSpec)

    @property
    def baseline_arm(self) -> str:
        return self.baseline or self.arms[0]

    @model_validator(mode="after")
    def _consistent(self) -> ExperimentSpec:
        tuning_seeds = self.tuning.seeds if self.tuning else ()
        for what, values in (
            ("arms", self.arms), ("seeds", self.seeds), ("tuning.seeds", tuning_seeds),
        ):  # fmt: skip
            if len(set(values)) != len(values):
                raise ValueError(f"{what} {list(values)}: one is named twice")
        for what, arm in (("baseline", self.baseline), ("controls.placebo", self.controls.placebo)):
            if arm is not None and arm not in self.arms:
                raise ValueError(f"{what} {arm!r} is not among arms {list(self.arms)}")
        for name, rungs in self.ladder.lists.items() if self.ladder else ():
            if unknown := [arm for arm in rungs if arm not in self.arms]:
                raise ValueError(f"ladder.{name}: {unknown} are not among arms {list(self.arms)}")
        if self.verdict:
            asked = (self.controls.base, self.controls.placebo)
            controls = tuple(name for name, on in zip(CONTROLS, asked, strict=True) if on)
            self.verdict.check(
                (*controls, *self.arms), tuple(self.data.test), self.evaluation.k,
                self.evaluation.greedy,
            )  # fmt: skip
        if self.ladder and self.tuning and self.tuning.arms:
            raise ValueError(
                "tuning.arms sets single arms, and rungs of a ladder may differ in their axis "
                "alone; tune what all share (tuning.shared), or leave the ladder out"
            )
        self._check_settings()
        if self.tuning and (both := set(self.tuning.seeds) & set(self.seeds)):
            raise ValueError(f"tuning.seeds {sorted(both)} are also in seeds: tune on others")
        batch = self.sampling.prompts_per_step * self.sampling.completions_per_prompt
        if batch % self.optimizer.minibatches:
            raise ValueError(
                f"optimizer.minibatches {self.optimizer.minibatches} does not divide the batch of "
                f"{batch} completions (sampling.prompts_per_step x completions_per_prompt)"
            )
        return self

    def _check_settings(self) -> None:
        if unknown := [arm for arm in self.settings if arm not in self.arms]:
            raise ValueError(f"settings: {unknown} are not among arms {list(self.arms)}")
        if self.settings and (self.tuning or self.ladder):
            raise ValueError(
                "settings sets arms by hand; leave tuning and ladder out, whose arms change"
            )
        for arm, made in self.settings.items():
            if shared := [path for path in made if path.startswith("optimizer.")]:
                raise ValueError(
                    f"settings.{arm}: {shared} are controls, equal for all arms; set optimizer"
                )
