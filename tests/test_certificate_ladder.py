"""The audit's check of a declared ladder: it names each step's axis, and what is no step."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.arms.ladder import FACTORIAL, FORWARD, REVERSE
from harness.certificate import audit, write_certificate
from harness.store import read_json

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none
from certificate_fixture import build
from certificate_plants import edit_json, edit_lock

from harness.certificate.finding import Violation
from harness.identity import digest
from harness.spec.load import check_spec

LADDER = {
    "forward": [arm.name for arm in FORWARD],
    "reverse": [arm.name for arm in REVERSE],
    "factorial": [arm.name for arm in FACTORIAL],
}
ARMS = list(dict.fromkeys(name for names in LADDER.values() for name in names))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(
        tmp_path_factory.mktemp("ladder") / "results", arms=ARMS, seeds=[0], tuning=None,
        baseline="ladder_ppo", ladder=LADDER,
    )  # fmt: skip


@pytest.fixture
def results(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "results"))


def relock(results: Path, change: Any) -> None:
    """Change the locked spec, and every hash of it, so that the ladder alone is wrong."""

    def edit(lock: dict[str, Any]) -> None:
        change(lock)
        spec = check_spec(lock["spec"], "lock").model_dump(mode="json", exclude={"runtime"})
        lock["hashes"]["spec"] = digest(spec)
        hashes.append(lock["hashes"]["spec"])

    hashes: list[str] = []
    edit_lock(results, edit)
    for run in results.glob("runs/*/*/run.json"):
        name = str(run.relative_to(results))
        edit_json(results, name, lambda r: r["hashes"].update(spec=hashes[0]))


def the_one(results: Path) -> Violation:
    certificate = audit(results)
    assert not certificate.certified
    assert {v.check for v in certificate.violations} == {"ladder"}, [
        v.message for v in certificate.violations
    ]
    return certificate.violations[0]


def test_the_shipped_ladder_is_certified_and_its_axes_are_named(sound: Path):
    certificate = write_certificate(sound)
    assert certificate.violations == ()
    assert certificate.certified
    told = read_json(sound / "certificate.json")["ladder"]
    forward = [step["axes"] for step in told["forward"]]
    assert [[axis["path"] for axis in step] for step in forward] == [
        ["advantage.gae_lambda"], ["advantage.critic.warmup_steps"], ["sampling.group_size"],
        ["advantage"], ["scale"], ["scale"], ["kl"], ["kl.estimator"], ["aggregate"],
    ]  # fmt: skip
    assert forward[0][0] | {"path": ""} == {"path": "", "before": 0.95, "after": 1.0}
    assert (told["reverse"][0]["from"], told["reverse"][-1]["to"]) == ("grpo", "ladder_ppo")


def test_a_step_of_two_axes_is_named_with_both(results: Path):
    def skip_a_rung(lock: dict[str, Any]) -> None:
        lock["spec"]["ladder"]["forward"].remove("ladder_k3")
        lock["spec"]["ladder"].pop("reverse")

    relock(results, skip_a_rung)
    found = the_one(results)
    assert found.key == "spec.lock.yaml: spec.ladder.forward.8"
    assert found.found == ["aggregate", "kl.estimator"]
    assert "grpo is not one step from ladder_kl_in_loss" in found.message


def test_the_way_back_must_exchange_the_same_axes(results: Path):
    def shorten(lock: dict[str, Any]) -> None:
        ladder = lock["spec"]["ladder"]
        ladder["forward"] = ["ladder_group_std", "ladder_kl_in_loss", "ladder_k3", "grpo"]
        ladder["reverse"] = ["grpo", "mix_advantage_scale_aggregate", "ladder_group_std"]

    relock(results, shorten)
    found = the_one(results)
    assert found.key == "spec.lock.yaml: spec.ladder.reverse"
    assert found.expected == ["aggregate", "kl", "kl.estimator"]
    assert found.found == ["aggregate", "kl"]


def test_a_factorial_that_lacks_a_combination_is_named(results: Path):
    def exchange(lock: dict[str, Any]) -> None:
        names = lock["spec"]["ladder"]["factorial"]
        names[names.index("mix_scale")] = "back_no_std"

    relock(results, exchange)
    found = the_one(results)
    assert found.key == "spec.lock.yaml: spec.ladder.factorial"
    assert "back_no_std has a" in found.message


def test_a_rung_that_ran_with_other_parts_is_betrayed_by_the_check_of_the_arms(results: Path):
    """The ladder is judged by the locked parts, so those must be what ran."""

    def other(run: dict[str, Any]) -> None:
        run["parts"]["advantage"]["gae_lambda"] = 0.99

    edit_json(results, "runs/ladder_lambda_1/seed-0/run.json", other)
    broken = {v.check for v in audit(results).violations}
    assert "arms" in broken


def test_an_experiment_without_a_ladder_says_nothing_of_one(tmp_path: Path):
    folder = build(tmp_path / "plain", arms=["grpo"], seeds=[0], tuning=None)
    certificate = write_certificate(folder)
    assert certificate.certified
    assert "ladder" not in read_json(folder / "certificate.json")
    assert {c.name: c.passed for c in certificate.checks}["ladder"]


def test_tuning_shared_settings_keeps_a_ladder_certified(tmp_path: Path):
    """Rungs have no knobs of their own then: gae_lambda is an axis of this step."""
    tuning = {
        "trials": 2, "budget_fraction": 0.5, "seeds": [1000], "samples": 4,
        "shared": {"optimizer.learning_rate": {"low": 1e-4, "high": 1e-2, "log": True}},
    }  # fmt: skip
    names = ["ladder_ppo", "ladder_lambda_1"]
    folder = build(
        tmp_path / "tuned", arms=names, seeds=[0], baseline="ladder_ppo", tuning=tuning,
        controls={"base": True}, ladder={"forward": names},
    )  # fmt: skip
    assert audit(folder).violations == ()
