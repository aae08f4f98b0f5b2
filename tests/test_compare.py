"""Experiments side by side: their own numbers, what they differ in, and that nothing is matched."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none
from report_fixture import LIMIT, PROBLEMS, SEEDS, write_fixture

from harness.cli import main
from harness.errors import InputError
from harness.report.compare import NOT_MATCHED, Comparison, compare, write_comparison
from harness.store import read_json, write_json


def relock(results: Path, **changes: Any) -> Path:
    """Change keys of a lock's spec."""
    file = results / "spec.lock.yaml"
    lock = yaml.safe_load(file.read_text())
    lock["spec"] |= changes
    file.write_text(yaml.safe_dump(lock))
    return results


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """``first`` is certified; ``second`` has other draws, half the budget and is not audited."""
    folder = tmp_path_factory.mktemp("compare")
    first = relock(write_fixture(folder / "first"), name="first")
    write_json(first / "certificate.json", {"certified": True, "violations": []})
    budget = {"unit": "flops", "limit": LIMIT / 2, "evaluate_at": [0.25, 0.5, 0.75, 1.0]}
    second = write_fixture(folder / "second", seed=1)
    return first, relock(second, name="second", baseline="ppo", budget=budget)


@pytest.fixture(scope="module")
def made(pair: tuple[Path, Path]) -> Comparison:
    return compare(pair)


def table(made: Comparison, name: str) -> Any:
    return next(t for t in made.tables if t.name == f"compare_{name}")


def final(results: Path, arm: str, seed: int) -> list[int]:
    """Correct samples of each problem at the end of a cell, straight from its file."""
    file = results / "runs" / arm / f"seed-{seed}" / "evals.jsonl"
    line = json.loads(file.read_text().splitlines()[-1])
    assert line["purpose"] == "final"
    return [p["correct"] / p["n"] for p in line["problems"]]


def test_scores_are_each_experiments_own(made: Comparison, pair: tuple[Path, Path]):
    scores = table(made, "scores")
    assert scores.columns == ("test set", "arm", "first", "second")
    row = next(row for row in scores.rows if row[1] == "dapo")
    for results, cell in zip(pair, row[2:], strict=True):
        values = [v for seed in SEEDS for v in final(results, "dapo", seed)]
        assert cell.startswith(f"{100 * sum(values) / len(values):.1f} [")
        assert cell.endswith(", 3 seeds")
    assert row[2] != row[3]


def test_differences_are_to_the_baseline_of_the_same_experiment(
    made: Comparison, pair: tuple[Path, Path]
):
    records = [r for r in table(made, "paired").records if r["metric"] == "avg"]
    assert {(r["experiment"], r["control"]) for r in records} == {
        ("first", "grpo"), ("second", "ppo"),
    }  # fmt: skip
    found = next(r for r in records if r["experiment"] == "second" and r["arm"] == "dapo")
    mine, its = (sum(sum(final(pair[1], a, s)) for s in SEEDS) for a in ("dapo", "ppo"))
    assert found["mean"] == pytest.approx((mine - its) / (len(SEEDS) * PROBLEMS))


def test_it_says_that_nothing_is_matched_and_what_is_not_certified(made: Comparison):
    assert made.notes[0] == NOT_MATCHED
    assert "Arms of different experiments are not matched" in made.markdown()
    assert "second: not audited. Nothing shows that its arms were matched." in made.notes
    assert not any(note.startswith("first: ") for note in made.notes)
    assert made.to_json()["matched_across"] is False


def test_only_what_differs_is_listed(made: Comparison):
    assert {row[0]: tuple(row[1:]) for row in table(made, "specs").rows} == {
        "baseline": ("grpo", "ppo"),
        "budget.limit": ("1e12", "5e11"),
    }
    assert "The experiments differ in: baseline, budget." in made.notes


def test_verdicts_keep_their_standing(made: Comparison):
    verdicts = table(made, "verdicts")
    assert {(r["experiment"], r["certificate"]) for r in verdicts.records} == {
        ("first", "certified"), ("second", "not audited"),
    }  # fmt: skip
    assert all(r["status"].startswith("exploratory") for r in verdicts.records)


def test_a_branch_that_one_lacks_is_one_line(pair: tuple[Path, Path], tmp_path: Path):
    first = shutil.copytree(pair[0], tmp_path / "untuned")
    relock(first, tuning=None, name="untuned")
    rows = {row[0]: row[1:] for row in table(compare([pair[0], first]), "specs").rows}
    assert list(rows) == ["tuning"]
    assert rows["tuning"][1] == "none"
    assert "trials 2" in rows["tuning"][0]


