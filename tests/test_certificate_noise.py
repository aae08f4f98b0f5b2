"""Noise on the reward in whole runs: certified where all arms bore the same, else named."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none
from certificate_plants import edit_json, every_step, forge, put, read
from experiment_fixture import save_model, write_spec

from harness.arms import find_arms
from harness.cell import run_cell
from harness.certificate import audit
from harness.certificate.finding import MISSING
from harness.errors import InputError
from harness.experiment import ensure_lock, open_context
from harness.grading import check_reward
from harness.job import Cell
from harness.lock import make_lock
from harness.plan import make_plan
from harness.spec.load import load_spec

NOISE = {"flip": 0.1, "false_negative": 0.2, "sigma": 0.5}
ARMS = ("grpo", "rloo", "placebo")


def run(root: Path, model: Path, **noise: float) -> Path:
    """A tiny experiment under noise, without tuning: 256 completions for each arm."""
    spec = write_spec(
        root / "spec.yaml", model, arms=["grpo", "rloo"], tuning=None, reward={"noise": noise},
        controls={"base": False}, budget={"limit": 64, "evaluate_at": [1.0]},
    )  # fmt: skip
    context = open_context(spec, [], [], root / "results")
    ensure_lock(context, make_lock(context))
    for arm in ARMS:
        run_cell(context, Cell(arm, "seed", 0, context.spec.budget.limit))
    return context.results


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def sound(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("noisy"), model, **NOISE)


@pytest.fixture(scope="module")
def louder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("louder"), model, flip=0.6, sigma=1.0)


@pytest.fixture
def results(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "results"))


def messages(results: Path) -> list[str]:
    return [v.message for v in audit(results).violations]


def noise_of(results: Path, arm: str) -> list[dict[str, Any]]:
    return [line.get("noise") for line in read(results / f"runs/{arm}/seed-0/steps.jsonl")]


def test_a_noisy_run_is_certified_and_says_how_noisy_it_was(sound: Path):
    assert messages(sound) == []
    for arm in ("grpo", "rloo"):
        found = noise_of(sound, arm)
        wrong, turned = (sum(n[k] for n in found) for k in ("wrong", "wrong_turned"))
        assert wrong > 200  # a random model is seldom right
        assert abs(turned / wrong - 0.1) < 4 * (0.1 * 0.9 / wrong) ** 0.5
        rms = (sum(n["added_rms"] ** 2 for n in found) / len(found)) ** 0.5
        assert rms == pytest.approx(0.5, rel=4 / (2 * 256) ** 0.5)
    assert noise_of(sound, "placebo") == [None] * len(noise_of(sound, "grpo"))


def test_evaluations_are_of_the_truth(sound: Path):
    """What an arm was told is far from it: more right answers than there were."""
    told, true = 0, 0
    for line in read(sound / "runs/grpo/seed-0/steps.jsonl"):
        noise = line["noise"]
        told += noise["right"] - noise["right_turned"] + noise["wrong_turned"]
        true += line["outcomes"].get("correct", 0)
        assert line["accuracy"] == pytest.approx(line["outcomes"].get("correct", 0) / line["used"])
    assert told > true + 10
    samples = read(sound / "runs/grpo/seed-0/samples.jsonl")
    assert samples
    assert all((s["extracted"] == s["gold"]) == (s["outcome"] == "correct") for s in samples)


def test_an_arm_that_bore_other_noise_is_named(results: Path, louder: Path):
    """Its steps come from a run of another noise; its own account says it was this one's."""
    for name in ("steps.jsonl", "evals.jsonl", "done.json"):
        shutil.copy(louder / "runs/rloo/seed-0" / name, results / "runs/rloo/seed-0" / name)
    found = audit(results).violations
    keys = {v.key for v in found if v.check == "graded" and v.cells == ("runs/rloo/seed-0",)}
    assert {"steps.jsonl: noise.wrong_turned", "steps.jsonl: noise.added_rms"} <= keys
    assert not any("grpo" in cell for v in found for cell in v.cells)


PLANTS = {
    "another reward": (
        lambda r: edit_json(r, "runs/rloo/seed-0/run.json", put("hashes/reward", "0" * 64)),
        "hashes.reward"),
    "other noise in the controls": (
        lambda r: edit_json(
            r, "runs/rloo/seed-0/run.json", put("controls/reward/noise/flip", 0.2)),
        "controls.reward.noise.flip"),
    "scores without the noise that is recorded": (
        lambda r: forge(r, "rloo/seed-0", "steps.jsonl", put("3/score_mean", 9.0)),
        "line 4: score_mean"),
    "noise on other verdicts": (
        lambda r: forge(
            r, "rloo/seed-0", "steps.jsonl", put("0/noise/wrong", lambda n: n + 1)),
        "line 1: noise.wrong"),
    "a narrower spread": (
        lambda r: forge(
            r, "rloo/seed-0", "steps.jsonl", every_step("noise/added_rms", lambda x: x / 2)),
        "noise.added_rms"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTS)
def test_planted_noise_is_named(results: Path, name: str):
    plant, key = PLANTS[name]
    plant(results)
    found = audit(results).violations
    assert any(key in v.key and "runs/rloo/seed-0" in v.cells for v in found), messages(results)


@pytest.mark.parametrize("key", ["noise", "noise/added_rms"])
def test_noise_that_is_not_recorded_is_missing(results: Path, key: str):
    forge(results, "rloo/seed-0", "steps.jsonl", lambda lines: put(f"2/{key}", None)(lines))
    assert any(v.check == MISSING and "noise" in v.key for v in audit(results).violations)


# -- arms that noise would spare ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arm", "noise", "why"),
    [
        ("dapo", {"sigma": 0.1}, "scores signs"),
        ("vapo", {"sigma": 0.1}, "sigma does not reach"),
        ("grpo_process", {"flip": 0.1}, "worked steps"),
        ("grpo_process", {"sigma": 0.1}, "worked steps"),
        ("dapo", {"flip": 0.1}, None),
        ("grpo_process", {"flip": 0.0}, None),
        ("grpo", {"flip": 0.1, "sigma": 1.0}, None),
    ],
)
def test_an_arm_that_noise_would_spare_is_refused(
    tmp_path: Path, model: Path, arm: str, noise: dict[str, float], why: str | None
):
    """Noise that reaches all arms but one would be a difference that nobody declared."""
    file = write_spec(
        tmp_path / "spec.yaml", model, arms=[arm], tuning=None, reward={"noise": noise},
        controls={"placebo": None},
    )  # fmt: skip
    found = find_arms([arm])[arm].arm
    if why is None:
        check_reward(load_spec(file), found)
        return
    with pytest.raises(InputError, match=why):
        check_reward(load_spec(file), found)
    with pytest.raises(InputError, match=why):
        make_plan(open_context(file, [], [], tmp_path / "results"))
