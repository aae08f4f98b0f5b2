"""The tasks a spec can name."""

from __future__ import annotations

from typing import Any

from harness.tasks import dialogue, reasoning_gym, reviews
from harness.tasks.arithmetic import ArithmeticSteps
from harness.tasks.contests import AIME24, AIME25, AIME26, AMC23
from harness.tasks.gsm8k import GSM8K
from harness.tasks.math import MATH
from harness.tasks.source import SplitInfo, TaskSource
from harness.tasks.task import Problem

_ENDLESS = {"train": SplitInfo(), "validation": SplitInfo(), "test": SplitInfo()}


def _arithmetic(split: str, *, seed: int, limit: int | None, **options: Any) -> list[Problem]:
    from harness.tasks import arithmetic

    return arithmetic.load(split, seed=seed, limit=limit, **options)


TASKS: dict[str, TaskSource] = {
    "arithmetic": TaskSource("arithmetic", _ENDLESS, generate=_arithmetic, steps=ArithmeticSteps()),
    "arithmetic_dialogue": TaskSource(
        "arithmetic_dialogue",
        _ENDLESS,
        generate=dialogue.load,
        environment=dialogue.ArithmeticDialogue(),
    ),
    "reviews": TaskSource("reviews", _ENDLESS, generate=reviews.load),
    "reasoning_gym": TaskSource("reasoning_gym", _ENDLESS, generate=reasoning_gym.load),
    "gsm8k": GSM8K,
    "math": MATH,
    "aime24": AIME24,
    "aime25": AIME25,
    "aime26": AIME26,
    "amc23": AMC23,
}

__all__ = ["TASKS", "Problem", "TaskSource"]
