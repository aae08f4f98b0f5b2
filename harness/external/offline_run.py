"""The harness's steps made of an offline trainer's events: its pairs, budget, rates and records.

One step reads as many completions as a rollout batch has, in pairs, and takes as many optimizer
steps as an arm that samples takes in one pass over it. Nothing is sampled, so nothing of a rollout
is recorded.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from harness.cost.flops import Lengths
from harness.errors import CellError, DivergedError, InputError
from harness.external.arm import OfflineArm
from harness.external.offline_settings import PairBatches, pair_batches
from harness.external.offline_trainer import build_offline_trainer
from harness.identity import digest
from harness.loop import Loop
from harness.models import Base, scored
from harness.pairs import Pair, PairData, PairStream, pair_ids
from harness.samplers.sampler import left_pad
from harness.spec.schema import ExperimentSpec
from harness.train import rate_factor
from harness.types import Rollout

Record = dict[str, Any]
MEASURED = {  # TRL's names of what a record holds
    "loss/policy": "loss",
    "grad_norm": "grad_norm",
    "preference_accuracy": "rewards/accuracies",
    "preference_margin": "rewards/margins",
}


def train_offline(
    loop: Loop,
    base: Base,
    spec: ExperimentSpec,
    data: PairData,
    folder: Path,
    on_step: Callable[[Record], None],
) -> None:
    """Let the arm's trainer train ``loop``'s policy on pairs until the budget is spent.

    Args:
        loop: as a cell builds it, where it stands; its cursor counts pairs.
        base: the base model.
        spec: with the arm's tuned settings put in.
        data: read in shuffled epochs, as often as the budget allows.
        folder: for the trainer, which writes nothing.
        on_step: is given each step's record, while the trainer waits.

    Raises:
        InputError: pairs without a prompt.
        CellError: the trainer did something else than the harness asked for.
        DivergedError: a loss or gradient that is not finite.
    """
    if loop.finished:
        return
    arm = loop.arm
    assert isinstance(arm, OfflineArm)
    if not all(pair.prompt_ids for pair in data.pairs):
        raise InputError(
            f"arm {arm.name!r}: some preference pairs have no prompt, so that nothing comes before "
            "their first tokens; take data with prompts, or take the arm out"
        )
    stream, cut = PairStream(data, loop.controls.seed), pair_batches(spec)
    loop.progress.stream.every = cut.pairs
    steps = PairSteps(loop, arm, stream, cut, on_step)
    trainer = build_offline_trainer(loop, base, arm, spec, folder, stream, follower=steps)
    steps.trainer = trainer
    trainer.train()
    if not loop.finished:
        raise CellError(f"{arm.loop.trainer} stopped before its budget was spent")


@dataclass
class Reading:
    """A step in progress."""

    record: Record
    began: float  # by the clock
    taken: list[int]  # the step's pairs, by index
    share: float  # of the budget, before the updates
    lengths: Lengths
    head: int  # completion tokens
    read: int = 0  # pairs so far
    declared: float | None = None  # our loss of the batch in hand, if it is measured
    rates: list[float] = field(default_factory=list)
    logs: list[dict[str, float]] = field(default_factory=list)


class PairSteps(TrainerCallback):
    """Follows a trainer from event to event."""

    def __init__(
        self,
        loop: Loop,
        arm: OfflineArm,
        stream: PairStream,
        cut: PairBatches,
        on_step: Callable[[Record], None],
    ) -> None:
        self.loop, self.arm, self.stream, self.cut, self.on_step = loop, arm, stream, cut, on_step
        self.trainer: Any = None
        self.now: Reading | None = None

    # -- a step begins ------------------------------------------------------------------------

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Charge what the reference will read; the updates are charged at the end."""
        if self.now is not None:
            return
        loop = self.loop
        loop.progress.step += 1
        loop.ledger.start_step()
        taken = self.stream.take(loop.progress.cursor, self.cut.pairs)
        pairs = [self.stream.pairs[i] for i in taken]
        lengths = Lengths.of(
            len(pair.prompt_ids) + len(completion)
            for pair in pairs
            for completion in (pair.chosen_ids, pair.rejected_ids)
        )
        head = sum(len(pair.chosen_ids) + len(pair.rejected_ids) for pair in pairs)
        loop.ledger.charge_score("reference", lengths, head)
        record: Record = {
            "step": loop.progress.step, "phase": "offline", "reference_step": 0,
            "kl_coef": float(self.trainer.beta),
        }  # fmt: skip
        share = loop.share_spent
        self.now = Reading(record, time.perf_counter(), taken, share, lengths, head)

    def _begun(self) -> Reading:
        if self.now is None:
            raise CellError("the trainer read or updated outside of a step")
        return self.now

    # -- what it reads ------------------------------------------------------------------------

    def read(self, inputs: dict[str, Tensor]) -> None:
        """Hold the batch against the stream; of a step's first one, compute the declared loss."""
        now = self._begun()
        found = _pairs_of(inputs)
        expected = [self.stream.pairs[i] for i in now.taken[now.read : now.read + len(found)]]
        if found != [pair_ids(pair) for pair in expected]:
            raise CellError(
                f"the trainer read other pairs than the {len(found)} from position "
                f"{self.loop.progress.cursor + now.read} of the stream on"
            )
        now.declared = self._declared(expected) if now.read == 0 else None
        now.read += len(found)

    def lost(self, loss: Tensor) -> None:
        """Take the trainer's loss of the batch that was read last."""
        now = self._begun()
        if now.declared is not None:
            now.record["loss_gap"] = abs(float(loss) - now.declared)

    @torch.no_grad()
    def _declared(self, pairs: Sequence[Pair]) -> float:
        """The arm's loss of some pairs under the models as they are now; not charged."""
        loop = self.loop
        assert loop.reference is not None
        rows = as_rows(pairs, loop.learner.policy.model)
        micro = loop.controls.optimizer.micro_batch
        ratio = scored(loop.learner.policy.logprobs, rows, micro)
        ratio = (ratio - scored(loop.reference.logprobs, rows, micro)).double().sum(1)
        chosen, rejected = ratio.chunk(2)
        return float(self.arm.preference(chosen, rejected, self.arm.kl.kl_coef).mean())

    # -- the updates --------------------------------------------------------------------------

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Set the learning rate of the spec's own schedule."""
        now, spec = self._begun(), self.loop.controls.optimizer
        factor = rate_factor(spec, self.loop.progress.policy_steps, now.share)
        for group in self.loop.learner.policy_optimizer.param_groups:
            group["lr"] = spec.learning_rate * factor

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Note the rate that was used, and charge the update."""
        (rate,) = {g["lr"] for g in self.loop.learner.policy_optimizer.param_groups}
        self._begun().rates.append(float(rate))
        self.loop.progress.optimizer_steps += 1
        self.loop.progress.policy_steps += 1
        self.loop.ledger.charge(updates=1)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """After an optimizer step: end the harness's step with its last one, and the training."""
        now = self.now
        if now is None or logs is None or "grad_norm" not in logs:
            return  # the summary at the end of a training
        for name in ("loss", "grad_norm"):
            if not math.isfinite(logs[name]):
                raise DivergedError(f"{name} is {logs[name]}; lower the learning rate")
        now.logs.append(dict(logs))
        if len(now.rates) == self.cut.minibatches:
            self._end(now)
            control.should_training_stop = self.loop.finished

    def _end(self, now: Reading) -> None:
        loop = self.loop
        if now.read != self.cut.pairs:
            raise CellError(f"the trainer read {now.read} pairs in a step of {self.cut.pairs}")
        seconds = loop.ledger.seconds.get("update", 0.0) + time.perf_counter() - now.began
        loop.ledger.seconds["update"] = seconds
        loop.ledger.charge_train("policy", now.lengths, now.head, 1)
        loop.progress.cursor += self.cut.pairs
        ids = [digest(pair_ids(self.stream.pairs[i])) for i in now.taken]
        now.record |= {
            ours: sum(log[theirs] for log in now.logs) / len(now.logs)
            for ours, theirs in MEASURED.items()
        } | {
            "pairs": {
                "read": self.cut.pairs, "cursor": loop.progress.cursor,
                "count": len(self.stream.pairs), "sha256": self.stream.sha256,
                "stream": loop.progress.stream.add(ids),
            },
            "offline": self._used(now),
            "spent": loop.ledger.spent(), "flops": dict(loop.ledger.flops),
            "lengths": loop.ledger.lengths,
        }  # fmt: skip
        loop.sampler.load(loop.learner.policy.model)
        self.now = None
        self.on_step(now.record)

    def _used(self, now: Reading) -> Record:
        """What the trainer really used, read back from it and from the optimizer."""
        args, (group,) = self.trainer.args, self.loop.learner.policy_optimizer.param_groups
        return {
            "learning_rate": now.rates[0],
            "betas": list(group["betas"]),
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "max_grad_norm": args.max_grad_norm,
            "gradient_steps": len(now.rates),
            "pairs_per_gradient_step": args.per_device_train_batch_size
            * args.gradient_accumulation_steps,
            "loss_type": list(self.trainer.loss_types),
            "label_smoothing": self.trainer.label_smoothing,
        }


