"""TRL's trainer around a run's own model and optimizer; the only file that imports TRL here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import IterableDataset
from datasets.iterable_dataset import ExamplesIterable
from huggingface_hub import constants
from transformers import GenerationConfig, PrinterCallback, TrainerCallback
from transformers.utils import logging as transformers_logging
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_config import RLOOConfig
from trl.trainer.rloo_trainer import RLOOTrainer

from harness.data import PromptSet
from harness.errors import CellError, InputError
from harness.external.arm import ExternalArm
from harness.external.settings import arguments
from harness.loop import Loop
from harness.models import Base, weights_sha256
from harness.spec.schema import ExperimentSpec
from harness.tasks.prompts import prompt_from_spec

CLASSES = {
    "GRPOTrainer": (GRPOTrainer, GRPOConfig),
    "RLOOTrainer": (RLOOTrainer, RLOOConfig),
}
SEEDS = 2**32  # numpy takes no larger one
# Rounding of log-probs in float32, or in half precision; absolute positions are far above both.
POSITION_GAP = {True: 1e-3, False: 0.25}
Completions = tuple[list[list[int]], list[list[int]]]  # token ids of prompts and completions


def build_trainer(
    loop: Loop,
    base: Base,
    arm: ExternalArm,
    spec: ExperimentSpec,
    folder: Path,
    *,
    reward: Callable[..., list[float]],
    callback: TrainerCallback,
    draw: Callable[[], Completions] | None,
) -> Any:
    """A trainer that trains ``loop``'s policy by ``loop``'s optimizer from ``loop``'s cursor on.

    Args:
        loop: as a cell builds it; its policy's model and optimizer are the trainer's.
        base: what the reference is.
        arm: with its tuned settings put in.
        spec: the same.
        folder: of the trainer's own, for the length of this call.
        reward: scores a rollout's completions.
        callback: is told of every optimizer step.
        draw: draws a rollout's completions in place of TRL, if it should not.

    Raises:
        InputError: prompts or positions that TRL reads otherwise, or an environment that changes
            its settings.
        CellError: a reference that is not the base.
    """
    quiet()
    model: Any = loop.learner.policy.model
    _only_its_ends(model, base)
    if arm.kl.needs_reference and spec.model.lora is None:
        base.model.save_pretrained(folder / "base")  # TRL loads its reference from a folder
        model.config._name_or_path = str(folder / "base")
    trainer_class, config_class = CLASSES[arm.loop.trainer]
    device = next(model.parameters()).device
    config: Any = config_class(
        **arguments(arm, spec, folder=folder, seed=loop.controls.seed % SEEDS,
                    cpu=device.type == "cpu"),
        model_init_kwargs={"device_map": None},
    )  # fmt: skip
    one_device(config)
    trainer: Any = trainer_class(
        model=model,
        args=config,
        reward_funcs=reward,
        train_dataset=_stream(loop, spec),
        processing_class=base.tokenizer,
        callbacks=[callback],
        optimizers=(stepped(loop), None),
    )
    trainer.remove_callback(PrinterCallback)
    if draw is not None:
        _draw_by(trainer, draw)
    without_adapter_copy(trainer)
    if trainer.ref_model is not None and weights_sha256(trainer.ref_model) != base.model_sha256:
        raise CellError("the reference that TRL loaded is not the base model")
    check_environment(trainer)
    check_positions(base, arm)
    _check_prompts(trainer, loop.prompts.prompts, spec)
    return trainer


def quiet() -> None:
    """No reports to the hub, which TRL makes of each trainer, and no progress bars."""
    constants.HF_HUB_DISABLE_TELEMETRY = True
    transformers_logging.disable_progress_bar()


def one_device(config: Any) -> None:
    """A cell has one, whatever the machine has."""
    if config.n_gpu > 1:
        config._n_gpu = 1


def without_adapter_copy(trainer: Any) -> None:
    """Drop TRL's copy of the adapters as they are now, which in a resumed run are trained ones.

    Without it the reference is the model without adapters, the base.
    """
    if "ref" in getattr(trainer.model, "peft_config", {}):
        trainer.model.delete_adapter("ref")


def _only_its_ends(model: Any, base: Base) -> None:
    """Leave of the model's generation defaults its end tokens alone, as our own sampling does.

    TRL sets a few fields and would take the rest (penalties, suppressed tokens) from the model.
    """
    model.generation_config = GenerationConfig(
        eos_token_id=list(base.eos_token_ids),
        pad_token_id=base.tokenizer.pad_token_id,
        bos_token_id=base.tokenizer.bos_token_id,
    )


def stepped(loop: Loop) -> Any:
    """The learner's own optimizer, which writes float32 masters back after each step."""
    optimizer = loop.learner.policy_optimizer
    optimizer.register_step_pre_hook(lambda *_: _nothing(optimizer.gather()))
    optimizer.register_step_post_hook(lambda *_: _nothing(optimizer.scatter()))
    return optimizer


