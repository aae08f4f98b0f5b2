"""Verdicts in the report: their numbers, and what is withheld; other budgets and checkpoints."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scipy import stats

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none
from report_fixture import LIMIT, SAMPLES, write_fixture

from harness.amendments import amended
from harness.report import all_tables, write_report
from harness.report.content import compose
from harness.report.load import Experiment, load_experiment
from harness.report.scores import TestScores, final_scores
from harness.report.table_checkpoints import checkpoints_table, selected_checkpoints
from harness.report.table_exchange import exchange, exchange_table
from harness.report.table_verdict import verdict_sentences, verdict_table
from harness.report.verdicts import NOT_DECLARED, Judged, all_terms, judged
from harness.stats.power import superiority_power, tost_power

VERDICT = {"metric": "avg", "test": "all", "margin": 0.02, "family": [["dapo", "grpo"]]}
FIVE = list(range(5))


def edit_lock(results: Path, change: Any) -> None:
    path = results / "spec.lock.yaml"
    lock = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(change(lock) or lock))


def declare(results: Path, **verdict: Any) -> None:
    edit_lock(results, lambda lock: lock["spec"].update(verdict=VERDICT | verdict))


def judged_right(n: int, share: float) -> dict[str, Any]:
    right = round(n * share)
    answers = [["1", right, True]] if right else []
    return {"n": n, "correct": right, "unparsed": n - right, "answers": answers}


def set_scores(results: Path, arm: str, by_seed: list[float], spread: float = 0.0) -> None:
    """Final scores of an arm: each seed's mean, problems alternately above and below it.

    Of 1000 samples a problem, so that a mean is met to 0.001. Seeds that the fixture has not are
    copied from the first.
    """
    for seed, mean in enumerate(by_seed):
        folder = results / "runs" / arm / f"seed-{seed}"
        if not folder.exists():
            shutil.copytree(results / "runs" / arm / "seed-0", folder)
            run = json.loads((folder / "run.json").read_text())
            (folder / "run.json").write_text(json.dumps(run | {"seed": seed}))
        path = folder / "evals.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for i, problem in enumerate(lines[-1]["problems"]):
            problem |= judged_right(1000, mean + (spread if i % 2 else -spread))
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def with_seeds(results: Path, grpo: list[float], dapo: list[float], spread: float = 0.0) -> None:
    edit_lock(results, lambda lock: lock["spec"].update(seeds=list(range(len(grpo)))))
    set_scores(results, "grpo", grpo)
    set_scores(results, "dapo", dapo, spread)


def loaded(results: Path) -> tuple[Experiment, list[TestScores]]:
    experiment = load_experiment(results)
    return experiment, final_scores(experiment)


def verdicts(results: Path) -> list[Judged]:
    experiment, scores = loaded(results)
    return [one for t in all_terms(experiment) for one in judged(experiment, scores, t)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fixture(tmp_path_factory.mktemp("made") / "invented")


@pytest.fixture
def results(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "invented"))


GAPS = np.array([0.004, -0.002, 0.006, 0.001, 0.003])


def test_equivalence_is_told_with_its_numbers(results: Path):
    declare(results)
    with_seeds(results, [0.5] * 5, list(0.5 + GAPS))
    (one,) = verdicts(results)
    assert (one.label, one.withheld) == ("equivalent", ())
    assert one.terms.in_advance
    se, df = GAPS.std(ddof=1) / np.sqrt(5), 4
    half = stats.t.ppf(0.95, df) * se
    assert one.found.interval_tost == pytest.approx((GAPS.mean() - half, GAPS.mean() + half))
    p = stats.t.sf((0.02 - GAPS.mean()) / se, df)  # the nearer margin
    assert one.found.p_equivalence == pytest.approx(p, rel=1e-6)
    experiment, scores = loaded(results)
    (text,) = verdict_sentences(experiment, scores)
    assert text.startswith(
        "At equal FLOPs, on arithmetic by Avg@16, with a margin of 2 points declared in advance: "
        "dapo and grpo are equivalent within 2 points (90 % interval [−0.1, +0.5]"
    )
    table = verdict_table(experiment, scores)
    assert table.rows[0][1:3] == ["dapo − grpo", "equivalent"]


def test_a_difference_beyond_the_margin_is_better(results: Path):
    declare(results)
    with_seeds(results, [0.5] * 5, list(0.6 + GAPS))
    (one,) = verdicts(results)
    assert (one.label, one.withheld) == ("better", ())
    text = verdict_sentences(*loaded(results))[0]
    assert "dapo is better than grpo by 10.2 points (95 % interval [+9.9, +10.6]" in text


@pytest.mark.parametrize(
    ("grpo", "dapo", "spread", "label", "reason"),
    [
        ([0.5] * 4, [0.604, 0.598, 0.606, 0.601], 0, "better", "4 seeds, fewer than 5"),
        # Shown over seeds, and not for other problems: half of them are 30 points the other way.
        ([0.5] * 5, list(0.55 + GAPS), 0.3, "better", "on others like these it may be 0"),
        ([0.5] * 5, list(0.5 + GAPS), 0.3, "equivalent", "on others like these it may be larger"),
        # A spread of 1.5 points: five seeds see a difference of 2 points one time in two.
        ([0.5] * 5, [0.53, 0.55, 0.54, 0.513, 0.537], 0, "better", "to see the margin, wanted 0.8"),
    ],
)
def test_what_seeds_problems_or_power_do_not_carry_is_withheld(
    results: Path, grpo: Any, dapo: Any, spread: float, label: str, reason: str
):
    declare(results)
    with_seeds(results, grpo, dapo, spread)
    (one,) = verdicts(results)
    assert one.found.label == label
    assert one.label == "inconclusive"
    assert any(reason in why for why in one.withheld)
    text = verdict_sentences(*loaded(results))[0]
    assert f"not claimed as {label}: " in text
    assert "is better" not in text
    assert "are equivalent" not in text


def test_a_failed_seed_withholds_the_claim(results: Path):
    declare(results)
    with_seeds(results, [0.5] * 6, [*(0.6 + GAPS), 0.6])
    (results / "runs/dapo/seed-5/done.json").unlink()
    (one,) = verdicts(results)
    assert one.withheld == ("1 of 6 seeds are missing",)


def test_the_design_s_power_is_that_of_its_spread(results: Path):
    declare(results, family="baseline")
    with_seeds(results, [0.5] * 5, list(0.5 + 4 * GAPS))
    one = next(v for v in verdicts(results) if v.arm == "dapo")
    sd, level = float(np.std(4 * GAPS, ddof=1)), 0.05 / 2  # ppo and dapo against grpo
    assert one.found.family == 2
    assert one.power_difference == pytest.approx(superiority_power(5, sd, 0.02, level))
    assert one.power_equivalence == pytest.approx(tost_power(5, sd, 0.02, alpha=level))
    n = one.seeds_difference
    assert n is not None
    assert superiority_power(n, sd, 0.02, level) >= 0.8 > superiority_power(n - 1, sd, 0.02, level)
    assert f"{n} seeds would show a difference" in " ".join(verdict_sentences(*loaded(results)))


def test_without_a_declaration_the_verdict_is_exploratory(results: Path):
    with_seeds(results, [0.5] * 5, list(0.5 + GAPS))
    one = next(v for v in verdicts(results) if v.arm == "dapo")
    assert (one.terms.status, one.terms.margin) == (NOT_DECLARED, 0.02)
    experiment, scores = loaded(results)
    assert (
        "(no margin was declared in advance, so this is exploratory)"
        in (verdict_sentences(experiment, scores)[0])
    )
    assert verdict_table(experiment, scores).rows[1][2] == "equivalent (exploratory)"


def append(results: Path, begun: int, **changes: Any) -> None:
    """Amend the lock, as ``harness amend`` would."""

    def change(lock: dict[str, Any]) -> dict[str, Any]:
        lock |= {"streams": {}}
        old = lock["spec"] | {f"verdict.{k}": v for k, v in lock["spec"]["verdict"].items()}
        pairs = {k.replace("__", "."): v for k, v in changes.items()}
        pairs = {k: (old[k], v) for k, v in pairs.items()}
        new = {"arms": lock["arms"], "streams": {}}
        return amended(lock, new, pairs, why="because", begun=begun, done=begun,
                       time="2026-01-01T00:00:00+00:00")  # fmt: skip

    edit_lock(results, change)


def test_what_was_promised_is_still_answered_beside_what_was_amended(results: Path):
    with_seeds(results, [0.5] * 5, list(0.5 + 2 * GAPS))
    declare(results, margin=0.005)
    append(results, 7, verdict__margin=0.02)
    first, second = verdicts(results)
    assert (first.label, first.terms.in_advance) == ("inconclusive", True)
    assert (second.label, second.terms.in_advance) == ("equivalent", False)
    experiment, scores = loaded(results)
    table = verdict_table(experiment, scores)
    assert table.columns[0] == "declared"
    assert [row[0] for row in table.rows] == ["in advance", "exploratory"]
    assert table.rows[1][3] == "equivalent (exploratory)"
    assert (
        "changed after cells had run: verdict.margin (amendment 1)"
        in (verdict_sentences(experiment, scores)[1])
    )
    page = write_report(results).markdown.read_text()
    assert "Amendment 1 of 2026-01-01T00:00:00+00:00, when 7 cells had begun" in page


def test_an_amendment_before_the_first_cell_is_still_in_advance(results: Path):
    with_seeds(results, [0.5] * 5, list(0.5 + GAPS))
    declare(results, margin=0.005)
    append(results, 0, verdict__margin=0.02)
    (one,) = verdicts(results)
    assert (one.terms.in_advance, one.terms.margin, one.label) == (True, 0.02, "equivalent")


def test_added_seeds_enter_the_exploratory_verdict_alone_and_mark_every_table(results: Path):
    with_seeds(results, [0.5] * 5, list(0.5 + GAPS))
    edit_lock(results, lambda lock: lock["spec"].update(seeds=[0, 1, 2, 3]))
    declare(results)
    append(results, 7, seeds=FIVE)
    first, second = verdicts(results)
    assert (first.found.seeds, second.found.seeds) == (4, 5)
    experiment, scores = loaded(results)
    tables = {t.name: t for t in all_tables(experiment, scores)}
    for name in ("final", "paired", "gain", "levels", "exchange", "budget", "checkpoints"):
        assert "Exploratory: 1 seed ([4]) added after cells had run." in tables[name].note, name
    assert all(r["exploratory"] for r in tables["final"].records or ())
    assert "Exploratory" not in tables["arms"].note


def test_an_added_arm_is_marked_wherever_it_stands(results: Path):
    edit_lock(results, lambda lock: lock["spec"].update(arms=["ppo", "grpo"]))
    declare(results, family="baseline")
    append(results, 7, arms=["ppo", "grpo", "dapo"])
    experiment, scores = loaded(results)
    tables = {t.name: t for t in all_tables(experiment, scores)}
    assert tables["final"].columns[2:] == ("base", "placebo", "ppo", "grpo", "dapo ‡")
    assert "dapo ‡ − grpo" in [row[2] for row in tables["paired"].rows]
    assert r"\ddag{}" in tables["final"].latex()
    told = {r["arm"]: r["exploratory"] for r in tables["final"].records or ()}
    assert (told["dapo"], told["ppo"]) == (True, False)
    assert [(v.arm, v.terms.in_advance) for v in verdicts(results)] == [
        ("ppo", True), ("ppo", False), ("dapo", False),
    ]  # fmt: skip


# -- checkpoints ----------------------------------------------------------------------------------


def evals(results: Path, cell: str, change: Any) -> None:
    path = results / "runs" / cell / "evals.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines = change(lines) or lines
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def all_right(line: dict[str, Any], share: float) -> None:
    for problem in line["problems"]:
        problem |= judged_right(10, share)


def test_the_optimism_of_the_best_checkpoint_is_counted(results: Path):
    for seed, (best, last) in enumerate([(0.9, 0.5), (0.7, 0.6), (0.4, 0.7)]):

        def change(lines: list[dict[str, Any]], best: float = best, last: float = last) -> None:
            for line in lines[:-1]:
                all_right(line, 0.2)
            all_right(lines[1], best)
            all_right(lines[-1], last)

        evals(results, f"grpo/seed-{seed}", change)
    table = checkpoints_table(load_experiment(results))
    row = next(r for r in table.rows if r[1] == "grpo")
    # Last (0.5 + 0.6 + 0.7)/3, best (0.9 + 0.7 + 0.7)/3.
    assert row[2:] == ["3", "4", "60.0", "not evaluated", "76.7", "+16.7", "2 of 3"]
    assert "validation in tuning trials only" in table.note


def test_a_checkpoint_chosen_by_validation_is_shown_where_there_is_one(results: Path):
    def change(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for line, share in zip(lines, (0.1, 0.4, 0.3, 0.2), strict=True):
            all_right(line, share)
        judged = [json.loads(json.dumps(line)) | {"split": "validation"} for line in lines]
        for line, share in zip(judged, (0.1, 0.2, 0.9, 0.3), strict=True):
            all_right(line, share)
        return [*lines, *judged]

    for seed in range(3):
        evals(results, f"grpo/seed-{seed}", change)
    table = checkpoints_table(load_experiment(results))
    row = next(r for r in table.rows if r[1] == "grpo")
    assert row[4:8] == ["20.0", "30.0", "40.0", "+20.0"]
    assert next(r for r in table.rows if r[1] == "ppo")[5] == "not evaluated"


def test_a_final_score_that_was_selected_on_test_is_flagged(results: Path):
    assert list(selected_checkpoints(load_experiment(results))) == []

    def plant(lines: list[dict[str, Any]]) -> None:
        all_right(lines[1], 1.0)
        lines[-1] |= {"step": lines[1]["step"], "problems": lines[1]["problems"]}

    evals(results, "dapo/seed-1", plant)
    experiment, scores = loaded(results)
    (text,) = selected_checkpoints(experiment)
    assert text.startswith(
        "The final score of runs/dapo/seed-1 on arithmetic is of step 6, the best of its "
        "evaluations on test, not of its last, 12: it looks selected"
    )
    lead = compose(experiment, scores, [], [], [])[0]
    assert text in [item for b in lead.blocks for item in getattr(b, "items", ())]


# -- other units ----------------------------------------------------------------------------------


def straight(results: Path, arm: str, tokens: float, scores: list[float]) -> None:
    """An arm that spends so many tokens by the end, evaluated four times with these scores."""

    def change(lines: list[dict[str, Any]]) -> None:
        for line, share in zip(lines, scores, strict=True):
            line["spent"] |= {"tokens": tokens * line["at"]}
            all_right(line, share)

    for seed in range(3):
        evals(results, f"{arm}/seed-{seed}", change)


def test_an_exchange_interpolates_and_never_extrapolates(results: Path):
    straight(results, "grpo", 1000.0, [0.2, 0.4, 0.6, 0.8])
    straight(results, "dapo", 2000.0, [0.3, 0.5, 0.7, 0.9])
    straight(results, "ppo", 900.0, [0.1, 0.2, 0.3, 0.4])
    experiment, scores = loaded(results)
    found = exchange(experiment, "arithmetic", "tokens")
    assert found is not None
    assert found.limit == 900  # the least of the largest: ppo's end
    means = {arm: e.mean for arm, e in found.found.items() if e}
    # grpo between 0.75 and 1: 0.6 + 0.2 * 150/250; dapo between 0.25 and 0.5: 0.3 + 0.2 * 400/500.
    assert means == pytest.approx({"ppo": 0.4, "grpo": 0.72, "dapo": 0.46})
    assert found.ranking == ("grpo", "dapo", "ppo")
    flops = exchange(experiment, "arithmetic", "flops")
    assert flops is not None
    assert (flops.limit, flops.ranking) == (pytest.approx(LIMIT), ("dapo", "grpo", "ppo"))
    table = exchange_table(experiment, scores)
    row = next(r for r in table.rows if r[1] == "tokens 900")
    assert row[3].startswith("72.0 ")
    assert row[3].endswith(" (1)")
    assert "the order changes with the unit: at equal completions dapo, grpo, ppo; " in table.note


def test_before_the_first_evaluation_nothing_is_said_without_a_base(results: Path):
    straight(results, "grpo", 1000.0, [0.2, 0.4, 0.6, 0.8])
    straight(results, "dapo", 100_000.0, [0.3, 0.5, 0.7, 0.9])
    straight(results, "ppo", 1000.0, [0.1, 0.2, 0.3, 0.4])
    shutil.rmtree(results / "runs/base")
    found = exchange(load_experiment(results), "arithmetic", "tokens")
    assert found is not None
    assert found.found["dapo"] is None
    assert found.ranking == ("grpo", "ppo")


def test_memory_admits_the_arms_that_fit(results: Path):
    experiment, scores = loaded(results)
    rows = [r for r in exchange_table(experiment, scores).rows if r[1].startswith("memory")]
    assert [[c == "does not fit" for c in r[2:]] for r in rows] == [
        [True, True, False], [True, False, False], [False, False, False],
    ]  # fmt: skip
    assert rows[0][4].endswith(" (1)")


def test_the_fixture_evaluates_as_it_says(made: Path):
    """What the tests above build on: four moments, the last with all samples."""
    lines = (made / "runs/grpo/seed-0/evals.jsonl").read_text().splitlines()
    assert [json.loads(line)["at"] for line in lines] == [0.25, 0.5, 0.75, 1.0]
    assert json.loads(lines[-1])["problems"][0]["n"] == SAMPLES