def test_the_same_arm_with_other_parts_is_named(pair: tuple[Path, Path], tmp_path: Path):
    other = relock(shutil.copytree(pair[0], tmp_path / "other"), name="other")
    for file in other.glob("runs/dapo/seed-*/run.json"):
        run = read_json(file)
        run["parts"]["clip"]["clip_high"] = 0.4
        write_json(file, run)
    rows = table(compare([pair[0], other]), "specs").rows
    assert [list(row) for row in rows] == [["arm dapo.clip.clip_high", "0.28", "0.4"]]
    without = relock(shutil.copytree(pair[0], tmp_path / "w"), name="w", arms=["ppo", "grpo"])
    rows = table(compare([pair[0], without, other]), "specs").rows
    assert [list(row) for row in rows] == [
        ["arms", "ppo, grpo, dapo", "ppo, grpo", "ppo, grpo, dapo"],
        ["arm dapo.clip.clip_high", "0.28", "–", "0.4"],
    ]


def test_a_copy_is_no_replication(pair: tuple[Path, Path], tmp_path: Path):
    copy = relock(shutil.copytree(pair[0], tmp_path / "copy"), name="copy")
    notes = compare([pair[0], copy]).notes
    assert any("the same runs, or runs repeated exactly" in note for note in notes)
    assert any(note.startswith("No setting, part or hash differs") for note in notes)
    assert not any("repeated exactly" in note for note in compare(pair).notes)


def test_test_sets_of_one_name_with_other_problems_stand_apart(
    pair: tuple[Path, Path], tmp_path: Path
):
    other = relock(shutil.copytree(pair[1], tmp_path / "other"), name="other")
    for file in other.glob("runs/*/seed-*/evals.jsonl"):
        file.write_text(file.read_text().replace("2" * 64, "3" * 64))
    made = compare([pair[0], other])
    scores = table(made, "scores")
    assert {row[0] for row in scores.rows} == {
        "arithmetic (problems 22222222)", "arithmetic (problems 33333333)",
    }  # fmt: skip
    assert all("–" in row[2:] for row in scores.rows)
    assert any("has other problems in some experiments" in note for note in made.notes)


def test_experiments_of_one_name_are_told_apart_and_repeats_are_dropped(
    pair: tuple[Path, Path], tmp_path: Path
):
    folders = [shutil.copytree(pair[0], tmp_path / f"run{i}" / "first") for i in (1, 2)]
    made = compare([*folders, folders[0]])
    assert [row[0] for row in table(made, "experiments").rows] == ["run1/first", "run2/first"]


def test_of_many_each_has_rows_of_its_own(pair: tuple[Path, Path], tmp_path: Path):
    more = [shutil.copytree(pair[1], tmp_path / f"e{i}") for i in range(4)]
    made = compare([pair[0], *(relock(one, name=one.name) for one in more)])
    assert table(made, "scores").columns == ("test set", "arm", "experiment", "score")
    rows = table(made, "specs").rows
    assert ["budget.limit", "1e12", "first"] in [list(row) for row in rows]
    assert ["budget.limit", "5e11", "e0, e1, e2, e3"] in [list(row) for row in rows]


def test_the_command_prints_writes_and_speaks_json(
    pair: tuple[Path, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["compare", *map(str, pair), *arguments])
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capfd.readouterr()

    out = tmp_path / "side_by_side"
    code, text, err = run("--out", str(out))
    assert (code, err) == (0, "")
    assert text.startswith(f"note: {NOT_MATCHED}\n")
    assert NOT_MATCHED in (out / "COMPARE.md").read_text()
    with (out / "tables" / "compare_scores.csv").open() as file:
        rows = list(csv.DictReader(file))
    code, text, err = run("--json")
    scores = json.loads(text)["scores"]
    assert (code, err, len(scores)) == (0, "", len(rows))
    assert {row["experiment"] for row in rows} == {"first", "second"}
    code, _, err = run("--out", str(pair[0]))
    assert code == 2
    assert "is a results folder; name another" in err


def test_a_results_folder_keeps_its_own_report_alone(made: Comparison, pair: tuple[Path, Path]):
    with pytest.raises(InputError, match="is a results folder"):
        write_comparison(made, pair[1])
    assert not (pair[1] / "COMPARE.md").exists()
