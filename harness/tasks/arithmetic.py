"""Procedural arithmetic with worked solutions: the task that needs no download.

A question is one line such as ``2+3*4-1=``; its worked solution reduces one operation at a time,
``3*4=12;2+12=14;14-1=13;A13``. Levels 1 and 2 are chains of ``+`` and ``-``. Levels 3 and 4 put a
product behind a sum, so that working from left to right, ``2+3=5;5*4=20;...``, is a tempting
convention that always ends at a wrong answer. Every value on the way is at least 0 under both
conventions, so no step needs a sign.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.errors import InputError, suggest
from harness.tasks.task import Problem

SPLITS = ("train", "validation", "test")
ANSWER_MARKER, STEP_SEPARATOR = "A", ";"
CHARACTERS = "0123456789+-*=" + STEP_SEPARATOR + ANSWER_MARKER
STANDARD, LEFT_TO_RIGHT = "standard", "left_to_right"
GENERATOR_VERSION = 1  # raise when a seed would give other questions or solutions

_DEFAULT_COUNT = {"train": 2048, "validation": 256, "test": 256}
_PATIENCE = 2000  # draws without a fresh question after which a level counts as exhausted
_HELD_OUT = {0: "test", 1: "validation"}  # by hash modulo 10; the other eight are train
_STREAM = f"arithmetic/{GENERATOR_VERSION}"
_QUESTION = re.compile(r"(\d+(?:[-+*]\d+)+)=")
_STEP = re.compile(r"(\d+)([-+*])(\d+)=(\d+)")


@dataclass(frozen=True)
class Level:
    """Shape of one difficulty: how many operands, of which how many products join two."""

    terms: int
    products: int
    subject: str


LEVELS = {
    "Level 1": Level(terms=3, products=0, subject="chain"),
    "Level 2": Level(terms=4, products=0, subject="chain"),
    "Level 3": Level(terms=3, products=1, subject="precedence"),
    "Level 4": Level(terms=4, products=1, subject="precedence"),
}


@dataclass(frozen=True)
class Step:
    """One reduction: ``left operator right = value`` at operator position ``at``."""

    left: int
    operator: str
    right: int
    value: int
    at: int

    @property
    def text(self) -> str:
        """The step as it is written, for example ``3*4=12``."""
        return f"{self.left}{self.operator}{self.right}={self.value}"


@dataclass(frozen=True)
class Expression:
    """Operands and the operators between them, not yet reduced."""

    numbers: tuple[int, ...]
    operators: tuple[str, ...]

    def step(self, at: int) -> Step:
        """The reduction of the operation at position ``at``, computed correctly."""
        left, right, operator = self.numbers[at], self.numbers[at + 1], self.operators[at]
        if operator == "*":
            value = left * right
        else:
            value = left + right if operator == "+" else left - right
        return Step(left, operator, right, value, at)

    def reduce(self, step: Step) -> Expression:
        """The expression that is left when ``step`` has been done."""
        numbers = (*self.numbers[: step.at], step.value, *self.numbers[step.at + 2 :])
        return Expression(numbers, self.operators[: step.at] + self.operators[step.at + 1 :])

    def allowed(self) -> list[int]:
        """Positions that precedence and left-to-right grouping allow to be reduced next."""
        ops = self.operators
        products = [i for i, op in enumerate(ops) if op == "*" and (i == 0 or ops[i - 1] != "*")]
        first_sum = bool(ops) and ops[0] != "*" and (len(ops) == 1 or ops[1] != "*")
        return ([0] if first_sum else []) + products


def parse_question(question: str) -> Expression:
    """Read ``2+3*4-1=``. Raises InputError when the text is not such a line."""
    match = _QUESTION.fullmatch(question)
    if match is None:
        raise InputError(f"arithmetic: question {question!r} is not of the form '2+3*4-1='.")
    parts = re.split(r"([-+*])", match[1])
    return Expression(tuple(int(n) for n in parts[::2]), tuple(parts[1::2]))


def work(question: str, convention: str = STANDARD) -> list[Step]:
    """All steps to the answer: products first (STANDARD), or strictly from LEFT_TO_RIGHT."""
    rest, steps = parse_question(question), []
    while rest.operators:
        product_first = convention == STANDARD and "*" in rest.operators
        step = rest.step(rest.operators.index("*") if product_first else 0)
        steps.append(step)
        rest = rest.reduce(step)
    return steps


def write(steps: Sequence[Step]) -> str:
    """Steps as a completion: ``3*4=12;2+12=14;A14``."""
    answer = f"{ANSWER_MARKER}{steps[-1].value}"
    return STEP_SEPARATOR.join([*(step.text for step in steps), answer])


def check_steps(question: str, completion: str) -> list[bool]:
    """Verdict on each ``;``-separated piece of a completion, the answer last.

    A step is right when its arithmetic is right and the expression that the right steps before it
    have left allows that operation next (so ``2+3=5`` is wrong for ``2+3*4=``). A wrong step leaves
    the expression as it was. An answer is right when it equals the question's value. Nothing
    follows an answer: any piece after one is wrong, or saying it twice would be worth more.
    """
    rest, gold = parse_question(question), work(question)[-1].value
    verdicts: list[bool] = []
    answered = False
    for piece in completion.split(STEP_SEPARATOR):
        if answered or piece.startswith(ANSWER_MARKER):
            verdicts.append(not answered and piece == f"{ANSWER_MARKER}{gold}")
            answered = True
            continue
        step = next((s for s in map(rest.step, rest.allowed()) if s.text == piece), None)
        verdicts.append(step is not None)
        rest = rest if step is None else rest.reduce(step)
    return verdicts


@dataclass(frozen=True)
class ArithmeticSteps:
    """``check_steps`` as the task declares it; the answer is the last step."""

    separator: str = STEP_SEPARATOR
    version: int = 1

    def __call__(self, question: str, completion: str) -> list[bool]:
        return check_steps(question, completion)


def strategy(question: str, completion: str) -> str:
    """Which way a completion goes: ``direct``, ``worked``, ``left_to_right`` or ``other``.

    Decided by the first piece alone, right or wrong in its arithmetic: an answer at once is direct;
    otherwise the operation it starts with tells the convention. In a chain both conventions agree,
    and that is ``worked``.
    """
    first = completion.split(STEP_SEPARATOR, 1)[0]
    if first.startswith(ANSWER_MARKER):
        return "direct"
    match = _STEP.fullmatch(first)
    if match is not None:
        for name, convention in (("worked", STANDARD), ("left_to_right", LEFT_TO_RIGHT)):
            start = work(question, convention)[0]
            if (int(match[1]), match[2], int(match[3])) == (
                start.left,
                start.operator,
                start.right,
            ):
                return name
    return "other"


def split_of(question: str) -> str:
    """The split a question belongs to, by its text alone: splits cannot share a question."""
    bucket = int.from_bytes(hashlib.sha256(question.encode()).digest()[:8], "big") % 10
    return _HELD_OUT.get(bucket, "train")


def draw_question(level: Level, max_operand: int, rng: random.Random) -> str | None:
    """One question of a level, or None when the draw breaks a rule of the level."""
    operators = [rng.choice("+-") for _ in range(level.terms - 1)]
    for at in rng.sample(range(1, level.terms - 1), level.products):
        operators[at] = "*"
    numbers = [rng.randint(1, max_operand) for _ in range(level.terms)]
    pairs = zip(operators, numbers[1:], strict=True)
    question = f"{numbers[0]}{''.join(f'{op}{n}' for op, n in pairs)}="
    right, tempting = work(question), work(question, LEFT_TO_RIGHT)
    if any(step.value < 0 for step in (*right, *tempting)):
        return None
    if level.products and right[-1].value == tempting[-1].value:
        return None
    return question


def stream(
    split: str, *, seed: int = 0, levels: Sequence[str] = tuple(LEVELS), max_operand: int = 9
) -> Iterator[Problem]:
    """Problems of one split without end, levels in turn; a question may come again.

    Ids name the question, so a repeated question has one id.
    """
    _check(split, levels, max_operand)
    rng = random.Random(f"{_STREAM}/{split}/{seed}")
    while True:
        for name in levels:
            yield _draw_problem(name, split, max_operand, rng)


def load(
    split: str,
    *,
    seed: int = 0,
    limit: int | None = None,
    levels: Sequence[str] = tuple(LEVELS),
    max_operand: int = 9,
) -> list[Problem]:
    """Distinct problems of one split, levels in turn.

    Args:
        split: ``train``, ``validation`` or ``test``; disjoint by the question's hash.
        seed: another seed draws other problems of the same split.
        limit: how many; 2048 train, 256 validation and 256 test problems when None.
        levels: names from LEVELS.
        max_operand: operands are drawn from 1 to this number, 2 to 99; it bounds how many
            distinct questions there are.

    Raises:
        InputError: an argument is out of range, or the levels hold too few distinct questions.
    """
    if limit is not None and limit < 1:
        raise InputError(f"arithmetic: limit is {limit}; give a number of problems of at least 1.")
    _check(split, levels, max_operand)
    rng = random.Random(f"{_STREAM}/{split}/{seed}")
    found: dict[str, Problem] = {}
    for i in range(_DEFAULT_COUNT[split] if limit is None else limit):
        name = levels[i % len(levels)]
        draws = (_draw_problem(name, split, max_operand, rng) for _ in range(_PATIENCE))
        fresh = next((p for p in draws if p.id not in found), None)
        if fresh is None:
            raise InputError(
                f"arithmetic: {name} has no fresh {split} question after {i} problems; "
                f"lower limit (now {limit}) or raise max_operand (now {max_operand})."
            )
        found[fresh.id] = fresh
    return list(found.values())


def _draw_problem(name: str, split: str, max_operand: int, rng: random.Random) -> Problem:
    level = LEVELS[name]
    while True:
        question = draw_question(level, max_operand, rng)
        if question is not None and split_of(question) == split:
            break
    steps = work(question)
    return Problem(
        id=f"arithmetic/{question[:-1]}",
        question=question,
        answer=str(steps[-1].value),
        solution=write(steps),
        level=name,
        subject=level.subject,
    )


def _check(split: str, levels: Sequence[str], max_operand: int) -> None:
    if split not in SPLITS:
        raise InputError(f"arithmetic: split is {split!r}.{suggest(split, SPLITS)}")
    if isinstance(levels, str) or not levels:
        raise InputError(f"arithmetic: levels is {levels!r}; give a list such as ['Level 1'].")
    for name in levels:
        if name not in LEVELS:
            raise InputError(f"arithmetic: levels holds {name!r}.{suggest(str(name), LEVELS)}")
    if not 2 <= max_operand <= 99:
        raise InputError(f"arithmetic: max_operand is {max_operand}; give 2 to 99.")
