"""TRL: ``trainer_state.json`` and the trainer's configuration as JSON.

Read for trl 1.16's ``GRPOConfig`` and ``RLOOConfig``, and for the ``PPOConfig`` of trl 0.2x. TRL
saves its configuration as ``training_args.bin``, a pickle, which is not opened here: unpickling
runs what is in it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.certificate.imported.files import read_tree
from harness.certificate.imported.run import ImportedRun, beside, known, look, number, ratio
from harness.errors import InputError
from harness.store import read_json

STATE = "trainer_state.json"
CONFIGS = ("training_args.json", "grpo_config.json", "ppo_config.json", "rloo_config.json",
           "config.yaml", "args.json")  # fmt: skip
PICKLE = "training_args.bin"
HOW = 'write it with json.dump(trainer.args.to_dict(), open("training_args.json", "w"))'
NORMALISERS = {"grpo": "sequence_mean", "dapo": "token_mean", "bnpo": "token_mean_micro",
               "dr_grpo": "constant"}  # fmt: skip
SHARED = {
    "learning_rate": "learning_rate",
    "lr_scheduler": "lr_scheduler_type",
    "warmup": ("warmup_steps", "warmup_ratio"),
    "weight_decay": "weight_decay",
    "max_grad_norm": "max_grad_norm",
    "temperature": "temperature",
    "seed": "seed",
    "data_seed": "data_seed",
}


def read_trl(name: str, path: Path) -> ImportedRun:
    """A run of TRL's from its output folder, a checkpoint, or its ``trainer_state.json``.

    Raises:
        InputError: neither the state nor a configuration is there.
    """
    run = ImportedRun(name, "trl", path, rate_key="learning_rate")
    state, config = _files(path)
    if config is None:
        pickled = f" ({PICKLE} is a pickle, and not opened)" if beside(path, [PICKLE]) else ""
        run.missing.append(f"no configuration as JSON beside the log{pickled}; {HOW}")
    tree = {} if config is None else read_tree(config)
    told: Mapping[str, Any] = {}
    if state is None:
        run.missing.append(f"no {STATE}: call trainer.save_state() after training")
    else:
        told = _state(run, state)
    run.kept(tree, SHARED)
    run.algorithm = _algorithm(tree, run)
    if run.algorithm in ("grpo", "rloo"):
        _grouped(run, tree)
    elif run.algorithm == "ppo":
        _ppo(run, tree)
    _rewards(run)
    _totals(run, tree, told)
    return run


def _files(path: Path) -> tuple[Path | None, Path | None]:
    if path.is_file() and path.name != STATE:
        if path.suffix not in (".json", ".yaml", ".yml"):
            raise InputError(f"{path} is no log of TRL's; give a folder with {STATE}")
        return None, path
    state = beside(path, [STATE])
    if state is None:  # the last checkpoint has the longest history
        saved = sorted(path.glob(f"checkpoint-*/{STATE}"), key=lambda p: _step_of(p.parent.name))
        state = saved[-1] if saved else None
    config = beside(path, CONFIGS) or (beside(state, CONFIGS) if state else None)
    if config is None and state is not None and state.parent.name.startswith("checkpoint-"):
        config = beside(state.parent.parent, CONFIGS)
    if state is None and config is None:
        raise InputError(f"{path}: neither {STATE} nor {CONFIGS[0]} is there; give the output_dir")
    return state, config


def _step_of(folder: str) -> int:
    digits = re.search(r"(\d+)$", folder)
    return int(digits[1]) if digits else -1


def _state(run: ImportedRun, path: Path) -> Mapping[str, Any]:
    state = read_json(path)
    if not isinstance(state, Mapping) or not isinstance(state.get("log_history"), list):
        raise InputError(f"{path}: no log_history in it; give the {STATE} that TRL wrote")
    for row in state["log_history"]:
        run.rows.append({k: float(v) for k, v in row.items() if type(v) in (int, float)})
    limit, reached = state.get("max_steps"), state.get("global_step")
    if limit and reached is not None:
        run.settings["step_limit"] = limit
        run.finished = reached >= limit
    return state


def _algorithm(tree: Mapping[str, Any], run: ImportedRun) -> str | None:
    if "num_ppo_epochs" in tree or any("objective/kl" in row for row in run.rows):
        return "ppo"
    if "loss_type" in tree and "num_generations" in tree:
        return "grpo"
    return "rloo" if "num_generations" in tree and "normalize_advantages" in tree else None


def _grouped(run: ImportedRun, tree: Mapping[str, Any]) -> None:
    """GRPOConfig and RLOOConfig."""
    run.kept(tree, {"max_completion_length": "max_completion_length", "top_p": "top_p",
                    "group_size": "num_generations", "epochs": "num_iterations",
                    "completions_per_batch": "generation_batch_size", "clip_low": "epsilon",
                    "ratio": "importance_sampling_level"})  # fmt: skip
    have = run.settings
    if "top_k" in tree:
        have["top_k"] = tree["top_k"] or None  # 0 switches it off
    high = tree.get("epsilon_high")
    if "epsilon" in tree:
        have["clip_high"] = tree["epsilon"] if high is None else high
    if run.algorithm == "grpo":
        if tree.get("delta") is not None:
            have["ratio_cap"] = tree["delta"]  # before the minimum is taken
        loss = tree["loss_type"]
        have["loss_normaliser"] = NORMALISERS.get(loss, f"TRL's {loss}")
        have["advantage"] = "group mean"
        scale = tree.get("scale_rewards")  # a flag in older versions
        have["scale"] = ("group" if scale else "none") if isinstance(scale, bool) else scale
        run.kept(tree, {"entropy_coef": "entropy_coef"})
        _penalty(run, tree, "loss", "k3")
    else:
        have["advantage"], have["ratio"] = "leave one out", "product"
        have["scale"] = "batch" if tree.get("normalize_advantages") else "none"
        run.assumed["loss_normaliser"] = ("sequence_mean", "trl 1.16, RLOOTrainer")
        _penalty(run, tree, "reward", "k1")
    if "use_vllm" in tree:
        used = tree["use_vllm"] and tree.get("vllm_importance_sampling_correction")
        have["engine_correction"] = tree.get("vllm_importance_sampling_mode") if used else None
    for absent in ("gae_lambda", "value_clip", "critic_learning_rate"):
        have[absent] = None
    run.assumed |= {
        "dual_clip": (None, "trl 1.16 has none"),
        "filter": (None, "trl 1.16 has none"),
    }
    step = number(tree, "gradient_accumulation_steps")
    have |= known(minibatches=ratio(number(tree, "steps_per_generation"), step))
    have |= known(
        optimizer_batch=ratio(run.number("completions_per_batch"), run.number("minibatches"))
    )


def _penalty(run: ImportedRun, tree: Mapping[str, Any], place: str, estimator: str) -> None:
    if "beta" not in tree:
        return
    on = tree["beta"] != 0
    if on and place == "loss" and tree.get("use_bias_correction_kl"):
        estimator = f"{estimator} times the ratio"
    run.settings |= {"kl_coef": tree["beta"], "kl_place": place if on else "none",
                     "kl_estimator": estimator if on else None}  # fmt: skip
    run.measured_kl = ("kl",)


def _ppo(run: ImportedRun, tree: Mapping[str, Any]) -> None:
    """PPOConfig: one optimizer for policy and critic, the loss a mean over a micro-batch."""
    run.kept(tree, {"max_completion_length": "response_length", "epochs": "num_ppo_epochs",
                    "minibatches": "num_mini_batches", "completions_per_batch": "batch_size",
                    "optimizer_batch": "mini_batch_size", "clip_low": "cliprange",
                    "clip_high": "cliprange", "gamma": "gamma", "gae_lambda": "lam",
                    "value_clip": "cliprange_value", "critic_learning_rate": "learning_rate",
                    "kl_coef": "kl_coef"})  # fmt: skip
    have = run.settings
    if have.get("completions_per_batch") is None:  # filled in when training begins
        have.pop("completions_per_batch", None)
        have.pop("optimizer_batch", None)
        run.not_told["completions_per_batch"] = "batch_size is null until training begins"
    have |= {"advantage": "GAE", "scale": "batch"}
    if "kl_coef" in have:
        on = have["kl_coef"] != 0
        have["kl_place"] = "reward" if on else "none"
        there, estimator = look(tree, "kl_estimator")
        if there:
            have["kl_estimator"] = estimator if on else None
    run.assumed |= {
        "loss_normaliser": ("token_mean_micro", "trl 0.2x, PPOTrainer: masked_mean"),
        "group_size": (1, "trl 0.2x, PPOTrainer draws one completion per prompt"),
        "top_p": (1.0, "trl 0.2x, PPOTrainer's generation_config"),
        "top_k": (None, "trl 0.2x, PPOTrainer's generation_config"),
        "entropy_coef": (0.0, "trl 0.2x, PPOTrainer"),
        "dual_clip": (None, "trl 0.2x, PPOTrainer"),
        "filter": (None, "trl 0.2x, PPOTrainer"),
    }
    run.measured_kl = ("objective/kl",)
    run.rate_key = "lr" if any("lr" in row for row in run.rows) else run.rate_key


def _rewards(run: ImportedRun) -> None:
    """TRL logs each reward function under its own name."""
    pattern = re.compile(r"rewards/(.+)/mean")
    names = {m[1] for row in run.rows for key in row if (m := pattern.fullmatch(key))}
    if names:
        run.settings["reward"] = sorted(names)


def _totals(run: ImportedRun, tree: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    reached = state.get("global_step")
    if run.algorithm == "ppo":
        _ppo_totals(run, number(tree, "total_episodes"))
        return
    if reached is not None:
        run.totals["optimizer_steps"] = reached
        run.totals |= known(completions=_drawn(reached, run))
    tokens = [(row["num_tokens"], run.step_of(row)) for row in run.rows if "num_tokens" in row]
    if not tokens or reached is None:
        return
    per_draw = _steps_per_draw(run) or 1  # counted whenever completions are drawn
    last_draw = (reached - 1) // per_draw * per_draw + 1
    if any(step is not None and step >= last_draw for _, step in tokens):
        run.totals["tokens"] = max(total for total, _ in tokens)
    else:
        run.not_told["tokens"] = "the last completions were drawn after the last logged step"


def _ppo_totals(run: ImportedRun, asked: float | None) -> None:
    """By episodes: what PPOTrainer counts as steps and as their limit changed between versions."""
    run.settings.pop("step_limit", None)
    run.not_told["step_limit"] = "versions of PPOTrainer count it in two ways"
    run.finished = None
    drawn = max((row["episode"] for row in run.rows if "episode" in row), default=None)
    if drawn is None:
        return
    run.totals["completions"] = drawn
    batch, minibatches = run.number("completions_per_batch"), run.number("minibatches")
    if asked is not None:  # the last batch is drawn whole
        run.finished = drawn >= asked
    epochs, batches = run.number("epochs"), ratio(drawn, batch)
    if batches is not None and minibatches is not None and epochs is not None:
        run.totals["optimizer_steps"] = batches * minibatches * epochs


def _steps_per_draw(run: ImportedRun) -> float | None:
    minibatches, epochs = run.number("minibatches"), run.number("epochs")
    return minibatches * epochs if minibatches and epochs else None


def _drawn(steps: int, run: ImportedRun) -> float | None:
    """Batches are drawn anew every minibatches x epochs steps, the last perhaps used in part."""
    per_draw, batch = _steps_per_draw(run), run.number("completions_per_batch")
    return None if per_draw is None or batch is None else math.ceil(steps / per_draw) * batch
