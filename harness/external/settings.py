"""What TRL's trainer is configured by: the arm's parts, the experiment's pins, all else off.

Every argument that can move a number is set here, so that no default of TRL or transformers is
used unsaid; a test holds the list against the installed version's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.external.arm import ExternalArm
from harness.external.objective import TOKEN_MEAN, objective
from harness.spec.schema import ExperimentSpec

FOREVER = 10**9  # optimizer steps; the budget ends the training


@dataclass(frozen=True)
class Batches:
    """A rollout batch as the trainer cuts it.

    Attributes:
        group: completions per prompt.
        per_device: completions of one forward and backward pass.
        accumulation: of those passes in an optimizer step.
        minibatches: optimizer steps in one pass over the rollout batch.
        epochs: passes over it.
    """

    group: int
    per_device: int
    accumulation: int
    minibatches: int
    epochs: int

    @property
    def updates(self) -> int:
        """Optimizer steps on one rollout batch."""
        return self.minibatches * self.epochs

    @property
    def completions(self) -> int:
        return self.per_device * self.accumulation * self.minibatches

    @property
    def prompts(self) -> int:
        return self.completions // self.group


def batches(arm: ExternalArm, spec: ExperimentSpec) -> Batches:
    """How the spec's batch is cut; a pass is the largest equal cut that ``micro_batch`` allows."""
    sampling, optimizer = spec.sampling, spec.optimizer
    minibatch = sampling.prompts_per_step * sampling.completions_per_prompt // optimizer.minibatches
    largest = min(optimizer.micro_batch, minibatch)
    per_device = next(n for n in range(largest, 0, -1) if minibatch % n == 0)
    return Batches(
        group=arm.group_size(sampling.completions_per_prompt),
        per_device=per_device,
        accumulation=minibatch // per_device,
        minibatches=optimizer.minibatches,
        epochs=optimizer.epochs,
    )


def check_external(arm: ExternalArm, spec: ExperimentSpec) -> None:
    """Refuse what the trainer cannot do in this experiment.

    Raises:
        InputError: an engine or stop strings that TRL's sampling has not, a group of one, or a
            mean over tokens that TRL would take over something else.
    """
    group = arm.group_size(spec.sampling.completions_per_prompt)
    if group < 2:
        raise InputError(
            f"arm {arm.name!r}: TRL needs at least 2 completions per prompt, it would get {group}; "
            "raise sampling.completions_per_prompt"
        )
    if arm.loop.sampler == "trl":
        other = "use an arm whose loop.sampler is harness, or take the arm out"
        if spec.sampling.engine != "hf":
            raise InputError(
                f"arm {arm.name!r} samples with transformers' generate, and sampling.engine is "
                f"{spec.sampling.engine}; {other}"
            )
        if spec.sampling.stop:
            raise InputError(
                f"arm {arm.name!r}: TRL's trainers take no stop strings, and sampling.stop is "
                f"{list(spec.sampling.stop)}; {other}"
            )
    _loss(arm, spec)


def _loss(arm: ExternalArm, spec: ExperimentSpec) -> dict[str, Any]:
    """The parts' arguments, with the name of the loss that is exact at these batches."""
    said, cut = objective(arm, arm.loop.trainer), batches(arm, spec)
    kind = said.get("loss_type")
    if kind == TOKEN_MEAN and cut.accumulation == 1:
        return said | {"loss_type": "bnpo"}  # over the tokens of a pass, here a whole minibatch
    if kind not in (TOKEN_MEAN, "cispo"):
        return said
    if cut.minibatches > 1:
        mend = "take optimizer.minibatches 1"
        if kind == TOKEN_MEAN:
            whole = cut.per_device * cut.accumulation
            mend += f", or optimizer.micro_batch of {whole} or more"
        raise InputError(
            f"arm {arm.name!r}: TRL divides a minibatch's loss by the mean number of tokens of the "
            f"{cut.minibatches} minibatches, and not by its own; {mend}"
        )
    return said | ({"loss_type": "dapo"} if kind == TOKEN_MEAN else {})


def arguments(
    arm: ExternalArm, spec: ExperimentSpec, *, folder: Path, seed: int, cpu: bool
) -> dict[str, Any]:
    """The keyword arguments of ``GRPOConfig`` or ``RLOOConfig``.

    Args:
        arm: with its tuned settings put in.
        spec: the same.
        folder: where the trainer may write; it is told to write nothing.
        seed: of whatever happens before the first step; each step sets its own.
        cpu: train on the CPU though there is a GPU.
    """
    own = GRPO_OFF if arm.loop.trainer == "GRPOTrainer" else RLOO_OFF
    return OFF | own | _loss(arm, spec) | _pinned(arm, spec) | {
        "output_dir": str(folder), "seed": seed, "data_seed": seed, "use_cpu": cpu,
    }  # fmt: skip


def _pinned(arm: ExternalArm, spec: ExperimentSpec) -> dict[str, Any]:
    """What the experiment pins."""
    sampling, optimizer, cut = spec.sampling, spec.optimizer, batches(arm, spec)
    return {
        "learning_rate": optimizer.learning_rate,  # each step sets it, by the spec's schedule
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm,
        "per_device_train_batch_size": cut.per_device,
        "gradient_accumulation_steps": cut.accumulation,
        "steps_per_generation": cut.accumulation * cut.minibatches,
        "num_iterations": cut.epochs,
        "num_generations": cut.group,
        "max_completion_length": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "gradient_checkpointing": spec.model.gradient_checkpointing,
    }


# What no arm of ours does, of every trainer.
MACHINERY: dict[str, Any] = {
    # data: the stream comes in its order, and the last batch is never short
    "remove_unused_columns": False,
    "dataloader_num_workers": 0,
    "dataloader_drop_last": False,
    "auto_find_batch_size": False,
    # model
    "disable_dropout": True,
    "neftune_noise_alpha": None,
    "router_aux_loss_coef": 0.0,
    "use_liger_kernel": False,
    "torch_compile": False,
    "bf16": False,
    "fp16": False,
    "full_determinism": False,
    # optimizer
    "optim": "adamw_torch",
    "lr_scheduler_type": "constant",
    "lr_scheduler_kwargs": None,
    "warmup_steps": 0,
    "max_steps": FOREVER,
    # a number that is not finite must be seen
    "logging_nan_inf_filter": False,
    "logging_strategy": "steps",
    "logging_steps": 1,
    "logging_first_step": False,
    # nothing is written, shown or evaluated by the trainer
    "report_to": [],
    "disable_tqdm": True,
    "save_strategy": "no",
    "eval_strategy": "no",
    "push_to_hub": False,
}
# Of both that sample.
OFF: dict[str, Any] = MACHINERY | {
    "shuffle_dataset": False,
    # sampling
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "generation_kwargs": None,
    "chat_template_kwargs": None,
    "cache_implementation": None,
    "use_vllm": False,
    "use_transformers_continuous_batching": False,
    "generation_batch_size": None,
    "pad_to_multiple_of": None,
    # loss
    "reward_weights": [1.0],
    "mask_truncated_completions": False,
    "sync_ref_model": False,
    "label_smoothing_factor": 0.0,
}
GRPO_OFF: dict[str, Any] = {
    # The KL is the plain estimate; by default TRL 1.16 multiplies it by the ratio.
    "use_bias_correction_kl": False,
    "cast_lm_head_to_fp32": False,
    "multi_objective_aggregation": "sum_then_normalize",
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "vllm_importance_sampling_correction": False,
}
RLOO_OFF: dict[str, Any] = {"normalize_advantages": False, "reward_clip_range": None}
