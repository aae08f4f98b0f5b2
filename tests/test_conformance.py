"""Every shipped arm conforms; and an arm with one thing wrong fails the check that is for it."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none

from broken_parts import (
    Bounded,
    Everything,
    Listed,
    OddClip,
    OnPadding,
    Outside,
    OverColumns,
    Scores,
    Splitting,
    TwiceRatio,
    Undecorated,
    Unversioned,
    Unwritten,
    Upwards,
    WithEntropy,
)

from harness.arm import Arm
from harness.arms import ARMS, find_arms
from harness.arms.cispo import CISPO
from harness.arms.grpo import GRPO
from harness.arms.ppo import PPO
from harness.arms.rloo import RLOO
from harness.arms.vapo import VAPO
from harness.cli import main
from harness.conformance import CHECKS, Outcome, check_arm, run_check
from harness.conformance.finding import Verdict
from harness.parts import kl as kl_module
from harness.parts.advantage import GroupBaseline, LeaveOneOut
from harness.parts.aggregate import TokenMean
from harness.parts.clip import PPOClip
from harness.parts.exclude import Unfinished
from harness.parts.imitate import Imitate
from harness.parts.kl import NoKL
from harness.parts.scale import GroupStd

OPO = Path(__file__).parent.parent / "examples/opo.py"
# Checks that do not apply to every arm that ships.
MAY_NOT_APPLY = {
    "knobs", "zero_variance", "expected_update", "imitation", "kl_gradient",
}  # fmt: skip


def says(arm: Arm, check: str) -> Verdict:
    """One check's verdict."""
    return run_check(CHECKS[check], arm)


# --- what ships ----------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ARMS.values(), ids=ARMS.keys())
def test_every_shipped_arm_conforms(arm: Arm):
    report = check_arm(arm)
    assert report.passed, [f for f in report.findings if f.outcome is Outcome.FAILED]
    assert [f.check for f in report.findings] == list(CHECKS)
    silent = {f.check for f in report.findings if f.outcome is Outcome.NOT_APPLICABLE}
    assert silent <= MAY_NOT_APPLY
    assert all(f.detail for f in report.findings)
    # What applies is decided by the arm's parts, and not by whether it passes.
    assert ("kl_gradient" in silent) is not arm.kl.needs_reference
    assert ("imitation" in silent) is (arm.imitate is None)


def test_the_plugin_example_conforms_and_is_told_its_bias():
    opo = find_arms(["opo"], [OPO])["opo"].arm
    report = check_arm(opo)
    assert report.passed
    found = {f.check: f for f in report.findings}
    assert found["estimator"].outcome is Outcome.NOT_APPLICABLE
    assert "degrees off the exact policy gradient" in found["estimator"].detail
    assert found["ascent"].outcome is Outcome.PASSED


@pytest.mark.parametrize(
    ("name", "estimate"),
    [
        ("rloo", "the exact policy gradient"),
        ("ppo", "the exact policy gradient"),
        ("vc_ppo", "the exact policy gradient"),
        ("reinforce_pp", "the exact policy gradient"),
        ("dr_grpo", "3/4 of the exact policy gradient"),
        ("grpo", "3/4 of the exact policy gradient"),
        ("gspo", "3/4 of the exact policy gradient"),
    ],
)
def test_which_estimators_are_unbiased(name: str, estimate: str):
    """Of four completions, a mean that holds the completion's own score leaves three quarters."""
    found = says(ARMS[name], "estimator")
    assert found.outcome is Outcome.PASSED
    assert found.detail.partition(";")[0] == estimate


# --- arms with one thing wrong -------------------------------------------------------------------


def as_class(kind: type, arm: Arm) -> Arm:
    return kind(**{f.name: getattr(arm, f.name) for f in dataclasses.fields(Arm)})


def with_scores(kind: str) -> Arm:
    return RLOO.but("odd", advantage=Scores(kind=kind), kl=NoKL())


def with_clip(kind: str) -> Arm:
    return GRPO.but("odd", clip=OddClip(kind=kind))


