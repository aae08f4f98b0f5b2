"""Tables of tuning effort, shapes of curves and what would have changed a verdict."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none
from report_fixture import write_fixture
from test_report_verdict import GAPS, all_right, declare, edit_lock, evals, loaded, with_seeds

from harness.report.load import load_experiment
from harness.report.table_curves import crossover_table, sigmoid_table
from harness.report.table_sensitivity import sensitivity_table
from harness.report.table_tuning import effort_sentence, effort_table


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fixture(tmp_path_factory.mktemp("made") / "invented")


@pytest.fixture
def results(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "invented"))


def trial_scores(results: Path, arm: str, scores: list[float | None]) -> None:
    for number, score in enumerate(scores):
        path = results / "runs" / arm / f"trial-{number:03d}-seed-1000" / "done.json"
        done = json.loads(path.read_text())
        done["selected_metric"] = {"name": "avg", "value": score}
        path.write_text(json.dumps(done if score is not None else done | {"status": "diverged"}))


def test_the_expected_best_and_the_order_at_each_effort(results: Path):
    trial_scores(results, "ppo", [0.5, 0.5])
    trial_scores(results, "grpo", [0.2, 0.7])
    trial_scores(results, "dapo", [0.4, None])
    experiment = load_experiment(results)
    table = effort_table(experiment)
    # One trial: the mean, ± half the difference. Two: the better one.
    assert [list(row) for row in table.rows] == [
        ["1", "50.0 ± 0.0", "45.0 ± 25.0", "20.0 ± 20.0", "ppo, grpo, dapo"],
        ["2", "50.0 ± 0.0", "70.0 ± 0.0", "40.0 ± 0.0", "grpo, ppo, dapo"],
    ]
    lead = {(r["trials"], r["arm"]): r["chance_to_lead_baseline"] for r in table.records or ()}
    assert (lead[1, "ppo"], lead[2, "ppo"], lead[1, "grpo"]) == (0.5, 0.0, None)
    assert effort_sentence(experiment) == (
        "Who leads on validation depends on the effort of tuning: ppo after 1 trial, grpo from 2."
    )
    (results / "runs/ppo/trial-000-seed-1000/done.json").unlink()
    assert "ppo" not in effort_table(load_experiment(results)).columns


def test_an_arm_s_sigmoid_is_recovered_and_a_flat_one_refused(results: Path):
    shares = [0.1, 0.2, 0.3, 0.5, 0.75, 1.0]

    def along(curve: Any) -> Any:
        def change(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
            found = []
            for at in shares:
                line = json.loads(json.dumps(lines[-1])) | {"at": at}
                line["spent"]["flops"] = 1e12 * at
                for problem in line["problems"]:
                    right = round(10_000 * curve(at))
                    problem |= {"n": 10_000, "correct": right}
                found.append(line)
            return found

        return change

    for seed in range(3):
        evals(results, f"base/seed-{seed}", lambda lines: all_right(lines[0], 0.2))
        up = seed * 0.01  # seeds differ in their asymptote
        sigmoid = along(lambda at, up=up: 0.2 + (0.7 + up) / (1 + (0.25 / at) ** 2))
        evals(results, f"grpo/seed-{seed}", sigmoid)
        evals(results, f"dapo/seed-{seed}", along(lambda at: 0.2))
    table = sigmoid_table(load_experiment(results), loaded(results)[1])
    found = {r["arm"]: r for r in table.records or ()}
    assert found["grpo"]["asymptote"] == pytest.approx(0.91, abs=2e-3)
    assert found["grpo"]["midpoint"] == pytest.approx(0.25e12, rel=0.01)
    assert found["grpo"]["rate"] == pytest.approx(2.0, rel=0.02)
    assert found["grpo"]["asymptote_low"] < 0.91 < found["grpo"]["asymptote_high"]
    assert found["grpo"]["reached"] == pytest.approx(4, rel=0.02)
    assert found["dapo"]["no_fit"] == "the curve is flat"
    row = next(r for r in table.rows if r[1] == "dapo")
    assert row[2:] == ["none: the curve is flat", *["–"] * 5]


def test_the_base_overtakes_where_its_pass_at_k_does(results: Path):
    """The arm: half of the problems always right. The base: each sample right one time in 4."""
    for seed in range(3):
        evals(results, f"grpo/seed-{seed}", lambda lines: [
            p.update(n=16, correct=16 * (i % 2)) for i, p in enumerate(lines[-1]["problems"])
        ] and None)  # fmt: skip
        evals(results, f"base/seed-{seed}", lambda lines: [
            p.update(n=16, correct=4) for p in lines[-1]["problems"]
        ] and None)  # fmt: skip
    for cell in (results / "runs").glob("*/seed-*"):
        evals(results, f"{cell.parent.name}/{cell.name}", lambda lines: [
            p.update(answers=[], unparsed=p["n"]) for p in lines[-1]["problems"]
        ] and None)  # fmt: skip
    experiment, scores = loaded(results)
    row = next(r for r in crossover_table(experiment, scores).records or () if r["arm"] == "grpo")
    # Pass@2 of the base is 1 - (12/16)(11/15) = 0.45, Pass@3 is 0.607: above the arm's one half.
    assert (row["k"], row["largest"]) == (3, 8)


def test_what_would_have_changed_a_verdict(results: Path):
    declare(results)
    with_seeds(results, [0.5] * 5, [*(0.5 + GAPS[:4]), 0.54])
    experiment, scores = loaded(results)
    table = sensitivity_table(experiment, scores)
    (row,) = table.rows
    gaps = np.array([*GAPS[:4], 0.04])
    assert row[:3] == ["arithmetic", "dapo − grpo", "inconclusive"]
    assert row[3] == "without 4: equivalent"  # the one seed that stands apart
    margin = next(r["nearest_margin"] for r in table.records or ())
    from scipy import stats

    edge = gaps.mean() + stats.t.ppf(0.95, 4) * gaps.std(ddof=1) / np.sqrt(5)
    assert margin == pytest.approx(edge, abs=1e-4)  # TOST turns where the 90 % interval ends
    assert "greedy" not in row[6].lower() or "Greedy: " in row[6]


def test_another_budget_unit_may_turn_a_verdict_round(results: Path):
    """dapo leads at the end by spending twice the tokens; at equal tokens it does not."""
    declare(results)
    edit_lock(results, lambda lock: lock["spec"].update(seeds=[0, 1, 2]))
    for seed in range(3):

        def change(arm: str, tokens: float, scores: list[float], seed: int = seed) -> Any:
            def write(lines: list[dict[str, Any]]) -> None:
                for line, share in zip(lines, scores, strict=True):
                    line["spent"]["tokens"] = tokens * line["at"]
                    for i, problem in enumerate(line["problems"]):
                        right = round(1000 * share) + (seed if i == 0 else 0) * (arm == "dapo")
                        problem |= {"n": 1000, "correct": right, "unparsed": 1000 - right}
                        problem["answers"] = []
                        problem["unparsed"] = 1000

            return write

        evals(results, f"grpo/seed-{seed}", change("grpo", 1000.0, [0.5, 0.6, 0.7, 0.8]))
        evals(results, f"dapo/seed-{seed}", change("dapo", 2000.0, [0.6, 0.8, 0.85, 0.9]))
    experiment, scores = loaded(results)
    (record,) = sensitivity_table(experiment, scores).records or ()
    # At 1000 tokens dapo is at half of its run: 0.8, as grpo.
    assert record["label"] == "better"
    assert record["units"] == "tokens"