def _pairs_of(inputs: dict[str, Tensor]) -> list[list[list[int]]]:
    """The pairs of a padded batch: chosen rows first, then rejected ones."""
    halves = []
    for ids, seen, completed in zip(
        inputs["input_ids"], inputs["attention_mask"].bool(),
        inputs["completion_mask"].bool(), strict=True,
    ):  # fmt: skip
        halves.append((ids[seen & ~completed].tolist(), ids[seen & completed].tolist()))
    half = len(halves) // 2
    found = []
    for (prompt, chosen), (other, rejected) in zip(halves[:half], halves[half:], strict=True):
        if prompt != other:
            raise CellError("the trainer read a pair of two prompts")
        found.append([prompt, chosen, rejected])
    return found


def as_rows(pairs: Sequence[Pair], model: torch.nn.Module) -> Rollout:
    """Completions of pairs as scoring reads them: all chosen ones, then all rejected ones."""
    device = next(model.parameters()).device
    prompts = [tuple(pair.prompt_ids) for pair in pairs] * 2
    completions = [list(p.chosen_ids) for p in pairs] + [list(p.rejected_ids) for p in pairs]
    ids, mask = left_pad(prompts, 0)
    width = max(map(len, completions))
    real = torch.tensor([[i < len(row) for i in range(width)] for row in completions])
    rows = torch.tensor([row + [0] * (width - len(row)) for row in completions])
    nothing = torch.zeros(len(rows), device=device)
    return Rollout(
        prompt_ids=ids.to(device),
        prompt_mask=mask.to(device),
        completion_ids=rows.to(device),
        mask=real.to(device),
        group=torch.arange(len(rows), device=device) % len(pairs),
        score=nothing,
        bonus=nothing,
        correct=nothing.bool(),
        finished=nothing.bool(),
        behaviour_logprobs=torch.zeros(rows.shape, device=device),
    )
