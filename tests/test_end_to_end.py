"""The whole path through the console script: run, kill, resume, certify, report, tamper."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none
from experiment_fixture import contents, save_model, write_spec

from harness.cli import main

HARNESS = Path(sys.executable).with_name("harness")
NOT_DETERMINISTIC = (
    "seconds",
    "memory_measured",
    "exchange_measured",
)  # tables in files of their own
CELLS = 6

pytestmark = pytest.mark.xdist_group("end_to_end")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and a spec: two arms with their controls, one tuning trial each."""
    folder = tmp_path_factory.mktemp("home")
    model = save_model(folder / "model")
    write_spec(
        folder / "tiny.yaml", model, tuning={"trials": 1, "arms": {}}, budget={"limit": 8},
        arms=["grpo", "dapo"],
    )  # fmt: skip
    return folder


def command(home: Path, results: str, *more: str) -> list[str]:
    spec = str(home / "tiny.yaml")
    return [str(HARNESS), "run", spec, "--results", str(home / results), "--jobs", "2", *more]


@pytest.fixture(scope="module")
def whole(home: Path) -> subprocess.CompletedProcess[str]:
    """A run that nobody disturbs, in ``home/whole``."""
    return subprocess.run(command(home, "whole"), cwd=home, capture_output=True, text=True)


def deterministic(results: Path) -> dict[str, bytes]:
    """Steps, evaluations and tables: what two runs must share byte for byte."""
    found = contents(results / "runs", "steps.jsonl", "evals.jsonl", "samples.jsonl", "done.json")
    tables = contents(results / "tables", "*")
    tables = {n: b for n, b in tables.items() if not n.startswith(NOT_DETERMINISTIC)}
    return found | tables


def lines(results: Path) -> int:
    return sum(p.read_bytes().count(b"\n") for p in results.glob("runs/*/*/steps.jsonl"))


def test_a_run_ends_certified_with_tables_figures_and_a_report(home: Path, whole: Any):
    results = home / "whole"
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert whole.stderr == ""
    assert json.loads((results / "certificate.json").read_text())["certified"] is True
    assert (results / "report.html").stat().st_size > 10_000
    for name in ("final", "paired", "arms", "seconds", "memory_measured"):
        for kind in ("csv", "md", "tex"):
            assert (results / "tables" / f"{name}.{kind}").stat().st_size > 0
    assert list((results / "figures").glob("*.png"))
    assert list((results / "figures").glob("*.svg"))
    assert not list(results.rglob("*.tmp"))


def test_the_console_is_calm(home: Path, whole: Any):
    """A line for each cell, and what one wants to know; no colour, no bars, no chatter."""
    out = whole.stdout.splitlines()
    ended = [line for line in out if line.startswith("done ")]
    assert len(ended) == CELLS
    assert out[-2].startswith("certified: ")
    assert out[-1].startswith("report: ")
    assert "\x1b" not in whole.stdout
    assert len(out) < CELLS + 25


def kill_at(process: subprocess.Popen[Any], results: Path, target: int, how: int) -> bool:
    """Send a signal once the cells have written so many steps; False if the run ended before."""
    while process.poll() is None:
        if lines(results) >= target:
            os.killpg(process.pid, how) if how == signal.SIGINT else process.send_signal(how)
            return True
        time.sleep(0.01)
    return False


