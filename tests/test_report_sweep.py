"""A sweep's pooled report: numbers by hand, every case shown, and what is not certified said."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none
from report_fixture import ARMS, PROBLEMS, SEEDS, write_fixture

from harness.errors import InputError
from harness.report.sweep import write_sweep_report
from harness.report.sweep_load import leaf, load_sweep_results

FLIP, SIZE, KIND = "reward.noise.flip", "sampling.completions_per_prompt", "optimizer.schedule"
BASELINE, TEST = "grpo", "arithmetic"
GRID = {SIZE: [4, 64], FLIP: [0.0, 0.25]}


def write_cases(folder: Path, axes: dict[str, list[Any]], cases: dict[str, dict[str, Any]]) -> Path:
    """A sweep's folder; each case has invented numbers of its own, and a certificate."""
    for number, (name, sets) in enumerate(cases.items()):
        case = write_fixture(folder / name, seed=number)
        (case / "certificate.json").write_text(json.dumps({"certified": True, "violations": []}))
        edit_spec(case, lambda spec, sets=sets: set_all(spec, sets))
    (folder / "sweep.json").write_text(json.dumps({
        "format": 1, "name": "swept", "question": "What does it do?", "axes": axes,
        "order": list(axes), "cases": [{"name": n, "sets": s} for n, s in cases.items()],
    }, sort_keys=True))  # fmt: skip
    return folder


def edit_spec(case: Path, change: Any) -> None:
    path = case / "spec.lock.yaml"
    lock = yaml.safe_load(path.read_text())
    change(lock["spec"])
    path.write_text(yaml.safe_dump(lock))


def set_all(spec: dict[str, Any], sets: dict[str, Any]) -> None:
    for path, value in sets.items():
        *parents, last = path.split(".")
        below = spec
        for key in parents:
            below = below.setdefault(key, {})
        below[last] = value


def grid_cases(axes: dict[str, list[Any]]) -> dict[str, dict[str, Any]]:
    found: list[dict[str, Any]] = [{}]
    for path, values in axes.items():
        found = [sets | {path: value} for sets in found for value in values]
    return {"-".join(str(v) for v in sets.values()): sets for sets in found}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_cases(tmp_path_factory.mktemp("grid") / "swept", GRID, grid_cases(GRID))
    write_sweep_report(folder)
    return folder


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "swept"))


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / "tables" / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def shares(case: Path, arm: str, key: str = "correct") -> np.ndarray:
    """(seeds x problems) of the final evaluation, read off the stored lines."""
    found = []
    for seed in SEEDS:
        path = case / "runs" / arm / f"seed-{seed}" / "evals.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        final = next(line for line in lines if line["purpose"] == "final")
        found.append([
            p["correct"] / p["n"] if key == "correct" else float(p[key])
            for p in final["problems"]
        ])  # fmt: skip
    return np.array(found)


def test_scores_are_those_of_the_stored_evaluations(written: Path):
    found = {(r["case"], r["arm"]): r for r in rows(written, f"sweep_{TEST}")}
    assert len(found) == 4 * (2 + len(ARMS))
    for case in grid_cases(GRID):
        for arm in ARMS:
            row, expected = found[case, arm], shares(written / case, arm).mean()
            assert float(row["mean"]) == pytest.approx(expected)
            assert float(row["low"]) < expected < float(row["high"])
            assert (int(row["seeds"]), int(row["problems"])) == (len(SEEDS), PROBLEMS)
    greedy = {(r["case"], r["arm"]): r for r in rows(written, f"sweep_{TEST}_greedy")}
    expected = shares(written / "64-0.0", "dapo", "greedy").mean()
    assert float(greedy["64-0.0", "dapo"]["mean"]) == pytest.approx(expected)
    for stem in ("_greedy", "_pass8", "_maj8"):
        assert rows(written, f"sweep_{TEST}{stem}")
        assert rows(written, f"sweep_paired_{TEST}{stem}")


def test_differences_are_paired_within_a_case(written: Path):
    found = {(r["case"], r["arm"]): r for r in rows(written, f"sweep_paired_{TEST}")}
    assert not any(arm == BASELINE for _, arm in found)
    for case in grid_cases(GRID):
        gaps = shares(written / case, "ppo") - shares(written / case, BASELINE)
        row = found[case, "ppo"]
        assert float(row["mean"]) == pytest.approx(gaps.mean())
        assert [float(g) for g in row["by_seed"].split()] == pytest.approx(gaps.mean(1), rel=1e-4)
        assert row["control"] == BASELINE
        assert float(row["smallest_p"]) == 2 / 2 ** len(SEEDS)


