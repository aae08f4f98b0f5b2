"""What is claimed of the arms, declared before any of them runs."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, model_validator

from harness.spec.strict import Strict

METRIC = re.compile(r"avg|greedy|(?:pass|maj)@[1-9][0-9]*")
NAMED = "baseline"  # every arm against the baseline


class VerdictSpec(Strict):
    """The comparisons that the experiment is about, and what would answer them.

    ``margin`` is the smallest difference that matters, as a share (0.02 is two points of a
    hundred); two arms are equivalent where theirs is shown to be smaller. ``family`` lists the
    comparisons, whose p-values are adjusted together, over all the tests that are named;
    ``baseline`` is every arm against the baseline. ``power`` is what a design must reach for
    a claim. ``assumed_sd`` stands in for a pilot: the standard deviation, over seeds, of the
    difference between two arms' scores.
    """

    metric: str = "avg"  # avg, greedy, pass@K, maj@K
    test: str = "all"  # a test set's name, or all
    margin: float = Field(gt=0, lt=1)
    alpha: float = Field(default=0.05, gt=0, lt=0.5)
    power: float = Field(default=0.8, gt=0, lt=1)
    family: Literal["baseline"] | tuple[tuple[str, str], ...] = NAMED
    assumed_sd: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _sound(self) -> VerdictSpec:
        if not METRIC.fullmatch(self.metric):
            raise ValueError(f"metric {self.metric!r}: give avg, greedy, pass@K or maj@K")
        if self.family == NAMED:
            return self
        if not self.family:
            raise ValueError("family is empty: name one comparison or more, or say baseline")
        pairs = [frozenset(pair) for pair in self.family]
        if len(set(pairs)) != len(pairs) or any(len(pair) < 2 for pair in pairs):
            raise ValueError(
                f"family {[list(pair) for pair in self.family]}: give pairs of two different arms, "
                "each pair once"
            )
        return self

    def check(
        self, arms: tuple[str, ...], tests: tuple[str, ...], ks: tuple[int, ...], greedy: bool
    ) -> None:
        """Refuse what the rest of the spec cannot answer.

        Args:
            arms: those that a comparison may name, controls included.
            tests: the test sets.
            ks: the K at which Pass@K and Maj@K are evaluated.
            greedy: whether a greedy completion is drawn.

        Raises:
            ValueError: an unknown arm, test or K, or no greedy completion to judge by.
        """
        if self.test not in ("all", *tests):
            raise ValueError(f"verdict.test {self.test!r} is not all nor among {list(tests)}")
        kind, _, k = self.metric.partition("@")
        if k and int(k) not in ks:
            raise ValueError(f"verdict.metric {self.metric}: K is not in evaluation.k {list(ks)}")
        if kind == "greedy" and not greedy:
            raise ValueError("verdict.metric greedy, and evaluation.greedy is off; turn it on")
        named = [] if self.family == NAMED else [a for pair in self.family for a in pair]
        if unknown := [arm for arm in named if arm not in arms]:
            raise ValueError(f"verdict.family: {unknown} are not among arms {list(arms)}")


CONTROLS = ("base", "placebo")
