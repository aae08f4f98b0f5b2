"""Episodes of several turns while they are sampled: what an environment answers and pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from harness.errors import CellError
from harness.tasks.task import Environment, Problem


@dataclass(frozen=True)
class Episodes:
    """An environment, and the problem of each prompt of a draw."""

    environment: Environment
    problems: Sequence[Problem]

    @property
    def room(self) -> int:
        """Tokens that the environment may show after the first turn: at most its characters."""
        return max(self.environment.room(problem) for problem in self.problems)


class Dialogues:
    """The episodes of a draw in progress, ``group_size`` rows for each prompt.

    Attributes:
        turns: by row, the token that ended each turn -> its score.
        texts: by row, what the policy wrote in each turn that it ended.
        shown: by row, what the environment showed after each of them.
    """

    def __init__(
        self, episodes: Episodes, group_size: int, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.environment = episodes.environment
        self.tokenizer = tokenizer
        self.room = episodes.room
        self.problems = [p for p in episodes.problems for _ in range(group_size)]
        self.turns: list[dict[int, float]] = [{} for _ in self.problems]
        self.texts: list[list[str]] = [[] for _ in self.problems]
        self.shown: list[list[str]] = [[] for _ in self.problems]
        self._begun = [0 for _ in self.problems]  # the present turn's first token
        self._given = [0 for _ in self.problems]

    def reply(self, row: int, ids: Sequence[int]) -> list[int] | None:
        """What the environment shows to a row whose turn has just ended; None at the end.

        Args:
            row: of the draw.
            ids: all tokens of its completion so far, the one that ended the turn last.

        Raises:
            CellError: a score outside [0, 1], or more text than the environment announced.
        """
        problem = self.problems[row]
        self.texts[row].append(self._text(ids[self._begun[row] :]))
        text, score = self.environment.step(problem, self.texts[row])
        if not 0.0 <= score <= 1.0:
            raise CellError(f"the environment scores a turn of problem {problem.id!r} {score}")
        self.turns[row][len(ids) - 1] = score
        if text is None:
            return None
        shown = [int(i) for i in self.tokenizer(text, add_special_tokens=False)["input_ids"]]  # type: ignore[union-attr]
        self._given[row] += len(shown)
        if not shown or self._given[row] > self.room:
            raise CellError(
                f"the environment shows {text!r} in problem {problem.id!r}, {self._given[row]} "
                f"tokens in all; it announced 1 to {self.room}"
            )
        self.shown[row].append(text)
        self._begun[row] = len(ids) + len(shown)
        return shown

    def close(self, row: int, ids: Sequence[int]) -> None:
        """Note how a row ended; a turn that was cut has no score and is not answered."""
        last = len(ids) - 1
        if last not in self.turns[row]:
            self.turns[row][last] = 0.0
            self.texts[row].append(self._text(ids[self._begun[row] :]))

    def answer(self, row: int) -> str:
        """The last turn's text, which the verdict is on; empty where it was not reached."""
        texts = self.texts[row]
        return texts[-1] if len(texts) == self.environment.turns(self.problems[row]) else ""

    def transcript(self, row: int) -> str:
        """Both sides of an episode after the prompt, a turn or an answer to it on each line."""
        lines = [self.texts[row][0]]
        for shown, text in zip(self.shown[row], self.texts[row][1:], strict=False):
            lines += [shown, text]
        return "\n".join(lines)

    def _text(self, ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text if isinstance(text, str) else "".join(text)
