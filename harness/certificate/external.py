"""What the records cannot show of an arm that another library's trainer trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.certificate.design import Design, is_offline, part

LOOP = "loop"

UPDATE = (
    "that every ratio was 1 before the first update",
    "that the loss is its declared terms and nothing else",
    "that the weights of the loss sum to what the aggregation declares",
)
SAMPLING = (
    "that completions were drawn by the experiment's engine: they are transformers' generate() on "
    "torch's generator, so arms of one seed share prompts and not luck",
    "that the policy that sampled is the one that was trained: its log-probs are not told",
)

OFFLINE = (
    "that it learnt from the prompts of its seed: it learns from preference pairs, of which the "
    "checks show data, order, number, cost, optimizer and loss",
    "that its samples were graded: it has none, and pays neither for the pairs nor for their "
    "labels, as no arm pays for fitting a reward model",
    "that the order of pairs is the one of its seed: it is the same in all its runs of a seed",
    "that the loss is the declared one on every batch: it is held against it on the first of "
    "each step",
)


def loop_of(parts: Mapping[str, Any]) -> Mapping[str, Any]:
    """The declared loop; empty for an arm that the harness's own loop trains."""
    return part(parts, LOOP)


def samples_itself(parts: Mapping[str, Any]) -> bool:
    """Whether the trainer draws its completions, rather than the experiment's engine."""
    return bool(loop_of(parts)) and loop_of(parts).get("sampler") != "harness"


def external_arms(design: Design) -> dict[str, dict[str, Any]]:
    """Arm -> which loop trains it, and what is therefore not proven of it."""
    found = {}
    for name, arm in sorted(design.lock.arms.items()):
        loop = loop_of(arm.parts)
        if not loop:
            continue
        lines = UPDATE + (SAMPLING if samples_itself(arm.parts) else ())
        checks = ["effective"]
        if is_offline(arm.parts):
            lines, checks = OFFLINE, ["prompts", "graded", "effective"]
        found[name] = {
            "loop": f"external: {loop.get('library')} {loop.get('trainer')}",
            "checks": checks,  # that show less of it
            "not_proven": list(lines),
        }
    return found
