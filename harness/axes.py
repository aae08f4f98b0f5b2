"""Where arms differ, as designs need it: one axis between two rungs, or a full factorial.

Works on trees of parts (``harness.arm.parts``, or ``parts`` in a lock or ``run.json``), so that
arms are told apart by what they are and never by their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from harness.identity import difference

Parts = Mapping[str, Any]


@dataclass(frozen=True)
class Axis:
    """One difference between two arms.

    Attributes:
        path: dotted, among the parts: ``scale``, ``advantage.gae_lambda``.
        before, after: plain JSON; a whole part where its class changes.
    """

    path: str
    before: Any
    after: Any


def axes(a: Parts, b: Parts) -> tuple[Axis, ...]:
    """Every axis in which b differs from a, by path."""
    return tuple(Axis(path, *pair) for path, pair in difference(a, b).items())


@dataclass(frozen=True)
class Factorial:
    """A full two-level factorial design.

    Attributes:
        axes: the parts in which the two ends differ, in the order of the parts.
        levels: arm -> the axes in which it has the last arm's part; all others are the first's.
    """

    axes: tuple[str, ...]
    levels: Mapping[str, frozenset[str]]

    @property
    def ends(self) -> tuple[str, str]:
        """The arm with none of the last arm's parts, and the arm with all of them."""
        by_level = {level: arm for arm, level in self.levels.items()}
        return by_level[frozenset()], by_level[frozenset(self.axes)]


def factorial(arms: Mapping[str, Parts]) -> Factorial:
    """The design that these arms make up; the first and the last are its ends.

    Raises:
        ValueError: they are no full factorial; the message says which arm or combination.
    """
    names = list(arms)
    first, last = (arms[names[0]], arms[names[-1]]) if names else ({}, {})
    axes_ = tuple(key for key in first if first[key] != last.get(key))
    if not axes_:
        raise ValueError("the first and the last arm have the same parts, so there is no axis")
    levels: dict[str, frozenset[str]] = {}
    for name, parts in arms.items():
        for key in parts.keys() | first.keys():
            if parts.get(key) != first.get(key) and parts.get(key) != last.get(key):
                raise ValueError(f"{name} has a {key} of neither {names[0]} nor {names[-1]}")
        level = frozenset(key for key in axes_ if parts.get(key) == last[key])
        twin = next((other for other, known in levels.items() if known == level), None)
        if twin is not None:
            raise ValueError(f"{name} and {twin} have the same parts")
        levels[name] = level
    for chosen in subsets(axes_):
        if chosen not in levels.values():
            shown = ", ".join(key for key in axes_ if key in chosen)
            raise ValueError(f"no arm has {names[-1]}'s {shown} and else {names[0]}'s parts")
    return Factorial(axes_, levels)


def subsets(items: Sequence[str]) -> list[frozenset[str]]:
    """All subsets, the empty one first, by size."""
    return [frozenset(c) for size in range(len(items) + 1) for c in combinations(items, size)]
