"""A run that another library trained, in the words that runs of all libraries share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.certificate.imported.files import STEP, Row, at
from harness.errors import InputError

# What a comparison of algorithms holds equal. A run in which one is not recorded proves nothing
# about it.
CONTROLS = {
    "model": "the model that training began from",
    "data": "the prompts' data set",
    "reward": "the reward: functions, model or service",
    "learning_rate": "peak learning rate of the policy",
    "lr_scheduler": "shape of the learning rate over time",
    "warmup": "warm-up, in steps (or a fraction of them)",
    "weight_decay": "the optimizer's weight decay",
    "max_grad_norm": "bound on the gradient's norm",
    "temperature": "sampling temperature",
    "top_p": "nucleus sampling",
    "top_k": "top-k sampling; null for none",
    "max_completion_length": "tokens a completion may have",
    "kl_place": "where the KL penalty enters: none, reward, loss",
    "kl_estimator": "k1, k2 or k3; null without KL",
    "kl_coef": "coefficient of the KL penalty",
    "loss_normaliser": "over what the loss of tokens is averaged",
    "epochs": "passes over each batch of completions",
    "minibatches": "optimizer steps in a pass",
    "group_size": "completions per prompt",
    "completions_per_batch": "completions that are drawn before an update",
    "optimizer_batch": "completions per optimizer step",
    "clip_low": "lower clip of the ratio: 1 - this",
    "clip_high": "upper clip of the ratio: 1 + this",
    "dual_clip": "bound of the ratio where the advantage is negative; null for none",
    "entropy_coef": "coefficient of an entropy bonus",
    "step_limit": "steps that the configuration asks for, as the library counts them",
}
# Named or counted in each library's own way: values of two libraries cannot be held together.
OWN_WORDS = ("data", "reward", "warmup", "step_limit")
# What names an algorithm: a comparison is of these.
ALGORITHM = {
    "advantage": "the baseline that rewards are compared with",
    "scale": "what advantages are divided by",
    "gamma": "discount",
    "gae_lambda": "lambda of GAE",
    "value_clip": "clip of the value function",
    "critic_learning_rate": "learning rate of the critic",
    "ratio": "token or sequence",
    "filter": "groups that are dropped or drawn again",
    "engine_correction": "weights for the difference between engine and trainer",
}
SEEDS = {"seed": "the seed", "data_seed": "the seed of the prompts' order"}
TOTALS = {
    "optimizer_steps": "optimizer steps taken",
    "completions": "completions drawn",
    "tokens": "tokens of prompts and completions",
}
NO_CRITIC = ("gae_lambda", "value_clip", "critic_learning_rate")


@dataclass
class ImportedRun:
    """One run, as its files tell of it.

    Attributes:
        name: the log's path, as short as it stays unlike the others'.
        library: trl, verl or openrlhf.
        algorithm: as the library calls it; None where nothing tells.
        settings: what the configuration records, under the names of this module. A name that is
            not here is not known; None is a value ("no limit").
        assumed: settings that no file of the run records and the library's source fixes, with the
            place in the source. They are shown and prove nothing.
        rows: the logged steps, in the file's order.
        step: the key of ``rows`` that counts steps.
        totals: what the log says was spent.
        finished: whether the declared steps were reached; None where it cannot be told.
        damaged: lines or files that could not be read.
        missing: files that a run of this library could have left, and how to get them.
        not_told: setting or total -> why it is not known, where there is more to say than that.
        rounded: the log's numbers were rounded when printed.
        rate_key: the key of the logged learning rate.
        kl_key: the key of the logged KL coefficient.
        measured_kl: the keys of a measured KL to the reference.
    """

    name: str
    library: str
    path: Path
    algorithm: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    assumed: dict[str, tuple[Any, str]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    step: str = STEP
    totals: dict[str, float] = field(default_factory=dict)
    finished: bool | None = None
    damaged: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    not_told: dict[str, str] = field(default_factory=dict)
    rounded: bool = False
    rate_key: str = ""
    kl_key: str = ""
    measured_kl: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """Library and algorithm: runs of one kind are seeds of one arm."""
        return f"{self.library} {self.algorithm or 'unknown'}"

    def step_of(self, row: Row) -> int | None:
        """The step of a logged row; None where it has none."""
        step = row.get(self.step, math.nan)
        return int(step) if math.isfinite(step) else None

    def number(self, name: str) -> float | None:
        """A setting that is a number; None where it is not known, or is none."""
        value = self.settings.get(name)
        return None if isinstance(value, bool) or not isinstance(value, int | float) else value

    @property
    def steps(self) -> list[int]:
        return [step for row in self.rows if (step := self.step_of(row)) is not None]

    @property
    def training_steps(self) -> list[int]:
        return [step for row in self.training_rows if (step := self.step_of(row)) is not None]

    @property
    def every_step_logged(self) -> bool:
        """Steps 1, 2, 3 and so on, each once: sums over them are sums over the run."""
        steps = self.training_steps
        return bool(steps) and steps == list(range(1, len(steps) + 1))

    @property
    def training_rows(self) -> list[Row]:
        """The logged steps that trained: evaluations may be logged as step 0, or of their own."""
        return [row for row in self.rows if (self.step_of(row) or 0) >= 1 and self.rate_key in row]

    def kept(self, tree: Mapping[str, Any], names: Mapping[str, str | Iterable[str]]) -> None:
        """Take settings over from the first path of each that the configuration has."""
        for name, paths in names.items():
            there, value = look(tree, *([paths] if isinstance(paths, str) else paths))
            if there:
                self.settings[name] = value

    def sum_of(self, key: str) -> float | None:
        """A column's sum over the training steps; None unless every step has it."""
        rows = self.training_rows
        if not self.every_step_logged or self.rounded or any(key not in row for row in rows):
            return None
        total = sum(row[key] for row in rows)
        return total if math.isfinite(total) else None


def look(tree: Mapping[str, Any], *paths: str) -> tuple[bool, Any]:
    """Whether one of these paths is there, and the value at the first that is."""
    for path in paths:
        there, value = at(tree, path)
        if there:
            return True, value
    return False, None


def number(tree: Mapping[str, Any], *paths: str) -> float | None:
    """The number at the first of these paths; None where there is none."""
    _, value = look(tree, *paths)
    return None if isinstance(value, bool) or not isinstance(value, int | float) else value


def ratio(above: float | None, below: float | None) -> float | None:
    """A quotient, whole where it is whole; None where a side is not known."""
    if above is None or not below:
        return None
    found = above / below
    return int(found) if found == int(found) else found


def known(**values: Any) -> dict[str, Any]:
    """Those that are not None: a quotient that cannot be told is not known, and no value."""
    return {name: value for name, value in values.items() if value is not None}


def log_file(folder: Path, patterns: Iterable[str], besides: Iterable[str] = ()) -> Path | None:
    """The one file of a folder that matches the first pattern that any file matches.

    Raises:
        InputError: several match; the user must say which.
    """
    for pattern in patterns:
        found = [path for path in sorted(folder.glob(pattern)) if path.name not in besides]
        if len(found) > 1:
            names = ", ".join(path.name for path in found)
            raise InputError(f"{folder} has several logs ({names}); name the one that is meant")
        if found:
            return found[0]
    return None


def beside(path: Path, names: Iterable[str]) -> Path | None:
    """The first of these files in the log's folder."""
    folder = path if path.is_dir() else path.parent
    return next((folder / name for name in names if (folder / name).is_file()), None)
