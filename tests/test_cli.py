"""The command line: what each command prints for people and for programs, and its exit codes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none
from experiment_fixture import save_model, write_spec

from harness.arms import ARMS
from harness.cli import main, show
from harness.errors import BAD_INPUT

COMMANDS = ["list", "validate", "plan", "run", "amend", "status", "audit", "report", "evaluate",
            "compare", "grade", "metrics", "reward-model", "doctor", "diff",
            "conformance"]  # fmt: skip
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def harness(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command; its exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        out, err = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err

    return run


def rows_of(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base") / "model")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(harness: Run, command: str):
    code, out, err = harness(command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: harness {command}")
    prints_data = command != "run"
    assert ("--json" in out) is prints_data


def test_the_program_lists_its_commands(harness: Run):
    code, out, _ = harness("--help")
    assert code == 0
    assert {line.split()[0] for line in out.partition("Commands:")[2].splitlines() if line} >= set(
        COMMANDS
    )


def test_an_unknown_command_is_bad_input(harness: Run):
    code, out, err = harness("runn")
    assert (code, out) == (BAD_INPUT, "")
    assert re.fullmatch(r"error: No such command 'runn'.*\n", err)


# -- list, diff -----------------------------------------------------------------------------------


def test_arms_are_a_list_of_objects_with_names(harness: Run, tmp_path: Path):
    code, out, err = harness("list", "arms", "--json")
    assert (code, err) == (0, "")
    arms = json.loads(out)
    assert isinstance(arms, list)
    assert [a["name"] for a in arms][: len(ARMS)] == list(ARMS)
    assert {"ppo", "grpo", "dapo", "grpo_clip_higher"} <= {a["name"] for a in arms}
    assert {a["origin"] for a in arms[: len(ARMS)]} == {"built-in"}
    (tmp_path / "mine.py").write_text(
        "from harness.arms.grpo import GRPO\nMINE = GRPO.but('mine')\n"
    )
    _, out, _ = harness("list", "arms", "--json", "--plugin", "mine.py")
    mine = next(a for a in json.loads(out) if a["name"] == "mine")
    assert mine["origin"] == "plugin mine.py"
    grpo = next(a for a in arms if a["name"] == "grpo")
    assert mine["axes"] == grpo["axes"]
    assert grpo["axes"]["kl"] == "loss k3 0.04"
    assert grpo["parts"]["kl"]["estimator"] == "k3"


def test_arms_are_printed_as_rows_of_their_axes_on_any_screen(
    harness: Run, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    for width in (120, 160):
        screen = Console(highlight=False, width=width, color_system=None)
        monkeypatch.setattr(show, "console", screen)
        code, out, _ = harness("list", "arms")
        assert code == 0
        lines = out.splitlines()
        assert max(map(len, lines)) <= width
        rows = {line.split()[0]: line for line in lines if line.split()}
        assert set(ARMS) <= set(rows)  # a name never wraps
        assert "-0.2 +0.28" in rows["grpo_clip_higher"]
        assert "-0.2 +0.2 " in rows["grpo"]
        assert "with a critic" in out
        assert "between two arms" in out


def test_one_of_a_thing_is_not_many(harness: Run, tmp_path: Path, model: Path):
    spec = write_spec(tmp_path / "one.yaml", model, arms=["grpo"], tuning={"trials": 1})
    assert "tiny: valid. 1 arm, 1 seed.\n" in harness("validate", str(spec))[1]
    out = harness("plan", str(spec))[1]
    assert re.search(r"^grpo +1 trial +\d", out, re.MULTILINE)
    assert "1 trial for 2 dimensions" in out
    assert not re.search(r"\b1 (arms|cells|dimensions|problems|seeds|steps|threads|trials)\b", out)
    assert harness("diff", "grpo", "grpo_clip_higher")[1].startswith("1 difference ")
    file = rows_of(tmp_path / "m.jsonl", {"problem": 1, "correct": False, "answer": None})
    assert ": 1 problem metric value" in " ".join(harness("metrics", file)[1].split())


def test_truth_is_printed_in_plain_words(harness: Run):
    out = harness("list", "prompts")[1]
    assert re.search(r"^chat_boxed +yes ", out, re.MULTILINE)
    assert re.search(r"^plain +no ", out, re.MULTILINE)


@pytest.mark.parametrize("what", ["arms", "tasks", "prompts", "experiments"])
def test_lists_are_printed_for_people_and_for_programs(harness: Run, what: str):
    code, out, err = harness("list", what, "--json")
    assert (code, err) == (0, "")
    assert isinstance(json.loads(out), list)
    code, out, err = harness("list", what)
    assert (code, err) == (0, "")
    assert out


def test_a_broken_experiment_hides_no_other(
    harness: Run, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("experiments").mkdir()
    write_spec(Path("experiments/good.yaml"), model)
    Path("experiments/bad.yaml").write_text("name: x\nname: y\n")
    Path("experiments/ugly.yaml").write_text("colour: red\n")
    code, out, err = harness("list", "experiments", "--json")
    assert (code, err) == (0, "")
    found = {row["name"]: row for row in json.loads(out)}
    assert list(found) == ["bad", "good", "ugly"]
    assert (found["good"]["arms"], found["good"]["seeds"]) == ("grpo, ppo", 1)
    assert found["good"]["error"] is None
    assert found["bad"]["error"] == (
        "experiments/bad.yaml line 2: not YAML: key 'name' stands twice"
    )
    assert found["bad"]["seeds"] is None
    code, out, err = harness("list", "experiments")
    assert (code, err) == (0, "")
    assert re.search(r"^good +Does every part", out, re.MULTILINE)
    assert f"error: {found['bad']['error']}\n" in out
    assert re.search(r"^error: experiments/ugly.yaml: key 'name' is missing", out, re.MULTILINE)


def test_an_unknown_list_is_bad_input(harness: Run):
    code, _, err = harness("list", "arm")
    assert code == BAD_INPUT
    assert "Did you mean 'arms'?" in err


def test_a_difference_of_arms_is_what_they_differ_in(harness: Run):
    code, out, _ = harness("diff", "grpo", "grpo_clip_higher", "--json")
    assert code == 0
    assert json.loads(out) == {"clip.clip_high": [0.2, 0.28]}
    assert harness("diff", "grpo", "grpo")[0] == BAD_INPUT
    _, out, _ = harness("diff", "ppo", "grpo")
    assert out.startswith("4 differences")
    where = [line.split()[0] for line in out.splitlines()[2:] if line[0] != " "]
    assert where == ["kl", "advantage", "scale", "aggregate"]  # in the order of an arm's parts
    assert re.search(r"kl +KLInReward\(kl_coef=0.05, estimator=k1\) +KLInLoss\(kl_coef=0.04", out)
    _, out, _ = harness("diff", "grpo", "dr_grpo")
    assert re.search(r"scale +GroupStd\(eps=1e-6, ddof=0\) +none\n", re.sub(r" +\n", "\n", out))
    _, out, _ = harness("diff", "grpo", "grpo_clip_higher")
    assert out.startswith("1 difference ")
    assert re.search(r"clip.clip_high +0.2 +0.28", out)


# -- grade, metrics -------------------------------------------------------------------------------


def test_grading_prints_a_row_for_each_in_order(harness: Run, tmp_path: Path):
    path = rows_of(
        tmp_path / "g.jsonl",
        {"id": "b", "gold": "12", "completion": "so \\boxed{12}"},
        {"id": 1, "gold": "12", "completion": "so \\boxed{13}"},
        {"id": "a", "gold": "1/2", "completion": "\\boxed{\\frac{1}{2}}"},
        {"id": "c", "gold": "3", "completion": "I do not know"},
    )
    code, out, err = harness("grade", path, "--json")
    assert (code, err) == (0, "")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [set(row) for row in rows] == [{"id", "correct", "outcome", "extracted"}] * 4
    assert [row["id"] for row in rows] == ["b", 1, "a", "c"]
    assert [row["correct"] for row in rows] == [True, False, True, False]
    assert [row["outcome"] for row in rows] == ["correct", "wrong", "correct", "no_answer"]
    assert rows[3]["extracted"] is None
    code, out, _ = harness("grade", path)
    assert code == 0
    assert "no_answer" in out


def test_metrics_are_exact(harness: Run, tmp_path: Path):
    """Two right of four: pass@2 = 1 - C(2,2)/C(4,2) = 5/6; problem 2 has none right."""
    path = rows_of(
        tmp_path / "m.jsonl",
        *({"problem": "p", "correct": right, "answer": a}
          for right, a in ((True, "7"), (True, "7"), (False, "3"), (False, None))),
        *({"problem": "q", "correct": False, "answer": "1"} for _ in range(4)),
    )  # fmt: skip
    code, out, err = harness("metrics", path, "--k", "1,2,4", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["pass@k"] == pytest.approx({"1": 0.25, "2": 5 / 12, "4": 0.5}, abs=1e-15)
    assert found["maj@k"]["1"] == 0.25
    assert found["maj@k"]["4"] == 0.5
    assert found["avg@k"] == {"1": 0.25, "2": 0.25, "4": 0.25}
    assert found["exact"]["pass@2"] == "5/12"
    code, out, _ = harness("metrics", path, "--k", "2")
    assert code == 0
    assert "pass@2" in out
    assert "0.416667" in out


@pytest.mark.parametrize(
    ("command", "rows", "expected"),
    [
        (["grade"], ["{"], r"f.jsonl:1: not JSON"),
        (["grade"], ['{"id": 1, "gold": "2"}'], r"f.jsonl:1: key 'completion' is missing"),
        (["grade"], ["", " "], r"f.jsonl: holds no rows"),
        (["metrics"], ['{"problem": 1, "correct": 1, "answer": "2"}'], r"f.jsonl:1: correct is 1"),
        (
            ["metrics", "--k", "2"],
            ['{"problem": 1, "correct": true, "answer": "2"}'],
            r"k = 2 but problem 1 has 1 samples; draw more samples or lower --k",
        ),
        (["metrics", "--k", "a"], ["{}"], r"--k 'a': give whole numbers with commas"),
        (["metrics", "--k", "0"], ["{}"], r"--k '0': every K is at least 1"),
    ],
)
def test_a_bad_file_is_named_with_its_line(
    harness: Run, tmp_path: Path, command: list[str], rows: list[str], expected: str
):
    (tmp_path / "f.jsonl").write_text("\n".join(rows) + "\n")
    code, out, err = harness(*command, "f.jsonl", "--json")
    assert (code, out) == (BAD_INPUT, "")
    assert len(err.splitlines()) == 1
    assert re.search(expected, err), err
    code, _, err = harness(command[0], "none.jsonl")
    assert code == BAD_INPUT
    assert "none.jsonl: cannot be read" in err


# -- before a run ---------------------------------------------------------------------------------


def test_a_valid_spec_is_said_to_be_so_and_planned(harness: Run, tmp_path: Path, model: Path):
    spec = str(write_spec(tmp_path / "tiny.yaml", model))
    code, out, err = harness("validate", spec, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["valid"] is True
    code, out, err = harness("plan", spec, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["budget"]["limit"] == 12
    code, out, _ = harness("validate", spec)
    assert code == 0
    assert out.startswith("tiny: valid. 2 arms, 1 seed.\n")
    assert harness("plan", spec)[0] == 0
    assert not (tmp_path / "results").exists()


def test_the_status_before_anything_ran(harness: Run, tmp_path: Path, model: Path):
    spec = str(write_spec(tmp_path / "tiny.yaml", model))
    code, out, err = harness("status", spec, "--json")
    assert (code, err) == (0, "")
    rows = json.loads(out)
    assert len(rows) == 8
    assert {tuple(row) for row in rows} == {("arm", "cell", "state", "share", "note")}
    states = {(r["arm"], r["cell"]): r["state"] for r in rows}
    assert states["grpo", "trial-000-seed-1000"] == "ready"
    assert states["placebo", "seed-0"] == "waiting"
    code, out, _ = harness("status", spec)
    assert code == 0
    assert "0 of 8 cells done" in out
    assert not (tmp_path / "results").exists()


def test_doctor_says_what_it_looked_at(harness: Run):
    code, out, err = harness("doctor", "--json")
    assert code in (0, BAD_INPUT)
    assert err == ""
    checks = json.loads(out)
    assert all({"name", "ok"} <= set(c) for c in checks)
    assert (code == 0) is all(c["ok"] for c in checks)


# -- printing -------------------------------------------------------------------------------------


def test_printed_lines_are_neither_wrapped_nor_read_as_markup(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(show, "console", Console(width=20))
    line = "FAILED [/tmp] seeds [a, b] " + "x" * 100
    show.say(line)
    assert capfd.readouterr().out == line + "\n"
    show.print_table("t", ["range"], [["[low, high]"], [None]])
    assert "[low, high]" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (89, "89 s"), (90, "2 min"), (7200, "2.0 h")]
)
def test_durations(seconds: float, text: str):
    assert show.duration(seconds) == text


def test_equal_numbers_vote_together(harness: Run, tmp_path: Path):
    """Half, written three ways, outvotes a wrong answer given twice."""
    rows = [("0.50", True), ("0.5", True), ("1/2", True), ("3", False), ("3", False)]
    path = tmp_path / "samples.jsonl"
    path.write_text(
        "".join(json.dumps({"problem": 1, "correct": ok, "answer": a}) + "\n" for a, ok in rows)
    )
    code, out, _ = harness("metrics", str(path), "--k", "5", "--json")
    assert code == 0
    assert json.loads(out)["maj@5"] == 1.0


def test_a_path_that_is_no_results_folder_is_called_that(harness: Run):
    code, _, err = harness("audit", "published/nothing")
    assert code == 2
    assert "published/nothing is no results folder" in err


def test_no_two_arms_are_printed_alike(capsys: pytest.CaptureFixture[str]):
    """A row that hides what sets an arm apart would be a confound in print."""
    from harness.cli.list_commands import COLUMNS, _arms, _cell

    rows = [row for row in _arms([]) if row["family"] != "between two arms"]
    shown = {}
    for row in rows:
        cells = tuple(_cell(row["axes"], names) for names in COLUMNS.values())
        key = (row["family"], row["axes"].get("loop"), *cells)
        shown.setdefault(key, []).append(row["name"])
    alike = [names for names in shown.values() if len(names) > 1]
    assert alike == []
