"""Arithmetic over several turns: the policy's answer is what the next question starts from.

A problem is written ``9-3+4= -2+5= +1-4=``. The first turn shows ``9-3+4=``; after the answer
``A10`` the second shows ``10-2+5=``, and so on. It shows what the policy answered, right or not: a
slip is carried on, and later turns can be right about a wrong number. The problem's answer is that
of the last turn where no turn has slipped.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.errors import InputError, suggest
from harness.tasks.arithmetic import (
    ANSWER_MARKER,
    SPLITS,
    STEP_SEPARATOR,
    split_of,
    work,
)
from harness.tasks.task import Problem

GENERATOR_VERSION = 1  # raise when a seed would give other questions
TURNS = (1, 2, 3, 4)
LARGEST = 20  # no value on the right way is above it: turns differ little in length

_DEFAULT_COUNT = {"train": 2048, "validation": 256, "test": 256}
_PATIENCE = 2000  # draws without a fresh question after which they count as exhausted
_DIGITS = 3  # of an answer that is carried on
_ANSWER = re.compile(rf"{ANSWER_MARKER}(\d{{1,{_DIGITS}}})")


@dataclass(frozen=True)
class ArithmeticDialogue:
    """The environment of these problems; one of a single turn is an ordinary chain."""

    version: int = 1

    def reset(self, problem: Problem) -> str:
        return problem.question.split(" ")[0]

    def turns(self, problem: Problem) -> int:
        return problem.question.count(" ") + 1

    def room(self, problem: Problem) -> int:
        return sum(_DIGITS + len(text) for text in problem.question.split(" ")[1:])

    def step(self, problem: Problem, texts: Sequence[str]) -> tuple[str | None, float]:
        """1 where the turn's last piece is the value of the question that it was shown.

        An answer that is no number from 0 to 999 ends the episode: nothing can start from it.
        """
        first, *later = problem.question.split(" ")
        before = answer_of(texts[-2]) if len(texts) > 1 else None
        shown = first if before is None else f"{before}{later[len(texts) - 2]}"
        answer = answer_of(texts[-1])
        if answer is None:
            return None, 0.0
        reward = float(answer == str(work(shown)[-1].value))
        return (f"{answer}{later[len(texts) - 1]}" if len(texts) <= len(later) else None), reward


def answer_of(text: str) -> str | None:
    """The number that a turn ends in, as it is written; None where it ends otherwise."""
    found = _ANSWER.fullmatch(text.rsplit(STEP_SEPARATOR, 1)[-1])
    return found and found[1]


def stream(split: str, *, seed: int = 0, turns: int = 3) -> Iterator[Problem]:
    """Problems of one split without end; one may come again."""
    _check(split, turns)
    rng = random.Random(f"arithmetic_dialogue/{GENERATOR_VERSION}/{split}/{seed}/{turns}")
    while True:
        problem = _draw(turns, rng)
        if problem is not None and split_of(problem.question) == split:
            yield problem


def load(split: str, *, seed: int = 0, limit: int | None = None, turns: int = 3) -> list[Problem]:
    """Distinct problems of one split, all of so many turns.

    Args:
        split: ``train``, ``validation`` or ``test``; disjoint by the question's hash.
        seed: another seed draws other problems of the same split.
        limit: how many; 2048 train, 256 validation and 256 test problems when None.
        turns: 1 to 4.

    Raises:
        InputError: an argument is out of range, or there are too few distinct problems.
    """
    if limit is not None and limit < 1:
        raise InputError(f"arithmetic_dialogue: limit is {limit}; give at least 1 problem.")
    _check(split, turns)
    wanted = _DEFAULT_COUNT[split] if limit is None else limit
    found: dict[str, Problem] = {}
    idle = 0
    for problem in stream(split, seed=seed, turns=turns):
        idle = idle + 1 if problem.id in found else 0
        found.setdefault(problem.id, problem)
        if len(found) == wanted:
            break
        if idle == _PATIENCE:
            raise InputError(
                f"arithmetic_dialogue: no fresh {split} question of {turns} turns after "
                f"{len(found)} problems; lower limit (now {limit}), or give more turns."
            )
    return list(found.values())


def _draw(turns: int, rng: random.Random) -> Problem | None:
    """A problem, or None where a value on the right way is below 0 or above the largest."""
    texts, value = [], rng.randint(1, 9)
    for turn in range(turns):
        text = "".join(f"{rng.choice('+-')}{rng.randint(1, 9)}" for _ in range(2)) + "="
        texts.append(f"{value}{text}" if turn == 0 else text)
        steps = work(f"{value}{text}")
        if any(not 0 <= step.value <= LARGEST for step in steps):
            return None
        value = steps[-1].value
    question = " ".join(texts)
    return Problem(
        id=f"arithmetic_dialogue/{question.replace(' ', '')}",
        question=question,
        answer=str(value),
        level=f"{turns} turns" if turns > 1 else "1 turn",
        subject="chain",
    )


def _check(split: str, turns: int) -> None:
    if split not in SPLITS:
        raise InputError(f"arithmetic_dialogue: split is {split!r}.{suggest(split, SPLITS)}")
    if turns not in TURNS:
        raise InputError(f"arithmetic_dialogue: turns is {turns!r}; give 1 to {TURNS[-1]}.")