def test_a_change_is_paired_between_cases_that_differ_in_nothing_else(written: Path):
    found = rows(written, f"sweep_change_{TEST}")
    changes = {(r["path"], r["from"], r["to"], r[FLIP] or r[SIZE]) for r in found}
    assert changes == {
        (SIZE, "4", "64", "0"), (SIZE, "4", "64", "0.25"),
        (FLIP, "0", "0.25", "4"), (FLIP, "0", "0.25", "64"),
    }  # fmt: skip

    def row(arm: str, less: str) -> dict[str, str]:
        (one,) = (
            r for r in found
            if (r["path"], r[SIZE], r["arm"], r["less"]) == (FLIP, "64", arm, less)
        )  # fmt: skip
        return one

    mine, its = (
        shares(written / "64-0.25", arm) - shares(written / "64-0.0", arm)
        for arm in ("ppo", BASELINE)
    )
    assert float(row("ppo", "")["mean"]) == pytest.approx(mine.mean())
    assert float(row(BASELINE, "")["mean"]) == pytest.approx(its.mean())
    assert float(row("ppo", BASELINE)["mean"]) == pytest.approx((mine - its).mean())
    by_seed = [float(g) for g in row("ppo", BASELINE)["by_seed"].split()]
    assert by_seed == pytest.approx((mine - its).mean(1), rel=1e-4, abs=1e-6)


def test_every_interval_that_is_promised_is_shown(written: Path):
    for name in (f"sweep_{TEST}", f"sweep_paired_{TEST}", f"sweep_change_{TEST}"):
        text = (written / "tables" / f"{name}.md").read_text()
        lines = [line for line in text.splitlines() if line.startswith("|")][2:]
        assert len(lines) == 4
        for line in lines:
            cells = [cell.strip() for cell in line.strip("|").split("|")][2:]
            shown = [cell for cell in cells if cell != "–"]
            assert len(shown) >= 4
            assert all(re.fullmatch(r"[+−]?\d+\.\d \[.+, .+\]", cell) for cell in shown), line


def test_a_figure_for_each_axis_and_the_first_one_first(written: Path):
    names = sorted(p.name for p in (written / "figures").iterdir())
    along_flip = f"sweep_{TEST}_{FLIP.replace('.', '_')}"
    assert names == sorted(
        f"{n}.{kind}" for n in (f"sweep_{TEST}", along_flip) for kind in ("png", "svg")
    )
    text = (written / "REPORT.md").read_text()
    assert f"Accuracy on {TEST} against completions_per_prompt" in text
    assert text.index("against completions_per_prompt") < text.index("against flip")


def test_the_same_files_give_the_same_bytes_and_ask_for_no_network(written: Path, copy: Path):
    for name in ("tables", "figures"):
        shutil.rmtree(copy / name)
    write_sweep_report(copy)
    for path in sorted(written.rglob("*")):
        if path.is_file():
            assert (copy / path.relative_to(written)).read_bytes() == path.read_bytes(), path
    html = (written / "report.html").read_text()
    assert not re.search(r"(src|href)=\"https?:", html)
    assert 'href="4-0.25/report.html"' in html
    assert '<p class="badge yes"' in html


def test_a_case_that_is_not_certified_is_marked_wherever_it_stands(copy: Path):
    bad = {"certified": False, "violations": [{"message": f"cell {n} is odd"} for n in range(5)]}
    (copy / "64-0.25" / "certificate.json").write_text(json.dumps(bad))
    (copy / "4-0.0" / "certificate.json").unlink()
    write_sweep_report(copy)
    text = (copy / "REPORT.md").read_text()
    assert "4 experiments, of which 2 are certified as matched" in text
    assert "64-0.25: NOT certified" in text
    assert "4-0.0: not audited" in text
    assert "64-0.25: violation: cell 2 is odd" in text
    assert "64-0.25: 2 more violations." in text
    table = (copy / "tables" / f"sweep_{TEST}.md").read_text()
    assert "| 64 | 0.25 † |" in table
    assert "| 64 | 0 |" in table
    assert "not certified" in table
    change = (copy / "tables" / f"sweep_change_{TEST}.md").read_text()
    assert change.count("†") == 4 + 1  # each change touches one of the two; and the note
    assert '<p class="badge no"' in (copy / "report.html").read_text()
    uncertified = {r["case"] for r in rows(copy, f"sweep_{TEST}") if r["certified"] == "false"}
    assert uncertified == {"64-0.25", "4-0.0"}


