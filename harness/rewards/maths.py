"""Grade a completion's final answer by mathematical equivalence (math-verify), bounded and cached.

Three layers, cheapest first: a rule that is certain (``equal``), a cache, math-verify in worker
processes (``worker``, ``pool``). The first two never change a verdict, only its cost.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from harness.errors import InputError, suggest
from harness.rewards.equal import canonical, surely_equal, tidy
from harness.rewards.extract import ANSWER_FORMATS, AnswerFormat, final_answer
from harness.rewards.pool import Failure, Reply, WorkerPool

LONGEST_ANSWER = 2000  # characters; more is a derivation, not a final answer


class Outcome(StrEnum):
    """What grading found. Only the first two are verdicts on the mathematics."""

    CORRECT = "correct"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"
    TRUNCATED = "truncated"
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True)
class Verdict:
    """The outcome for one completion.

    Attributes:
        outcome: see ``Outcome``.
        extracted: the final answer in canonical text, its class in a majority vote; None where the
            completion states no answer.
    """

    outcome: Outcome
    extracted: str | None

    @property
    def correct(self) -> bool:
        """Whether the answer was shown to equal the gold one."""
        return self.outcome is Outcome.CORRECT


@dataclass
class GraderStats:
    """How verdicts came about, since the grader was made."""

    calls: int = 0
    fast: int = 0
    cached: int = 0
    verified: int = 0
    timeouts: int = 0
    errors: int = 0


class MathGrader:
    """Grades completions; a context manager that owns its worker processes.

    Args:
        workers: grading processes at most; none starts while the certain rules suffice.
        timeout_seconds: processor time for one comparison.
        memory_mb: resident memory of one grading process.
        cache_size: verdicts kept.
        answer_format: where the final answer stands (``extract.final_answer``).
        marker: the text before the answer, for ``answer_format="marker"``.

    Raises:
        InputError: an unknown answer format, an empty marker or a limit below what works.
    """

    version: ClassVar[int] = 1

    def __init__(
        self,
        *,
        workers: int = 1,
        timeout_seconds: float = 5.0,
        memory_mb: int = 1024,
        cache_size: int = 200_000,
        answer_format: AnswerFormat = "auto",
        marker: str = "A",
    ) -> None:
        if answer_format not in ANSWER_FORMATS:
            hint = suggest(str(answer_format), ANSWER_FORMATS)
            raise InputError(f"reward.answer_format: unknown {answer_format!r}.{hint}")
        if answer_format == "marker" and not marker:
            raise InputError("reward.marker: is empty; give the text that precedes the answer")
        limits = {"workers": (workers, 1), "timeout_seconds": (timeout_seconds, 0.1)}
        limits |= {"memory_mb": (memory_mb, 256), "cache_size": (cache_size, 0)}
        for key, (value, least) in limits.items():
            if value < least:
                raise InputError(f"reward.{key}: {value} is too small; give at least {least}")
        self._form: AnswerFormat = answer_format
        self._marker = marker
        self._cache: OrderedDict[tuple[str, str], Outcome] = OrderedDict()
        self._cache_size = cache_size
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._pool = WorkerPool(
            "harness.rewards.worker", workers=workers, seconds=timeout_seconds, megabytes=memory_mb
        )
        self.stats = GraderStats()

    def __enter__(self) -> MathGrader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes. The grader may be used again; it starts new ones."""
        self._pool.close()

    @property
    def processes(self) -> int:
        """Worker processes alive now."""
        return self._pool.started

    def grade(
        self,
        golds: Sequence[str],
        completions: Sequence[str],
        finished: Sequence[bool] | None = None,
    ) -> list[Verdict]:
        """The verdict on each completion, in order.

        Args:
            golds: the gold answer for each completion.
            completions: the model's texts, without prompts.
            finished: False where the completion was cut at the length limit; None means that all
                ended by themselves.

        Raises:
            ValueError: lengths differ. InputError: an empty gold. CellError: no grading process
                can be started.
        """
        ended = [True] * len(completions) if finished is None else finished
        if not len(golds) == len(completions) == len(ended):
            raise ValueError(f"{len(golds)} golds, {len(completions)} texts, {len(ended)} flags")
        verdicts: list[Verdict | None] = []
        pairs: list[tuple[str, str] | None] = []
        for i, (gold, text, done) in enumerate(zip(golds, completions, ended, strict=True)):
            if not gold.strip():
                raise InputError(f"gold answer {i} is empty; give each problem an answer")
            answer = final_answer(text, finished=done, form=self._form, marker=self._marker)
            if answer is None or not (answer := tidy(answer)) or len(answer) > LONGEST_ANSWER:
                verdicts.append(Verdict(Outcome.NO_ANSWER if done else Outcome.TRUNCATED, None))
                pairs.append(None)
            else:
                verdicts.append(None)
                pairs.append((tidy(gold), answer))
        outcomes = iter(self._compare([pair for pair in pairs if pair is not None]))
        return [
            verdict or Verdict(next(outcomes), canonical(pair[1] if pair else ""))
            for verdict, pair in zip(verdicts, pairs, strict=True)
        ]

    def check_golds(self, ids: Sequence[str], golds: Sequence[str]) -> list[str]:
        """Refuse golds that could not be graded: empty ones, and those not equal to themselves.

        Returns:
            The ids whose gold math-verify reads as no value (``05:00``): for these an answer is
            right only in the same text.

        Raises:
            InputError: naming the problem, its gold answer and the mend.
        """
        for name, gold in zip(ids, golds, strict=True):
            if not tidy(gold):
                raise InputError(f"problem {name}: its gold answer is empty; correct or drop it")
        pairs = [(tidy(gold), tidy(gold)) for gold in golds]
        asked = sorted({pair for pair in pairs if surely_equal(*pair) is None})
        replies = dict(zip(asked, self._pool.run(asked), strict=True))
        as_text = []
        for name, gold, pair in zip(ids, golds, pairs, strict=True):
            reply = replies.get(pair)
            if reply is None:
                continue
            if reply.failure is not None or not reply.value.get("equal"):
                raise InputError(
                    f"problem {name}: the grader cannot handle its gold answer {gold!r} "
                    f"({reply.failure or 'unreadable'}); correct it or drop the problem"
                )
            if not reply.value["as_value"]:
                as_text.append(name)
        return as_text

    def _compare(self, pairs: Sequence[tuple[str, str]]) -> list[Outcome]:
        """Outcome of each (gold, answer); equal pairs are compared once."""
        if os.getpid() != self._owner:  # forked: the parent's lock may have been held
            self._lock, self._owner = threading.Lock(), os.getpid()
        with self._lock:
            self.stats.calls += len(pairs)
            found: dict[tuple[str, str], Outcome] = {}
            unknown: list[tuple[str, str]] = []
            for pair in pairs:
                if pair in found:
                    self.stats.cached += 1
                elif (certain := surely_equal(*pair)) is not None:
                    self.stats.fast += 1
                    found[pair] = Outcome.CORRECT if certain else Outcome.WRONG
                elif pair in self._cache:
                    self.stats.cached += 1
                    self._cache.move_to_end(pair)
                    found[pair] = self._cache[pair]
                else:
                    found[pair] = Outcome.ERROR
                    unknown.append(pair)
            for pair, reply in zip(unknown, self._pool.run(unknown), strict=True):
                found[pair] = self._settle(pair, reply)
            return [found[pair] for pair in pairs]

    def _settle(self, pair: tuple[str, str], reply: Reply) -> Outcome:
        self.stats.verified += 1
        if reply.failure is Failure.TIMEOUT:
            outcome = Outcome.TIMEOUT
            self.stats.timeouts += 1
        elif reply.failure is not None or "error" in reply.value:
            self.stats.errors += 1
            return Outcome.ERROR  # perhaps the machine's fault: not kept
        else:
            outcome = Outcome.CORRECT if reply.value["equal"] else Outcome.WRONG
        if self._cache_size:
            self._cache[pair] = outcome
            if len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        return outcome
