"""What TRL's DPOTrainer is configured by: the arm's loss, the experiment's pins, all else off."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.external.arm import OfflineArm
from harness.external.settings import FOREVER, MACHINERY
from harness.spec.schema import ExperimentSpec

UNITS = ("flops", "updates", "seconds")  # in which an arm that samples nothing spends


@dataclass(frozen=True)
class PairBatches:
    """A step as the trainer cuts it: as many completions as a rollout batch has, in pairs.

    Attributes:
        per_device: pairs of one forward and backward pass.
        accumulation: of those passes in an optimizer step.
        minibatches: optimizer steps in a step.
    """

    per_device: int
    accumulation: int
    minibatches: int

    @property
    def per_update(self) -> int:
        """Pairs of an optimizer step."""
        return self.per_device * self.accumulation

    @property
    def pairs(self) -> int:
        """Pairs of a step."""
        return self.per_update * self.minibatches


def pair_batches(spec: ExperimentSpec) -> PairBatches:
    """An optimizer step reads as many completions as that of an arm that samples."""
    sampling, optimizer = spec.sampling, spec.optimizer
    rows = sampling.prompts_per_step * sampling.completions_per_prompt
    update = rows // optimizer.minibatches // 2
    largest = max(1, min(optimizer.micro_batch // 2, update))
    per_device = next(n for n in range(largest, 0, -1) if update % n == 0)
    return PairBatches(per_device, update // per_device, optimizer.minibatches)


def check_offline(arm: OfflineArm, spec: ExperimentSpec) -> None:
    """Refuse what an arm that learns from pairs cannot do in this experiment.

    Raises:
        InputError: no preference pairs, a budget that it never spends, a batch that is no whole
            number of pairs, a temperature, or its placebo.
    """
    who = f"arm {arm.name!r}"
    if spec.reward.learned is None:
        raise InputError(
            f"{who} learns from the preference pairs of a learned reward, and reward.kind is "
            f"{spec.reward.kind}; give reward.learned, or take the arm out"
        )
    if spec.budget.unit not in UNITS:
        raise InputError(
            f"{who} samples nothing and never spends a budget in {spec.budget.unit}; take "
            f"budget.unit {' or '.join(UNITS)}"
        )
    rows = spec.sampling.prompts_per_step * spec.sampling.completions_per_prompt
    if rows % (2 * spec.optimizer.minibatches):
        raise InputError(
            f"{who}: {rows} completions in {spec.optimizer.minibatches} minibatches are no whole "
            "pairs; make sampling.prompts_per_step x completions_per_prompt a multiple of twice "
            "optimizer.minibatches"
        )
    if spec.sampling.temperature != 1.0:
        raise InputError(
            f"{who}: TRL's DPOTrainer has no temperature, and arms that sample would train at "
            f"sampling.temperature {spec.sampling.temperature}; take 1.0"
        )
    if spec.controls.placebo == arm.name:
        raise InputError(f"controls.placebo: {who} grades nothing; imitate an arm that samples")


def offline_arguments(
    arm: OfflineArm, spec: ExperimentSpec, *, folder: Path, seed: int, cpu: bool
) -> dict[str, Any]:
    """The keyword arguments of ``DPOConfig``.

    Args:
        arm: with its tuned settings put in.
        spec: the same.
        folder: where the trainer may write; it is told to write nothing.
        seed: of whatever is random in the trainer, which nothing is.
        cpu: train on the CPU though there is a GPU.
    """
    optimizer, cut = spec.optimizer, pair_batches(spec)
    return MACHINERY | DPO_OFF | {
        "loss_type": ["sigmoid"],
        "beta": arm.kl.kl_coef,
        "learning_rate": optimizer.learning_rate,  # each step sets it, by the spec's schedule
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm,
        "per_device_train_batch_size": cut.per_device,
        "gradient_accumulation_steps": cut.accumulation,
        "gradient_checkpointing": spec.model.gradient_checkpointing,
        "max_steps": FOREVER,
        "output_dir": str(folder), "seed": seed, "data_seed": seed, "use_cpu": cpu,
    }  # fmt: skip


DPO_OFF: dict[str, Any] = {
    "loss_weights": None,
    "label_smoothing": 0.0,
    "ld_alpha": None,
    "f_divergence_type": "reverse_kl",
    "use_weighting": False,
    "sync_ref_model": False,
    "precompute_ref_log_probs": False,
    "max_length": None,  # nothing is cut off
    "truncation_mode": "keep_start",
    "padding_free": False,
    "pad_to_multiple_of": None,
    "activation_offloading": False,
    "dataset_num_proc": None,
}
