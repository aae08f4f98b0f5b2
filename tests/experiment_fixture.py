"""A whole experiment small enough for tests: a random one-layer Llama, and its spec as YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from harness.spec.load import merge
from harness.tasks.arithmetic import CHARACTERS
from harness.tokenizer import build_tokenizer

CONTEXT = 64

SPEC: dict[str, Any] = {
    "name": "tiny",
    "question": "Does every part of the harness work?",
    "arms": ["grpo", "ppo"],
    "controls": {"base": True, "placebo": "grpo"},
    "seeds": [0],
    "model": {"name": "model", "attention": "eager"},
    "data": {
        "train": {"task": "arithmetic", "split": "train", "limit": 32},
        "validation": {"task": "arithmetic", "split": "validation", "limit": 6},
        "test": {"arithmetic": {"task": "arithmetic", "split": "test", "limit": 6}},
        "prompt": "equation",
        "max_prompt_tokens": 16,
    },
    # A random model writes a number often, and now and then the right one: both are worth points.
    "reward": {"answer_format": "last_number", "format": 0.5},
    "sampling": {"prompts_per_step": 2, "completions_per_prompt": 4, "max_new_tokens": 6},
    "optimizer": {"learning_rate": 1e-2, "minibatches": 2, "micro_batch": 8},
    "budget": {"unit": "updates", "limit": 12, "evaluate_at": [0.5, 1.0]},
    "tuning": {
        "trials": 2,
        "budget_fraction": 0.5,
        "seeds": [1000],
        "samples": 2,
        "shared": {"optimizer.learning_rate": {"low": 1e-3, "high": 1e-2, "log": True}},
    },
    "evaluation": {"samples": 4, "curve_samples": 2, "k": [1, 2]},
}


def save_model(folder: Path, *, pad: bool = True, context: int = CONTEXT) -> Path:
    """A random Llama of 3 k parameters with the embedded base's tokenizer, saved."""
    tokenizer = build_tokenizer(CHARACTERS, max_length=context)
    if not pad:
        tokenizer.pad_token = None
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=context, initializer_range=0.2,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_spec(path: Path, model: Path, /, **changes: Any) -> Path:
    """The spec with some keys changed; a key changed to None is left out."""
    tree = merge(SPEC, merge({"model": {"name": str(model)}}, changes))
    path.write_text(yaml.safe_dump({k: v for k, v in tree.items() if v is not None}))
    return path


def contents(folder: Path, *names: str) -> dict[str, bytes]:
    """The bytes of every file of these names below a folder, by relative path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for name in names
        for path in sorted(folder.rglob(name))
        if path.is_file()
    }
