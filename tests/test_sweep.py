"""One file, several matched experiments: how it expands, what is refused, run, kill and resume."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none
from certificate_plants import edit_json, put, read
from experiment_fixture import contents, save_model, write_spec

from harness.certificate import audit
from harness.cli import main
from harness.errors import BAD_INPUT, NOT_CERTIFIED, InputError
from harness.experiment import open_context, open_contexts, write_sweep
from harness.lock import make_lock
from harness.plan import make_plan
from harness.report.load import load_experiment
from harness.report.sweep_load import load_sweep_results
from harness.report.table_design import arms_table
from harness.spec.load import load_spec
from harness.spec.sweep import Sweep, load_sweep

ROOT = Path(__file__).parent.parent
FLIP, SIZE = "reward.noise.flip", "sampling.completions_per_prompt"


def sweep_file(folder: Path, sweep: dict[str, Any], model: Path | None = None, **more: Any) -> Path:
    """The tiny experiment with a section ``sweep``."""
    changes = {"tuning": None, "controls": {"base": False, "placebo": None}} | more
    path = write_spec(folder / "tiny.yaml", model or folder / "model", **changes)
    path.write_text(path.read_text() + yaml.safe_dump({"sweep": sweep}, sort_keys=False))
    return path


def expanded(folder: Path, sweep: dict[str, Any], **more: Any) -> Sweep:
    found = load_sweep(sweep_file(folder, sweep, **more))
    assert found is not None
    return found


# -- expansion ------------------------------------------------------------------------------------


def test_a_grid_is_every_combination_in_the_order_of_the_file(tmp_path: Path):
    found = expanded(tmp_path, {"grid": {SIZE: [4, 2], FLIP: [0.0, 0.1, 0.25]}})
    specs = [c.spec for c in found.cases]
    assert [s.sampling.completions_per_prompt for s in specs] == [4, 4, 4, 2, 2, 2]
    assert [s.reward.noise and s.reward.noise.flip for s in specs] == [0.0, 0.1, 0.25] * 2
    assert [c.name for c in found.cases][:2] == [
        "completions_per_prompt_4-flip_0.0", "completions_per_prompt_4-flip_0.1",
    ]  # fmt: skip
    assert found.cases[1].sets == {SIZE: 4, FLIP: 0.1}
    assert found.cases[1].spec.name == f"tiny.{found.cases[1].name}"
    assert {s.sampling.prompts_per_step for s in specs} == {2}  # nothing else moves


def test_completions_of_a_step_are_held_by_fewer_prompts(tmp_path: Path):
    found = expanded(tmp_path, {"grid": {SIZE: [1, 4, 16]}, "completions_per_step": 16})
    batches = [
        (c.spec.sampling.prompts_per_step, c.spec.sampling.completions_per_prompt)
        for c in found.cases
    ]
    assert batches == [(16, 1), (4, 4), (1, 16)]


def test_named_cases_lay_patches_over_the_spec(tmp_path: Path):
    found = expanded(
        tmp_path,
        {"cases": {
            "weak": {"settings": {"grpo": {"kl.kl_coef": 0.01}}, "seeds": [0, 1]},
            "strong": {"optimizer": {"learning_rate": 0.5}},
        }},
    )  # fmt: skip
    weak, strong = found.cases
    assert (weak.name, strong.name) == ("weak", "strong")
    assert weak.spec.settings == {"grpo": {"kl.kl_coef": 0.01}}
    assert (weak.spec.seeds, strong.spec.seeds) == ((0, 1), (0,))
    assert weak.spec.optimizer.learning_rate == 1e-2
    assert strong.spec.optimizer.learning_rate == 0.5
    assert strong.spec.optimizer.minibatches == 2  # merged, not replaced
    assert weak.sets == {"settings.grpo.kl.kl_coef": 0.01, "seeds": [0, 1]}


def test_specs_that_use_none_of_it_are_as_they_were(tmp_path: Path):
    """Their dump, and so their hash and lock, has no new key."""
    spec = load_spec(write_spec(tmp_path / "t.yaml", tmp_path / "model"))
    dumped = spec.model_dump(mode="json")
    assert "settings" not in dumped
    assert "sweep" not in dumped
    assert "noise" not in dumped["reward"]


def test_a_file_that_extends_a_sweep_has_it_unless_it_says_otherwise(tmp_path: Path):
    sweep_file(tmp_path, {"grid": {FLIP: [0.0, 0.1]}})
    for text, cases in (("name: more\n", 2), ("name: one\nsweep: null\n", None)):
        path = tmp_path / "above.yaml"
        path.write_text("extends: tiny.yaml\n" + text)
        found = load_sweep(path)
        assert (found and len(found.cases)) == cases
    assert load_spec(tmp_path / "above.yaml").reward.noise is None


def test_the_order_of_the_grid_is_kept_in_the_results(tmp_path: Path):
    """JSON is written with sorted keys; the first axis is the one to draw along."""
    path = sweep_file(tmp_path, {"grid": {SIZE: [4, 2], FLIP: [0.0, 0.1]}})
    folder = write_sweep(path, [], tmp_path / "results")
    assert folder is not None
    made = json.loads((folder / "sweep.json").read_text())
    assert made["order"] == [SIZE, FLIP]
    assert [case["sets"][SIZE] for case in made["cases"]] == [4, 4, 2, 2]


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        ({}, "give grid or cases"),
        ({"grid": {FLIP: [0.1]}, "cases": {"a": {}}}, "give grid or cases"),
        ({"grid": {FLIP: []}}, "each once"),
        ({"grid": {FLIP: [0.1, 0.1]}}, "each once"),
        ({"grid": {"reward.nois.flip": [0.1]}}, "case flip_0.1: unknown key 'reward.nois'"),
        ({"grid": {FLIP: [0.1, 2.0]}}, "case flip_2.0: reward.noise.flip"),
        ({"grid": {SIZE: [3]}, "completions_per_step": 16}, "does not divide"),
        ({"cases": {"a/b": {}}}, "cannot name a folder"),
        ({"grid": {"question": ["why?", "why!"]}}, "two cases would have the folder"),
        ({"grids": {FLIP: [0.1]}}, "sweep.grids"),
    ],
)
def test_what_is_no_sweep_is_refused_in_one_line(tmp_path: Path, sweep: Any, words: str):
    path = sweep_file(tmp_path, sweep)
    with pytest.raises(InputError) as caught:
        load_sweep(path)
    line = str(caught.value)
    assert words in line
    assert "\n" not in line
    assert str(path) in line


def test_a_case_is_asked_for_by_its_name(tmp_path: Path):
    path = sweep_file(tmp_path, {"grid": {FLIP: [0.0, 0.1]}})
    (one,) = open_contexts(path, [], [], tmp_path / "r", "flip_0.1")
    assert one.results == tmp_path / "r" / "flip_0.1"
    with pytest.raises(InputError, match="none of this sweep's"):
        open_contexts(path, [], [], None, "flip_0.2")
    with pytest.raises(InputError, match="--case"):
        load_spec(path)
    with pytest.raises(InputError, match="no sweep"):
        open_contexts(write_spec(tmp_path / "plain.yaml", tmp_path), [], [], None, "flip_0.1")


BLOCKS = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "sweeps.md").read_text(), re.DOTALL)


@pytest.mark.parametrize(("block", "cases"), zip(BLOCKS, (4, 2, 0), strict=True))
def test_what_the_documentation_writes_is_valid(tmp_path: Path, block: str, cases: int):
    tree = {"name": "written", "tuning": None} | yaml.safe_load(block)
    tree["extends"] = str(ROOT / "experiments" / "matched_math.yaml")
    path = tmp_path / "written.yaml"
    path.write_text(yaml.safe_dump(tree))
    found = load_sweep(path)
    if found is None:
        assert load_spec(path).settings
    assert (len(found.cases) if found else 0) == cases


# -- settings of single arms ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base") / "model")


@pytest.mark.parametrize(
    ("settings", "more", "words"),
    [
        ({"grpo": {"optimizer.learning_rate": 1e-3}}, {}, "controls, equal for all arms"),
        ({"dapo": {"kl.kl_coef": 0.1}}, {}, "not among arms"),
        ({"grpo": {"kl.kl_coef": 0.1}}, {"tuning": {"trials": 1}}, "leave tuning and ladder out"),
        ({"grpo": {"kl.kl_coeff": 0.1}}, {}, "no knob of the arm. Did you mean 'kl.kl_coef'"),
        ({"grpo": {"aggregate": 0.1}}, {}, "no knob of the arm"),
        ({"grpo": {"kl.kl_coef": "high"}}, {}, "not of the kind"),
    ],
)
def test_settings_that_are_no_arms_own_are_refused(
    tmp_path: Path, model: Path, settings: Any, more: Any, words: str
):
    path = write_spec(tmp_path / "t.yaml", model, **({"tuning": None} | more), settings=settings)
    with pytest.raises(InputError, match=words):
        make_plan(open_context(path, [], [], tmp_path / "r"))
    with pytest.raises(InputError, match=words):
        make_lock(open_context(path, [], [], tmp_path / "r"))


# -- whole sweeps ---------------------------------------------------------------------------------

SWEEP = {
    "cases": {
        "quiet": {"reward": {"noise": {"flip": 0.0}}},
        "noisy": {"reward": {"noise": {"flip": 0.3}}, "settings": {"grpo": {"kl.kl_coef": 0.5}}},
    }
}


def command(spec: Path, results: Path) -> list[str]:
    words = ["run", str(spec), "--results", str(results), "--jobs", "2"]
    return [sys.executable, "-m", "harness.cli", *words]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def spec(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sweep_file(
        tmp_path_factory.mktemp("sweep"), SWEEP, model, arms=["grpo", "rloo"],
        budget={"limit": 16, "evaluate_at": [1.0]},
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(spec: Path) -> subprocess.CompletedProcess[str]:
    """A run of the sweep that nobody disturbs."""
    return subprocess.run(
        command(spec, spec.parent / "whole"), capture_output=True, text=True, env=environment(),
        cwd=spec.parent,
    )  # fmt: skip


@pytest.fixture
def results(spec: Path, whole: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(spec.parent / "whole", tmp_path / "results"))


def test_every_case_has_a_lock_a_certificate_and_a_report(spec: Path, whole: Any):
    assert whole.returncode == 0, whole.stdout + whole.stderr
    for case in ("quiet", "noisy"):
        folder = spec.parent / "whole" / case
        assert json.loads((folder / "certificate.json").read_text())["certified"] is True
        assert (folder / "spec.lock.yaml").is_file()
        assert (folder / "report.html").is_file()
    assert (spec.parent / "whole" / "report.html").is_file()
    assert "case 2 of 2: noisy" in whole.stdout
    assert load_sweep_results(spec.parent / "whole").certified


def test_settings_are_run_recorded_and_shown_as_declared(results: Path):
    record = json.loads((results / "noisy/runs/grpo/seed-0/run.json").read_text())
    assert record["settings"] == {"kl.kl_coef": 0.5}
    assert record["parts"]["kl"]["kl_coef"] == 0.5
    assert {line["kl_coef"] for line in read(results / "noisy/runs/grpo/seed-0/steps.jsonl")} == {
        0.5
    }
    assert audit(results / "noisy").settings["grpo"] == {"kl.kl_coef": 0.5}
    rows = {row[0]: row for row in arms_table(load_experiment(results / "noisy")).rows}
    assert rows["kl.kl_coef"][1] == "0.5 (set)"
    plain = json.loads((results / "quiet/runs/grpo/seed-0/run.json").read_text())
    assert plain["settings"] == {}


@pytest.mark.parametrize(
    ("cell", "change", "key"),
    [
        ("noisy/runs/grpo", put("settings", {}), "settings"),
        ("noisy/runs/rloo", put("settings", {"kl.kl_coef": 0.5}), "settings"),
        ("noisy/runs/grpo", put("parts/kl/kl_coef", 0.1), "parts.kl.kl_coef"),
        ("quiet/runs/rloo", put("hashes/reward", "0" * 64), "hashes.reward"),
    ],
)
def test_one_case_that_is_not_certified_is_the_sweeps_exit_code(
    results: Path, cell: str, change: Any, key: str, capsys: pytest.CaptureFixture[str]
):
    case = results / cell.partition("/")[0]
    edit_json(results, f"{cell}/seed-0/run.json", change)
    assert any(key in v.key for v in audit(case).violations)
    with pytest.raises(SystemExit) as ended:
        main(["audit", str(results)])
    assert ended.value.code == NOT_CERTIFIED
    out = capsys.readouterr().out
    assert f"{case.name}: NOT certified" in out
    other = "noisy" if case.name == "quiet" else "quiet"
    assert f"{other}: certified" in out
    with pytest.raises(SystemExit):
        main(["report", str(results)])
    text = (results / "REPORT.md").read_text()
    assert "2 experiments, of which 1 is certified" in text
    assert f"{case.name}: NOT certified" in text


def steps(results: Path, case: str) -> int:
    files = (results / case).glob("runs/*/*/steps.jsonl")
    return sum(path.read_bytes().count(b"\n") for path in files)


def kill_when(spec: Path, results: Path, case: str) -> None:
    """SIGKILL the sweep's process once this case has made steps."""
    process = subprocess.Popen(
        command(spec, results), stdout=subprocess.DEVNULL, cwd=spec.parent, env=environment(),
        start_new_session=True,
    )  # fmt: skip
    while process.poll() is None:
        if steps(results, case) >= 2:
            process.send_signal(signal.SIGKILL)
        time.sleep(0.01)
    assert process.returncode == -signal.SIGKILL


