"""The harness's steps made of a trainer's events: its prompts, reward, budget, seeds and records.

One step is one rollout batch and the optimizer steps on it, as in ``harness.train``. TRL draws,
assigns credit, and updates; here the rollout is graded, charged and scored for the records, the
learning rate is set, and the training is ended.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from harness.collect import judged, noise_record, sampling_record
from harness.errors import CellError, DivergedError
from harness.external.arm import ExternalArm
from harness.external.settings import Batches, batches
from harness.external.trainer import Completions, build_trainer
from harness.identity import stream_seed
from harness.loop import Loop
from harness.models import Base
from harness.rewards.learned import learned_record
from harness.samplers.sampler import Drawn, left_pad
from harness.spec.schema import ExperimentSpec
from harness.train import credited, rate_factor, scored_experience, whole_lengths
from harness.types import Batch

Record = dict[str, Any]
# TRL's names of what we call otherwise; means over the passes of an optimizer step.
CLIPPED = {
    "clip_fraction_high": ("clip_ratio/high_mean", "cispo_clip_ratio"),
    "clip_fraction_low": ("clip_ratio/low_mean",),
}


def train_externally(
    loop: Loop, base: Base, spec: ExperimentSpec, folder: Path, on_step: Callable[[Record], None]
) -> None:
    """Let the arm's trainer train ``loop``'s policy until the budget is spent.

    Args:
        loop: as a cell builds it, where it stands.
        base: the base model.
        spec: with the arm's tuned settings put in.
        folder: of the trainer's own; removed at the end.
        on_step: is given each step's record, while the trainer waits.

    Raises:
        CellError: the trainer did something else than the harness asked for.
        DivergedError: a loss or gradient that is not finite.
    """
    if loop.finished:
        return
    arm = loop.arm
    assert isinstance(arm, ExternalArm)
    steps = Steps(loop, base, batches(arm, spec), on_step)
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    folder.mkdir(parents=True)
    try:
        trainer = build_trainer(
            loop, base, arm, spec, folder, reward=steps.reward, callback=steps,
            draw=steps.draw if arm.loop.sampler == "harness" else None,
        )  # fmt: skip
        steps.trainer = trainer
        shutil.rmtree(folder, ignore_errors=True)
        trainer.train()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not loop.finished:
        raise CellError(f"{arm.loop.trainer} stopped before its budget was spent")


@dataclasses.dataclass
class Ongoing:
    """A step in progress."""

    record: Record
    began: float  # by the clock
    counted: int  # tokens that the trainer had seen before
    drawn: Drawn | None = None  # where the harness drew
    batch: Batch | None = None
    share: float = 0.0  # of the budget, before the updates
    rates: list[float] = dataclasses.field(default_factory=list)
    logs: list[dict[str, float]] = dataclasses.field(default_factory=list)


class Steps(TrainerCallback):
    """Follows a trainer from event to event."""

    def __init__(
        self, loop: Loop, base: Base, cut: Batches, on_step: Callable[[Record], None]
    ) -> None:
        self.loop, self.base, self.cut, self.on_step = loop, base, cut, on_step
        self.trainer: Any = None
        self.now: Ongoing | None = None
        self.open_below = getattr(loop.arm.clip, "clip_low", None) is None

    # -- before a rollout ---------------------------------------------------------------------

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Begin a step where the trainer is about to sample; else it is in the middle of one.

        Its random numbers become a function of seed and step, so that a resumed run draws what
        the whole one would have drawn.
        """
        if self.now is not None:
            return
        loop = self.loop
        loop.progress.step += 1
        loop.ledger.start_step()
        record: Record = {
            "step": loop.progress.step, "phase": "train", "kl_coef": float(self.trainer.beta),
        }  # fmt: skip
        if loop.reference is not None:
            record["reference_step"] = 0
        torch.manual_seed(stream_seed(loop.controls.seed, "external", loop.progress.step))
        self.now = Ongoing(record, time.perf_counter(), int(state.num_input_tokens_seen))

    def _begun(self) -> Ongoing:
        if self.now is None:
            raise CellError("the trainer sampled or updated outside of a step")
        return self.now

    # -- the rollout --------------------------------------------------------------------------

    def draw(self) -> Completions:
        """Completions by the experiment's own engine, as a loop of ours would draw them."""
        loop, now = self.loop, self._begun()
        indices = loop.prompts.take(loop.progress.cursor, self.cut.prompts)
        prompts = [loop.prompts.prompts.prompts[i] for i in indices]
        seed = stream_seed(loop.controls.seed, "sampling", loop.progress.step, 0)
        now.drawn = loop.sampler.draw(prompts, self.cut.group, loop.decoding, seed)
        return [list(p) for p in prompts for _ in range(self.cut.group)], unpadded(now.drawn)

    def reward(
        self, completion_ids: list[list[int]], position: list[int], problem: list[int], **_: Any
    ) -> list[float]:
        """Grade, charge and score a rollout; its scores."""
        loop, now = self.loop, self._begun()
        if now.batch is not None:
            raise CellError("the trainer sampled twice in one step")
        loop.ledger.seconds["sample"] = (
            loop.ledger.seconds.get("sample", 0.0) + time.perf_counter() - now.began
        )
        indices = self._expected(position, problem)
        drawn = now.drawn or self._drawn(indices, completion_ids)
        if unpadded(drawn) != completion_ids:
            raise CellError("the trainer scores other completions than those that were drawn")
        stream: dict[str, str] = {}
        before = loop.progress.cursor
        rollout, verdicts = judged(loop, indices, self.cut.group, drawn, 0, stream)
        seconds = dict(loop.ledger.seconds)
        experience = scored_experience(loop, rollout)
        loop.ledger.seconds = seconds  # for the records alone; TRL's own passes are in "sample"
        if now.drawn is None:  # generate() tells no log-probs: the policy's own stand for them
            experience = dataclasses.replace(experience, behaviour_logprobs=experience.old_logprobs)
        now.record |= sampling_record(experience) | {
            "prompts": {
                "drawn": loop.progress.cursor - before, "cursor": loop.progress.cursor,
                "stream": stream,
            },
            "outcomes": dict(Counter(v.outcome.value for v in verdicts)),
            "dropped": {"groups": 0, "completions": 0},
            "used": len(rollout),
            "completions_per_prompt": self.cut.group,
        } | learned_record(verdicts) | noise_record(loop, verdicts, rollout)  # fmt: skip
        now.batch = credited(loop, experience, now.record, warmup=False)
        if now.drawn is None:
            now.record["engine_gap"] = None
        now.share = loop.share_spent
        now.began = time.perf_counter()
        return rollout.score.tolist()

    def _expected(self, position: list[int], problem: list[int]) -> list[int]:
        """The problems of the next prompts of the stream, which the trainer must have drawn for."""
        cursor, size = self.loop.progress.cursor, self.cut.group
        indices = self.loop.prompts.take(cursor, self.cut.prompts)
        places = [cursor + i for i in range(self.cut.prompts) for _ in range(size)]
        if position != places or problem != [i for i in indices for _ in range(size)]:
            raise CellError(
                f"the trainer drew other prompts than the {self.cut.prompts} from position "
                f"{cursor} of the stream on"
            )
        return indices

    def _drawn(self, indices: list[int], completion_ids: list[list[int]]) -> Drawn:
        """TRL's completions as an engine of ours would give them."""
        pad = int(self.base.tokenizer.pad_token_id)  # type: ignore[arg-type]
        device = next(self.loop.learner.policy.model.parameters()).device
        prompts = [self.loop.prompts.prompts.prompts[i] for i in indices]
        ids, mask = (x.repeat_interleave(self.cut.group, 0) for x in left_pad(prompts, pad))
        lengths = torch.tensor([len(row) for row in completion_ids])
        width = max(int(lengths.max()), 1)
        rows = torch.tensor([row + [pad] * (width - len(row)) for row in completion_ids])
        real = torch.arange(width)[None] < lengths[:, None]
        ends = set(self.base.eos_token_ids)
        texts = self.base.tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        return Drawn(
            prompt_ids=ids.to(device),
            prompt_mask=mask.to(device),
            completion_ids=rows.to(device),
            mask=real.to(device),
            finished=torch.tensor([row[-1] in ends for row in completion_ids], device=device),
            logprobs=torch.zeros(real.shape, device=device),
            texts=tuple(texts),
        )

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
        if len(now.rates) == self.cut.updates:
            self._end(now, int(state.num_input_tokens_seen))
            control.should_training_stop = self.loop.finished

    def _end(self, now: Ongoing, counted: int) -> None:
        loop, batch = self.loop, now.batch
        assert batch is not None
        loop.ledger.seconds["update"] = (
            loop.ledger.seconds.get("update", 0.0) + time.perf_counter() - now.began
        )
        lengths, head = whole_lengths(batch), int(batch.mask.sum())
        if counted - now.counted != lengths.tokens:
            raise CellError(
                f"TRL counted {counted - now.counted} tokens in this step, the harness "
                f"{lengths.tokens}"
            )
        loop.ledger.charge_train("policy", lengths, head, self.cut.epochs)
        now.record |= self._updates(now.logs) | {
            "advantage_gap": self._advantage_gap(batch), "effective": self._effective(now),
            "spent": loop.ledger.spent(), "flops": dict(loop.ledger.flops),
            "lengths": loop.ledger.lengths,
        }  # fmt: skip
        loop.sampler.load(loop.learner.policy.model)
        self.now = None
        self.on_step(now.record)

    def _updates(self, logs: list[dict[str, float]]) -> Record:
        """What TRL logs of its optimizer steps: means over them."""

        def mean(*names: str) -> float | None:
            found = [log[name] for log in logs for name in names if log.get(name) is not None]
            return sum(found) / len(found) if found else None

        clipped = {ours: mean(*theirs) for ours, theirs in CLIPPED.items()}
        if self.open_below:
            clipped["clip_fraction_low"] = 0.0
        return clipped | {"loss/policy": mean("loss"), "grad_norm": mean("grad_norm")}

    def _advantage_gap(self, batch: Batch) -> float:
        """The largest gap between TRL's advantages and those of the arm's parts."""
        theirs = torch.tensor(list(self.trainer._logs["advantages"]))
        ours = batch.advantages[:, 0].float().cpu()
        if len(theirs) != len(ours):
            raise CellError(f"TRL assigned {len(theirs)} advantages to {len(ours)} completions")
        return float((theirs - ours).abs().max())

    def _effective(self, now: Ongoing) -> Record:
        """What the trainer really used, read back from it."""
        trainer = self.trainer
        config, args = trainer.generation_config, trainer.args
        return {
            "learning_rate": now.rates[0],
            "critic_learning_rate": None,
            "temperature": config.temperature,
            "top_p": config.top_p,
            "max_new_tokens": config.max_new_tokens,
            "epochs": trainer.num_iterations,
            "minibatches": args.steps_per_generation // args.gradient_accumulation_steps,
            "gradient_steps": len(now.rates),
            "completions_per_prompt": trainer.num_generations,
            "weight_sum": None,
        }


def unpadded(drawn: Drawn) -> list[list[int]]:
    """The completions' token ids without their padding."""
    rows: list[tuple[Tensor, Tensor]] = list(zip(drawn.completion_ids, drawn.mask, strict=True))
    return [ids[real].tolist() for ids, real in rows]
