"""Where problems come from: files and hub data sets of known size and content, or a generator."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from harness.tasks.task import Environment, Problem, StepGrader

Row = Mapping[str, Any]
Part = Literal["all", "train", "validation"]


@dataclass(frozen=True)
class Hub:
    """A data set on the Hugging Face hub.

    Attributes:
        repo: owner/name.
        split: the hub's name of the split.
        revision: commit (40 hex digits) that the rows are read at.
        configs: configurations whose rows are joined; ``None`` is the default one.
    """

    repo: str
    split: str
    revision: str
    configs: tuple[str | None, ...] = (None,)


@dataclass(frozen=True)
class SplitInfo:
    """One split of a task.

    Attributes:
        size: number of problems; ``None`` for a generator, which has no end.
        rows: rows of the file (or hub split) that the problems are taken from.
        path: local file below the data root.
        sha256: hash of the local file as it was checked; another file of the same form is
            accepted and noted.
        hub: the same rows on the hub.
        part: the rows are a training file, of which this split is all, the part that a run trains
            on, or the part held out to select on.
    """

    size: int | None = None
    rows: int | None = None
    path: str | None = None
    sha256: str | None = None
    hub: Hub | None = None
    part: Part = "all"


@dataclass(frozen=True)
class Parsed:
    """Problems read from rows, and what was mended on the way."""

    problems: tuple[Problem, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class TaskSource:
    """A task's splits and how their rows become problems.

    Attributes:
        name: the name in a spec.
        splits: what exists, by name.
        parse: rows of a file or hub split (local and hub columns alike) -> problems.
        generate: for a procedural task, in place of ``parse``: ``(split, *, seed, limit,
            **options)`` -> problems, the same ones for the same arguments.
        not_for_training: ids left out of ``train`` and ``validation``, and why.
        validation_size: problems held out of the training file for ``validation``.
        steps: judges the steps of a worked completion; None where only answers can be graded.
        environment: answers the policy's turns and scores them; None where there is one turn.
    """

    name: str
    splits: Mapping[str, SplitInfo]
    parse: Callable[[Sequence[Row], str], Parsed] | None = None
    generate: Callable[..., list[Problem]] | None = None
    not_for_training: Mapping[str, str] = field(default_factory=dict)
    validation_size: int = 500
    steps: StepGrader | None = None
    environment: Environment | None = None

    @property
    def procedural(self) -> bool:
        """Whether problems are generated (then contamination compares whole questions)."""
        return self.generate is not None


def collapse(text: str) -> str:
    """Text with runs of white space as one space: equal in all copies of a data set."""
    return " ".join(text.split())


def content_key(*texts: str) -> str:
    """Twelve hex digits that name a problem by its text, so that every copy gives it one id."""
    joined = "\n".join(collapse(text) for text in texts)
    return hashlib.sha256(joined.encode()).hexdigest()[:12]


def words(text: str) -> list[str]:
    """Lower-case runs of letters or of digits; punctuation and signs are dropped."""
    return re.findall(r"[^\W\d_]+|\d+", text.casefold())


def hash_order(problem: Problem) -> str:
    """Sort key: an order that depends on the id alone and follows neither subject nor level."""
    return hashlib.sha256(problem.id.encode()).hexdigest()
