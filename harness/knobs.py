"""Numbers that tuning may set, declared on the field they belong to, and their search space."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from harness.errors import InputError, shown, suggest

FEW_TRIALS_PER_KNOB = 2


def is_thin(trials: int, searched: int) -> bool:
    """Whether so few trials can hardly find good values of so many numbers."""
    return trials < FEW_TRIALS_PER_KNOB * searched


@dataclass(frozen=True)
class Range:
    """The values that tuning may try: an interval, or a list of choices."""

    low: float | None = None
    high: float | None = None
    log: bool = False
    choices: tuple[float | int | str, ...] | None = None

    def __post_init__(self) -> None:
        interval = self.low is not None and self.high is not None
        if interval == (self.choices is not None):
            given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
            found = {name: v for name, v in given.items() if v is not None and name != "log"}
            raise InputError(f"search range {shown(found)}: give either low and high, or choices")
        if self.choices is not None and not self.choices:
            raise InputError("search range: choices is empty; give the values to try")
        if interval and not (self.low < self.high):  # type: ignore[operator]
            raise InputError(f"search range: low {self.low} must be below high {self.high}")
        if self.log and interval and self.low <= 0:  # type: ignore[operator]
            raise InputError(f"search range: log scale needs low > 0, found {self.low}")

    def at(self, quantile: float) -> float | int | str:
        """The value at a quantile in [0, 1) of the range: uniform, log-uniform, or by choice."""
        if self.choices is not None:
            return self.choices[min(int(quantile * len(self.choices)), len(self.choices) - 1)]
        assert self.low is not None
        assert self.high is not None
        if self.log:
            return float(self.low * (self.high / self.low) ** quantile)
        return float(self.low + (self.high - self.low) * quantile)


def first_value(default: Any, values: Range) -> Any:
    """What trial 0 tries: the default, or the middle of a range that leaves the default out."""
    if values.choices is not None:
        return default if default in values.choices else values.at(0.5)
    assert values.low is not None
    assert values.high is not None
    inside = isinstance(default, (int, float)) and values.low <= default <= values.high
    return default if inside else values.at(0.5)


def knob(
    default: Any,
    *,
    low: float | None = None,
    high: float | None = None,
    log: bool = False,
    choices: tuple[float | int | str, ...] | None = None,
) -> Any:
    """A dataclass field that tuning may set: its default, its range and its meaning on one line."""
    return dataclasses.field(default=default, metadata={"range": Range(low, high, log, choices)})


def knobs(value: Any, prefix: str = "") -> dict[str, Range]:
    """Every knob below a dataclass value, by dotted path."""
    found: dict[str, Range] = {}
    for path, _, field in _leaves(value, prefix):
        if "range" in field.metadata:
            found[path] = field.metadata["range"]
    return found


def settings(value: Any, prefix: str = "") -> dict[str, Any]:
    """Every leaf field below a dataclass value, by dotted path."""
    return {path: leaf for path, leaf, _ in _leaves(value, prefix)}


def turn(value: Any, path: str, setting: Any) -> Any:
    """A copy of a dataclass value with the field at a dotted path set.

    Raises:
        InputError: no such field.
    """
    head, _, rest = path.partition(".")
    if isinstance(value, tuple) and head.isdigit() and int(head) < len(value):
        at = int(head)
        changed = turn(value[at], rest, setting) if rest else setting
        return (*value[:at], changed, *value[at + 1 :])
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        raise InputError(f"no setting {path!r}: {shown(value)} has no settings of its own")
    names = [f.name for f in dataclasses.fields(value)]
    if head not in names:
        raise InputError(f"no setting {head!r} on {type(value).__name__}.{suggest(head, names)}")
    if rest:
        setting = turn(getattr(value, head), rest, setting)
    return dataclasses.replace(value, **{head: setting})


def _leaves(value: Any, prefix: str) -> Iterator[tuple[str, Any, dataclasses.Field[Any]]]:
    for field in dataclasses.fields(value):
        child = getattr(value, field.name)
        path = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(child):
            yield from _leaves(child, f"{path}.")
        elif isinstance(child, tuple) and any(map(dataclasses.is_dataclass, child)):
            for index, item in enumerate(child):
                yield from _leaves(item, f"{path}.{index}.")
        else:
            yield path, child, field
