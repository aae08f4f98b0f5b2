"""Cells of an arm that learns from pairs: resumed, certified, reported; and what must not pass."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none
from certificate_plants import edit_json, every_step, forge, put
from experiment_fixture import contents, save_model, write_spec
from test_external import RECORDS, Stop, steps, stopped
from test_offline import data_of

import harness.samplers
from harness.cell import CellRun, run_cell
from harness.certificate import audit
from harness.certificate.finding import MISSING
from harness.experiment import ensure_lock, open_context
from harness.job import Cell, Context
from harness.lock import make_lock
from harness.plan import make_plan
from harness.report import write_report

LIMIT = 8.0


@pytest.fixture(scope="module", autouse=True)
def given():
    """Pairs in place of a reward model's; the reward is a rule, which the arm would refuse."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CellRun, "pairs", lambda self, grader: data_of())
        patch.setattr(harness.samplers, "check_offline", lambda arm, spec: None)
        yield


def opened(root: Path, results: Path) -> Context:
    spec = write_spec(
        results.with_suffix(".yaml"), root / "model", arms=["dpo", "grpo"], tuning=None,
        controls={"base": True, "placebo": None}, budget={"limit": LIMIT}, seeds=[0, 1],
        optimizer={"minibatches": 2, "warmup_steps": 3, "schedule": "linear"},
        runtime={"checkpoint_every": 2},
    )  # fmt: skip
    context = open_context(spec, [], [], results)
    ensure_lock(context, make_lock(context))
    return context


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("offline")
    save_model(root / "model")
    context = opened(root, root / "sound")
    for seed in (0, 1):
        for arm in ("base", "grpo", "dpo"):
            run_cell(context, Cell(arm, "seed", seed, 0.0 if arm == "base" else LIMIT))
    return context.results


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "copy"))


def test_it_is_certified_and_what_is_not_shown_is_said(sound: Path):
    certificate = audit(sound)
    assert certificate.violations == ()
    assert certificate.certified
    assert list(certificate.external) == ["dpo"]
    said = {check.name: check.proves for check in certificate.checks}
    less = {name for name, text in said.items() if "Of dpo it shows less" in text}
    assert less == {"prompts", "graded", "effective"}
    assert certificate.declared_differences["grpo"]["sampling"][0] is None


def test_its_records_hold_nothing_of_a_rollout(sound: Path):
    for record in steps(sound, "dpo"):
        assert record["phase"] == "offline"
        for name in ("prompts", "entropy", "accuracy", "used", "outcomes", "effective"):
            assert name not in record
    run = json.loads((sound / "runs/dpo/seed-0/run.json").read_text())
    assert set(run["shapes"]) == {"policy", "reference"}


def test_a_report_has_both_kinds_of_arms(copy: Path):
    write_report(copy)
    assert "dpo" in (copy / "tables" / "final.md").read_text()
    rows = (copy / "tables" / "diagnostics.md").read_text().splitlines()
    (accuracy,) = (row.split("|")[1:-1] for row in rows if "pairs in their order" in row)
    assert [cell.strip() != "–" for cell in accuracy[1:]] == [True, False]  # dpo, grpo
    (norm,) = (row for row in rows if "gradient norm" in row)
    assert "–" not in norm
    notes = (copy / "REPORT.md").read_text()
    assert "dpo 0" not in notes
    assert "differ in their clip" not in notes


def test_a_plan_beside_its_results_is_made(sound: Path):
    """Of an arm that samples nothing no length of completions can be measured."""
    plan = make_plan(opened(sound.parent, sound))
    (arm,) = (a for a in plan.arms if a.name == "dpo")
    assert arm.step.completions == 0
    flops = json.loads((sound / "runs/dpo/seed-0/done.json").read_text())["spent"]["flops"]
    assert arm.step.total_flops * 4 == pytest.approx(flops, rel=0.9)


def test_it_goes_on_to_the_same_bytes(sound: Path, monkeypatch: pytest.MonkeyPatch):
    results = sound.parent / "stopped"
    context = opened(sound.parent, results)
    stopped(context, "dpo", monkeypatch)
    assert issubclass(Stop, BaseException)
    run_cell(context, Cell("dpo", "seed", 0, LIMIT))
    names = (*RECORDS, "policy.safetensors")
    mine, its = (contents(r / "runs/dpo/seed-0", *names) for r in (sound, results))
    assert mine == its


