"""verl: metrics as JSON lines (its ``file`` logger), CSV or console output, and Hydra's config.

Keys as in ``verl/trainer/ppo/metric_utils.py`` and ``_generated_ppo_trainer.yaml`` (2025): a step
draws ``data.train_batch_size`` prompts ``rollout.n`` times, ``ppo_mini_batch_size`` counts prompts.
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

LOGS = ("*.jsonl", "*.csv", "*.log", "*.txt")
CONFIGS = (".hydra/config.yaml", "config.yaml", "config.yml", "config.json")
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
NORMALISERS = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean",
               "seq-mean-token-sum": "sequence_sum",
               "seq-mean-token-sum-norm": "constant"}  # fmt: skip
ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
ADVANTAGES = {"gae": "GAE", "grpo": "group mean", "rloo": "leave one out", "remax": "greedy",
              "reinforce_plus_plus": "batch mean",
              "reinforce_plus_plus_baseline": "group mean"}  # fmt: skip
NAMES = {"gae": "ppo"}  # verl calls an algorithm by its estimator

KEPT: dict[str, str | tuple[str, ...]] = {
    "model": "actor_rollout_ref.model.path",
    "data": "data.train_files",
    "learning_rate": f"{ACTOR}.optim.lr",
    "lr_scheduler": (f"{ACTOR}.optim.lr_scheduler_type", f"{ACTOR}.optim.warmup_style"),
    "weight_decay": f"{ACTOR}.optim.weight_decay",
    "max_grad_norm": (f"{ACTOR}.grad_clip", f"{ACTOR}.optim.clip_grad"),
    "temperature": f"{ROLLOUT}.temperature",
    "top_p": f"{ROLLOUT}.top_p",
    "max_completion_length": "data.max_response_length",
    "epochs": f"{ACTOR}.ppo_epochs",
    "group_size": f"{ROLLOUT}.n",
    "dual_clip": f"{ACTOR}.clip_ratio_c",
    "entropy_coef": f"{ACTOR}.entropy_coeff",
    "gamma": "algorithm.gamma",
    "seed": "data.seed",
    "data_seed": "data.seed",
}


def read_verl(name: str, path: Path) -> ImportedRun:
    """A run of verl's from a folder with log and config, or from the log itself.

    Raises:
        InputError: there is neither, or several logs to choose from.
    """
    run = ImportedRun(name, "verl", path, rate_key="actor/lr")
    config = beside(path, CONFIGS)
    log = path if path.is_file() else log_file(path, LOGS)
    if path.is_file() and path.suffix in (".yaml", ".yml"):
        config, log = path, None
    if config is None and log is None:
        raise InputError(f"{path}: neither a log nor {CONFIGS[0]} is there; give the run's folder")
    if log is None:
        run.missing.append("no log: add file to trainer.logger, which writes JSON lines")
    else:
        run.rows, run.damaged, run.rounded = read_rows(log)
    if config is None:
        run.missing.append(f"no {CONFIGS[0]} beside the log: Hydra writes it to the run's outputs")
    else:
        _settings(run, read_tree(config))
    run.kl_key, run.measured_kl = "actor/kl_coef", ("actor/kl_loss", "actor/reward_kl_penalty")
    _totals(run)
    return run


def _settings(run: ImportedRun, tree: Mapping[str, Any]) -> None:
    run.kept(tree, KEPT)
    have = run.settings
    there, estimator = look(tree, "algorithm.adv_estimator")
    if there:
        run.algorithm = NAMES.get(estimator, str(estimator))
        have["advantage"] = ADVANTAGES.get(estimator, f"verl's {estimator}")
    there, mode = look(tree, f"{ACTOR}.loss_agg_mode")
    if there:
        have["loss_normaliser"] = NORMALISERS.get(mode, f"verl's {mode}")
    _critic(run, tree)
    _clip(run, tree)
    _penalty(run, tree)
    _schedule(run, tree)
    _reward(run, tree)
    there, k = look(tree, f"{ROLLOUT}.top_k")
    if there:
        have["top_k"] = None if k in (-1, 0) else k
    prompts = number(tree, "data.train_batch_size")
    mini, group = number(tree, f"{ACTOR}.ppo_mini_batch_size"), run.number("group_size")
    if prompts is not None and group is not None:
        have["completions_per_batch"] = prompts * group
    if mini is not None and group is not None:
        have["optimizer_batch"] = mini * group
    have |= known(minibatches=ratio(prompts, mini))
    there, limit = look(tree, "trainer.total_training_steps")
    if there and limit is not None:
        have["step_limit"] = limit
    else:
        run.not_told["step_limit"] = "trainer.total_training_steps is null: it follows from epochs"
    there, filtered = look(tree, "algorithm.filter_groups.enable")
    have["filter"] = "resample" if there and filtered else None


def _critic(run: ImportedRun, tree: Mapping[str, Any]) -> None:
    have = run.settings
    if run.algorithm == "ppo":
        run.kept(tree, {"gae_lambda": "algorithm.lam", "value_clip": "critic.cliprange_value",
                        "critic_learning_rate": "critic.optim.lr"})  # fmt: skip
        have["scale"] = "batch"
    elif run.algorithm is not None:
        have |= dict.fromkeys(NO_CRITIC)
        there, divided = look(tree, "algorithm.norm_adv_by_std_in_grpo")
        if run.algorithm == "grpo" and there:
            have["scale"] = "group" if divided else "none"


def _clip(run: ImportedRun, tree: Mapping[str, Any]) -> None:
    """``clip_ratio`` counts only where ``clip_ratio_low`` or ``_high`` is not given."""
    for side in ("low", "high"):
        own = number(tree, f"{ACTOR}.clip_ratio_{side}")
        value = number(tree, f"{ACTOR}.clip_ratio") if own is None else own
        if value is not None:
            run.settings[f"clip_{side}"] = value
    there, mode = look(tree, f"{ACTOR}.policy_loss.loss_mode")
    if there:
        run.settings["ratio"] = {"vanilla": "token", "gspo": "sequence"}.get(mode, f"verl's {mode}")


def _penalty(run: ImportedRun, tree: Mapping[str, Any]) -> None:
    in_loss, in_reward = (
        look(tree, path) for path in (f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward")
    )
    if not (in_loss[0] and in_reward[0]):
        return
    where = {"loss": in_loss[1], "reward": in_reward[1]}
    places = [place for place, used in where.items() if used]
    have = run.settings
    have["kl_place"] = "+".join(places) or "none"
    if not places:
        have |= {"kl_coef": 0.0, "kl_estimator": None}
        return
    found = [
        (number(tree, f"{ACTOR}.kl_loss_coef"), look(tree, f"{ACTOR}.kl_loss_type")[1])
        if place == "loss"
        else (number(tree, "algorithm.kl_ctrl.kl_coef"), look(tree, "algorithm.kl_penalty")[1])
        for place in places
    ]
    coefs = [coef for coef, _ in found]
    names = [ESTIMATORS.get(str(kind), f"verl's {kind}") for _, kind in found]
    if None not in coefs:
        have["kl_coef"] = coefs[0] if len(coefs) == 1 else coefs
    have["kl_estimator"] = names[0] if len(names) == 1 else names
    if in_reward[1] and look(tree, "algorithm.kl_ctrl.type")[1] == "adaptive":
        have["kl_coef"] = f"adaptive, from {coefs[-1]}"


def _schedule(run: ImportedRun, tree: Mapping[str, Any]) -> None:
    """Steps of warm-up go before a fraction; -1 leaves it to the fraction."""
    steps = number(tree, f"{ACTOR}.optim.lr_warmup_steps")
    part = number(tree, f"{ACTOR}.optim.lr_warmup_steps_ratio")
    if steps is not None and steps >= 0:
        run.settings["warmup"] = steps
    elif part is not None:
        run.settings["warmup"] = part


def _reward(run: ImportedRun, tree: Mapping[str, Any]) -> None:
    there, path = look(tree, "custom_reward_function.path", "reward.custom_reward_function.path")
    learned, used = look(tree, "reward_model.enable")
    if there and learned:
        model = look(tree, "reward_model.model.path")[1] if used else None
        manager = look(tree, "reward_model.reward_manager")[1]
        run.settings["reward"] = [f"{part}" for part in (manager, path, model) if part is not None]


def _totals(run: ImportedRun) -> None:
    rows = run.training_rows
    last, limit = max(run.steps, default=None), run.number("step_limit")
    if limit is not None and last is not None:
        run.finished = last >= limit
    if not rows:
        return
    if not run.every_step_logged:
        run.not_told |= dict.fromkeys(("completions", "tokens"), "some steps are not in the log")
    passes, mini = run.number("epochs"), run.number("minibatches")
    if passes is not None and mini is not None and last is not None:
        run.totals["optimizer_steps"] = last * passes * mini
    if run.settings.get("filter"):
        run.not_told |= dict.fromkeys(
            ("completions", "tokens"), "groups were drawn again, and the log leaves those out"
        )
        return
    batch = run.number("completions_per_batch")
    if batch is not None and run.every_step_logged:
        run.totals["completions"] = len(rows) * batch
    run.totals |= known(tokens=run.sum_of("perf/total_num_tokens"))