def test_killed_at_random_moments_and_resumed_it_is_the_same(home: Path, whole: Any):
    """SIGKILL to the run alone: the next one starts at once, while its cells are still dying."""
    results, rng = home / "killed", random.Random(3)
    total = lines(home / "whole")
    for share in sorted(rng.uniform(0.05, 0.5) for _ in range(2)):
        process = subprocess.Popen(
            command(home, "killed"), cwd=home, stdout=subprocess.DEVNULL, start_new_session=True
        )
        assert kill_at(process, results, int(share * total) + 1, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    found = -1
    while found != (now := lines(results)):  # what is counted next is the next run's own
        found = now
        time.sleep(1)
    process = subprocess.Popen(
        command(home, "killed"), cwd=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True, text=True,
    )  # fmt: skip
    interrupted = kill_at(process, results, lines(results) + 1, signal.SIGINT)
    _, err = process.communicate()
    if interrupted and process.returncode != 0:  # 0: it ended before the signal reached it
        assert process.returncode == 130
        assert err.strip() == "error: stopped; the same command goes on from here"
    assert not list(results.glob("runs/*/*/error.json"))
    last = subprocess.run(command(home, "killed"), cwd=home, capture_output=True, text=True)
    assert last.returncode == 0, last.stdout + last.stderr
    mine, its = deterministic(home / "whole"), deterministic(results)
    assert mine.keys() == its.keys()
    assert [name for name in mine if mine[name] != its[name]] == []
    assert len([n for n in mine if n.endswith("steps.jsonl")]) == CELLS - 1
    assert len([n for n in mine if n.endswith(".csv")]) > 5


@pytest.fixture
def copy(home: Path, whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the whole results that a test may spoil."""
    assert whole.returncode == 0
    shutil.copytree(home / "whole", tmp_path / "copy")
    monkeypatch.chdir(home)
    return tmp_path / "copy"


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_report_is_made_again_from_the_runs_alone(copy: Path):
    before = contents(copy, "*")
    for name in ("tables", "figures"):
        shutil.rmtree(copy / name)
    for name in ("report.html", "REPORT.md"):
        (copy / name).unlink()
    assert run("report", "tiny.yaml", "--results", str(copy)) == 0
    after = contents(copy, "*")
    assert after.keys() == before.keys()
    assert [name for name in before if after[name] != before[name]] == []


def test_the_audit_passes_and_catches_tampering(copy: Path, capfd: pytest.CaptureFixture[str]):
    assert run("audit", "tiny.yaml", "--results", str(copy)) == 0
    assert "certified" in capfd.readouterr().out
    path = copy / "runs" / "dapo" / "seed-0" / "steps.jsonl"
    first, *rest = path.read_text().splitlines(keepends=True)
    record = json.loads(first)
    record["spent"]["completion_tokens"] += 1
    path.write_text(json.dumps(record, sort_keys=True) + "\n" + "".join(rest))
    assert run("audit", "tiny.yaml", "--results", str(copy), "--json") == 3
    found = json.loads(capfd.readouterr().out)
    assert found["certified"] is False
    assert "dapo/seed-0/steps.jsonl" in json.dumps(found)
    assert json.loads((copy / "certificate.json").read_text())["certified"] is False
    (copy / "runs" / "grpo" / "seed-0" / "steps.jsonl").unlink()  # missing evidence
    assert run("audit", "tiny.yaml", "--results", str(copy)) == 3


def test_the_status_of_a_finished_run(copy: Path, capfd: pytest.CaptureFixture[str]):
    assert run("status", "tiny.yaml", "--results", str(copy), "--json") == 0
    rows = json.loads(capfd.readouterr().out)
    assert [(r["state"], r["share"]) for r in rows] == [("done", 1.0)] * CELLS


@pytest.mark.parametrize("arm", ["base", "grpo", "placebo"])
def test_stored_weights_are_evaluated_to_the_stored_numbers(
    copy: Path, capfd: pytest.CaptureFixture[str], arm: str
):
    assert run("evaluate", "tiny.yaml", "--results", str(copy), "--arm", arm, "--json") == 0
    found = json.loads(capfd.readouterr().out)
    stored = json.loads(
        (copy / "runs" / arm / "seed-0" / "evals.jsonl").read_text().splitlines()[-1]
    )
    problems = stored["problems"]
    assert found["samples"] == problems[0]["n"] == 4
    expected = sum(p["correct"] / p["n"] for p in problems) / len(problems)
    assert found["metrics"]["avg@4"] == pytest.approx(expected, abs=1e-12)
    assert found["kl_to_base"]["mean"] == pytest.approx(stored["kl_to_base"]["mean"], abs=1e-12)
    if arm != "base":
        assert found["kl_to_base"]["mean"] != 0


def test_what_cannot_be_evaluated_is_said(copy: Path, capfd: pytest.CaptureFixture[str]):
    for options, expected in (
        (["--arm", "gpro"], "Did you mean 'grpo'?"),
        (["--arm", "grpo", "--seed", "7"], "policy.safetensors does not exist"),
        (["--arm", "grpo", "--split", "test.x"], "--split 'test.x' is not in the experiment"),
    ):
        assert run("evaluate", "tiny.yaml", "--results", str(copy), *options) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert expected in line


def test_a_failed_cell_is_told_and_the_rest_is_reported(home: Path, whole: Any, copy: Path):
    """Exit code 1, and a report of what there is; nothing of the failed cell is lost."""
    folder = copy / "runs" / "grpo" / "seed-0"
    (folder / "done.json").unlink()
    (folder / "checkpoint").joinpath("state.json").write_text("{")
    before = (folder / "steps.jsonl").read_bytes()
    shutil.rmtree(copy / "tables")
    ended = subprocess.run(
        [str(HARNESS), "run", str(home / "tiny.yaml"), "--results", str(copy)],
        cwd=home, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert ended.stderr == ""
    (failed,) = [x for x in ended.stdout.splitlines() if x.startswith("FAILED")]
    assert "grpo/seed-0: " in failed
    assert "state.json: cannot be resumed from" in failed
    assert f"{CELLS - 1} cells done, 1 failed, 0 not run" in ended.stdout
    assert (folder / "steps.jsonl").read_bytes() == before
    assert (copy / "tables" / "failures.csv").exists()
