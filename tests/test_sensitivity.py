"""The smallest change that flips a verdict, on analyses whose borders are known."""

from __future__ import annotations

import numpy as np
import pytest

from harness.errors import InputError
from harness.stats.sensitivity import sensitivity
from harness.stats.verdict import judge

# One seed carries the difference: without seed 4 the mean is 0.
GAPS = {0: 0.01, 1: -0.01, 2: 0.02, 3: -0.02, 4: 0.9, 5: 0.0}


def carried(dropped, margin, settings):
    kept = [gap for seed, gap in GAPS.items() if seed not in dropped]
    return "better" if np.mean(kept) > 0.1 else "inconclusive"


def test_the_one_seed_that_carries_it_is_found():
    found = sensitivity(carried, list(GAPS), 0.1, drop=3)
    assert found.label == "better"
    assert found.fewest_seeds == 1
    assert [(f.dropped, f.label) for f in found.seeds] == [((4,), "inconclusive")]
    assert found.margins == ()
    assert found.nearest_margin(0.1) is None


def test_two_seeds_are_left_out_only_if_one_does_not_do():
    def needs_two(dropped, margin, settings):
        return "worse" if {1, 3} <= dropped else "better"

    found = sensitivity(needs_two, [0, 1, 2, 3], 0.1, drop=3)
    assert [f.dropped for f in found.seeds] == [(1, 3)]
    assert sensitivity(needs_two, [0, 1, 2, 3], 0.1, drop=1).fewest_seeds is None
    assert sensitivity(needs_two, [0, 1, 2, 3], 0.1, drop=0).seeds == ()


def test_the_margin_of_a_real_verdict_is_bisected_to_its_border():
    values = np.array([0.4, -0.6, 0.9, 0.1, -0.3, 0.5, 0.2, -0.1])

    def analyse(dropped, margin, settings):
        return judge(np.delete(values, list(dropped)), margin).label

    found = sensitivity(analyse, range(8), 1.0)
    assert found.label == "equivalent"
    [flip] = found.margins
    assert flip.margin == pytest.approx(0.45560851693, abs=1e-4)  # the 90 % interval's far end
    assert (flip.below, flip.above) == ("inconclusive", "equivalent")
    assert found.nearest_margin(1.0) == flip.margin
    assert found.fewest_seeds is None


def test_several_borders_are_listed_in_order():
    def three(dropped, margin, settings):
        return "abc"[(margin > 0.2) + (margin > 0.5)]

    found = sensitivity(three, [0, 1], 0.3)
    assert [f.margin for f in found.margins] == pytest.approx([0.2, 0.5], abs=1e-4)
    assert [(f.below, f.above) for f in found.margins] == [("a", "b"), ("b", "c")]


def test_settings_are_varied_one_at_a_time():
    def analyse(dropped, margin, settings):
        assert sum(settings[k] != v for k, v in declared.items()) <= 1
        return "worse" if settings["unit"] == "tokens" else "better"

    declared = {"unit": "flops", "grader": "strict"}
    alternatives = {"unit": ["tokens", "seconds"], "grader": ["lenient"]}
    found = sensitivity(
        analyse, [0, 1], 1.0, settings=declared, alternatives=alternatives, drop=1, steps=4
    )
    assert [(f.name, f.value, f.label) for f in found.settings] == [("unit", "tokens", "worse")]
    assert found.tried == 1 + 2 + 4 + 3


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"alternatives": {"unit": ["tokens"]}}, "alternatives to unit"),
        ({"drop": 3}, "at least one must stay"),
        ({"margins": (0.2, 0.1)}, "need 0 < from < to"),
    ],
)
def test_what_cannot_be_varied_is_refused(more, says):
    with pytest.raises(InputError, match=says):
        sensitivity(lambda *_: "better", [0, 1, 2], 1.0, **more)


def test_too_many_subsets_are_refused():
    with pytest.raises(InputError, match="lower drop"):
        sensitivity(lambda *_: "better", range(60), 1.0, drop=4)
