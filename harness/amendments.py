"""Amendments to ``spec.lock.yaml``: what was declared anew after the lock was written, and when.

The lock itself is never rewritten. An amendment is appended with its time, its reason, the old and
the new values and how many cells had begun by then; each holds the hash of all that stands before
it, the lock included. What it touches is exploratory from then on, unless no cell had begun.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from harness.identity import difference, digest
from harness.store import chain_breaks, chained

KEY = "amendments"
# What the report reads and no cell does. Lists of the second kind may only grow: a seed or an arm
# that is taken away is a result that is hidden.
AMENDABLE = ("verdict", "baseline", "ladder", "question", "seeds", "arms")
GROWING = ("seeds", "arms")


def amendments(lock: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Those of a lock, in order."""
    return lock.get(KEY) or ()


def applied(lock: Mapping[str, Any], count: int | None = None) -> dict[str, Any]:
    """The lock with its first ``count`` amendments put in (all when None): spec, arms, streams."""
    found = dict(lock)
    for amendment in amendments(lock)[:count]:
        spec, adds = copy.deepcopy(found["spec"]), amendment.get("adds") or {}
        for path, change in amendment["changes"].items():
            *heads, last = path.split(".")
            place = spec
            for head in heads:
                place = place.setdefault(head, {})
            place[last] = change["new"]
        found["spec"] = spec
        for part in ("arms", "streams"):
            found[part] = {**(found.get(part) or {}), **(adds.get(part) or {})}
    return found


def promised(lock: Mapping[str, Any]) -> dict[str, Any]:
    """The lock as it stood when the first cell began: with the amendments made before that."""
    early = 0
    for amendment in amendments(lock):
        if amendment["cells_begun"]:
            break
        early += 1
    return applied(lock, early)


def late(lock: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The amendments made after a cell had begun, and any that follow them."""
    found = list(amendments(lock))
    while found and not found[0]["cells_begun"]:
        found.pop(0)
    return found


def spec_changes(
    before: Mapping[str, Any], now: Mapping[str, Any]
) -> tuple[dict[str, tuple[Any, Any]], dict[str, tuple[Any, Any]]]:
    """Where two specs differ: what an amendment may change, and what it may not.

    ``runtime`` moves no number and is not compared.
    """
    old, new = dict(before), dict(now)
    old.pop("runtime", None)
    new.pop("runtime", None)
    free: dict[str, tuple[Any, Any]] = {}
    bound: dict[str, tuple[Any, Any]] = {}
    for path, (was, given) in difference(old, new).items():
        (free if may_change(path, was, given) else bound)[path] = was, given
    return free, bound


def may_change(path: str, old: Any, new: Any) -> bool:
    """Whether an amendment may make this change of the spec."""
    head = path.partition(".")[0]
    if head in GROWING:
        both = isinstance(old, Sequence) and isinstance(new, Sequence)
        return path == head and both and list(new[: len(old)]) == list(old) and len(new) > len(old)
    return head in AMENDABLE


def amended(
    lock: Mapping[str, Any],
    new: Mapping[str, Any],
    changes: Mapping[str, tuple[Any, Any]],
    *,
    why: str,
    time: str,
    begun: int,
    done: int,
) -> dict[str, Any]:
    """The lock with one more amendment.

    Args:
        lock: as it stands.
        new: the lock that the changed spec would have; arms and streams are taken from it.
        changes: dotted path in the spec -> (old, new).
        begun, done: how many cells had begun, and had ended, by now.
    """
    before = applied(lock)
    adds = {
        part: {name: value for name, value in new[part].items() if name not in before[part]}
        for part in ("arms", "streams")
    }
    record = {
        "number": len(amendments(lock)) + 1,
        "time": time,
        "why": why,
        "cells_begun": begun,
        "cells_done": done,
        "changes": {path: {"old": was, "new": given} for path, (was, given) in changes.items()},
        "adds": adds,
    }
    last = amendments(lock)[-1]["chain"] if amendments(lock) else root(lock)
    return {**lock, KEY: [*amendments(lock), chained(record, last)]}


def root(lock: Mapping[str, Any]) -> str:
    """The hash of the lock as it was first written, on which the chain of amendments stands."""
    return digest({key: value for key, value in lock.items() if key != KEY})


def broken_links(lock: Mapping[str, Any]) -> list[int]:
    """Positions of the amendments that are not what was written after what stands before them."""
    return chain_breaks([dict(a) for a in amendments(lock)], root(lock))