def test_cases_that_have_not_begun_are_named_and_the_others_shown(copy: Path):
    shutil.rmtree(copy / "64-0.25")
    write_sweep_report(copy)
    text = (copy / "REPORT.md").read_text()
    assert "Not begun: 64-0.25." in text
    assert "4 experiments, of which 3 are" in text
    assert '<p class="badge no"' in (copy / "report.html").read_text()
    changes = {(r["path"], r["to"]) for r in rows(copy, f"sweep_change_{TEST}")}
    assert changes == {(SIZE, "64"), (FLIP, "0.25")}
    for case in ("4-0.0", "4-0.25", "64-0.0"):
        shutil.rmtree(copy / case)
    with pytest.raises(InputError, match="no case of the sweep has begun"):
        write_sweep_report(copy)
    (copy / "sweep.json").write_text("{}")
    with pytest.raises(InputError, match=r"sweep\.json: cannot be read"):
        write_sweep_report(copy)


def test_seeds_that_one_case_lacks_are_left_out_of_a_pair(copy: Path):
    shutil.rmtree(copy / "64-0.25" / "runs" / "ppo" / "seed-1")
    write_sweep_report(copy)
    (one,) = (
        r for r in rows(copy, f"sweep_change_{TEST}")
        if (r["path"], r[SIZE], r["arm"], r["less"]) == (FLIP, "64", "ppo", "")
    )  # fmt: skip
    assert int(one["seeds"]) == len(SEEDS) - 1
    moved = shares(copy / "64-0.25", BASELINE) - shares(copy / "64-0.0", BASELINE)
    assert moved.shape[0] == len(SEEDS)
    done = {row[0]: row[-2] for row in table_rows(copy, "cases")}
    assert done["64-0.25"] == "20 of 21"


def table_rows(folder: Path, name: str) -> list[list[str]]:
    text = (folder / "tables" / f"{name}.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_three_axes_of_which_one_is_words(tmp_path: Path):
    """A panel for each combination of the others; words are no axis to draw along."""
    axes = {FLIP: [0.0, 0.1], SIZE: [4, 8], KIND: ["constant", "linear"]}
    folder = write_cases(tmp_path / "swept", axes, grid_cases(axes))
    write_sweep_report(folder)
    names = {p.stem for p in (folder / "figures").iterdir()}
    assert names == {f"sweep_{TEST}", f"sweep_{TEST}_sampling_completions_per_prompt"}
    svg = (folder / "REPORT.md").read_text()
    assert "a panel for each completions_per_prompt and schedule" in svg
    sweep = load_sweep_results(folder)
    assert len(list(sweep.changes())) == 3 * 4


def test_named_cases_are_compared_with_the_first(tmp_path: Path):
    """They may differ in arms and budget: the head says so, and what is not there is a dash."""
    cases = {"weak": {"budget.limit": 1e12}, "strong": {"budget.limit": 2e12}}
    folder = write_cases(tmp_path / "swept", {}, cases)
    edit_spec(folder / "strong", lambda spec: spec.update(arms=["grpo", "dapo"]))
    shutil.rmtree(folder / "strong" / "runs" / "ppo")
    write_sweep_report(folder)
    assert not (folder / "figures").exists()
    found = {row[0]: row[1:] for row in table_rows(folder, f"sweep_{TEST}")}
    assert list(found) == ["weak", "strong"]
    assert found["strong"][2] == "–"  # ppo
    assert [row[0] for row in table_rows(folder, f"sweep_change_{TEST}")] == ["case weak to strong"]
    text = (folder / "REPORT.md").read_text()
    assert "- Budget: 1e12 FLOPs a run / 2e12 FLOPs a run" in text
    assert "- Arms: ppo, grpo, dapo / grpo, dapo" in text


def test_names_of_axes_are_short_where_they_stay_apart():
    assert leaf("reward.noise.flip", ["reward.noise.flip", "budget.limit"]) == "flip"
    both = ["data.train.limit", "budget.limit"]
    assert [leaf(path, both) for path in both] == both


def test_the_pooled_report_loads_no_torch(written: Path, copy: Path):
    code = (
        "import sys; from pathlib import Path\n"
        "from harness.report.sweep import write_sweep_report\n"
        "write_sweep_report(Path(sys.argv[1]))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(copy)], check=True)
