"""A dataclass tree as plain JSON, and its hash: what a run *is*."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def tree(value: Any) -> Any:
    """Plain JSON of a value; a dataclass carries its class name and its ``version``, if any.

    Raises:
        TypeError: a value of a type that has no stable form.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: tree(getattr(value, f.name)) for f in dataclasses.fields(value)}
        head: dict[str, Any] = {"part": type(value).__name__} | _origin(type(value))
        version = getattr(value, "version", None)
        return head | ({"version": version} if version is not None else {}) | fields
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): tree(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [tree(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no stable form")


def _origin(kind: type) -> dict[str, str]:
    """Where a class from outside the harness is defined: a plugin's ``GAE`` is not ours."""
    if kind.__module__.partition(".")[0] == __name__.partition(".")[0]:
        return {}
    source = getattr(sys.modules.get(kind.__module__), "__file__", None)
    content = Path(source).read_bytes() if source else repr(kind).encode()
    return {"module": f"{kind.__module__}#{hashlib.sha256(content).hexdigest()[:16]}"}


def canonical(value: Any) -> str:
    """JSON text with one spelling for equal content."""
    return json.dumps(tree(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest(value: Any) -> str:
    """SHA-256 of the canonical JSON."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def stream_seed(*names: Any) -> int:
    """A 63-bit seed from a path of names, so that random streams are separate and stateless.

    The stream of (run seed, "sampling", step) never depends on what other streams consumed, so a
    resumed run needs no generator state and two arms of one seed share what they should share.
    """
    data = json.dumps(list(names)).encode()
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big") >> 1


def difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Where two trees of parts differ: dotted path -> (a's, b's).

    A part of another class differs as a whole; of one class, field by field.
    """
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted(a.keys() | b.keys()):
        left, right = a.get(key), b.get(key)
        if left == right:
            continue
        same = isinstance(left, Mapping) and isinstance(right, Mapping)
        if same and left.get("part") == right.get("part"):  # type: ignore[union-attr]
            inner = difference(left, right)  # type: ignore[arg-type]
            found |= {f"{key}.{path}": pair for path, pair in inner.items()}
        else:
            found[key] = (left, right)
    return found
