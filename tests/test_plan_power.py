"""What a plan promises of a verdict, and what it refuses to."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none
from certificate_fixture import SPEC
from report_fixture import write_fixture
from test_report_verdict import GAPS, with_seeds

from harness.cli import main
from harness.errors import BAD_INPUT, InputError
from harness.plan.power import design_power
from harness.report.load import load_experiment
from harness.spec.load import check_spec
from harness.spec.schema import ExperimentSpec
from harness.stats.power import power_of, seeds_for, superiority_power, tost_power

ROOT = Path(__file__).parent.parent
TESTS = {"arithmetic": 30}


def spec(**verdict: Any) -> ExperimentSpec:
    data = SPEC["data"] | {"test": {"arithmetic": SPEC["data"]["test"]["sums"]}}
    declared = {"margin": 0.02, "family": [["dapo", "grpo"]]} | verdict
    return check_spec(SPEC | {"data": data, "verdict": declared, "seeds": list(range(5))}, "here")


@pytest.fixture(scope="module")
def pilot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fixture(tmp_path_factory.mktemp("pilot") / "pilot")


def test_nothing_is_promised_without_a_verdict_or_a_spread():
    bare = spec().model_copy(update={"verdict": None})
    assert "no verdict is declared" in design_power(bare, TESTS, None).refusals[0]
    found = design_power(spec(), TESTS, None)
    assert found.comparisons == ()
    (refusal,) = found.refusals
    assert "the spread of 1 comparison is not known, and nothing is promised" in refusal


def test_an_assumed_spread_gives_the_power_of_the_t_tests():
    found = design_power(spec(assumed_sd=0.012), TESTS, None)
    (one,) = found.comparisons
    assert one.difference == pytest.approx(superiority_power(5, 0.012, 0.02, 0.05))
    assert one.equivalence == pytest.approx(tost_power(5, 0.012, 0.02))
    assert one.seeds_equivalence == seeds_for(0.012, margin=0.02)
    assert one.difference_beyond is None  # of other problems an assumed spread says nothing
    assert (one.difference > 0.8) is (len([r for r in found.refusals if "difference" in r]) == 0)


def test_a_small_enough_spread_is_promised():
    assert design_power(spec(assumed_sd=0.005), TESTS, None).refusals == ()


def test_the_levels_of_a_family_are_shared():
    family = [["dapo", "grpo"], ["ppo", "grpo"]]
    one, two = design_power(spec(assumed_sd=0.012, family=family), TESTS, None).comparisons
    assert one.difference == two.difference
    assert one.difference == pytest.approx(superiority_power(5, 0.012, 0.02, 0.025))


def test_a_pilot_s_seeds_tell_the_spread(pilot: Path, tmp_path: Path):
    """Seeds differ by GAPS on every problem alike; what else varies is 4 samples a problem."""
    copy = Path(shutil.copytree(pilot, tmp_path / "even"))
    with_seeds(copy, [0.5] * 5, list(0.5 + GAPS))
    found = design_power(spec(), TESTS, copy)
    (one,) = found.comparisons
    assert one.basis == "5 seeds of even"
    within = 0.25 + np.mean((0.5 + GAPS) * (0.5 - GAPS))  # of one sample of each arm
    within *= 16 / 15  # the fewest samples of any arm in the pilot
    variance = GAPS.var(ddof=1) + within / 4 / 30
    assert one.sd == pytest.approx(np.sqrt(variance), rel=1e-3)
    assert one.difference == pytest.approx(superiority_power(5, one.sd, 0.02, 0.05))
    assert any("from 5 the true one" in note for note in found.notes)


def test_more_problems_help_only_as_far_as_seeds_allow(pilot: Path):
    few, many = (design_power(spec(), {"arithmetic": n}, pilot).comparisons[0] for n in (30, 3000))
    assert many.sd < few.sd
    assert many.equivalence >= few.equivalence
    needed = many.problems_equivalence
    if needed is not None:
        assert needed == few.problems_equivalence


def test_tuning_trials_stand_in_for_seeds_and_are_called_what_they_are(pilot: Path, tmp_path: Path):
    copy = Path(shutil.copytree(pilot, tmp_path / "trials"))
    for arm in ("ppo", "grpo", "dapo"):
        for folder in (copy / "runs" / arm).glob("seed-*"):
            line = json.loads((folder / "evals.jsonl").read_text().splitlines()[-1])
            number = int(folder.name.removeprefix("seed-"))
            trial = copy / "runs" / arm / f"trial-{number:03d}-seed-1000"
            if trial.exists():
                text = json.dumps(line | {"split": "validation", "purpose": "tuning"})
                (trial / "evals.jsonl").write_text(text + "\n")
            shutil.rmtree(folder)
    found = design_power(spec(), TESTS, copy)
    (one,) = found.comparisons
    assert one.basis == "2 trials of trials, on validation"
    assert any("wider than that of seeds" in note for note in found.notes)
    shutil.rmtree(copy / "runs")
    with pytest.raises(InputError, match="a pilot needs two finished seeds, or tuning trials"):
        design_power(spec(), TESTS, copy)


def test_the_power_over_other_problems_is_that_of_random_problems(pilot: Path):
    from harness.plan.power import _noise

    noise, _ = _noise(spec(), load_experiment(pilot), "arithmetic", "dapo", "grpo")
    assert noise is not None
    (one,) = design_power(spec(), TESTS, pilot).comparisons
    expected = power_of(noise, 5, 30, 4, margin=0.02, random=True)
    assert one.equivalence_beyond == pytest.approx(expected)
    assert np.isfinite(one.sd)


@pytest.mark.parametrize(("more", "code"), [((), 0), (("--strict",), BAD_INPUT)])
def test_strict_turns_a_refusal_into_an_exit_code(
    capfd: pytest.CaptureFixture[str], more: tuple[str, ...], code: int
):
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(ROOT / "experiments" / "smoke.yaml"), *more])
    out, err = capfd.readouterr()
    assert (ended.value.code, err) == (code, "")
    assert "not promised (2)" in out
    assert "2 seeds: the report claims nothing with fewer than 5" in out