Lines = list[dict[str, Any]]


def fewer_pairs(lines: Lines) -> None:
    lines[1]["pairs"]["read"] = 3


def sampled(lines: Lines) -> None:
    for line in lines:
        line["spent"] |= {"completions": 8, "completion_tokens": 8, "tokens": 8}


def unpaid(lines: Lines) -> None:
    """The reference's passes are left out, in every total."""
    for line in lines:
        del line["lengths"]["reference/score"]
        line["spent"]["flops"] -= line["flops"].pop("reference/score")


def twice(lines: Lines) -> None:
    lines[0]["lengths"]["policy/train"]["epochs"] = 2


def as_of_a_sampler(lines: Lines) -> None:
    lines[2]["phase"] = "train"


PLANTS: dict[str, tuple[Callable[[Lines], Any], str, str]] = {
    "pairs skipped": (every_step("pairs/cursor", lambda n: n + 4), "prompts", "pairs.cursor"),
    "fewer pairs": (fewer_pairs, "prompts", "line 2: pairs.read"),
    "other data": (put("1/pairs/sha256", "0" * 64), "prompts", "line 2: pairs.sha256"),
    "an order not hashed": (put("1/pairs/stream", {}), "prompts", "line 2: pairs.stream"),
    "something sampled": (sampled, "graded", "line 1: spent"),
    "an uncharged reference": (unpaid, "flops", "line 1: lengths"),
    "two epochs for one": (
        twice, "flops", "policy/train.epochs"),
    "another learning rate": (
        put("2/offline/learning_rate", 0.5), "effective", "line 3: offline.learning_rate"),
    "another beta": (every_step("kl_coef", 0.2), "effective", "kl_coef"),
    "other moments": (put("0/offline/betas", [0.9, 0.95]), "effective", "offline.betas"),
    "another clip": (put("0/offline/max_grad_norm", 5.0), "effective", "offline.max_grad_norm"),
    "another loss": (put("0/offline/loss_type", ["ipo"]), "effective", "offline.loss_type"),
    "a loss that is not declared": (put("3/loss_gap", 0.1), "effective", "line 4: loss_gap"),
    "updates not taken": (put("0/offline/gradient_steps", 4), "effective", "spent.updates"),
    "a reference that moved": (put("1/reference_step", 1), "effective", "reference_step"),
    "no gradient norm": (lambda lines: lines[0].pop("grad_norm"), MISSING, "grad_norm"),
    "no loss gap": (lambda lines: lines[0].pop("loss_gap"), MISSING, "loss_gap"),
    "a step that sampled": (as_of_a_sampler, MISSING, "line 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTS)
def test_planted_records_are_found(copy: Path, name: str):
    change, check, key = PLANTS[name]
    forge(copy, "dpo/seed-0", "steps.jsonl", change)
    found = [v for v in audit(copy).violations if v.check == check and key in v.key]
    assert found, [(v.check, v.key) for v in audit(copy).violations]


def test_runs_of_a_seed_that_read_other_pairs_are_found(copy: Path):
    """A second arm's run of the seed would show it; here the other seed's folder poses as one."""
    forge(copy, "dpo/seed-1", "steps.jsonl", put("0/pairs/stream/4", "0" * 64))
    assert audit(copy).certified  # alone in its seed, an order has nothing to be held against
    edit_json(copy, "runs/dpo/seed-1/run.json", put("seed", 0))
    keys = [v.key for v in audit(copy).violations if v.check == "prompts"]
    assert any("pairs.stream.4" in key for key in keys)


def test_an_arm_that_samples_cannot_pose_as_offline(copy: Path):
    offline = steps(copy, "dpo")

    def pose(lines: Lines) -> None:
        lines[:] = [
            line | {"prompts": old["prompts"]}
            for line, old in zip(offline, lines[:4], strict=False)
        ]

    forge(copy, "grpo/seed-0", "steps.jsonl", pose)
    found = {(v.check, v.key.rpartition(": ")[2]) for v in audit(copy).violations}
    assert ("effective", "phase") in found
