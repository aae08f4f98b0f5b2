"""Reward against KL in a report: invented checkpoints on known curves, read back from its files."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none
from report_fixture import write_fixture

from harness.report import write_report
from harness.report.frontier import BEST_OF, Frontier, frontiers
from harness.report.load import load_experiment
from harness.report.table_frontier import over_optimisation

TEST, SAMPLES = "arithmetic", 16
SHARES = (0.02, 0.06, 0.12, 0.2, 0.3, 0.42, 0.56, 0.7, 0.85, 1.0)
REACH = {"ppo": 3.0, "grpo": 5.0, "dapo": 5.0}
BASE_SD = {"gold": 0.4, "proxy": 1.0}


def falling(d: float) -> float:
    return 0.2 * d if d <= 3 else 0.6 - 0.1 * (d - 3)


GOLD: dict[str, Callable[[float], float]] = {
    "ppo": lambda d: 0.2 * d, "grpo": falling, "dapo": lambda d: 0.15 * d
}  # fmt: skip


def write_scores(folder: Path, **numbers: int) -> Path:
    """Ten checkpoints a run (of an arm in ``numbers``, fewer), with both rewards of each sample."""
    for cell in sorted((folder / "runs").glob("*/seed-*")):
        arm, seed = cell.parent.name, int(cell.name.removeprefix("seed-"))
        path = cell / "evals.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        if arm in REACH:
            rng = np.random.default_rng((ord(arm[0]), seed))
            lines = [_line(lines[-1], arm, at, rng) for at in SHARES[-numbers.get(arm, 10) :]]
        elif arm == "base":
            lines = [_scored(lines[-1], 0.0, 0.0, np.random.default_rng(seed), 1.0)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def _line(like: dict[str, Any], arm: str, at: float, rng: np.random.Generator) -> dict[str, Any]:
    d = REACH[arm] * at**0.5 * float(np.exp(rng.normal(0, 0.04)))
    found = _scored(like, GOLD[arm](d) + float(rng.normal(0, 0.005)), 0.5 * d, rng, 0.0)
    purpose = "final" if at == 1.0 else "curve"
    kl = {"mean": d * d, "se": 0.1, "n": 60}
    return found | {"at": at, "purpose": purpose, "kl_to_base": kl}


def _scored(
    like: dict[str, Any], gold: float, proxy: float, rng: np.random.Generator, spread: float
) -> dict[str, Any]:
    """Samples around two means; of the base, gold follows proxy but for noise."""
    problems = []
    for problem in like["problems"]:
        both = rng.normal(size=(2, SAMPLES)) * spread
        golds = gold + 0.4 * (0.6 * both[0] + 0.8 * both[1])
        proxies = proxy + both[0]
        problems.append(problem | {"gold": golds.tolist(), "proxy": proxies.tolist()})
    return like | {"problems": problems}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scores(write_fixture(tmp_path_factory.mktemp("frontier") / "learned"))


@pytest.fixture(scope="module")
def written(folder: Path) -> Path:
    write_report(folder)
    return folder


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / "tables" / f"{name}_{TEST}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read(folder: Path) -> Frontier:
    (found,) = frontiers([("", load_experiment(folder))])
    return found


def test_rewards_at_a_distance_are_those_of_the_curves(written: Path):
    found = {(r["arm"], r["reward"], float(r["d"])): r for r in rows(written, "frontier")}
    base = read(written)
    for arm, d in (("ppo", 1.0), ("ppo", 2.0), ("grpo", 2.0), ("grpo", 4.0), ("dapo", 4.0)):
        gold, proxy = GOLD[arm](d), 0.5 * d
        gap = (proxy - base.base_proxy) / base.proxy_sd - (gold - base.base_gold) / base.gold_sd
        for name, expected in (("gold", gold), ("proxy", proxy), ("gap", gap)):
            row = found[arm, name, d]
            assert float(row["mean"]) == pytest.approx(expected, abs=0.02)
            if name == "gold":
                assert float(row["low"]) < float(row["mean"]) < float(row["high"])
    assert found["ppo", "gold", 4.0]["mean"] == ""  # ended at 3
    assert base.gold_sd == pytest.approx(BASE_SD["gold"], abs=0.03)
    assert base.proxy_sd == pytest.approx(BASE_SD["proxy"], abs=0.06)


def test_best_of_n_is_in_the_table_and_has_the_base_at_n_1(written: Path):
    found = read(written)
    assert [r.pooled.n for r in found.reference] == [1, 2, 4, 8, 16]
    first = found.reference[0]
    assert (first.pooled.gold, first.pooled.proxy, first.d) == pytest.approx(
        (found.base_gold, found.base_proxy, 0.0)
    )
    assert first.gold.low is not None
    assert first.gold.low < found.base_gold
    # the expected largest of two and of eight standard normals, and 0.4 * 0.6 of it in gold
    for place, expected in ((1, 0.564), (3, 1.424)):
        assert found.reference[place].pooled.proxy == pytest.approx(expected, abs=0.12)
        assert found.reference[place].pooled.gold == pytest.approx(0.24 * expected, abs=0.06)
    table = {(r["arm"], r["reward"], float(r["d"])): r for r in rows(written, "frontier")}
    low, high = found.reference[2].pooled.proxy, found.reference[3].pooled.proxy
    assert found.reference[2].d < 1.0 < found.reference[3].d
    assert low < float(table[BEST_OF, "proxy", 1.0]["mean"]) < high
    assert table[BEST_OF, "proxy", 3.0]["mean"] == ""


def test_the_falling_arm_is_called_over_optimised_and_the_others_are_not(written: Path):
    found = {r["arm"]: r for r in rows(written, "frontier_peak")}
    assert {a: r["over_optimised"] for a, r in found.items()} == {
        "ppo": "false", "grpo": "true", "dapo": "false"
    }  # fmt: skip
    assert float(found["grpo"]["peak_d"]) == pytest.approx(3.0, abs=0.3)
    assert float(found["grpo"]["gold_change"]) == pytest.approx(-0.2, abs=0.06)
    assert float(found["grpo"]["proxy_change"]) == pytest.approx(1.0, abs=0.3)
    assert found["dapo"]["peak_d"] == ""
    sentences = dict(s.split(":", 1) for s in over_optimisation(read(written)))
    assert sentences["grpo"].endswith("the proxy is over-optimised.")
    assert "does not peak within the d = 3." in sentences["ppo"]
    assert "no over-optimisation is shown" in sentences["dapo"]
    page = (written / "REPORT.md").read_text()
    assert "## Reward against KL" in page
    assert all(f"{arm}:{text}" in page for arm, text in sentences.items())


def test_areas_end_where_every_arm_was_and_count_the_points_within(written: Path):
    found = {r["arm"]: r for r in rows(written, "frontier_area")}
    points = read(written).arms
    limit = min(max(p.kl for p in found) for found in points.values())
    assert float(found["ppo"]["limit"]) == pytest.approx(limit)
    for arm, row in found.items():
        assert int(row["points_within"]) == sum(p.kl <= limit for p in points[arm])
        assert float(row["low"]) < float(row["area"]) < float(row["high"])
    # below a line of slope 0.2 in d: the mean over KL of 0.2 sqrt(KL), less what steps leave out
    assert float(found["ppo"]["area"]) == pytest.approx(0.2 * 2 / 3 * limit**0.5, rel=0.15)


def test_gaos_peaks_beyond_the_data_are_not_reported(written: Path):
    found = {r["arm"]: r for r in rows(written, "gao")}
    assert {a: r["form"] for a, r in found.items()} == {
        "ppo": "rl", "grpo": "rl", "dapo": "rl", BEST_OF: "bon"
    }  # fmt: skip
    assert found["grpo"]["peak_within_reach"] == "true"
    assert found["ppo"]["peak_within_reach"] == "false"
    table = (written / "tables" / f"gao_{TEST}.md").read_text()
    for line in table.splitlines():
        if line.startswith(("| ppo", "| dapo")):
            assert line.split("|")[-2].strip() == "–"
    for row in found.values():
        if row["alpha_low"]:
            assert float(row["alpha_low"]) < float(row["alpha"]) < float(row["alpha_high"])


@pytest.mark.parametrize("stem", ["frontier", "envelope", "gao"])
def test_every_figure_is_drawn(written: Path, stem: str):
    for kind in ("png", "svg"):
        assert (written / "figures" / f"{stem}_{TEST}.{kind}").stat().st_size > 5000


def test_more_checkpoints_of_one_arm_are_left_out_and_said(tmp_path: Path):
    folder = write_scores(write_fixture(tmp_path / "learned"), ppo=6)
    found = read(folder)
    assert {arm: len(points) for arm, points in found.arms.items()} == dict.fromkeys(REACH, 18)
    assert found.dropped == {"ppo": 0, "grpo": 12, "dapo": 12}
    write_report(folder)
    table = (folder / "tables" / f"frontier_{TEST}.md").read_text()
    assert "Each arm has 18 points; 12 of grpo left out; 12 of dapo left out." in table


def test_the_same_runs_in_two_cases_are_counted_once(folder: Path, tmp_path: Path):
    """An arm without a strength repeats itself in each case that keeps the seeds."""
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    for cell in (other / "runs" / "grpo").glob("seed-*"):  # the others' runs are the very same
        lines = [json.loads(line) for line in (cell / "evals.jsonl").read_text().splitlines()]
        for line in lines:
            line["kl_to_base"]["mean"] *= 0.9
        (cell / "evals.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = frontiers([("a", load_experiment(folder)), ("b", load_experiment(other))])
    assert found.repeated == {"ppo": 3, "dapo": 3}
    assert len({p.run for p in found.arms["ppo"]}) == 3
    assert len({p.run for p in found.arms["grpo"]}) == 6
    assert len(found.arms["grpo"]) == len(found.arms["ppo"]) == 30
    alone = read(folder)  # nor is the base counted twice
    assert found.reference == alone.reference


def test_cases_with_different_reward_models_are_not_pooled(folder: Path, tmp_path: Path):
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    lock = yaml.safe_load((other / "spec.lock.yaml").read_text())
    lock["spec"]["reward"]["learned"] = {"model": {"epochs": 3}}
    (other / "spec.lock.yaml").write_text(yaml.safe_dump(lock))
    assert len(frontiers([("b", load_experiment(other))])) == 1
    assert frontiers([("a", load_experiment(folder)), ("b", load_experiment(other))]) == []


def test_an_experiment_without_both_rewards_has_no_such_section(tmp_path: Path):
    folder = write_fixture(tmp_path / "plain")
    assert frontiers([("", load_experiment(folder))]) == []
    write_report(folder)
    assert "Reward against KL" not in (folder / "REPORT.md").read_text()
    assert not list((folder / "tables").glob("frontier*"))