BROKEN = [
    ("shapes", with_scores("has lost a dimension"), r"advantage Scores returned advantages of sh"),
    ("shapes", with_scores("raises"), r"ValueError at broken_parts.py:\d+: this one raises"),
    ("shapes", with_scores("is not a number"), "advantages is not finite on a token"),
    ("shapes", GRPO.but("odd", exclude=Everything()), "exclude.keep leaves nothing"),
    (
        "shapes",
        GRPO.but("odd", aggregate=OnPadding(), exclude=Unfinished(denominator="kept")),
        "weights is not 0 on padding",
    ),
    ("shapes", GRPO.but("odd", sampling=Splitting()), "sampling.keep splits a group"),
    ("padding", GRPO.but("odd", aggregate=OverColumns()), "3 more columns; largest gap .*allowed"),
    ("micro_batches", with_clip("centres over the micro-batch"), "largest gap .*allowed"),
    ("world_size", with_clip("centres over the micro-batch"), "2 ranks: the policy's gradient"),
    ("row_order", with_scores("looks at its neighbour"), "with the order of rows"),
    ("finite_differences", with_clip("has a gradient of its own"), "largest gap .*allowed"),
    ("first_minibatch", with_clip("stops the gradient"), "gradient's largest gap .*allowed"),
    ("first_minibatch", with_clip("cuts at once"), "clip_fraction_high is .* before any update"),
    ("first_minibatch", with_clip("doubles"), "gradient's largest gap 1.0.*allowed"),
    ("first_minibatch", with_clip("adds a constant"), "the surrogate is .*, expected"),
    ("first_minibatch", GRPO.but("odd", ratio=TwiceRatio()), "the ratio is 2.0 before any update"),
    ("first_minibatch", as_class(WithEntropy, GRPO), "is not the sum of its terms: a hidden term"),
    ("zero_variance", with_scores("ignores the group"), "all groups agree, and the gradient is"),
    ("zero_variance", with_scores("is nothing"), "groups that differ do not move the policy"),
    ("estimator", with_scores("lowers"), "lowers the expected score"),
    ("ascent", with_scores("lowers"), "lowers the expected score"),
    ("ascent", with_scores("is nothing"), "lowers the expected score"),
]


@pytest.mark.parametrize(
    ("check", "arm", "message"), BROKEN, ids=[f"{c}-{n}" for n, (c, *_) in enumerate(BROKEN)]
)
def test_what_is_wrong_with_an_arm_fails_its_check(check: str, arm: Arm, message: str):
    found = says(arm, check)
    assert found.outcome is Outcome.FAILED
    assert re.search(message, found.detail), found.detail


def test_the_same_parts_done_right_pass():
    for arm in (with_scores("right"), with_clip("right")):
        assert check_arm(arm).passed


def test_after_wrong_shapes_nothing_else_is_run():
    report = check_arm(with_scores("has lost a dimension"))
    assert [f.check for f in report.findings if f.outcome is Outcome.FAILED] == ["shapes"]
    assert {f.detail for f in report.findings[3:]} == {"not run, as shapes failed"}


def test_a_penalty_of_unknown_kind_is_measured_against_both_directions():
    found = says(GRPO.but("odd", kl=Upwards()), "kl_gradient")
    assert found.outcome is Outcome.NOT_APPLICABLE
    assert "180 degrees" not in found.detail.partition(";")[0]
    assert "1.8e+02 off that of KL(ref || pi)" in found.detail


# --- parts that are no values --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantage": Undecorated()}, "advantage: Undecorated is no dataclass, so bias is no fi"),
        ({"clip": Unversioned()}, "clip: Unversioned has version None; write `version"),
        ({"advantage": Listed()}, "advantage: Listed has an unhashable weights"),
        ({"advantage": Unwritten()}, "advantage: Unwritten cannot be written as JSON: builtin"),
    ],
)
def test_a_part_that_is_no_value_is_named(changes: dict[str, Any], message: str):
    found = says(GRPO.but("odd", **changes), "parts")
    assert found.outcome is Outcome.FAILED
    assert message in found.detail


def test_a_part_cannot_thaw():
    """Python refuses it before the check could."""
    with pytest.raises(TypeError, match="non-frozen"):
        dataclass(type("Thawed", (GroupBaseline,), {}))