def test_killed_in_a_case_and_resumed_it_is_the_same(spec: Path, whole: Any):
    results, undisturbed = spec.parent / "killed", spec.parent / "whole"
    kill_when(spec, results, "noisy")
    done = contents(results / "quiet", "steps.jsonl", "done.json")
    assert len(done) == 4  # the first case was over
    stamps = [p.stat().st_mtime_ns for p in sorted(results.glob("quiet/runs/*/*/done.json"))]
    again = subprocess.run(
        command(spec, results), capture_output=True, text=True, cwd=spec.parent, env=environment()
    )
    assert again.returncode == 0, again.stdout + again.stderr
    after = [p.stat().st_mtime_ns for p in sorted(results.glob("quiet/runs/*/*/done.json"))]
    assert after == stamps  # and was not run again
    names = ("steps.jsonl", "evals.jsonl", "samples.jsonl", "done.json")
    mine, its = contents(undisturbed, *names), contents(results, *names)
    assert mine.keys() == its.keys()
    assert [name for name in mine if mine[name] != its[name]] == []
    tables = contents(undisturbed / "tables", "*")
    assert tables == contents(results / "tables", "*")


def test_commands_that_mean_one_experiment_ask_which(
    spec: Path, whole: Any, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", str(spec), "--arm", "grpo", "--results", str(spec.parent / "whole")])
    assert ended.value.code == BAD_INPUT
    assert "choose one with --case: quiet, noisy" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["status", str(spec), "--results", str(spec.parent / "whole"), "--json"])
    assert ended.value.code == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["case"], row["arm"], row["state"]) for row in rows] == [
        (case, arm, "done") for case in ("quiet", "noisy") for arm in ("grpo", "rloo")
    ]
