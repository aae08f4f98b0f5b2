"""The audit certifies what is right, and names what is wrong: the check, the cell, and the key."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.arm import parts
from harness.arms import ARMS
from harness.certificate import RULES, audit, write_certificate
from harness.certificate.checks_cells import check_matrix
from harness.certificate.checks_tuning import paired_quantile
from harness.certificate.checks_update import RATIO_TOLERANCE, rate_factor
from harness.certificate.compare import equal
from harness.certificate.design import Design
from harness.certificate.evidence import Evidence
from harness.certificate.finding import MISSING
from harness.certificate.records import Lock
from harness.identity import canonical, difference
from harness.learner import RATIO_TOLERANCE as LEARNER_TOLERANCE
from harness.spec.load import check_spec
from harness.spec.schema import OptimizerSpec
from harness.train import rate_factor as rate_of_the_loop
from harness.tune import propose

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none
from certificate_fixture import SPEC, build
from certificate_plants import (
    GRPO0,
    LINE,
    PLANTS,
    PPO0,
    Lines,
    Plant,
    edit_json,
    edit_lock,
    every_step,
    forge,
    read,
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("sound") / "results")


@pytest.fixture
def results(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "results"))


SMALL: dict[str, Any] = {"seeds": [0], "tuning": SPEC["tuning"] | {"trials": 2}}


@pytest.fixture(scope="module")
def small_sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("small") / "results", **SMALL)


@pytest.fixture
def small(small_sound: Path, tmp_path: Path) -> Path:
    """Fewer cells, for what is tried on every key."""
    return Path(shutil.copytree(small_sound, tmp_path / "results"))


def test_a_sound_folder_is_certified(sound: Path):
    certificate = audit(sound)
    assert certificate.violations == ()
    assert certificate.certified
    assert certificate.cells == 2 + 2 + 3 * (2 + 3)  # base, placebo, arms x (seeds + trials)
    assert [check.name for check in certificate.checks] == [MISSING, *(r.name for r in RULES)]
    assert all(check.passed and check.proves.endswith(".") for check in certificate.checks)
    assert all(len(read(f)) >= 4 for f in sound.glob("runs/*/seed-*/steps.jsonl"))


def test_the_sound_folder_exercises_what_the_checks_look_at(sound: Path):
    """Otherwise a check could pass for want of anything to look at."""
    dapo = [line for f in sound.glob("runs/dapo/*/steps.jsonl") for line in read(f)]
    assert any(line["dropped"]["groups"] for line in dapo)
    ppo = read(sound / "runs/ppo/seed-0/steps.jsonl")
    assert {line["phase"] for line in ppo} == {"critic_warmup", "train"}
    assert len({line["effective"]["learning_rate"] for line in ppo}) > 2
    settings = json.loads((sound / "runs/grpo/trial-001-seed-1000/run.json").read_text())
    assert set(settings["settings"]) == {"optimizer.learning_rate", "kl.kl_coef"}


def test_declared_differences_are_those_of_the_arms(sound: Path):
    declared = audit(sound).declared_differences
    assert set(declared) == {"ppo", "dapo"}  # the baseline is grpo
    for name, found in declared.items():
        expected = difference(parts(ARMS["grpo"]), parts(ARMS[name]))
        assert canonical(found) == canonical(expected)
    assert set(declared["ppo"]) == {"advantage", "aggregate", "kl", "scale"}


def test_the_certificate_is_deterministic_json(results: Path):
    first = write_certificate(results)
    text = (results / "certificate.json").read_text()
    assert json.loads(text)["certified"] is True
    write_certificate(results)
    assert (results / "certificate.json").read_text() == text
    assert json.loads(text) == json.loads(json.dumps(first.to_json()))


# -- planted violations ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_violation_is_named(results: Path, name: str):
    plant, check, cell, key = PLANTS[name]
    plant(results)
    certificate = audit(results)
    assert not certificate.certified
    named = [
        v
        for v in certificate.violations
        if v.check == check
        and key in v.key
        and (not cell or f"runs/{cell}" in v.cells)
        and "\n" not in v.message
        and v.key in v.message
    ]
    assert named, [v.message for v in certificate.violations]
    assert check in {c.name for c in certificate.checks if not c.passed}


# -- missing evidence -----------------------------------------------------------------------------

KINDS = ("base/seed-0", "placebo/seed-0", "grpo/seed-0", "ppo/trial-001-seed-1000")
RUN_KEYS = (
    "arm", "budget", "controls", "declared_parts", "format", "hashes", "kind", "origin", "parts",
    "placebo_of", "seed", "settings", "shapes", "trial",
)  # fmt: skip


@pytest.mark.parametrize("cell", KINDS)
def test_deleting_any_file_of_a_cell_is_a_violation(small: Path, cell: str):
    files = sorted((small / "runs" / cell).iterdir())
    assert len(files) == (5 if cell.startswith("base") else 7)
    for file in files:
        text = file.read_text()
        file.unlink()
        certificate = audit(small)
        named = [v for v in certificate.violations if f"runs/{cell}" in v.cells]
        assert any(v.key.startswith(file.name) for v in named), file.name
        assert not certificate.certified
        file.write_text(text)
    assert audit(small).certified


@pytest.mark.parametrize("cell", ["base/seed-0", "grpo/seed-0", "ppo/trial-001-seed-1000"])
def test_deleting_any_key_of_run_json_is_a_violation(small: Path, cell: str):
    path = small / "runs" / cell / "run.json"
    record = json.loads(path.read_text())
    assert tuple(sorted(record)) == RUN_KEYS
    for key in (*paths_of(record, 2),):
        edit_json(small, f"runs/{cell}/run.json", lambda r, key=key: without(r, key))
        found = [v for v in audit(small).violations if f"runs/{cell}" in v.cells]
        assert any(key[-1] in v.key or key[0] in v.key for v in found), key
        path.write_text(json.dumps(record))


def paths_of(tree: Any, depth: int) -> list[tuple[str, ...]]:
    """Every key of a tree of objects, down to a depth."""
    if not isinstance(tree, dict) or not depth:
        return []
    below = [(k, *p) for k, v in tree.items() for p in paths_of(v, depth - 1)]
    return [(key,) for key in tree] + below


def without(tree: Any, path: tuple[str, ...]) -> None:
    for key in path[:-1]:
        tree = tree[key]
    del tree[path[-1]]


DIAGNOSTIC = ("completions_per_prompt", "explained_variance")  # recorded, and proving nothing


@pytest.mark.parametrize("cell", ["ppo/seed-0", "grpo/seed-0"])
def test_deleting_any_key_of_a_step_is_a_violation(small: Path, cell: str):
    """By the chain; and by the key itself, where somebody mends the chain."""
    path = small / "runs" / cell / "steps.jsonl"
    ending = path.with_name("done.json")
    text, done = path.read_text(), ending.read_text()
    for key in paths_of(read(path)[2], 1):
        lines = text.splitlines(keepends=True)
        line = json.loads(lines[2])
        if line.pop(key[0]) is None or key[0] in (*DIAGNOSTIC, "chain"):
            lines[2] = json.dumps(line) + "\n"
            path.write_text("".join(lines))
            assert not audit(small).certified, key
        else:
            forge(small, cell, "steps.jsonl", lambda s, key=key: without(s[2], key))
            violations = audit(small).violations
            assert any(key[0] in v.key and f"{LINE} 3" in v.key for v in violations), key
        path.write_text(text)
        ending.write_text(done)


@pytest.mark.parametrize("cell", ["ppo/seed-0", "dapo/seed-0"])
def test_no_count_can_be_raised_by_one(small: Path, cell: str):
    """Every count of a step is bound to another (FLOPs within rounding): no chain is needed."""
    path = small / "runs" / cell / "steps.jsonl"
    ending = path.with_name("done.json")
    text, done = path.read_text(), ending.read_text()
    lines = read(path)
    index = next((i for i, s in enumerate(lines) if s["dropped"]["groups"]), len(lines) - 2)
    tried = 0
    for head in ("spent", "flops", "lengths", "prompts", "outcomes", "dropped", "used"):
        for key in paths_of({head: lines[index][head]}, 4):
            if not isinstance(value_at(lines[index], key), int):
                continue

            def raise_it(lines: Lines, key: tuple[str, ...] = key) -> None:
                tree = lines[index]
                for part in key[:-1]:
                    tree = tree[part]
                value = tree[key[-1]]
                tree[key[-1]] += 1 if "flops" not in key else value // 100

            forge(small, cell, "steps.jsonl", raise_it)
            checks = {v.check for v in audit(small).violations}
            assert checks - {"records"}, key
            tried += 1
            path.write_text(text)
            ending.write_text(done)
    assert tried > 25


def value_at(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


GARBAGE = ("", "null", "[]", "{}", "1", '"x"', "{", "{}\n{", "\x00\xff", '{"a": 1, "a": 2}\n')


@pytest.mark.parametrize("name", ["run.json", "steps.jsonl", "evals.jsonl", "done.json",
                                  "environment.json", "timing.jsonl"])  # fmt: skip
def test_garbage_is_missing_evidence_and_no_exception(small: Path, name: str):
    path = small / "runs" / GRPO0 / name
    for text in GARBAGE:
        path.write_bytes(text.encode("latin-1"))
        certificate = audit(small)
        assert not certificate.certified
        assert certificate.to_json()["violations"], text


@pytest.mark.parametrize("value", [None, [], {}, "x", -1, True, 1e308])
def test_values_of_any_type_raise_nothing(small: Path, value: Any):
    path = small / "runs" / PPO0 / "run.json"
    record = json.loads(path.read_text())
    for key in record:
        if not equal(record[key], value):
            path.write_text(json.dumps(record | {key: value}))
            assert not audit(small).certified, key


def test_lengths_of_any_shape_raise_nothing(small: Path):
    text = (small / "runs" / PPO0 / "steps.jsonl").read_text()
    for value in ({}, {"lengths": 1}, {"lengths": {"tokens": "x"}, "head_tokens": None}):
        forge(small, PPO0, "steps.jsonl", lambda s, v=value: s[2]["lengths"].update(
            {"policy/score": v}))  # fmt: skip
        assert {v.check for v in audit(small).violations} >= {MISSING}
        (small / "runs" / PPO0 / "steps.jsonl").write_text(text)


@pytest.mark.parametrize("plant", [
    lambda r: shutil.rmtree(r), lambda r: shutil.rmtree(r / "runs"),
    lambda r: [shutil.rmtree(f) for f in r.glob("runs/*/*")],
])  # fmt: skip
def test_nothing_is_not_certified(small: Path, plant: Plant):
    plant(small)
    certificate = audit(small)
    assert not certificate.certified
    assert certificate.cells == 0
    assert certificate.violations


def test_a_check_that_stumbles_proves_nothing(small: Path, monkeypatch: pytest.MonkeyPatch):
    def stumble(evidence: object, design: object) -> Any:
        raise ZeroDivisionError("oops")

    rules = [replace(rule, find=stumble) if rule.name == "budget" else rule for rule in RULES]
    monkeypatch.setattr("harness.certificate.RULES", tuple(rules))
    certificate = audit(small)
    assert [c.name for c in certificate.checks if not c.passed] == [MISSING, "budget"]
    assert "oops" in certificate.violations[0].message


# -- other experiments ----------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [
    {"tuning": None},
    {"controls": {"base": False, "placebo": None}},
    {"arms": ["grpo", "ppo_ungrouped"]},
    {"budget": {"unit": "tokens", "limit": 1500.0, "evaluate_at": [0.1, 0.2, 1.0]}},
    {"budget": {"unit": "updates", "limit": 10.0, "evaluate_at": [1.0]}},
    {"budget": {"unit": "seconds", "limit": 0.55, "evaluate_at": [0.5, 1.0]}},
    {"optimizer": {"learning_rate": 1e-3, "schedule": "cosine", "epochs": 2, "minibatches": 4}},
    {"tuning": SPEC["tuning"] | {"sampler": "tpe", "trials": 4, "seeds": [1000, 1001]}},
    {"tuning": SPEC["tuning"] | {"arms": {"grpo": {"kl.kl_coef": {"choices": [0.1, 0.2]}}}}},
], ids=lambda c: next(iter(c)))  # fmt: skip
def test_other_experiments_are_certified(tmp_path: Path, changes: dict[str, Any]):
    results = build(tmp_path / "results", **changes)
    certificate = audit(results)
    assert [v.message for v in certificate.violations] == []
    assert certificate.certified


def test_an_arm_named_by_its_module_is_found_in_the_lock():
    names = {"a": "module pkg.mod", "b": "module other", "c": "entry point pkg:C"}
    lock = Lock.model_validate({
        "format": 1, "spec": {}, "hashes": {"x": "y"}, "streams": {}, "evaluation_problems": {},
        "arms": {name: {"origin": o, "source": "", "parts": {}} for name, o in names.items()}
        | {"grpo": {"origin": "built-in", "source": "", "parts": {}}},
    })  # fmt: skip
    arms = ["other:B", "grpo", "pkg.mod:A"]
    spec = check_spec(
        SPEC | {"arms": arms, "baseline": "pkg.mod:A", "controls": {"placebo": "other:B"}}, ""
    )
    design = Design(lock, spec)
    assert design.arm_names == {"grpo": "grpo", "other:B": "b", "pkg.mod:A": "a"}
    assert (design.baseline, design.placebo_arm) == ("a", "b")
    found = [v.key for v in check_matrix(Evidence(lock, spec, (), ()), design) if not v.cells]
    assert found == ["spec.lock.yaml: arms.c"]  # the lock holds an arm that no one asked for


def test_a_diverged_trial_counts_and_is_told(results: Path):
    chosen = json.loads((results / f"runs/{GRPO0}/run.json").read_text())["settings"]
    for trial in (0, 1, 2):
        cell = results / f"runs/grpo/trial-{trial:03d}-seed-1000"
        whole = Path(shutil.copytree(cell, results / "aside"))
        diverge(cell)
        certificate = audit(results)
        assert certificate.diverged == (f"runs/grpo/{cell.name}",)
        was_best = json.loads((whole / "run.json").read_text())["settings"] == chosen
        assert certificate.certified is not was_best
        assert {v.check for v in certificate.violations} == ({"tuning"} if was_best else set())
        shutil.rmtree(cell)
        whole.rename(cell)
    diverge(results / f"runs/{GRPO0}")
    assert not audit(results).certified


def diverge(cell: Path) -> None:
    (cell / "done.json").write_text('{"status": "diverged", "reason": "loss/policy is nan"}')
    (cell / "evals.jsonl").unlink()
    (cell / "memory.json").unlink()
    lines = (cell / "steps.jsonl").read_text().splitlines(keepends=True)[:2]
    (cell / "steps.jsonl").write_text("".join(lines))
    times = (cell / "timing.jsonl").read_text().splitlines(keepends=True)[:2]
    (cell / "timing.jsonl").write_text("".join(times))


def test_a_locked_knob_bounds_what_tuning_may_set(results: Path):
    """Where the lock holds the knobs, any other setting is named, in whatever cells it stands."""
    ranges = {"low": 1e-3, "high": 0.2, "log": True, "choices": None}
    edit_lock(results, lambda lock: lock["arms"]["grpo"].update(knobs={"kl.kl_coef": ranges}))
    assert audit(results).certified
    edit_lock(results, lambda lock: lock["arms"]["grpo"].update(knobs={"other.knob": ranges}))
    found = [v for v in audit(results).violations if v.check == "arms"]
    assert {v.key for v in found} == {"run.json: settings.kl.kl_coef"}
    edit_lock(results, lambda lock: lock["arms"]["grpo"].update(
        knobs={"kl.kl_coef": ranges | {"high": 0.0100001}}))  # fmt: skip
    found = audit(results).violations
    assert {v.check for v in found} == {"arms", "tuning"}  # out of range, and not the draw


def test_many_lines_of_one_kind_are_one_violation(results: Path):
    forge(results, GRPO0, "steps.jsonl", every_step("effective/temperature", 0.7))
    (found,) = audit(results).violations
    count = len(read(results / "runs" / GRPO0 / "steps.jsonl"))
    assert found.message.endswith(f"and {count - 1} more like it")
    assert found.expected == 1.0
    assert found.found == 0.7
    assert found.to_json()["cells"] == [f"runs/{GRPO0}"]


# -- what is computed again is what the harness computes ------------------------------------------


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 5])
def test_the_rate_is_that_of_the_loop(schedule: Any, warmup: int):
    spec = OptimizerSpec(learning_rate=1e-3, schedule=schedule, warmup_steps=warmup)
    for steps_before in (0, 3, 10):
        for share in (0.0, 0.3, 1.0):
            assert rate_factor(spec, steps_before, share) == pytest.approx(
                rate_of_the_loop(spec, steps_before, share), abs=1e-15
            )


def test_the_ratio_tolerance_is_that_of_the_learner():
    assert {str(k).removeprefix("torch."): v for k, v in LEARNER_TOLERANCE.items()} == (
        RATIO_TOLERANCE | {"float64": 1e-9}
    )


@pytest.mark.parametrize("arm", ["ppo", "grpo", "dapo"])
def test_the_draws_are_those_of_the_tuner(arm: str):
    spec = check_spec(SPEC | {"tuning": SPEC["tuning"] | {"trials": 7, "sampler_seed": 3}}, "")
    assert spec.tuning is not None
    path = "optimizer.learning_rate"
    space = spec.tuning.shared[path].range()
    for number, settings in enumerate(propose(spec, ARMS[arm], [])):
        expected = space.at(paired_quantile(3, path, number, 7)) if number else 1e-3
        assert settings[path] == pytest.approx(expected, rel=1e-12)


def test_the_audit_loads_no_torch(sound: Path):
    code = (
        "import sys; from pathlib import Path; from harness.certificate import audit; "
        f"print(audit(Path({str(sound)!r})).certified, 'torch' in sys.modules)"
    )
    root = Path(__file__).parent.parent
    ended = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert (ended.stdout, ended.returncode) == ("True False\n", 0), ended.stderr
