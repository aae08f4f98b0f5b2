"""The report as a pure function of stored runs: exact numbers, equal bytes, nothing dropped."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.errors import InputError
from harness.report import write_report
from harness.report.content import certificate_line
from harness.report.load import Experiment, load_experiment
from harness.report.notices import notices, summary
from harness.report.samples import side_by_side
from harness.report.scores import TestScores, final_scores
from harness.report.table_design import arms_table, controls_table, failures_table, tuning_table
from harness.report.table_scores import score_tables
from harness.report.table_spent import budget_table, diagnostics_table, outcomes_table
from harness.report.tables import Table, fixed, latex, number, setting, signed

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(Path(__file__).parent))
from report_fixture import ARMS, LIMIT, PROBLEMS, SEEDS, write_fixture  # noqa: E402


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return write_fixture(tmp_path / "invented")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results folder with its report; read only."""
    path = write_fixture(tmp_path_factory.mktemp("written") / "invented")
    write_report(path)
    return path


def loaded(results: Path) -> tuple[Experiment, list[TestScores]]:
    experiment = load_experiment(results)
    return experiment, final_scores(experiment)


def rows(results: Path, name: str) -> list[dict[str, str]]:
    with (results / "tables" / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def final_problems(results: Path, arm: str, seed: int) -> list[dict[str, Any]]:
    """Read afresh, without the report's own code."""
    text = (results / "runs" / arm / f"seed-{seed}" / "evals.jsonl").read_text()
    return json.loads(text.splitlines()[-1])["problems"]


def rewrite(path: Path, change: Any) -> None:
    """Apply ``change`` to every record of a JSON-lines file."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        change(record)
    path.write_text("".join(json.dumps(r) + "\n" for r in records))


def tree(folder: Path) -> dict[str, bytes]:
    produced = [folder / "report.html", folder / "REPORT.md"]
    produced += [*(folder / "tables").iterdir(), *(folder / "figures").iterdir()]
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in produced}


# -- purity -------------------------------------------------------------------------------------


def test_another_process_in_another_folder_writes_the_same_bytes_without_torch(
    written: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "elsewhere" / "copied"
    shutil.copytree(written / "runs", copy / "runs")
    shutil.copy(written / "spec.lock.yaml", copy)
    script = (
        "import sys; from pathlib import Path; from harness.report import write_report\n"
        f"write_report(Path({str(copy)!r}))\n"
        "assert not {'torch', 'transformers', 'optuna'} & set(sys.modules), 'heavy import'"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "LC_ALL": "C"}
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, check=True)
    ours, theirs = tree(written), tree(copy)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []
    assert len(ours) > 60
    assert not [p for p in copy.rglob(".*") if p.is_file()], "a temporary file was left"


def test_only_files_marked_measured_depend_on_seconds_and_measured_memory(
    written: Path, results: Path
) -> None:
    for path in results.glob("runs/*/*/timing.jsonl"):
        rewrite(path, lambda r: r.update({k: 3 * r[k] for k in r if k == "total_seconds"}))
    for path in results.glob("runs/*/*/memory.json"):
        memory = json.loads(path.read_text())
        for item in (*memory["measured"], memory["peak"]):
            item["bytes"] *= 2
        path.write_text(json.dumps(memory))
    files = write_report(results)
    measured = {p.relative_to(results).as_posix() for p in files.measured}
    ours, theirs = tree(written), tree(results)
    changed = {name for name in ours if ours[name] != theirs[name]}
    assert {Path(name).stem for name in measured} == {
        "seconds", "memory_measured", "learning_seconds", "exchange_measured",
    }  # fmt: skip
    assert changed - measured == {"report.html", "REPORT.md"}
    assert "tables/memory_measured.csv" in changed


def test_the_excerpt_of_samples_survives_without_the_samples(written: Path, tmp_path: Path) -> None:
    copy = tmp_path / "cloned"
    shutil.copytree(written, copy)
    for path in copy.glob("runs/*/*/samples.jsonl"):
        path.unlink()
    kept = side_by_side(load_experiment(copy))
    assert kept == side_by_side(load_experiment(written))
    assert len(kept) == 4
    assert [w.arm for w in kept[0].written] == ["base", "placebo", *ARMS]


# -- numbers ------------------------------------------------------------------------------------


def test_final_scores_follow_from_the_stored_counts(written: Path) -> None:
    table = {(r["arm"], r["metric"], r["k"]): r for r in rows(written, "final")}
    for arm in ("base", "placebo", *ARMS):
        stored = [final_problems(written, arm, seed) for seed in SEEDS]
        flat = [p for problems in stored for p in problems]
        expected = {
            ("avg", ""): np.mean([p["correct"] / p["n"] for p in flat]),
            ("greedy", ""): np.mean([p["greedy"] for p in flat]),
            ("pass", "4"): np.mean(
                [1 - comb(p["n"] - p["correct"], 4) / comb(p["n"], 4) for p in flat]
            ),
            ("maj", "1"): np.mean([p["correct"] / p["n"] for p in flat]),
        }
        for (metric, k), value in expected.items():
            row = table[arm, metric, k]
            assert float(row["mean"]) == pytest.approx(value, abs=1e-9)
            assert float(row["low"]) < value < float(row["high"])
            assert (row["seeds"], row["problems"]) == ("3", str(PROBLEMS))
    assert {r["k"] for r in rows(written, "final")} == {"", "1", "2", "4", "8"}


def test_paired_differences_follow_from_the_stored_counts(written: Path) -> None:
    row = next(r for r in rows(written, "paired") if (r["arm"], r["metric"]) == ("dapo", "avg"))
    by_seed = [
        np.mean(
            [
                a["correct"] / a["n"] - b["correct"] / b["n"]
                for a, b in zip(ours, theirs, strict=True)
            ]
        )
        for seed in SEEDS
        for ours, theirs in [
            (final_problems(written, "dapo", seed), final_problems(written, "grpo", seed))
        ]
    ]
    assert float(row["mean"]) == pytest.approx(np.mean(by_seed), abs=1e-9)
    assert [float(d) for d in row["by_seed"].split()] == pytest.approx(by_seed, abs=1e-5)
    assert float(row["smallest_p"]) == 0.25
    assert float(row["p_sign_flip"]) == 0.25  # all three seeds on one side
    assert row["control"] == "grpo"


def test_no_score_table_ranks_or_embolds(written: Path) -> None:
    for name in ("final", "paired", "gain", "levels"):
        text = (written / "tables" / f"{name}.md").read_text()
        assert "**" not in text.split("\n", 1)[1], f"{name}: bold below the title"
        assert r"\textbf" not in (written / "tables" / f"{name}.tex").read_text()


def test_levels_split_the_problems(results: Path) -> None:
    experiment, scores = loaded(results)
    table = {t.name: t for t in score_tables(experiment, scores)}["levels"]
    assert table.records is not None
    sizes = {r["group"]: r["problems"] for r in table.records if r["arm"] == "ppo"}
    assert sizes == {"1": 10, "2": 10, "3": 10, "addition": 15, "products": 15}
    stored = [p for s in SEEDS for p in final_problems(results, "ppo", s) if p["level"] == 2]
    found = next(r for r in table.records if (r["arm"], r["group"]) == ("ppo", "2"))
    assert found["mean"] == pytest.approx(np.mean([p["correct"] / p["n"] for p in stored]))


def test_the_arms_table_marks_what_differs_from_the_baseline(results: Path) -> None:
    table = arms_table(load_experiment(results))
    by_part = {row[0]: dict(zip(table.columns[1:], row[1:], strict=True)) for row in table.rows}
    assert by_part["clip.clip_high"] == {
        "ppo": "0.2", "grpo": "0.2", "dapo": "≠ 0.28", "placebo": "0.2",
    }  # fmt: skip
    assert by_part["advantage"]["ppo"] == "≠ GAE v1"
    assert by_part["advantage.gae_lambda"]["ppo"] == "≠ 0.95 (tuned)"
    assert by_part["shaping"]["dapo"] == "≠ SignedScore → OverlongPenalty"
    assert not [r for r in by_part.values() if r["grpo"].startswith("≠")]
    assert not [r for r in by_part.values() if r["placebo"].startswith("≠")]


def test_a_coefficient_of_another_penalty_is_marked(results: Path) -> None:
    """PPO's weighs a KL in the reward, GRPO's one in the loss."""
    table = arms_table(load_experiment(results))
    (row,) = [row for row in table.rows if row[0] == "kl.kl_coef"]
    shown = dict(zip(table.columns[1:], row[1:], strict=True))
    assert shown == {"ppo": "≠ 0.05 †", "grpo": "0.04", "dapo": "≠ –", "placebo": "0.04"}
    assert (
        "† weighs another penalty than grpo's kl_coef: the two numbers are not comp" in table.note
    )
    assert table.records is not None
    marked = [(r["part"], r["arm"]) for r in table.records if not r["comparable"]]
    assert marked == [("kl.kl_coef", "ppo")]
    assert r"0.05 \dag{}" in table.latex()
    for path in (results / "runs/ppo").glob("seed-*/run.json"):
        run = json.loads(path.read_text())
        run["parts"]["kl"]["part"] = "KLInLoss"
        path.write_text(json.dumps(run))
    table = arms_table(load_experiment(results))
    assert "†" not in table.note
    assert not any("†" in cell for row in table.rows for cell in row)


def test_a_control_that_one_arm_ran_otherwise_is_called_out(results: Path) -> None:
    path = results / "runs/dapo/seed-0/run.json"
    run = json.loads(path.read_text())
    run["controls"]["sampling"]["temperature"] = 0.7
    run["controls"]["optimizer"]["learning_rate"] = 5e-4
    path.write_text(json.dumps(run))
    table = {row[0]: row[1:] for row in controls_table(load_experiment(results)).rows}
    value, holds = table["sampling.temperature"]
    assert holds == "DIFFERS"
    assert "dapo 0.7" in value
    assert table["optimizer.learning_rate"][1] == "tuned per arm"
    assert table["sampling.max_new_tokens"] == ["32", "all arms"]


def test_every_trial_stands_in_the_tuning_table(results: Path) -> None:
    done = results / "runs/ppo/trial-000-seed-1000/done.json"
    done.write_text(json.dumps({"status": "diverged", "reason": "loss is NaN"}))
    table = tuning_table(load_experiment(results))
    assert len(table.rows) == 2 * len(ARMS)
    assert table.rows[0][-2:] == ["diverged", ""]
    assert [row[-1] for row in table.rows] == ["", "chosen"] * 3
    assert "ppo 2, grpo 1, dapo 1" in table.note


def test_spending_is_told_in_every_unit(results: Path) -> None:
    table = budget_table(load_experiment(results))
    assert table.records is not None
    dapo = next(r for r in table.records if (r["arm"], r["cell"]) == ("dapo", "seed-1"))
    assert dapo["flops"] == pytest.approx(LIMIT)
    assert dapo["share_of_limit"] == pytest.approx(1.0)
    assert (dapo["steps"], dapo["completions"], dapo["updates"]) == (12, 384, 24)
    assert (dapo["dropped_groups"], dapo["dropped_completions"]) == (24, 96)
    assert {r["cell"] for r in table.records} > {"trial-000-seed-1000", "seed-2"}


def test_diagnostics_leave_critic_warmup_out(results: Path) -> None:
    table = diagnostics_table(load_experiment(results))
    assert table.records is not None
    value = next(
        r for r in table.records if (r["diagnostic"], r["arm"]) == ("zero_variance_share", "ppo")
    )
    steps = [0.2 + 0.3 * step / 12 for step in range(2, 13)]  # step 1 warms the critic up
    assert value["all_steps"] == pytest.approx(np.mean(steps))
    assert value["last_tenth"] == pytest.approx(steps[-1])


# -- unfinished experiments ---------------------------------------------------------------------


def test_unfinished_cells_are_listed_and_enter_no_score(results: Path) -> None:
    runs = results / "runs"
    shutil.rmtree(runs / "ppo/seed-0")
    (runs / "dapo/seed-1/done.json").unlink()
    (runs / "dapo/seed-1/error.json").write_text(
        json.dumps({"error": "loss is NaN", "where": "dapo/seed-1", "step": 7})
    )
    (runs / "grpo/seed-2/done.json").unlink()
    experiment, scores = loaded(results)
    assert failures_table(experiment).rows == [
        ["ppo", "seed-0", "missing", "not started"],
        ["grpo", "seed-2", "unfinished", "at step 12"],
        ["dapo", "seed-1", "failed", "loss is NaN (step 7)"],
    ]
    assert {a: s.seeds for a, s in scores[0].arms.items()} == {
        "base": (0, 1, 2), "placebo": (0, 1, 2), "ppo": (1, 2), "grpo": (0, 1), "dapo": (0, 2),
    }  # fmt: skip
    paired = {t.name: t for t in score_tables(experiment, scores)}["paired"]
    assert paired.records is not None
    seeds = {r["arm"]: r["seeds"] for r in paired.records}
    assert seeds == {"placebo": 2, "ppo": 1, "dapo": 1}
    assert any("3 of 21 cells are not finished" in n for n in notices(experiment, scores))


def test_a_comparison_without_a_shared_seed_is_left_blank(results: Path) -> None:
    for seed in (0, 1):
        shutil.rmtree(results / f"runs/ppo/seed-{seed}")
    shutil.rmtree(results / "runs/grpo/seed-2")
    experiment, scores = loaded(results)
    paired = {t.name: t for t in score_tables(experiment, scores)}["paired"]
    ppo = [row for row in paired.rows if row[2] == "ppo − grpo"]
    assert ppo
    assert all(row[3:] == ["0", *["–"] * 5] for row in ppo)
    assert "ppo" not in summary(experiment, scores).partition("Paired")[2]


def test_a_folder_with_nothing_but_a_lock_still_reports(results: Path) -> None:
    shutil.rmtree(results / "runs")
    files = write_report(results)
    text = files.markdown.read_text()
    assert "nothing to compare" in text
    assert text.count("not started") == 21
    assert not (results / "figures").exists()


@pytest.mark.parametrize("broken", ["folder", "lock", "lock without spec", "steps"])
def test_bad_folders_end_in_one_line(results: Path, broken: str) -> None:
    if broken == "folder":
        results = results / "nowhere"
    elif broken == "lock":
        (results / "spec.lock.yaml").unlink()
    elif broken == "lock without spec":
        (results / "spec.lock.yaml").write_text("hashes: {}\n")
    else:
        (results / "runs/ppo/seed-0/steps.jsonl").write_text("{\n{}\n")
    with pytest.raises(InputError) as caught:
        write_report(results)
    assert "\n" not in str(caught.value)
    assert results.name in str(caught.value)
    assert not (results / "report.html").exists()


# -- what it says -------------------------------------------------------------------------------


def test_a_clean_experiment_has_no_notices_and_claims_no_winner(results: Path) -> None:
    for path in (results / "runs/ppo").glob("trial-*/run.json"):
        run = json.loads(path.read_text())
        del run["settings"]["advantage.gae_lambda"]  # two trials for two knobs would be few
        path.write_text(json.dumps(run))
    experiment, scores = loaded(results)
    assert notices(experiment, scores) == []
    text = summary(experiment, scores)
    assert "cannot fall below p = 0.25; the verdicts rest on t tests over seeds." in text
    assert not re.search(r"\b(better|best|wins?|winner|outperform)", text)


def _all_steps(results: Path, arm: str, **values: Any) -> None:
    for path in (results / "runs" / arm).glob("seed-*/steps.jsonl"):
        rewrite(path, lambda record: record.update(values))


def _explained(results: Path, early: float, late: float) -> None:
    """What the critic explains up to the middle of training, and after it."""
    middle = (1 + 12) // 2  # step 1 warms the critic up
    for path in (results / "runs/ppo").glob("seed-*/steps.jsonl"):
        rewrite(
            path,
            lambda s: s.update(explained_variance=early if s["step"] <= middle else late),
        )


def _all_problems(results: Path, arm: str, change: Any) -> None:
    for path in (results / "runs" / arm).glob("seed-*/evals.jsonl"):
        rewrite(path, lambda record: [change(p) for p in record["problems"]])


def _shorten(results: Path) -> None:
    for path in (results / "runs/dapo").glob("seed-*/steps.jsonl"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:5]))


def _try_rates(results: Path, arm: str, rates: list[float]) -> None:
    """As many trials as rates, copies of the first but for theirs; the seeds run the first rate."""
    first = next((results / "runs" / arm).glob("trial-000*"))
    for at, rate in enumerate(rates):
        folder = first.with_name(first.name.replace("000", f"{at:03d}"))
        if at:
            shutil.copytree(first, folder, dirs_exist_ok=True)
        _set_rate(folder, at, rate)
    for folder in (results / "runs" / arm).glob("seed-*"):
        _set_rate(folder, None, rates[0])


def _set_rate(folder: Path, trial: int | None, rate: float) -> None:
    run = json.loads((folder / "run.json").read_text())
    run["settings"]["optimizer.learning_rate"] = rate
    (folder / "run.json").write_text(json.dumps(run | {"trial": trial}))


CASES = {
    "of sampled groups had equal scores": lambda r: _all_steps(r, "grpo", zero_variance_share=0.93),
    "were cut at the length limit": lambda r: _all_steps(r, "dapo", truncated_share=0.4),
    "explained variance averaged −0.30": lambda r: _all_steps(r, "ppo", explained_variance=-0.3),
    "the critic explained 10 % of the variance of returns over the last half": lambda r: _explained(
        r, 0.9, 0.1
    ),
    "The search is thin: 2 trials an arm, fewer than 2 for each knob that was searched "
    "(knobs: ppo 2);": lambda r: None,
    "dapo and grpo differ in their clip, which cut at most 0.10 % of tokens": lambda r: [
        _all_steps(r, arm, clip_fraction_high=0.001, clip_fraction_low=0.0)
        for arm in ("grpo", "dapo")
    ],
    "was chosen at the edge of what was tried by grpo:": lambda r: _try_rates(
        r, "grpo", [1e-4, 2e-5, 3e-5, 4e-5]
    ),
    "Very few training steps (fewest of any seed: dapo 5)": _shorten,
    "The grader timed out on some completions (ppo 90)": lambda r: (
        _all_steps(r, "ppo", outcomes={"timeout": 5} | {"correct": 5})
        or [p for p in (r / "runs/ppo").glob("seed-*/steps.jsonl") if _keep_first(p, 6)]
    ),
    "The placebo, trained on random reward, moved on arithmetic": lambda r: _all_problems(
        r, "placebo", lambda p: p.update(correct=p["n"], answers=[["1", p["n"], True]], unparsed=0)
    ),
    "the arms spent, on average, ppo 100.0 %, grpo 100.0 %, dapo 104.0 % of it": lambda r: [
        p.write_text(json.dumps(json.loads(p.read_text()) | {"spent": {"flops": 1.04 * LIMIT}}))
        for p in (r / "runs/dapo").glob("seed-*/done.json")
    ],
    "nats a completion from the base": lambda r: [
        rewrite(p, lambda e: e.update(kl_to_base={"mean": 31.0, "se": 1.0, "n": 9}))
        for p in (r / "runs/grpo").glob("seed-*/evals.jsonl")
    ],
    "1 problem of arithmetic is not in every evaluation": lambda r: [
        rewrite(p, lambda e: e["problems"].pop())
        for p in (r / "runs/ppo/seed-0").glob("evals.jsonl")
    ],
}


def _keep_first(path: Path, lines: int) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))


@pytest.mark.parametrize("expected", CASES)
def test_what_a_reader_must_know_is_said_plainly(results: Path, expected: str) -> None:
    CASES[expected](results)
    experiment, scores = loaded(results)
    assert [n for n in notices(experiment, scores) if expected in n]


def test_a_critic_that_came_to_explain_returns_is_not_called_weak(results: Path) -> None:
    _explained(results, 0.0, 0.3)
    assert not [n for n in notices(*loaded(results)) if "the critic" in n]
    _explained(results, 0.5, 0.19)
    assert [n for n in notices(*loaded(results)) if "ppo: the critic explained 19 %" in n]


def test_rare_outcomes_do_not_round_away(results: Path) -> None:
    path = results / "runs/grpo/seed-0/steps.jsonl"
    first, *rest = path.read_text().splitlines()
    step = json.loads(first)
    step["outcomes"] |= {"timeout": 1, "wrong": 5000}
    path.write_text("\n".join([json.dumps(step), *rest]) + "\n")
    table = outcomes_table(load_experiment(results))
    place = table.columns.index("timeout")
    row = next(r for r in table.rows if r[:2] == ["grpo", "training"])
    assert row[place] == "<0.1 (1)"


@pytest.mark.parametrize(
    ("certificate", "said"),
    [
        (None, "not audited"),
        ({"certified": True, "checks": [{}] * 9, "violations": []}, "certified (9 checks)"),
        ({"certified": False, "violations": [{"message": "m"}]}, "NOT certified (1 violation)"),
        ({"violations": []}, "NOT certified"),
    ],
)
def test_the_certificate_is_reported_as_it_is(
    results: Path, certificate: dict[str, Any] | None, said: str
) -> None:
    if certificate is not None:
        (results / "certificate.json").write_text(json.dumps(certificate))
    assert said in certificate_line(load_experiment(results))


# -- the page -----------------------------------------------------------------------------------


class Page(HTMLParser):
    """Tags in order, with a check that they close as they opened."""

    VOID = frozenset({"meta", "link", "img", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.crossed: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.crossed.append(tag)

    def named(self, name: str) -> Iterator[dict[str, str | None]]:
        return (attributes for tag, attributes in self.tags if tag == name)


@pytest.fixture(scope="module")
def page(written: Path) -> Page:
    found = Page()
    found.feed((written / "report.html").read_text())
    return found


def test_the_page_asks_the_network_for_nothing(page: Page, written: Path) -> None:
    text = (written / "report.html").read_text()
    assert not list(page.named("script"))
    assert "@import" not in text
    assert "url(" not in text
    for tag, attributes in page.tags:
        assert not [a for a in attributes if a.startswith("on")], tag
        source = attributes.get("src")
        assert source is None or source.startswith("data:"), tag
    assert not [a for a in page.named("a") if (a["href"] or "").startswith(("http", "//"))]


def test_the_page_is_well_formed_and_accessible(page: Page, written: Path) -> None:
    assert (page.crossed, page.open) == ([], [])
    assert [a["lang"] for a in page.named("html")] == ["en"]
    assert len(list(page.named("h1"))) == 1
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert all(b - a <= 1 for a, b in pairwise(levels))
    assert all(len(a.get("alt") or "") > 30 for a in page.named("img"))
    assert all(a.get("scope") for a in page.named("th"))
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    for link in page.named("a"):
        target = link["href"] or ""
        assert target[1:] in ids if target.startswith("#") else (written / target).exists(), target


def test_every_table_and_figure_is_on_the_page_with_its_files(page: Page, written: Path) -> None:
    targets = {a["href"] for a in page.named("a")}
    tables = {p.stem for p in (written / "tables").glob("*.csv")} - {"failures"}
    assert {f"tables/{name}.csv" for name in tables} <= targets
    figures = {p.stem for p in (written / "figures").glob("*.svg")}
    assert len(figures) == 12
    assert {f"figures/{name}.png" for name in figures} <= targets
    assert "runs/dapo/seed-2/" in targets


def test_what_models_write_is_shown_and_never_interpreted(written: Path) -> None:
    text = (written / "report.html").read_text()
    assert "What is 7 + 0? &lt;b&gt;&amp;" in text
    assert "<b>&" not in text
    assert "```\nWhat is 7 + 0? <b>&\n```" in (written / "REPORT.md").read_text()


# -- spelling -----------------------------------------------------------------------------------


def test_numbers_are_spelt_alike_whatever_the_last_bits() -> None:
    assert fixed(41.25 + 1e-12) == fixed(41.25 - 1e-12)
    assert fixed(-0.04) == "0.0"
    assert (signed(0.3), signed(-0.3), signed(0.0)) == ("+0.3", "−0.3", "0.0")
    assert (number(1e12), number(1234.0), number(2.3e-4)) == ("1e12", "1,234", "0.00023")
    assert (setting(True), setting(None), setting([1, 0.5])) == ("yes", "none", "1, 0.5")


def test_three_spellings_of_one_table() -> None:
    table = Table("t", "A & B", "Note_1", ("arm", "50 %"), [["a|b", "≠ 1"]], [{"x": 0.1 + 0.2}])
    assert table.csv() == "x\n0.3\n"
    assert "| a\\|b | ≠ 1 |" in table.markdown()
    assert r"\caption{A \& B. Note\_1}" in table.latex()
    assert r"a|b & $\neq$ 1 \\" in table.latex()
    assert latex("a_b^2{50%}~#") == r"a\_b\textasciicircum{}2\{50\%\}\textasciitilde{}\#"
