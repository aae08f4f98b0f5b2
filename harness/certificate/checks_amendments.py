"""That what was declared anew after the lock was written is recorded, and changes no cell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from harness.amendments import applied, broken_links, may_change
from harness.certificate.compare import ABSENT, equal, look_up
from harness.certificate.design import Design
from harness.certificate.evidence import LOCK, Evidence
from harness.certificate.finding import Violation, violation
from harness.certificate.records import Amendment

NAME = "amendments"


def check_amendments(evidence: Evidence, design: Design) -> Iterator[Violation]:
    """Each follows from what stood before it, and changes nothing that a cell computes."""
    made, raw = design.lock.amendments, evidence.raw_lock
    broken = broken_links(raw)
    for place in broken:
        yield violation(
            NAME, (), f"{LOCK}: amendments.{place}.chain",
            "the hash of this amendment, and of the lock and the amendments before it",
            made[place].chain, "it or what stands before it was changed after it was written",
        )  # fmt: skip
    begun, time = 0, None
    for place, amendment in enumerate(made):
        key = f"{LOCK}: amendments.{place}"
        if amendment.number != place + 1:
            yield violation(
                NAME, (), f"{key}.number", place + 1, amendment.number,
                "amendments are not numbered 1, 2, …: one was taken away",
            )  # fmt: skip
        now = _moment(amendment.time)
        if now is None or (time is not None and now < time):
            yield violation(
                NAME, (), f"{key}.time", "a time after the one before", amendment.time,
                "the amendment's time does not follow",
            )  # fmt: skip
        if not max(begun, amendment.cells_done) <= amendment.cells_begun <= len(evidence.cells):
            yield violation(
                NAME, (), f"{key}.cells_begun",
                f"{max(begun, amendment.cells_done)} to {len(evidence.cells)}",
                amendment.cells_begun, "so many cells cannot have begun by then",
            )  # fmt: skip
        begun, time = amendment.cells_begun, now or time
        yield from _changes(key, amendment, applied(raw, place))


def _moment(text: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo else None


def _changes(key: str, amendment: Amendment, before: Mapping[str, Any]) -> Iterator[Violation]:
    """The old values are those in force by then, and the new ones are free to be changed."""
    for path, change in amendment.changes.items():
        found = look_up(before["spec"], path)
        known = None if found is ABSENT else found
        if not equal(known, change.old):
            yield violation(
                NAME, (), f"{key}.changes.{path}.old", known, change.old,
                "the old value is not the one that was in force",
            )  # fmt: skip
        if not may_change(path, change.old, change.new):
            yield violation(
                NAME, (), f"{key}.changes.{path}", "a value that no cell computes with, or more "
                "seeds or arms at the end", change.new,
                "an amendment may not change what cells compute, nor take away seeds or arms",
            )  # fmt: skip
    for part in ("arms", "streams"):
        for name in getattr(amendment.adds, part):
            if name in (before.get(part) or {}):
                yield violation(
                    NAME, (), f"{key}.adds.{part}.{name}", "something new", name,
                    "an amendment may not promise anew what the lock has promised",
                )  # fmt: skip
