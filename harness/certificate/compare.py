"""Comparing what was recorded with what was pinned: strict on kind, tolerant of rounding alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

# Sums of integers below 2^53 are exact and FLOPs are integers; what is left is JSON's last digit.
FLOPS_TOLERANCE = 1e-9
# A mean in float64 times its count gives the integer back to about 1e-12 of it.
MEAN_TOLERANCE = 1e-9
# Scores are float32: seven digits.
SCORE_TOLERANCE = 1e-6
# Loss terms are summed in float32 over thousands of tokens, over micro-batches and minibatches.
LOSS_TOLERANCE = 1e-5
# Weights are float64 and sum to their target within rounding.
WEIGHT_TOLERANCE = 1e-9
# A rate is a product of two float64 numbers.
RATE_TOLERANCE = 1e-12

ABSENT = "(absent)"


def close(a: float, b: float, relative: float, absolute: float = 0.0) -> bool:
    """Equal within a tolerance; NaN is close to nothing."""
    return math.isclose(a, b, rel_tol=relative, abs_tol=absolute)


def equal(a: Any, b: Any) -> bool:
    """Equal as JSON values; 1 and 1.0 are, 1 and true are not."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(equal(v, b[k]) for k, v in a.items())
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    numbers = type(a) in (int, float) and type(b) in (int, float)
    return (numbers or type(a) is type(b)) and a == b


def leaves_that_differ(expected: Any, found: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two trees differ, leaf by leaf: (dotted path, expected, found)."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        for key in sorted(expected.keys() | found.keys()):
            below = f"{path}.{key}" if path else str(key)
            yield from leaves_that_differ(expected.get(key, ABSENT), found.get(key, ABSENT), below)
    elif not equal(expected, found):
        yield path, expected, found


def look_up(tree: Any, path: str) -> Any:
    """The value at a dotted path, or ``ABSENT``."""
    for key in path.split("."):
        if not isinstance(tree, Mapping) or key not in tree:
            return ABSENT
        tree = tree[key]
    return tree


def with_settings(tree: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the tree with the leaves at these dotted paths set; unknown paths are left out."""
    changed = dict(tree)
    for path, value in settings.items():
        head, _, rest = path.partition(".")
        if head in changed and not rest:
            changed[head] = value
        elif isinstance(changed.get(head), Mapping):
            changed[head] = with_settings(changed[head], {rest: value})
    return changed