def _nothing(_: object) -> None:
    """What a hook must return to change no argument."""


def _stream(loop: Loop, spec: ExperimentSpec) -> IterableDataset:
    """The prompts from the cursor on, without end, each with its position and problem."""
    prompt = prompt_from_spec(spec.data.prompt, chat=spec.data.chat_template)
    problems, start = loop.prompts.prompts.problems, loop.progress.cursor

    def rows() -> Iterator[tuple[int, dict[str, Any]]]:
        position = start
        while True:
            index = loop.prompts.at(position)
            question = problems[index].question
            text = prompt.messages(question) if prompt.chat else prompt.render(question)
            yield position, {"prompt": text, "position": position, "problem": index}
            position += 1

    # from_generator() would hash the generator and keep a lock file in the user's cache.
    return IterableDataset(ExamplesIterable(rows, {}))


def _draw_by(trainer: Any, draw: Callable[[], Completions]) -> None:
    """Let completions be drawn from outside; RLOO has no argument for it."""

    def rollout(*_: Any) -> dict[str, Any]:
        prompts, completions = draw()
        return {"prompt_ids": prompts, "completion_ids": completions, "logprobs": None}

    def single_turn(prompt_ids: list[list[int]], *_: Any) -> list[list[int]]:
        prompts, completions = draw()
        if prompts != prompt_ids:
            raise CellError("TRL asked for other prompts than those that were drawn for")
        return completions

    if isinstance(trainer, GRPOTrainer):
        trainer.rollout_func = rollout  # type: ignore[assignment]
    else:
        trainer._generate_single_turn = single_turn


def check_environment(trainer: Any) -> None:
    """accelerate takes precision and processes from the environment too."""
    found = (trainer.accelerator.mixed_precision, trainer.accelerator.num_processes)
    if found != ("no", 1):
        raise InputError(
            f"the environment gives accelerate mixed precision {found[0]!r} and {found[1]} "
            "processes; unset ACCELERATE_MIXED_PRECISION and what a distributed launcher sets"
        )


def check_positions(base: Base, arm: ExternalArm) -> None:
    """TRL numbers positions from the left padding on; the model must see distances alone.

    Raises:
        InputError: log-probs depend on how much padding stands before a token.
    """
    model, width = base.model, 8
    ids = torch.arange(width, device=model.device)[None] % model.config.vocab_size
    mask = torch.cat([torch.zeros_like(ids), torch.ones_like(ids)], 1)
    with torch.no_grad():
        bare = model(ids, attention_mask=torch.ones_like(ids)).logits[0].float().log_softmax(1)
        padded = model(torch.cat([ids, ids], 1), attention_mask=mask).logits[0, width:]
    gap = float((padded.float().log_softmax(1) - bare).abs().max())
    if gap > POSITION_GAP[model.dtype is torch.float32]:
        raise InputError(
            f"arm {arm.name!r}: TRL numbers positions from the padding on, and with it this "
            f"model's log-probs change by {gap:.2g}; use a model with rotary positions, or take "
            "the arm out"
        )


def _check_prompts(trainer: Any, prompts: PromptSet, spec: ExperimentSpec) -> None:
    """TRL tokenizes text; what it reads must be the experiment's token ids."""
    prompt = prompt_from_spec(spec.data.prompt, chat=spec.data.chat_template)
    questions = [p.question for p in prompts.problems]
    texts = [prompt.messages(q) if prompt.chat else prompt.render(q) for q in questions]
    found, *_ = trainer._tokenize_prompts(texts)
    for problem, ids, expected in zip(prompts.problems, found, prompts.prompts, strict=True):
        if tuple(ids) != expected:
            raise InputError(
                f"TRL reads the prompt of problem {problem.id!r} as {len(ids)} tokens, other ones "
                f"than the experiment's {len(expected)}; use another prompt or tokenizer, or take "
                "the arm out"
            )
