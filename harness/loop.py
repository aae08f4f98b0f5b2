"""The state of one run: what the experiment pins for it, its parts, and where it stands."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from harness.arm import Arm
from harness.data import PromptStream, StreamHash
from harness.learner import Learner
from harness.ledger import Ledger
from harness.models import Reference
from harness.rewards.judge import Judge
from harness.rewards.steps import StepJudge, TurnJudge
from harness.samplers.sampler import Decoding, Sampler
from harness.spec.reward import DenseSpec
from harness.spec.schema import BudgetSpec, OptimizerSpec, SamplingSpec


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
    step_judge: StepJudge | TurnJudge | None = None  # where the arm or the experiment rewards steps
    dense: DenseSpec | None = None  # what the experiment pays along the way

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
