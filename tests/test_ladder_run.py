"""A small ladder from spec to certified report: real training, every cell, on the tiny model."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none
from experiment_fixture import save_model, write_spec

from harness.cell import run_cell
from harness.certificate import write_certificate
from harness.experiment import ensure_lock, open_context
from harness.lock import make_lock
from harness.matrix import Matrix
from harness.report import write_report
from harness.store import CellFolder, read_json

# Two axes, KL and aggregation: the ways there and back, and their four mixtures.
THERE = ["ladder_group_std", "ladder_k3", "grpo"]
BACK = ["grpo", "mix_advantage_scale_aggregate", "ladder_group_std"]
MIXED = ["ladder_group_std", "ladder_k3", "mix_advantage_scale_aggregate", "grpo"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ladder")
    spec = write_spec(
        root / "tiny.yaml", save_model(root / "model"), baseline="ladder_group_std", tuning=None,
        arms=[*MIXED, "ladder_ppo"], budget={"limit": 8},
        ladder={"forward": THERE, "reverse": BACK, "factorial": MIXED},
    )  # fmt: skip
    context = open_context(spec, [], [], root / "results")
    ensure_lock(context, make_lock(context))
    for cell in Matrix(context).known():
        run_cell(context, cell)
    return context.results


def test_it_is_certified_with_its_axes_named(results: Path):
    certificate = write_certificate(results)
    assert certificate.violations == ()
    told = read_json(results / "certificate.json")["ladder"]
    axes = {way: [[x["path"] for x in step["axes"]] for step in told[way]] for way in told}
    assert axes == {"forward": [["kl"], ["aggregate"]], "reverse": [["kl"], ["aggregate"]]}


def test_the_start_of_the_ladder_trains_on_groups_of_one(results: Path):
    """As all rungs do on others: the same number of completions, of more prompts."""
    for arm, size in (("ladder_ppo", 1), ("grpo", 4)):
        for step in CellFolder(results / "runs" / arm / "seed-0").lines("steps.jsonl"):
            assert (step["completions_per_prompt"], step["used"]) == (size, 8)


def test_the_report_reads_the_design_from_what_was_run(results: Path):
    write_report(results)
    with (results / "tables" / "attribution.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == "avg"]
    # What the sums are is tested on stored runs: a random model of this size scores nothing.
    assert [(row["kind"], row["axis"], row["seeds"]) for row in rows if row["kind"] != "total"] == [
        (kind, axis, "1")
        for kind in ("Shapley", "main effect")
        for axis in ("aggregate: TokenMean → SequenceMean", "kl: KLInReward k1 → KLInLoss k3")
    ] + [("largest interaction", "aggregate × kl", "1")]
    assert "## The ladder" in (results / "REPORT.md").read_text()
