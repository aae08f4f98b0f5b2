"""What a task is: problems with known answers, in splits of pinned content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
        id: unique within its task and stable across runs.
        question: the text that the prompt template is filled with.
        answer: the gold final answer, as text that the grader parses.
        solution: a worked solution, where the data has one.
        level: difficulty, where the data has one (for example ``"Level 3"``).
        subject: topic, where the data has one.
    """

    id: str
    question: str
    answer: str
    solution: str | None = None
    level: str | None = None
    subject: str | None = None


class StepGrader(Protocol):
    """What a task declares that can judge each step of a worked completion, beside its answer.

    A completion's pieces between separators are its steps, the last one without a separator of
    its own. Splitting and judging are exact: the same text gives the same steps.
    """

    @property
    def separator(self) -> str:
        """The text that ends a step."""
        ...

    @property
    def version(self) -> int:
        """Raised when a completion would be split or judged otherwise."""
        ...

    def __call__(self, question: str, completion: str) -> Sequence[bool]:
        """The verdict on each piece of ``completion.split(separator)``, in order."""
        ...


class Environment(Protocol):
    """What a task declares whose problems take several turns.

    Its answers are a function of the problem and of what the policy has written, so that an
    episode can be played again from its texts. What it shows stands between the policy's turns, as
    text that the policy reads and did not sample.
    """

    @property
    def version(self) -> int:
        """Raised when it would show or pay something else."""
        ...

    def reset(self, problem: Problem) -> str:
        """What the first turn is asked; the prompt template is filled with it."""
        ...

    def turns(self, problem: Problem) -> int:
        """How many turns an episode has, unless it ends before."""
        ...

    def room(self, problem: Problem) -> int:
        """The most characters that it shows after the first turn, all turns together."""
        ...

    def step(self, problem: Problem, texts: Sequence[str]) -> tuple[str | None, float]:
        """Answer a turn that the policy has ended by itself.

        Args:
            problem: the problem.
            texts: what the policy has written, a text for each turn, the one to answer last.

        Returns:
            What it shows next, or None at the end of the episode; and the turn's score in [0, 1].
        """
        ...


def problems_sha256(problems: Sequence[Problem]) -> str:
    """Content hash of problems in their order: ids, questions and answers."""
    digest = hashlib.sha256()
    for p in problems:
        digest.update(json.dumps([p.id, p.question, p.answer], ensure_ascii=False).encode())
        digest.update(b"\n")
    return digest.hexdigest()
