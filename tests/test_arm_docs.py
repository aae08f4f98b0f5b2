"""What docs/arms.md says a part is called with is what it is called with."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

import pytest

from harness.arm import KINDS
from harness.conformance import CHECKS
from harness.parts.shaping import Shaping
from harness.types import Experience, Rollout, Tokens

DOCS = Path(__file__).parent.parent / "docs"
TEXT = (DOCS / "arms.md").read_text()
ROWS = {
    line.split("`")[1]: line
    for line in TEXT.partition("### What each kind of part is called with")[2].splitlines()
    if line.startswith("| `")
}
METHODS = {
    "Sampling": ["keep"],
    "Exclude": ["keep"],
    "KL": ["in_reward", "in_loss", "next_coef"],
    "Advantage": ["__call__", "assign"],
    "Imitate": ["weights"],
    "GoldReward": [],
}


def test_every_kind_has_a_row():
    assert set(ROWS) == {kind.__name__ for kind in (*KINDS.values(), Shaping)}


@pytest.mark.parametrize("kind", [*KINDS.values(), Shaping], ids=lambda k: k.__name__)
def test_signatures_are_the_codes(kind: type):
    for method in METHODS.get(kind.__name__, ["__call__"]):
        names = [*inspect.signature(getattr(kind, method)).parameters][1:]
        shown = f"`{'' if method == '__call__' else method}({', '.join(names)})`"
        assert shown in ROWS[kind.__name__], shown


def test_fields_that_a_part_may_read_are_named():
    records = TEXT.partition("The `Tokens` that a clip gets")[2]
    for record, silent in (
        (Tokens, set()),
        (Rollout, {"prompt_ids", "prompt_mask", "truth", "top_ids", "top_logprobs", "mixed_ids",
                   "mixed_weights", "step_ends", "step_scores", "paid"}),
        (Experience, {"prompt_ids", "prompt_mask", "truth", "top_ids", "mixed_ids", "mixed_weights",
                      "step_ends", "step_scores", "paid"}),
    ):  # fmt: skip
        for field in dataclasses.fields(record):
            assert field.name in silent or f"`{field.name}`" in records, field.name


def test_every_check_is_explained():
    text = (DOCS / "conformance.md").read_text()
    for name in CHECKS:
        assert f"`{name}`" in text, name
