"""Every shipped arm conforms; and an arm with one thing wrong fails the check that is for it."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none

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
from harness.errors import InputError
from harness.knobs import knob
from harness.parts import kl as kl_module
from harness.parts.advantage import Advantage, GroupBaseline, LeaveOneOut
from harness.parts.aggregate import Aggregate, TokenMean
from harness.parts.clip import Clip, NoClip, PPOClip
from harness.parts.exclude import Exclude, Unfinished
from harness.parts.imitate import Imitate
from harness.parts.kl import KLInLoss, NoKL
from harness.parts.ratio import TokenRatio
from harness.parts.sampling import Sampling
from harness.parts.scale import GroupStd
from harness.types import completion_return, group_mean

OPO = Path(__file__).parent.parent / "examples/opo.py"
# Checks that may not apply, and the kinds of arm for which they do.
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


@dataclass(frozen=True)
class Scores(Advantage):
    """Some function of the scores, by group; broken in the ways below."""

    version: ClassVar[int] = 1
    min_group: ClassVar[int] = 2
    kind: str = "right"

    def __call__(self, rewards: Any, mask: Any, group: Any, values: Any) -> Any:
        total = completion_return(rewards, mask)
        centred = total - group_mean(total, group)
        found = {
            "right": centred,
            "lowers": -centred,
            "ignores the group": total - 0.3,
            "is nothing": 0 * centred,
            "is not a number": centred / 0 * 0,
            "looks at its neighbour": total - total.roll(1),
            "has lost a dimension": centred,
        }
        if self.kind == "raises":
            raise ValueError("this one\nraises")
        advantage = found[self.kind]
        return (advantage if "lost" in self.kind else advantage[:, None] * mask), None


@dataclass(frozen=True)
class OddClip(Clip):
    version: ClassVar[int] = 1
    kind: str = "right"

    def __call__(self, ratio: Any, advantages: Any, x: Any) -> Any:
        plain, cut = ratio * advantages, torch.zeros_like(ratio, dtype=torch.bool)
        if self.kind == "stops the gradient":
            plain = plain.detach()
        if self.kind == "centres over the micro-batch":
            plain = plain - (plain.sum() / x.mask.sum()) * x.mask
        if self.kind == "cuts at once":
            cut = ratio <= 1
        if self.kind == "doubles":
            plain = 2 * plain
        if self.kind == "adds a constant":
            plain = plain + 0.1
        if self.kind == "has a gradient of its own":
            plain = Tilted.apply(plain)
        return plain, cut


class Tilted(torch.autograd.Function):
    """The identity, with a gradient that is not its slope where a number is above a bound."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return torch.where(x.abs() > 1.5, 1.001 * gradient, gradient)


@dataclass(frozen=True)
class TwiceRatio(TokenRatio):
    version: ClassVar[int] = 1

    def __call__(self, logprobs: Any, anchor_logprobs: Any, mask: Any) -> Any:
        return torch.where(mask, 2.0, 1.0) * super().__call__(logprobs, anchor_logprobs, mask)


@dataclass(frozen=True)
class OverColumns(Aggregate):
    """Divides by the columns of the batch, padding and all."""

    version: ClassVar[int] = 1

    def __call__(self, mask: Any, max_new_tokens: int) -> Any:
        return mask.double() / mask.numel()


@dataclass(frozen=True)
class OnPadding(Aggregate):
    version: ClassVar[int] = 1

    def __call__(self, mask: Any, max_new_tokens: int) -> Any:
        return torch.full(mask.shape, 1 / mask.numel(), dtype=torch.float64)


@dataclass(frozen=True)
class Everything(Exclude):
    version: ClassVar[int] = 1

    def keep(self, x: Any) -> Any:
        return torch.zeros_like(x.finished)


@dataclass(frozen=True)
class Splitting(Sampling):
    version: ClassVar[int] = 1

    def keep(self, correct: Any, group: Any) -> Any:
        return correct


@dataclass(frozen=True)
class Upwards(KLInLoss):
    """A penalty turned round: it pays for leaving the reference."""

    version: ClassVar[int] = 1

    def in_loss(self, logprobs: Any, ref_logprobs: Any) -> Any:
        found = super().in_loss(logprobs, ref_logprobs)
        assert found is not None
        return -found


@dataclass(frozen=True, kw_only=True)
class WithEntropy(Arm):
    """A bonus that no part declares."""

    def policy_loss(self, x: Any, logprobs: Any, kl_coef: float, top_logprobs: Any = None) -> Any:
        loss, stats = super().policy_loss(x, logprobs, kl_coef, top_logprobs)
        return loss + 0.01 * torch.where(x.mask, logprobs, 0.0).sum(), stats


def as_class(kind: type, arm: Arm) -> Arm:
    return kind(**{f.name: getattr(arm, f.name) for f in dataclasses.fields(Arm)})


def with_scores(kind: str) -> Arm:
    return RLOO.but("odd", advantage=Scores(kind=kind), kl=NoKL())


def with_clip(kind: str) -> Arm:
    return GRPO.but("odd", clip=OddClip(kind=kind))


BROKEN = [
    ("shapes", with_scores("has lost a dimension"), r"advantage Scores returned advantages of sh"),
    ("shapes", with_scores("raises"), r"ValueError at test_conformance.py:\d+: this one raises"),
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


class Undecorated(GroupBaseline):
    version: ClassVar[int] = 1
    bias: float = 0.5


@dataclass(frozen=True)
class Unversioned(Clip):
    def __call__(self, ratio: Any, advantages: Any, x: Any) -> Any:
        return NoClip()(ratio, advantages, x)


@dataclass(frozen=True)
class Listed(GroupBaseline):
    version: ClassVar[int] = 1
    weights: list[float] = field(default_factory=lambda: [1.0])


@dataclass(frozen=True)
class Unwritten(GroupBaseline):
    version: ClassVar[int] = 1
    rule: Any = max


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


@dataclass(frozen=True)
class Outside(GroupBaseline):
    version: ClassVar[int] = 1
    strength: float = knob(2.0, low=0.1, high=1.0)


@dataclass(frozen=True)
class Bounded(GroupBaseline):
    version: ClassVar[int] = 1
    strength: float = knob(0.5, low=0.1, high=1.0)

    def __post_init__(self) -> None:
        if self.strength > 0.9:
            raise InputError("strength is at most 0.9")


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
    assert out.startswith("opo: 10 passed, 0 failed, 5 not applicable")


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
