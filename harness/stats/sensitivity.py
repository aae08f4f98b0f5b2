"""The smallest change to an analysis that changes its verdict.

The analysis is a function ``analyse(dropped, margin, settings) -> label``: which seeds to leave
out, which margin, and any named choices (unit of the budget, grader, metric). Everything that was
chosen is varied from what was declared, one thing at a time, and what flips the label is listed. A
verdict that one seed or a slightly other margin overturns should be read with that in mind; the
list is no menu to choose an analysis from.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.errors import InputError

Analysis = Callable[[frozenset[int], float, Mapping[str, Any]], str]
MOST_SUBSETS = 20_000


@dataclass(frozen=True)
class SeedFlip:
    """Seeds whose absence changes the label, and to what."""

    dropped: tuple[int, ...]
    label: str


@dataclass(frozen=True)
class MarginFlip:
    """A margin at which the label changes.

    Attributes:
        margin: midpoint of the bracket in which it changes, at most ``tolerance`` wide.
        below, above: labels on either side of it.
    """

    margin: float
    below: str
    above: str


@dataclass(frozen=True)
class SettingFlip:
    """A named choice, and a value of it that changes the label."""

    name: str
    value: Any
    label: str


@dataclass(frozen=True)
class Sensitivity:
    """What changes a verdict.

    Attributes:
        label: as declared.
        seeds: the flips with the fewest seeds left out; empty if none up to ``dropped_up_to``.
        margins: all changes in the range searched, rising.
        settings: all single choices that flip it.
        tried: how many analyses were made.
    """

    label: str
    seeds: tuple[SeedFlip, ...]
    dropped_up_to: int
    margins: tuple[MarginFlip, ...]
    settings: tuple[SettingFlip, ...]
    tried: int

    @property
    def fewest_seeds(self) -> int | None:
        """How many seeds must go before the label changes; None if it never did."""
        return len(self.seeds[0].dropped) if self.seeds else None

    def nearest_margin(self, declared: float) -> float | None:
        """The margin nearest to the declared one at which the label changes."""
        return min((f.margin for f in self.margins), key=lambda m: abs(m - declared), default=None)


def sensitivity(
    analyse: Analysis,
    seeds: Sequence[int],
    margin: float,
    *,
    settings: Mapping[str, Any] | None = None,
    alternatives: Mapping[str, Sequence[Any]] | None = None,
    drop: int | None = None,
    margins: tuple[float, float] | None = None,
    steps: int = 64,
    tolerance: float = 1e-4,
) -> Sensitivity:
    """Vary seeds, margin and settings one at a time around what was declared.

    Args:
        settings: declared choices, passed on to ``analyse``.
        alternatives: choice -> other values to try.
        drop: leave out up to so many seeds, 2 if not given and so many can go; stops at the first
            number that flips the label.
        margins: range to search; a tenth of the declared to ten times it if not given.
        steps: margins looked at in the range, evenly in the logarithm, before bisecting between
            neighbours whose labels differ. Labels that change and change back between two
            neighbours are missed.
        tolerance: where bisection ends, as a share of the declared margin.

    Raises:
        InputError: an alternative of no declared choice, no seeds to drop, a bad range, or more
            subsets of seeds than ``MOST_SUBSETS``.
    """
    settings, alternatives = dict(settings or {}), dict(alternatives or {})
    drop = min(2, len(seeds) - 1) if drop is None else drop
    low, high = margins or (margin / 10, margin * 10)
    _check(seeds, settings, alternatives, drop, low, high)
    tried = 0

    def label(
        dropped: tuple[int, ...] = (), at: float = margin, choices: Mapping[str, Any] = settings
    ) -> str:
        nonlocal tried
        tried += 1
        return analyse(frozenset(dropped), at, choices)

    declared = label()
    return Sensitivity(
        label=declared,
        seeds=_seed_flips(lambda gone: label(dropped=gone), seeds, drop, declared),
        dropped_up_to=drop,
        margins=_margin_flips(lambda at: label(at=at), low, high, steps, tolerance * margin),
        settings=tuple(
            SettingFlip(name, value, found)
            for name, values in alternatives.items()
            for value in values
            if (found := label(choices=settings | {name: value})) != declared
        ),
        tried=tried,
    )


def _seed_flips(
    label: Callable[[tuple[int, ...]], str], seeds: Sequence[int], drop: int, declared: str
) -> tuple[SeedFlip, ...]:
    for count in range(1, drop + 1):
        flips = [
            SeedFlip(gone, found)
            for gone in itertools.combinations(seeds, count)
            if (found := label(gone)) != declared
        ]
        if flips:
            return tuple(flips)
    return ()


def _margin_flips(
    label: Callable[[float], str], low: float, high: float, steps: int, tolerance: float
) -> tuple[MarginFlip, ...]:
    grid = np.geomspace(low, high, steps).tolist()
    labels = [label(at) for at in grid]
    flips = []
    for a, b, below, above in zip(grid, grid[1:], labels, labels[1:], strict=False):
        if below == above:
            continue
        while b - a > tolerance:
            middle = (a + b) / 2
            found = label(middle)
            if found == below:
                a = middle
            else:
                b, above = middle, found
        flips.append(MarginFlip((a + b) / 2, below, above))
    return tuple(flips)


def _check(
    seeds: Sequence[int],
    settings: Mapping[str, Any],
    alternatives: Mapping[str, Any],
    drop: int,
    low: float,
    high: float,
) -> None:
    unknown = sorted(alternatives.keys() - settings.keys())
    if unknown:
        raise InputError(f"alternatives to {', '.join(unknown)}: no such choice was declared")
    if not 0 <= drop < len(seeds):
        raise InputError(f"drop = {drop} of {len(seeds)} seeds: at least one must stay")
    if not 0 < low < high:
        raise InputError(f"margins from {low} to {high}: need 0 < from < to")
    subsets = sum(math.comb(len(seeds), count) for count in range(1, drop + 1))
    if subsets > MOST_SUBSETS:
        raise InputError(
            f"drop = {drop} of {len(seeds)} seeds makes {subsets:,} subsets; lower drop"
        )
