"""Cells and the matrix: what fails is recorded and run again, and resuming changes no number."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none
from experiment_fixture import contents, save_model, write_spec

import harness.cell
import harness.grading
import harness.record
import harness.train
from harness.cell import run_cell
from harness.cli.status import matrix_rows
from harness.errors import CellError, InputError
from harness.experiment import ensure_lock, open_context, run_experiment
from harness.job import BASE, PLACEBO, Cell, Context
from harness.lock import make_lock, read_lock
from harness.matrix import Matrix
from harness.report.load import load_experiment
from harness.store import CellFolder, chain_breaks, read_lines

Opened = Callable[..., Context]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture
def opened(tmp_path: Path, model: Path) -> Opened:
    """The tiny experiment with some keys changed, its results in a folder of its own."""

    def open_(folder: str = "results", **changes: Any) -> Context:
        spec = write_spec(tmp_path / f"{folder}.yaml", model, **changes)
        return open_context(spec, [], [], tmp_path / folder)

    return open_


def seed_cell(context: Context, arm: str, **changes: Any) -> Cell:
    limit = context.spec.budget.limit
    return Cell(**({"arm": arm, "kind": "seed", "seed": 0, "limit": limit} | changes))


def trial_cell(context: Context, arm: str, **settings: Any) -> Cell:
    return Cell(arm, "trial", 1000, 6, tuple(settings.items()), 0)


def folder_of(context: Context, cell: Cell) -> CellFolder:
    return CellFolder(context.results / "runs" / cell.arm / cell.name)


def records(folder: CellFolder) -> dict[str, bytes]:
    return contents(folder.path, "steps.jsonl", "evals.jsonl", "samples.jsonl", "done.json")


# -- resuming -------------------------------------------------------------------------------------


class Stop(BaseException):
    """Stands for SIGKILL: nothing in the cell may catch it."""


def stop_before(monkeypatch: pytest.MonkeyPatch, where: str, count: int) -> None:
    """Let a function of a cell end the process at its ``count``-th call."""
    module = harness.train if where == "step" else harness.cell
    real, calls = getattr(module, where), []

    def stopping(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == count:
            raise Stop
        return real(*arguments, **named)

    monkeypatch.setattr(module, where, stopping)


ARMS = ["grpo", "ppo", PLACEBO]


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """The records of uninterrupted cells, by arm."""
    root = tmp_path_factory.mktemp("whole")
    context = open_context(write_spec(root / "t.yaml", model), [], [], root / "results")
    found = {}
    for arm in (*ARMS, BASE):
        cell = seed_cell(context, arm)
        run_cell(context, cell)
        found[arm] = records(folder_of(context, cell))
    return found


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize(
    ("where", "count"),
    [("step", 2), ("step", 5), ("evaluate", 1), ("save_checkpoint", 1), ("save_checkpoint", 4),
     ("memory_record", 1), ("save_weights", 1), ("drop_checkpoint", 1)],
)  # fmt: skip
def test_a_cell_killed_anywhere_goes_on_to_the_same_bytes(
    opened: Opened, whole: Any, monkeypatch: pytest.MonkeyPatch, arm: str, where: str, count: int
):
    context = opened()
    cell = seed_cell(context, arm)
    folder = folder_of(context, cell)
    with monkeypatch.context() as patch:
        stop_before(patch, where, count)
        with pytest.raises(Stop):
            run_cell(context, cell)
    assert not folder.failed
    run_cell(context, cell)
    assert records(folder) == whole[arm]


def test_the_whole_cells_truly_train(whole: Any):
    """Otherwise the bytes above would be equal for want of anything to differ."""
    for arm in ARMS:
        steps = [json.loads(line) for line in whole[arm]["steps.jsonl"].splitlines()]
        trained = [s for s in steps if s["phase"] == "train"]
        assert len(steps) == 6
        assert sum(s["grad_norm"] > 0 for s in trained) >= 3
        assert len({s["score_mean"] for s in steps}) > 1
        assert chain_breaks(steps) == []
    assert whole["grpo"]["steps.jsonl"] != whole[PLACEBO]["steps.jsonl"]
    assert "steps.jsonl" not in whole[BASE]


def test_a_step_cut_in_the_middle_of_its_line_is_run_again(
    opened: Opened, whole: Any, monkeypatch: pytest.MonkeyPatch
):
    context = opened()
    cell = seed_cell(context, "ppo")
    folder = folder_of(context, cell)
    with monkeypatch.context() as patch:
        stop_before(patch, "step", 4)
        with pytest.raises(Stop):
            run_cell(context, cell)
    with (folder.path / "steps.jsonl").open("ab") as file:
        file.write(b'{"accuracy": 0.5, "approx_k')
    assert len(read_lines(folder.path / "steps.jsonl")) == 3
    run_cell(context, cell)
    assert records(folder) == whole["ppo"]


def test_a_checkpoint_every_few_steps_gives_the_same_numbers(
    opened: Opened, whole: Any, monkeypatch: pytest.MonkeyPatch
):
    context = opened(runtime={"checkpoint_every": 4})
    cell = seed_cell(context, "grpo")
    with monkeypatch.context() as patch:
        stop_before(patch, "step", 6)
        with pytest.raises(Stop):
            run_cell(context, cell)
    run_cell(context, cell)
    assert records(folder_of(context, cell)) == whole["grpo"]


def test_a_finished_cell_keeps_its_weights_and_nothing_for_resuming(opened: Opened):
    context = opened()
    cell = seed_cell(context, "grpo")
    run_cell(context, cell)
    folder = folder_of(context, cell)
    assert [p.name for p in (folder.path / "checkpoint").iterdir()] == ["policy.safetensors"]
    before = contents(folder.path, "*")
    run_cell(context, cell)
    assert contents(folder.path, "*") == before


# -- failing --------------------------------------------------------------------------------------


def failure(context: Context, cell: Cell) -> dict[str, Any]:
    """Run a cell that fails; what it recorded."""
    with pytest.raises((CellError, InputError)):
        run_cell(context, cell)
    folder = folder_of(context, cell)
    assert folder.failed
    assert not (folder.path / "done.json").exists()
    error = folder.json("error.json")
    assert "\n" not in error["error"]
    assert error["where"] == f"{cell.arm}/{cell.name}"
    return error


@pytest.mark.parametrize("arm", ["grpo", "ppo"])
def test_a_diverged_seed_is_a_failed_cell(opened: Opened, arm: str):
    context = opened(optimizer={"learning_rate": 1e30, "max_grad_norm": 1e30})
    error = failure(context, seed_cell(context, arm))
    assert re.search(r"is (nan|inf|-inf).*; lower the learning rate", error["error"])
    assert error["step"] >= 2


def test_a_diverged_trial_is_a_trial(opened: Opened):
    context = opened()
    settings = {"optimizer.learning_rate": 1e30}
    cell = trial_cell(context, "grpo", **settings)
    run_cell(context, cell)
    done = folder_of(context, cell).json("done.json")
    assert done["status"] == "diverged"
    assert "lower the learning rate" in done["reason"]
    assert not folder_of(context, cell).failed


def test_a_reward_that_is_not_finite_is_a_failed_cell(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
):
    class Broken(harness.grading.MathsJudge):
        def __call__(self, *arguments: Any) -> Any:
            verdicts, score, bonus, correct = super().__call__(*arguments)
            score[-1] = float("nan")
            return verdicts, score, bonus, correct

    monkeypatch.setattr(harness.grading, "MathsJudge", Broken)
    context = opened()
    error = failure(context, seed_cell(context, "grpo"))
    assert error["step"] == 1
    assert not (folder_of(context, seed_cell(context, "grpo")).path / "steps.jsonl").exists()
    assert re.fullmatch(r"the reward of problem '.*' is not finite.*", error["error"])


@pytest.mark.parametrize(
    "damage", ["weights cut", "weights gone", "state cut", "state of another kind", "lines lost"]
)
def test_a_damaged_checkpoint_says_how_to_start_anew(
    opened: Opened, whole: Any, monkeypatch: pytest.MonkeyPatch, damage: str
):
    context = opened()
    cell = seed_cell(context, "grpo")
    folder = folder_of(context, cell)
    with monkeypatch.context() as patch:
        stop_before(patch, "step", 4)
        with pytest.raises(Stop):
            run_cell(context, cell)
    (weights,) = (folder.path / "checkpoint").glob("*.safetensors")
    state = folder.path / "checkpoint" / "state.json"
    if damage == "weights cut":
        weights.write_bytes(weights.read_bytes()[:-10])
    elif damage == "weights gone":
        weights.unlink()
    elif damage == "state cut":
        state.write_text(state.read_text()[:40])
    elif damage == "state of another kind":
        state.write_text("[]")
    else:
        lines = (folder.path / "steps.jsonl").read_bytes().splitlines(keepends=True)
        (folder.path / "steps.jsonl").write_bytes(b"".join(lines[:-1]))
    error = failure(context, cell)["error"]
    assert str(folder.path) in error
    assert "delete " in error
    shutil.rmtree(Path(re.findall(r"delete (\S+)", error)[0]))
    run_cell(context, cell)
    assert not folder.failed
    assert records(folder) == whole["grpo"]


def test_a_full_disk_fails_the_cell_and_loses_nothing(
    opened: Opened, whole: Any, monkeypatch: pytest.MonkeyPatch
):
    context = opened()
    cell = seed_cell(context, "ppo")
    folder = folder_of(context, cell)
    sync, calls = os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(1)
        if 12 <= len(calls) < 14:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CellError, match=r"the disk is full; free space and run again"):
            run_cell(context, cell)
    run_cell(context, cell)
    assert not folder.failed
    assert records(folder) == whole["ppo"]


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 320 KiB; the test skips where this user may not mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=320k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this user cannot mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_really_fills_up(opened: Opened, whole: Any, small_disk: Path, tmp_path: Path):
    context = opened("disk/results")
    ballast = small_disk / "ballast"
    cell = seed_cell(context, "ppo")
    folder = folder_of(context, cell)
    failures = 0
    for kib in (290, 250, 210, 170, 130, 0):
        ballast.write_bytes(b"x" * (kib << 10))
        with suppress(CellError):
            run_cell(context, cell)
        if folder.failed:
            assert "the disk is full; free space" in folder.json("error.json")["error"]
        failures += not folder.done
        assert not list(folder.path.rglob(".*"))
    assert failures >= 2
    assert records(folder) == whole["ppo"]


def test_a_cell_of_another_spec_is_refused(opened: Opened, monkeypatch: pytest.MonkeyPatch):
    context = opened()
    cell = seed_cell(context, "grpo")
    with monkeypatch.context() as patch:
        stop_before(patch, "step", 3)
        with pytest.raises(Stop):
            run_cell(context, cell)
    before = records(folder_of(context, cell))
    other = opened(optimizer={"weight_decay": 0.1})
    assert other.results == context.results
    error = failure(other, cell)["error"]
    assert "run.json was made by another spec or code version" in error
    assert records(folder_of(context, cell)) == before


# -- the lock -------------------------------------------------------------------------------------


def settle(context: Context) -> None:
    ensure_lock(context, make_lock(context))


def test_a_folder_of_another_spec_is_refused_with_the_key_and_both_values(opened: Opened):
    context = opened()
    context.results.mkdir()
    settle(context)
    settle(opened(runtime={"threads": 2}))  # moves no number
    before = (context.results / "spec.lock.yaml").read_bytes()
    for changes, key in (
        ({"budget": {"limit": 14}}, r"spec.budget.limit is 14.0, there 12.0"),
        ({"seeds": [0, 1]}, r"spec.seeds is \[0, 1\], there \[0\]"),
        ({"tuning": None}, r"spec.tuning is null, there \{arms: \{\}.*\.\.\."),
    ):
        with pytest.raises(InputError, match=rf"spec.lock.yaml: was made by another spec: {key}; "):
            settle(opened(**changes))
    assert (context.results / "spec.lock.yaml").read_bytes() == before


def test_a_folder_of_other_code_is_refused(opened: Opened, monkeypatch: pytest.MonkeyPatch):
    context = opened()
    context.results.mkdir()
    settle(context)
    monkeypatch.setattr(harness.record, "code_sha256", lambda: "0" * 64)
    with pytest.raises(InputError, match=r"another hashes: hashes.code is '000"):
        settle(context)


def test_runs_without_a_lock_and_a_damaged_lock_are_refused(opened: Opened):
    context = opened()
    (context.results / "runs").mkdir(parents=True)
    with pytest.raises(InputError, match=r"has runs but no spec.lock.yaml; move the folder away"):
        settle(context)
    lock = context.results / "spec.lock.yaml"
    for text in ("format: 99\n", "[]\n", "a: [\n"):
        lock.write_text(text)
        with pytest.raises(InputError, match=r"spec.lock.yaml"):
            settle(context)
        assert lock.read_text() == text


def test_the_lock_holds_every_default_and_every_hash(opened: Opened):
    context = opened()
    context.results.mkdir()
    settle(context)
    lock = read_lock(context.results / "spec.lock.yaml")
    assert lock["spec"] == context.spec.model_dump(mode="json")
    names = {"spec", "model", "tokenizer", "code", "reward"}
    names |= {"data.train", "data.validation", "data.test.arithmetic"}
    assert set(lock["hashes"]) == names
    assert all(re.fullmatch(r"[0-9a-f]{64}", h) for h in lock["hashes"].values())
    assert set(lock["streams"]) == {"0", "1000"}


# -- the matrix -----------------------------------------------------------------------------------


def test_the_matrix_interleaves_arms_and_waits_for_tuning(opened: Opened):
    context = opened()
    matrix = Matrix(context)
    known = [(c.arm, c.name) for c in matrix.known()]
    assert known == [
        ("grpo", "trial-000-seed-1000"), ("ppo", "trial-000-seed-1000"),
        ("grpo", "trial-001-seed-1000"), ("ppo", "trial-001-seed-1000"), ("base", "seed-0"),
    ]  # fmt: skip
    expected = set(matrix.expected())
    assert set(known) < expected
    assert expected - set(known) == {(a, "seed-0") for a in ("grpo", "ppo", "placebo")}


def test_an_arm_whose_trials_all_diverged_runs_its_defaults(opened: Opened):
    context = opened()
    matrix = Matrix(context)
    for number in range(2):
        folder = matrix.store.cell("grpo", f"trial-{number:03d}-seed-1000")
        folder.path.mkdir(parents=True)
        folder.write("done.json", {"status": "diverged", "reason": "the loss is nan"})
    trials = matrix.trials("grpo")
    assert trials is not None
    assert trials.complete
    assert trials.scores == (None, None)
    assert trials.chosen["optimizer.learning_rate"] == context.spec.optimizer.learning_rate
    seeds = [c for c in matrix.known() if c.kind == "seed"]
    assert {c.arm for c in seeds} == {"grpo", "placebo", "base"}
    assert {c.settings for c in seeds if c.arm != "base"} == {tuple(trials.chosen.items())}


def test_arms_named_by_module_are_found_by_controls_and_baseline(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(str(tmp_path))
    plugin = "from harness.arms.grpo import GRPO\nMINE = GRPO.but('mine')\n"
    (tmp_path / "arms_of_a_test.py").write_text(plugin)
    name = "arms_of_a_test:MINE"
    context = opened(
        arms=["grpo", name], baseline=name, controls={"placebo": name}, tuning=None
    )  # fmt: skip
    matrix = Matrix(context)
    assert {c.arm for c in matrix.known()} == {"base", "grpo", "mine", "placebo"}
    context.results.mkdir()
    settle(context)
    cell = seed_cell(context, PLACEBO, limit=2)
    run_cell(context, cell)
    assert folder_of(context, cell).json("run.json")["parts"]["kl"]["part"] == "KLInLoss"
    assert load_experiment(context.results).baseline == "mine"
    assert load_experiment(context.results).arms == ("grpo", "mine")


# -- a whole run ----------------------------------------------------------------------------------


def test_a_run_with_failing_cells_does_the_rest_and_mends_them_next_time(opened: Opened):
    """One trial diverges, one cell's process is killed, one arm fails: the others are done."""
    killed, ended = [], {}
    wide = {"optimizer.learning_rate": {"low": 1e-6, "high": 1e30, "log": True}}
    context = opened(tuning={"shared": wide})
    doomed = context.results / "runs" / "ppo" / "trial-000-seed-1000"

    def hold_one() -> None:
        """Let ppo's first trial wait, its steps behind it, for a reader of its evaluations."""
        doomed.mkdir(parents=True)
        os.mkfifo(doomed / "evals.jsonl")

    def kill_one(running: Any, matrix: Matrix) -> None:
        """SIGKILL the process of that trial once it has a checkpoint."""
        if killed or not (doomed / "checkpoint" / "state.json").exists():
            return
        for process in Path("/proc").glob("[0-9]*"):
            try:
                open_files = {str(f.readlink()) for f in (process / "fd").iterdir()}
            except OSError:
                continue
            if int(process.name) != os.getpid() and str(doomed / "log.txt") in open_files:
                os.kill(int(process.name), 9)
                killed.append(1)
        (doomed / "evals.jsonl").unlink()

    def note(end: Any, matrix: Matrix, error: str | None) -> None:
        ended[end.job.arm, end.job.name] = error

    first = run_experiment(context, 2, on_lock=hold_one, on_end=note, on_tick=kill_one)
    assert killed
    assert [(arm, name) for arm, name, _ in first.failed] == [("ppo", "trial-000-seed-1000")]
    assert "ended by signal 9 (out of memory?); the same command goes on" in first.failed[0][2]
    assert ended["ppo", "trial-000-seed-1000"] == first.failed[0][2]
    assert first.missing == 1  # ppo's seed waits for its tuning
    rows = {(r["arm"], r["cell"]): r for r in matrix_rows(context)}
    assert rows["ppo", "trial-000-seed-1000"]["state"] == "failed"
    assert rows["ppo", "seed-0"]["state"] == "waiting"
    assert rows["grpo", "seed-0"]["state"] == "done"
    trials = [r for (arm, cell), r in rows.items() if arm == "grpo" and "trial" in cell]
    assert {r["state"] for r in trials} == {"done"}
    assert any("lower the learning rate" in r["note"] for r in trials)
    tuning = json.loads((context.results / "tuning" / "grpo.json").read_text())
    assert [t["score"] is None for t in tuning["trials"]].count(True) == 1
    second = run_experiment(context, 2)
    assert (second.done, second.failed, second.missing) == (8, [], 0)


def test_random_kills_leave_the_same_bytes(opened: Opened, monkeypatch: pytest.MonkeyPatch):
    """Ten stops at random calls of random functions, one after another, in one cell."""
    one = opened("one")
    cell = seed_cell(one, "ppo")
    run_cell(one, cell)
    other = opened("other")
    rng, stops = random.Random(7), 0
    while not folder_of(other, cell).done:
        with monkeypatch.context() as patch:
            where = rng.choice(["step", "evaluate", "save_checkpoint", "chained"])
            if stops < 10:
                stop_before(patch, where, rng.randint(1, 3))
            try:
                run_cell(other, cell)
            except Stop:
                stops += 1
    assert stops >= 5
    mine, its = records(folder_of(one, cell)), records(folder_of(other, cell))
    assert mine == its
