"""OpenRLHF: its arguments as JSON or YAML, and its ``train/`` metrics as JSON lines or CSV.

OpenRLHF logs to W&B or TensorBoard and writes no file of its own; what is read here is an export
of either, under its names (``openrlhf/utils/logging_utils.py``), with the arguments as W&B keeps
them. Both spellings of its arguments are known: flat (``init_kl_coef``, to 0.9) and nested
(``algo.kl.init_coef``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.certificate.imported.files import read_rows, read_tree
from harness.certificate.imported.run import (
    NO_CRITIC,
    ImportedRun,
    beside,
    known,
    log_file,
    look,
    number,
    ratio,
)
from harness.errors import InputError

LOGS = ("*.jsonl", "*.csv")
CONFIGS = ("args.json", "args.yaml", "config.json", "config.yaml")
ADVANTAGES = {"gae": "GAE", "group_norm": "group mean", "dr_grpo": "group mean",
              "rloo": "leave one out", "reinforce": "batch mean",
              "reinforce_baseline": "group mean"}  # fmt: skip
NAMES = {"gae": "ppo", "group_norm": "grpo"}
ESTIMATOR = ("advantage_estimator", "algo.advantage.estimator")
SOURCE = "OpenRLHF 3c3be62, PolicyLoss"

KEPT: dict[str, str | tuple[str, ...]] = {
    "model": ("pretrain", "actor.model_name_or_path"),
    "data": ("prompt_data", "data.prompt_dataset"),
    "reward": ("remote_rm_url", "reward.remote_url"),
    "learning_rate": ("actor_learning_rate", "actor.adam.lr"),
    "lr_scheduler": ("lr_scheduler", "actor.lr_scheduler"),
    "warmup": ("lr_warmup_ratio", "actor.lr_warmup_ratio"),
    "weight_decay": ("l2", "actor.adam.weight_decay"),
    "max_grad_norm": ("max_norm", "actor.max_norm"),
    "temperature": ("temperature", "rollout.temperature"),
    "top_p": ("top_p", "rollout.top_p"),
    "max_completion_length": ("generate_max_len", "rollout.max_new_tokens"),
    "epochs": ("max_epochs", "train.max_epochs"),
    "group_size": ("n_samples_per_prompt", "rollout.n_samples_per_prompt"),
    "optimizer_batch": ("train_batch_size", "train.batch_size"),
    "dual_clip": ("dual_clip", "actor.dual_clip"),
    "gamma": ("gamma", "algo.advantage.gamma"),
    "seed": ("seed", "train.seed"),
    "data_seed": ("seed", "train.seed"),
}
CRITIC: dict[str, str | tuple[str, ...]] = {
    "gae_lambda": ("lambd", "algo.advantage.lambd"),
    "value_clip": ("value_clip", "critic.value_clip"),
    "critic_learning_rate": ("critic_learning_rate", "critic.adam.lr"),
}


def read_openrlhf(name: str, path: Path) -> ImportedRun:
    """A run of OpenRLHF's from a folder with exported log and arguments, or from the log itself.

    Raises:
        InputError: there is neither, or several logs to choose from.
    """
    run = ImportedRun(name, "openrlhf", path)
    run.step, run.rate_key = "train/global_step", "train/actor_lr"
    run.measured_kl = ("train/kl",)
    config = beside(path, CONFIGS)
    log = path if path.is_file() else log_file(path, LOGS)
    if path.is_file() and (path.name in CONFIGS or path.suffix in (".yaml", ".yml")):
        config, log = path, None
    if config is None and log is None:
        raise InputError(f"{path}: neither a log nor {CONFIGS[0]} is there; give the run's folder")
    if log is None:
        run.missing.append("no log: export the run's history from W&B or TensorBoard as CSV")
    else:
        run.rows, run.damaged, run.rounded = read_rows(log)
    if config is None:
        run.missing.append(f"no {CONFIGS[0]} beside the log: write vars(args), or W&B's config")
    else:
        _settings(run, read_tree(config))
    _totals(run)
    return run


def _settings(run: ImportedRun, tree: Mapping[str, Any]) -> None:
    run.kept(tree, KEPT)
    have = run.settings
    if have.get("reward") is None:
        have.pop("reward", None)
        run.kept(tree, {"reward": ("reward_pretrain", "reward.model_name_or_path")})
    there, estimator = look(tree, *ESTIMATOR)
    if there:
        run.algorithm = NAMES.get(estimator, str(estimator))
        have["advantage"] = ADVANTAGES.get(estimator, f"OpenRLHF's {estimator}")
        _scale(run, tree, estimator)
    _penalty(run, tree)
    _clip(run, tree)
    there, coef = look(tree, "entropy_loss_coef", "actor.entropy_coef")
    if there:
        have["entropy_coef"] = coef or 0.0  # null, and 0 which logs entropy alone
    there, kind = look(tree, "policy_loss_type", "actor.policy_loss_type")
    if there:
        have["ratio"] = {"ppo": "token", "gspo": "sequence"}.get(kind, kind)
    there, filtered = look(tree, "dynamic_filtering", "algo.dynamic_filtering_enable")
    if there:
        have["filter"] = "resample" if filtered else None
    there, fixed = look(tree, "enable_vllm_is_correction", "algo.advantage.is_correction_enable")
    if there:
        have["engine_correction"] = "truncated" if fixed else None
    prompts = number(tree, "rollout_batch_size", "rollout.batch_size")
    group = run.number("group_size")
    if prompts is not None and group is not None:
        have["completions_per_batch"] = prompts * group
    batch = ratio(run.number("completions_per_batch"), run.number("optimizer_batch"))
    have |= known(minibatches=batch)
    run.assumed |= {
        "loss_normaliser": ("token_mean", SOURCE),
        "top_k": (None, "OpenRLHF 3c3be62, its sampling parameters"),
    }
    run.not_told["step_limit"] = "OpenRLHF works it out from the length of the data"


def _scale(run: ImportedRun, tree: Mapping[str, Any], estimator: str) -> None:
    if estimator == "gae":
        run.kept(tree, CRITIC)
        run.settings["scale"] = "batch"
        return
    run.settings |= dict.fromkeys(NO_CRITIC)
    there, off = look(tree, "no_advantage_std_norm", "algo.advantage.no_std_norm")
    if estimator == "group_norm":
        run.settings["scale"] = "group"
    elif there:
        run.settings["scale"] = "none" if off or estimator == "dr_grpo" else "batch"


def _penalty(run: ImportedRun, tree: Mapping[str, Any]) -> None:
    coef = number(tree, "init_kl_coef", "algo.kl.init_coef")
    there, in_loss = look(tree, "use_kl_loss", "algo.kl.use_loss")
    if coef is None or not there:
        return
    have, on = run.settings, coef != 0
    have["kl_place"] = ("loss" if in_loss else "reward") if on else "none"
    have["kl_coef"] = coef
    told, estimator = look(tree, "kl_estimator", "algo.kl.estimator")
    if told:
        have["kl_estimator"] = estimator if on else None
    if on and number(tree, "kl_target", "algo.kl.target") is not None:
        have["kl_coef"] = f"adaptive, from {coef}"


def _clip(run: ImportedRun, tree: Mapping[str, Any]) -> None:
    _, both = look(tree, "eps_clip_low_high", "actor.eps_clip_low_high")
    one = number(tree, "eps_clip", "actor.eps_clip")
    if isinstance(both, list) and len(both) == 2:
        run.settings |= {"clip_low": both[0], "clip_high": both[1]}
    elif one is not None:
        run.settings |= {"clip_low": one, "clip_high": one}


def _totals(run: ImportedRun) -> None:
    """A global step is one batch of completions, with all its passes and minibatches."""
    rows, have = run.training_rows, run.settings
    if not rows:
        return
    last = max(run.training_steps)
    if not run.every_step_logged:
        run.not_told |= dict.fromkeys(("completions", "tokens"), "some steps are not in the log")
    epochs, minibatches = run.number("epochs"), run.number("minibatches")
    if epochs is not None and minibatches is not None:
        run.totals["optimizer_steps"] = last * epochs * minibatches
    if have.get("filter") or "filter" not in have:
        run.not_told |= dict.fromkeys(
            ("completions", "tokens"), "groups may have been drawn again, and the log has no count"
        )
        return
    batch = run.number("completions_per_batch")
    if batch is None or not run.every_step_logged:
        return
    run.totals["completions"] = len(rows) * batch
    length = run.sum_of("train/total_length")  # a mean over the step's completions
    if length is not None:
        run.totals["tokens"] = round(length * batch)
