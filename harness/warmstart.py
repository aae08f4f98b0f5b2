"""The embedded base model: a tiny Llama warm-started by supervised fine-tuning, built once.

Its training data mixes strategies as pre-training data does: worked steps that mostly succeed, a
direct guess that mostly fails, and worked steps under a tempting wrong convention. Reinforcement
learning then has something to choose; a model whose only fault is digit slips would not learn from
outcome rewards. docs/embedded_task.md has the measurements.

Weights are a function of (recipe, seed, library versions, kind of processor). They are built in a
child process with one thread, so that nothing the caller did (thread count, random state,
accelerate's environment) can reach a bit of them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.artefact import Artefact, ensure, keyed
from harness.errors import InputError, suggest
from harness.recipes import RECIPES, WARMSTART_VERSION, Recipe, recipe_from_json

_IGNORED = -100  # the label that the loss skips
_LOG_EVERY = 100


def ensure_embedded_base(
    name: str = "arithmetic",
    *,
    seed: int = 0,
    cache_dir: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """The folder of an embedded base model, built first where the cache lacks it.

    Processes that ask at the same time wait for one build. A build that dies leaves nothing that
    a later call could take for a model.

    Args:
        name: a key of RECIPES.
        seed: of initialisation and demonstrations; part of the model's identity.
        cache_dir: ``$HARNESS_CACHE``, else ``~/.cache/harness``, when None.
        progress: called with one line of text now and then while building.

    Returns:
        A folder with ``model.safetensors``, ``config.json``, the tokenizer and ``recipe.json``.

    Raises:
        InputError: unknown name, or a cache folder that cannot be written.
        CellError: the build failed (diverged, disk full, killed).
    """
    if name not in RECIPES:
        raise InputError(f"model.name: no embedded model {name!r}.{suggest(name, RECIPES)}")
    recipe = RECIPES[name]
    wanted = Artefact(
        kind="embedded",
        name=name,
        title=f"embedded/{name}",
        manifest=_manifest(name, recipe, seed),
        record="recipe.json",
        module="harness.warmstart",
        threads=recipe.threads,
    )
    return ensure(wanted, cache_dir=cache_dir, progress=progress)


def _manifest(name: str, recipe: Recipe, seed: int) -> dict[str, Any]:
    """What the weights depend on, and the key that it hashes to."""
    return keyed(
        {
            "name": name,
            "seed": seed,
            "recipe": dataclasses.asdict(recipe),
            "warmstart_version": WARMSTART_VERSION,
            "generator_version": recipe.generator_version,
        }
    )


def _train(recipe: Recipe, seed: int, work: Path) -> None:
    """Fine-tune from a fresh initialisation with trl's SFTTrainer; write ``work/model``."""
    import torch
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainerCallback
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    torch.set_num_threads(recipe.threads)
    torch.manual_seed(seed)
    tokenizer = recipe.tokenizer()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=recipe.hidden_size,
            intermediate_size=recipe.intermediate_size,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.heads,
            max_position_embeddings=recipe.context,
            initializer_range=recipe.initializer_range,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            attn_implementation="eager",  # type: ignore[call-arg]
        )
    )
    ids, labels = _encode(recipe, seed, tokenizer)
    parent = os.getppid()

    class Watch(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:
                print(f"step {state.global_step}/{recipe.steps} loss {logs['loss']}", flush=True)
            if os.getppid() != parent:  # whoever waited for this model is gone
                raise SystemExit("the process that asked for this model has ended")

    arguments = SFTConfig(
        output_dir=str(work / "trainer"),
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.batch,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=recipe.warmup_steps,
        adam_beta1=recipe.adam_betas[0],
        adam_beta2=recipe.adam_betas[1],
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.max_grad_norm,
        max_length=recipe.context,
        seed=seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        train_sampling_strategy="sequential",  # the demonstrations are drawn at random already
        dataset_kwargs={"skip_prepare_dataset": True},  # tokenized and masked by _encode
        dataloader_pin_memory=False,
        logging_steps=_LOG_EVERY,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": ids, "labels": labels}),
        processing_class=tokenizer,
        callbacks=[Watch()],
    )
    trainer.remove_callback(PrinterCallback)  # Watch says it
    trainer.train()
    if not all(bool(torch.isfinite(p).all()) for p in model.parameters()):
        raise SystemExit("the weights are not finite")
    model.save_pretrained(work / "model")
    tokenizer.save_pretrained(work / "model")


def _encode(recipe: Recipe, seed: int, tokenizer: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids, and labels with what is shown masked; each turn that is written ends with EOS."""
    ids, labels = [], []
    source = recipe.episodes(seed)
    for _ in range(recipe.steps * recipe.batch):
        row: list[int] = []
        told: list[int] = []
        for shown, written in next(source):
            prompt = tokenizer(shown)["input_ids"]
            target = [*tokenizer(written)["input_ids"], tokenizer.eos_token_id]
            row += prompt + target
            told += [_IGNORED] * len(prompt) + target
        ids.append(row)
        labels.append(told)
    return ids, labels


if __name__ == "__main__":
    request = json.load(sys.stdin)
    _train(recipe_from_json(request["recipe"]), request["seed"], Path.cwd())