def test_a_knob_out_of_its_range_is_named():
    found = says(GRPO.but("odd", advantage=Outside()), "knobs")
    assert (found.outcome, found.detail) == (
        Outcome.FAILED,
        "advantage.strength is 2.0, outside [0.1, 1.0]",
    )
    found = says(GRPO.but("odd", advantage=Bounded()), "knobs")
    assert (found.outcome, found.detail) == (
        Outcome.FAILED,
        "advantage.strength = 1.0 makes no arm: strength is at most 0.9",
    )


# --- a mistake in a part that ships --------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "arm", "owner", "name", "wrong"),
    [
        ("estimator", RLOO, LeaveOneOut, "__call__", GroupBaseline.__call__),
        ("expected_update", GRPO, GroupStd, "__call__",
         lambda self, a, r, m, g: GroupStd(ddof=1)(a, r, m, g)),
        ("kl_gradient", GRPO, kl_module, "estimate_kl", lambda kind, p, r: (p - r).square() / 2),
        ("first_minibatch", GRPO, kl_module, "estimate_kl", lambda kind, p, r: (p - r).square()),
        ("first_minibatch", PPO, TokenMean, "__call__",
         lambda self, mask, limit: mask.double() / (mask.sum() + 1)),
        ("imitation", VAPO, Imitate, "weights", lambda self, x: x.mask.double() / x.mask.sum()),
        ("first_minibatch", VAPO, Imitate, "weights", lambda self, x: x.mask / x.mask.sum()),
    ],
)  # fmt: skip
def test_a_wrong_formula_is_found(
    check: str, arm: Arm, owner: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
):
    right = dataclasses.replace(arm)
    if owner is GroupStd:  # the wrong one must not call itself
        plain = GroupStd.__call__
        monkeypatch.setattr(
            owner, name,
            lambda self, a, r, m, g: plain(dataclasses.replace(self, ddof=1), a, r, m, g),
        )  # fmt: skip
    else:
        monkeypatch.setattr(owner, name, wrong)
    assert CHECKS[check](right.but("wrong")).outcome is Outcome.FAILED


def test_a_held_weight_is_told_apart_from_a_slope():
    """CISPO's objective is no function whose slope is its gradient, until its weight is held."""
    assert "stop-gradients held" in says(CISPO, "finite_differences").detail
    open_ = CISPO.but("open", clip=PPOClip(clip_low=None, clip_high=None))
    assert "stop-gradients held" not in says(open_, "finite_differences").detail


# --- the command ---------------------------------------------------------------------------------


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["conformance", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_command_prints_for_people_and_for_programs(capfd: pytest.CaptureFixture[str]):
    assert command("grpo", "opo", "--plugin", str(OPO), "--json") == 0
    rows = json.loads(capfd.readouterr().out)
    assert [row["name"] for row in rows] == ["grpo", "opo"]
    assert rows[1]["origin"] == f"plugin {OPO}"
    assert [c["name"] for c in rows[0]["checks"]] == list(CHECKS)
    assert {c["outcome"] for c in rows[0]["checks"]} == {"passed", "not applicable"}
    assert command("--plugin", str(OPO)) == 0
    out = capfd.readouterr().out
    assert out.startswith("opo: 11 passed, 0 failed, 5 not applicable")


def test_the_command_ends_with_1_where_a_check_fails(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    plugin = tmp_path / "bad.py"
    plugin.write_text(
        OPO.read_text().replace("(total - baseline)[:, None] * mask, None", "total, None")
    )
    assert command("--plugin", str(plugin)) == 1
    out, err = capfd.readouterr()
    assert err == ""
    assert "LengthWeightedBaseline returned advantages of shape [12], expected [12, 7]" in out
    assert "0 of 1 arms conform; not opo" in out
    assert command("--plugin", str(plugin), "--json") == 1
    assert json.loads(capfd.readouterr().out)[0]["passed"] is False


def test_bad_input_ends_with_2(capfd: pytest.CaptureFixture[str]):
    assert command("grop") == 2
    assert "Did you mean 'grpo'?" in capfd.readouterr().err
    assert command("grpo", "--plugin", "nowhere.py") == 2
