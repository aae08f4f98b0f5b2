"""TRL's own trainers around a tiny model, configured as an arm and a spec would be."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel

from tests.tiny import tokenizer

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

LIMIT = 8  # tokens a completion may have
GROUP = 4

# Every argument of TRL that moves a number, at what our loop does.
PINNED: dict[str, Any] = {
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "optim": "adamw_torch",
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "per_device_train_batch_size": 2 * GROUP,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 1,
    "num_generations": GROUP,
    "max_completion_length": LIMIT,
    "temperature": 1.0,
    "shuffle_dataset": False,
    "bf16": False,
    "fp16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "report_to": [],
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
    "seed": 0,
}


def make_trainer(
    kind: str,
    model: PreTrainedModel,
    folder: Path,
    prompts: list[str],
    reward: Callable[..., list[float]],
    rollout: Callable[..., dict[str, Any]] | None = None,
    **changes: Any,
) -> Any:
    """A ``GRPOTrainer`` or ``RLOOTrainer``; the reference is the model as it is saved now."""
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    trainer, config = {
        "grpo": (GRPOTrainer, GRPOConfig),
        "rloo": (RLOOTrainer, RLOOConfig),
    }[kind]
    model.save_pretrained(folder)
    model.config._name_or_path = model.name_or_path = str(folder)
    arguments = config(output_dir=str(folder / "out"), **(PINNED | changes))
    torch.manual_seed(0)
    extra = {} if rollout is None else {"rollout_func": rollout}
    return trainer(
        model=model,
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer(),
        **extra,
    )
