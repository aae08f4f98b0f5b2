"""What an arm declares: parts that are values with versions, knobs whose defaults can be tuned."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any, ClassVar, get_origin

from harness.arm import PARTS, Arm
from harness.conformance.finding import Verdict, failed, not_applicable, passed
from harness.errors import InputError
from harness.identity import canonical
from harness.knobs import Range, knobs, settings, turn


def check_parts(arm: Arm) -> Verdict:
    """Every part is frozen, hashable, versioned, and has a stable form as JSON."""
    found = list(_values(arm))
    for path, value in found:
        fault = _fault(value)
        if fault:
            return failed(f"{path}: {type(value).__name__} {fault}")
    if hash(arm) != hash(dataclasses.replace(arm)) or arm != dataclasses.replace(arm):
        return failed("a copy of the arm is not equal to it")
    if len(canonical(arm)) != len(json.dumps(json.loads(canonical(arm)), **_COMPACT)):
        return failed("the arm's JSON does not read back as it was written")
    return passed(f"{len(found)} values frozen, hashable, with a version and a stable form")


_COMPACT: dict[str, Any] = {"separators": (",", ":"), "ensure_ascii": False}


def _values(arm: Arm) -> Iterator[tuple[str, Any]]:
    """Every part, and every value inside one, by dotted path."""
    for name in PARTS:
        part = getattr(arm, name)
        for path, value in [(name, part)] if name != "shaping" else _indexed(name, part):
            if value is not None:
                yield from _inside(path, value)


def _indexed(name: str, items: tuple[Any, ...]) -> list[tuple[str, Any]]:
    return [(f"{name}.{index}", item) for index, item in enumerate(items)]


def _inside(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    yield path, value
    for field in dataclasses.fields(value):
        child = getattr(value, field.name)
        if dataclasses.is_dataclass(child) and not isinstance(child, type):
            yield from _inside(f"{path}.{field.name}", child)


def _fault(part: Any) -> str | None:
    """What is wrong with a part as a value, if anything is."""
    kind = type(part)
    if "__dataclass_params__" not in vars(kind):
        own = [name for name, hint in _hints(kind).items() if not _is_class_variable(hint)]
        if own:
            return f"is no dataclass, so {own[0]} is no field; write @dataclass(frozen=True)"
        return "is no dataclass of its own; write @dataclass(frozen=True) above it"
    if not kind.__dataclass_params__.frozen:
        return "is not frozen; write @dataclass(frozen=True)"
    version = getattr(part, "version", None)
    if not isinstance(version, int) or isinstance(version, bool):
        return f"has version {version!r}; write `version: ClassVar[int] = 1`"
    for field in dataclasses.fields(part):
        try:
            hash(getattr(part, field.name))
        except TypeError:
            return f"has an unhashable {field.name}; make it a tuple or a frozen dataclass"
    try:
        canonical(part)
    except (TypeError, ValueError) as error:
        return f"cannot be written as JSON: {error}"
    return None


def _hints(kind: type) -> dict[str, Any]:
    return vars(kind).get("__annotations__", {})


def _is_class_variable(hint: Any) -> bool:
    return get_origin(hint) is ClassVar or (isinstance(hint, str) and "ClassVar" in hint)


def check_knobs(arm: Arm) -> Verdict:
    """Each default lies in its own range, and both ends of the range make an arm."""
    found, values = knobs(arm), settings(arm)
    if not found:
        return not_applicable("it has no number that tuning may set")
    for path, space in found.items():
        if not _inside_range(values[path], space):
            return failed(f"{path} is {values[path]!r}, outside {_shown(space)}")
        for end in space.choices or (space.low, space.high):
            try:
                turn(arm, path, end)
            except InputError as error:
                return failed(f"{path} = {end!r} makes no arm: {error}")
    ranges = ", ".join(f"{path} {values[path]} of {_shown(s)}" for path, s in found.items())
    return passed(ranges)


def _inside_range(value: Any, space: Range) -> bool:
    if space.choices is not None:
        return value in space.choices
    assert space.low is not None
    assert space.high is not None
    return isinstance(value, (int, float)) and space.low <= value <= space.high


def _shown(space: Range) -> str:
    if space.choices is not None:
        return "{" + ", ".join(map(str, space.choices)) + "}"
    return f"[{space.low}, {space.high}]"
