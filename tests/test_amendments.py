"""Amendments: recorded in the open, refused where a cell would compute otherwise, and audited."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none
from certificate_fixture import SPEC, Builder
from certificate_plants import edit_lock
from experiment_fixture import save_model, write_spec

import harness.cell
from harness.amendments import amended, amendments, applied, broken_links, late, promised
from harness.cell import run_cell
from harness.certificate import audit
from harness.errors import InputError
from harness.experiment import ensure_lock, open_context
from harness.job import Cell, Context
from harness.lock import amend, locked, make_lock, read_lock
from harness.matrix import Matrix
from harness.report.load import load_experiment
from harness.spec.load import check_spec
from harness.store import CellFolder

VERDICT = {"metric": "avg", "test": "all", "margin": 0.02}
Opened = Callable[..., Context]


# -- the spec -------------------------------------------------------------------------------------


def test_a_spec_without_a_verdict_keeps_its_dump():
    assert "verdict" not in check_spec(SPEC, "here").model_dump(mode="json")
    declared = check_spec(SPEC | {"verdict": VERDICT}, "here").verdict
    assert declared is not None
    assert (declared.family, declared.alpha, declared.power) == ("baseline", 0.05, 0.8)


@pytest.mark.parametrize(
    ("verdict", "message"),
    [
        ({}, "key 'verdict.margin' is missing"),
        ({"margin": 0}, "verdict.margin: should be greater than 0"),
        ({"margin": 2}, "verdict.margin: should be less than 1"),
        ({"margin": 0.02, "metric": "best"}, "metric 'best': give avg, greedy, pass@K or maj@K"),
        ({"margin": 0.02, "metric": "pass@4"}, "verdict.metric pass@4: K is not in evaluation.k"),
        ({"margin": 0.02, "test": "maths"}, "verdict.test 'maths' is not all nor among"),
        ({"margin": 0.02, "family": []}, "family is empty"),
        ({"margin": 0.02, "family": [["ppo", "ppo"]]}, "pairs of two different arms"),
        ({"margin": 0.02, "family": [["ppo", "grpo"], ["grpo", "ppo"]]}, "each pair once"),
        ({"margin": 0.02, "family": [["ppo", "rloo"]]}, r"\['rloo'\] are not among arms"),
        ({"margin": 0.02, "alpha": 0.5}, "verdict.alpha: should be less than 0.5"),
    ],
)
def test_a_verdict_that_cannot_be_given_is_refused(verdict: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        check_spec(SPEC | {"verdict": verdict}, "here")


def test_controls_may_be_compared():
    family = [["placebo", "base"], ["grpo", "base"]]
    check_spec(SPEC | {"verdict": VERDICT | {"family": family}}, "here")
    with pytest.raises(InputError, match=r"\['base'\] are not among"):
        check_spec(
            SPEC | {"verdict": VERDICT | {"family": family[1:]}, "controls": {"base": False}},
            "here",
        )


# -- amending a folder ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture
def opened(tmp_path: Path, model: Path) -> Opened:
    """The tiny experiment with a verdict and some keys changed, its results in one folder."""

    def open_(**changes: Any) -> Context:
        changes = {"verdict": VERDICT, "tuning": None} | changes
        spec = write_spec(tmp_path / "spec.yaml", model, **changes)
        return open_context(spec, [], [], tmp_path / "results")

    return open_


def settle(context: Context) -> Context:
    context.results.mkdir(exist_ok=True)
    ensure_lock(context, make_lock(context))
    return locked(context)


def test_a_changed_margin_is_refused_until_it_is_recorded(opened: Opened):
    settle(opened())
    lock = opened().results / "spec.lock.yaml"
    before = read_lock(lock)
    wider = opened(verdict=VERDICT | {"margin": 0.05})
    with pytest.raises(InputError, match=r"verdict.margin is 0.05, there 0.02; .* `harness amend"):
        settle(wider)
    assert read_lock(lock) == before
    made = amend(wider, "a reviewer asked")
    assert made["changes"] == {"verdict.margin": {"old": 0.02, "new": 0.05}}
    assert (made["number"], made["cells_begun"], made["why"]) == (1, 0, "a reviewer asked")
    settle(wider)
    after = read_lock(lock)
    assert {k: v for k, v in after.items() if k != "amendments"} == before  # nothing rewritten
    assert broken_links(after) == []
    with pytest.raises(InputError, match=r"verdict.margin is 0.02, there 0.05"):
        settle(opened())
    with pytest.raises(InputError, match="nothing to amend"):
        amend(wider, "again")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": {"limit": 14}}, r"spec.budget.limit is 14.0, there 12.0; move the folder"),
        ({"seeds": [1]}, r"spec.seeds is \[1\], there \[0\]; seeds and arms may be added at"),
        ({"arms": ["ppo", "grpo"]}, r"spec.arms is .*; seeds and arms may be added"),
        # What is free does not carry along what is not.
        ({"seeds": [0, 1], "optimizer": {"weight_decay": 0.1}}, r"weight_decay is 0.1, there 0.0"),
    ],
)
def test_what_cells_compute_cannot_be_amended(opened: Opened, changes: Any, message: str):
    settle(opened())
    lock = opened().results / "spec.lock.yaml"
    before = lock.read_bytes()
    with pytest.raises(InputError, match=message):
        amend(opened(**changes), "because")
    assert lock.read_bytes() == before


def test_an_amendment_needs_a_lock_and_a_reason(opened: Opened):
    with pytest.raises(InputError, match="nothing is locked yet"):
        amend(opened(), "because")
    settle(opened())
    with pytest.raises(InputError, match="--why is empty"):
        amend(opened(seeds=[0, 1]), "  ")


def test_other_code_is_refused_by_an_amendment_too(opened: Opened, monkeypatch: Any):
    settle(opened())
    monkeypatch.setattr("harness.record.code_sha256", lambda: "0" * 64)
    with pytest.raises(InputError, match=r"another hashes: hashes.code is '000"):
        amend(opened(seeds=[0, 1]), "because")


def test_a_cell_goes_on_after_an_amendment_to_the_same_bytes(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
):
    class Stop(BaseException):
        pass

    def cell_of(context: Context, arm: str, seed: int) -> tuple[Cell, CellFolder]:
        cell = Cell(arm, "seed", seed, context.spec.budget.limit)
        return cell, CellFolder(context.results / "runs" / arm / cell.name)

    context = settle(opened())
    cell, folder = cell_of(context, "grpo", 0)
    run_cell(context, cell)
    whole = (folder.path / "steps.jsonl").read_bytes(), folder.json("run.json")
    shutil.rmtree(folder.path)
    real, calls = harness.cell.save_checkpoint, []

    def stopping(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 6:
            raise Stop
        return real(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(harness.cell, "save_checkpoint", stopping)
        with pytest.raises(Stop):
            run_cell(context, cell)
    more = opened(seeds=[0, 1], arms=["grpo", "ppo", "rloo"], verdict=VERDICT | {"alpha": 0.01})
    made = amend(more, "the first seed was too noisy")
    assert (made["cells_begun"], made["cells_done"]) == (1, 0)
    assert set(made["adds"]["arms"]) == {"rloo"}
    assert set(made["adds"]["streams"]) == {"1"}
    more = settle(more)
    assert ("rloo", "seed-1") in Matrix(more).expected()
    run_cell(more, cell)
    assert ((folder.path / "steps.jsonl").read_bytes(), folder.json("run.json")) == whole
    added, second = cell_of(more, "rloo", 1)
    run_cell(more, added)
    assert second.json("run.json")["hashes"] == whole[1]["hashes"]  # one experiment still
    experiment = load_experiment(more.results)
    assert experiment.seeds == (0, 1)
    assert experiment.arms == ("grpo", "ppo", "rloo")


# -- the chain ------------------------------------------------------------------------------------


def lock_of(seeds: list[int], margin: float = 0.02) -> dict[str, Any]:
    spec = {"name": "x", "seeds": seeds, "verdict": {"margin": margin}}
    return {"format": 1, "spec": spec, "arms": {"a": {}}, "streams": {str(s): {} for s in seeds}}


def test_what_was_promised_and_what_came_late():
    first = lock_of([0])
    early = amended(first, lock_of([0], 0.03), {"verdict.margin": (0.02, 0.03)}, why="a",
                    time="2026-01-01T00:00:00+00:00", begun=0, done=0)  # fmt: skip
    both = amended(early, lock_of([0, 1], 0.03), {"seeds": ([0], [0, 1])}, why="b",
                   time="2026-01-02T00:00:00+00:00", begun=3, done=2)  # fmt: skip
    assert promised(both)["spec"] == {"name": "x", "seeds": [0], "verdict": {"margin": 0.03}}
    assert applied(both)["spec"]["seeds"] == [0, 1]
    assert set(applied(both)["streams"]) == {"0", "1"}
    assert first == lock_of([0])
    assert [a["why"] for a in late(both)] == ["b"]
    assert list(late(early)) == []
    assert broken_links(both) == []


class Amended(Builder):
    """A sound folder whose second seed and wider margin were declared after three cells."""

    def hashes(self) -> dict[str, str]:
        first = check_spec(SPEC | {"seeds": [0], "verdict": VERDICT}, "first")
        now, self.spec = self.spec, first
        found = super().hashes()
        self.spec = now
        return found

    def lock(self) -> None:
        super().lock()

        def append(lock: dict[str, Any]) -> None:
            new = {key: dict(lock[key]) for key in ("spec", "arms", "streams")}
            lock["spec"] |= {"seeds": [0], "verdict": lock["spec"]["verdict"] | {"margin": 0.02}}
            del lock["streams"]["1"]
            made = amended(lock, new, {"seeds": ([0], [0, 1])}, why="noisy",
                           time="2026-01-01T00:00:00+00:00", begun=3, done=2)  # fmt: skip
            made = amended(made, new, {"verdict.margin": (0.02, 0.05)}, why="a typing error",
                           time="2026-01-02T00:00:00+00:00", begun=5, done=5)  # fmt: skip
            lock |= made

        edit_lock(self.results, append)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = tmp_path_factory.mktemp("sound") / "results"
    spec = check_spec(SPEC | {"verdict": VERDICT | {"margin": 0.05}}, "now")
    Amended(results, spec).build()
    return results


@pytest.fixture
def results(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "results"))


def test_a_folder_with_amendments_is_certified(sound: Path):
    certificate = audit(sound)
    assert certificate.violations == ()
    assert certificate.certified
    experiment = load_experiment(sound)
    assert experiment.seeds == (0, 1)
    assert len(amendments(yaml.safe_load((sound / "spec.lock.yaml").read_text()))) == 2


def again(lock: dict[str, Any]) -> None:
    """Write the chain anew, so that it fits what the amendments say now."""
    made, lock["amendments"] = lock["amendments"], []
    for one in made:
        changes = {path: (c["old"], c["new"]) for path, c in one["changes"].items()}
        new = {"arms": one["adds"]["arms"] | lock["arms"],
               "streams": one["adds"]["streams"] | lock["streams"]}  # fmt: skip
        lock |= amended(lock, new, changes, why=one["why"], time=one["time"],
                        begun=one["cells_begun"], done=one["cells_done"])  # fmt: skip


def margin_moved(lock: dict[str, Any]) -> None:
    lock["amendments"][1]["changes"]["verdict.margin"]["new"] = 0.08


def dated_back(lock: dict[str, Any]) -> None:
    lock["amendments"][0] |= {"cells_begun": 0, "cells_done": 0}


def one_taken_away(lock: dict[str, Any]) -> None:
    del lock["amendments"][0]


def promise_rewritten(lock: dict[str, Any]) -> None:
    lock["spec"]["verdict"]["margin"] = 0.05


def old_value_forged(lock: dict[str, Any]) -> None:
    lock["amendments"][1]["changes"]["verdict.margin"]["old"] = 0.04
    again(lock)


def budget_amended(lock: dict[str, Any]) -> None:
    lock["amendments"][1]["changes"]["budget.limit"] = {"old": 6e7, "new": 7e7}
    again(lock)


def seed_taken_away(lock: dict[str, Any]) -> None:
    lock["amendments"][1]["changes"]["seeds"] = {"old": [0, 1], "new": [0]}
    again(lock)


def more_cells_than_there_are(lock: dict[str, Any]) -> None:
    lock["amendments"][1]["cells_begun"] = 99
    again(lock)


def time_went_back(lock: dict[str, Any]) -> None:
    lock["amendments"][1]["time"] = "2025-01-01T00:00:00+00:00"
    again(lock)


@pytest.mark.parametrize(
    ("plant", "key"),
    [
        (margin_moved, "amendments.1.chain"),
        (dated_back, "amendments.0.chain"),
        (one_taken_away, "amendments.0.chain"),
        (promise_rewritten, "amendments.0.chain"),
        (old_value_forged, "amendments.1.changes.verdict.margin.old"),
        (budget_amended, "amendments.1.changes.budget.limit"),
        (seed_taken_away, "amendments.1.changes.seeds"),
        (more_cells_than_there_are, "amendments.1.cells_begun"),
        (time_went_back, "amendments.1.time"),
    ],
)
def test_a_forged_amendment_is_told(results: Path, plant: Any, key: str):
    edit_lock(results, plant)
    certificate = audit(results)
    assert not certificate.certified
    found = [v for v in certificate.violations if v.check == "amendments"]
    assert f"spec.lock.yaml: {key}" in [v.key for v in found]


def test_an_amendment_that_cannot_be_read_is_missing_evidence(results: Path):
    edit_lock(results, lambda lock: lock["amendments"][0].pop("why"))
    certificate = audit(results)
    assert [v.key for v in certificate.violations] == ["spec.lock.yaml: amendments.0.why"]
