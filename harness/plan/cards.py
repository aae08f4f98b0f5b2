"""The architecture and tokenizer of a base model, found without its weights and without the hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from harness.errors import InputError, suggest
from harness.models import EMBEDDED
from harness.recipes import RECIPES, Recipe
from harness.spec.schema import ModelSpec


def _qwen2(hidden: int, mlp: int, heads: int, kv: int, vocab: int, tied: bool, context: int) -> Any:
    return {
        "model_type": "qwen2", "hidden_size": hidden, "intermediate_size": mlp,
        "num_hidden_layers": 28, "num_attention_heads": heads, "num_key_value_heads": kv,
        "vocab_size": vocab, "tie_word_embeddings": tied, "max_position_embeddings": context,
    }  # fmt: skip


_SMOLLM2 = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152,
    "tie_word_embeddings": True, "max_position_embeddings": 8192,
}  # fmt: skip

# What the models' published config.json files say, as far as costs depend on it. Their parameter
# counts, recomputed from these, are the published ones to the last digit (tests/test_plan.py).
# Contexts are the lower of the config's and the model card's figure.
CARDS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-1.5B": _qwen2(1536, 8960, 12, 2, 151936, True, 32768),
    "Qwen/Qwen2.5-Math-1.5B": _qwen2(1536, 8960, 12, 2, 151936, True, 4096),
    "Qwen/Qwen2.5-Math-7B": _qwen2(3584, 18944, 28, 4, 152064, False, 4096),
    "Qwen/Qwen3-1.7B-Base": {
        "model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
    },
    "HuggingFaceTB/SmolLM2-135M": _SMOLLM2,
    "HuggingFaceTB/SmolLM2-135M-Instruct": _SMOLLM2,
    "meta-llama/Llama-3.2-1B": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """What the planner knows of a base model.

    Attributes:
        config: the content of its ``config.json``.
        context: longest prompt + completion, tokens.
        source: where this was learnt, in words.
        tokenizer: None where none lies on this machine; prompt lengths are then estimates.
        recipe: of an embedded base.
    """

    config: Mapping[str, Any]
    context: int
    source: str
    tokenizer: PreTrainedTokenizerBase | None
    recipe: Recipe | None = None


def find_architecture(spec: ModelSpec) -> Architecture:
    """Look in the warm-start recipes, a local folder, the hub's local cache, the built-in cards.

    Raises:
        InputError: none of them knows the model, it is a hub id without a pinned revision, or its
            tokenizer has no pad token.
    """
    if spec.name.startswith(EMBEDDED):
        return _embedded(spec)
    folder = Path(spec.name).expanduser()
    if folder.is_dir():
        return _folder(spec, folder)
    if spec.name.startswith((".", "/", "~")):
        raise InputError(f"model.name: folder {spec.name} does not exist; check the path")
    if spec.revision is None:
        raise InputError(
            f"model.name {spec.name!r} is no folder here; if it is a hub id, pin it with "
            "model.revision (a commit hash)"
        )
    options: dict[str, Any] = {"revision": spec.revision, "local_files_only": True}
    config = _config(spec, spec.name, options)
    source = f"the hub's local cache, revision {spec.revision[:12]}"
    if config is None:
        if spec.name not in CARDS:
            raise InputError(
                f"model.name {spec.name!r}: not in the hub's local cache at revision "
                f"{spec.revision[:12]} and no built-in card; download it "
                f"(hf download {spec.name}) or name a local folder."
                f"{suggest(spec.name, CARDS)}"
            )
        config, source = CARDS[spec.name], "the built-in card"
    return Architecture(config, _context(config), source, _tokenizer(spec, spec.name, options))


def _embedded(spec: ModelSpec) -> Architecture:
    name = spec.name.removeprefix(EMBEDDED)
    if name not in RECIPES:
        raise InputError(f"model.name: no embedded model {name!r}.{suggest(name, RECIPES)}")
    recipe = RECIPES[name]
    tokenizer = recipe.tokenizer()
    config = {
        "model_type": "llama", "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.intermediate_size, "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads, "num_key_value_heads": recipe.heads,
        "vocab_size": len(tokenizer), "tie_word_embeddings": False,
        "max_position_embeddings": recipe.context,
    }  # fmt: skip
    return Architecture(config, recipe.context, "its warm-start recipe", tokenizer, recipe)


def _folder(spec: ModelSpec, folder: Path) -> Architecture:
    if spec.gguf_file is None and not (folder / "config.json").is_file():
        raise InputError(
            f"model.name: {folder} holds no config.json; name a folder that save_pretrained wrote, "
            "or set model.gguf_file"
        )
    if spec.gguf_file is None:
        try:
            config: Any = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(
                f"model.name: {folder}/config.json is not JSON ({error}); restore the folder"
            ) from error
    else:
        config = _config(spec, str(folder), {})
        if config is None:
            raise InputError(f"model.gguf_file: {folder}/{spec.gguf_file} cannot be read as GGUF")
    tokenizer = _tokenizer(spec, str(folder), {"local_files_only": True})
    return Architecture(config, _context(config), f"{folder}", tokenizer)


def _config(spec: ModelSpec, source: str, options: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """A config as transformers reads it; None where it is not on this machine."""
    gguf = {"gguf_file": spec.gguf_file} if spec.gguf_file else {}
    try:
        return AutoConfig.from_pretrained(source, **options, **gguf).to_dict()
    except (OSError, ValueError, ImportError):
        return None


def _tokenizer(
    spec: ModelSpec, source: str, options: Mapping[str, Any]
) -> PreTrainedTokenizerBase | None:
    gguf = {"gguf_file": spec.gguf_file} if spec.gguf_file else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options, **gguf)
    except (OSError, ValueError, ImportError):
        return None
    if tokenizer.pad_token_id is None and spec.pad_token is None:
        raise InputError(
            f"model.name {spec.name!r}: its tokenizer has no pad token; set model.pad_token, "
            f"for example to {tokenizer.eos_token!r} (padding is masked and never read)"
        )
    return tokenizer


def _context(config: Mapping[str, Any]) -> int:
    """As `harness.models.load_base` reads it: unbounded where the config names no limit."""
    return int(config.get("max_position_embeddings") or 1 << 30)
