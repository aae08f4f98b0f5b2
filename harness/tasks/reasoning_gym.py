"""Families of the package reasoning-gym (Stojanovski et al. 2025) as tasks: no download.

Only families whose every answer is a plain number or fraction are admitted, because completions
are graded by mathematical equality and never by the package's own score, which gives partial
credit to wrong answers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from harness.errors import InputError, suggest
from harness.tasks.source import collapse, content_key
from harness.tasks.task import Problem

FAMILIES = (
    "basic_arithmetic",
    "chain_sum",
    "count_bits",
    "count_primes",
    "decimal_chain_sum",
    "dice",
    "gcd",
    "gsm_symbolic",
    "lcm",
    "leg_counting",
    "letter_counting",
    "products",
    "simple_equations",
    "simple_geometry",
)
# Share of all questions (in 1/256 of the hash space) that belongs to each split.
SHARES = {"train": range(180), "validation": range(180, 218), "test": range(218, 256)}
CHUNK = 512
PATIENCE = 40  # chunks in a row without one new question: the family has no more


def split_of(question: str) -> str:
    """The split that a question belongs to, a function of its text alone.

    Item ``i`` of a reasoning-gym data set is drawn from seed + i, so data sets of neighbouring
    seeds share items; a split by the question's hash is disjoint whatever the seeds and sizes.
    """
    first = hashlib.sha256(collapse(question).encode()).digest()[0]
    return next(name for name, share in SHARES.items() if first in share)


def _check(split: str, family: str, config: Mapping[str, Any], limit: int | None) -> int:
    from reasoning_gym.factory import DATASETS

    if split not in SHARES:
        raise InputError(f"reasoning_gym: unknown split {split!r}.{suggest(split, SHARES)}")
    if family not in FAMILIES:
        if family in DATASETS:
            raise InputError(
                f"reasoning_gym: family {family!r} has answers that are not plain numbers; "
                f"use one of {', '.join(FAMILIES)}"
            )
        raise InputError(f"reasoning_gym: unknown family {family!r}.{suggest(family, FAMILIES)}")
    if taken := {"seed", "size"} & set(config):
        raise InputError(f"reasoning_gym: config.{min(taken)} is set by the task; use seed, limit")
    if limit is None:
        raise InputError("reasoning_gym: the task has no end; give the split a limit")
    return limit


def _chunk(family: str, config: Mapping[str, Any], start: int) -> list[dict[str, Any]]:
    import reasoning_gym

    try:
        made = reasoning_gym.create_dataset(family, **config, seed=start, size=CHUNK)
    except (TypeError, AssertionError, ValueError) as error:
        raise InputError(f"reasoning_gym {family}: config {dict(config)}: {error}") from None
    return [made[i] for i in range(CHUNK)]


def load(
    split: str,
    *,
    seed: int,
    limit: int | None,
    family: str = "chain_sum",
    config: Mapping[str, Any] | None = None,
) -> list[Problem]:
    """``limit`` different questions of a family; the three splits share none, at any seed.

    Args:
        split: ``train``, ``validation`` or ``test``.
        seed: another seed gives other questions of the same split.
        limit: number of problems; the first ones do not change when it grows.
        family: one of `FAMILIES`.
        config: the family's own settings (for example ``min_terms``, ``max_digits``).

    Raises:
        InputError: for an unknown split, family or setting, or a family with fewer questions.
    """
    config = dict(config or {})
    limit = _check(split, family, config, limit)
    problems: dict[str, Problem] = {}
    stale = number = 0
    while len(problems) < limit and stale < PATIENCE:
        stream = hashlib.sha256(f"{family}/{split}/{seed}/{number}".encode()).digest()
        before = len(problems)
        for item in _chunk(family, config, int.from_bytes(stream[:4], "big")):
            question = item["question"].strip()
            key = content_key(question)
            if key in problems or split_of(question) != split:
                continue
            problems[key] = Problem(
                id=f"{family}/{split}/{key}",
                question=question,
                answer=str(item["answer"]).strip().strip("$"),
                subject=family,
            )
        stale = 0 if len(problems) > before else stale + 1
        number += 1
    if len(problems) < limit:
        raise InputError(
            f"reasoning_gym {family}: limit {limit}, but its {split} split has only "
            f"{len(problems)} different questions; widen config or lower limit"
        )
    return list(problems.values())[:limit]
