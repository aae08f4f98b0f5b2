"""The audit certifies what is right, and names what is wrong: the check, the cell, and the key."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.arm import difference as difference_of_arms
from harness.arm import parts
from harness.arms import ARMS
from harness.cell import convention
from harness.certificate import RULES, audit, write_certificate
from harness.certificate.checks_cells import check_matrix
from harness.certificate.checks_flops import convention_of
from harness.certificate.checks_tuning import paired_quantile
from harness.certificate.checks_update import RATIO_TOLERANCE, rate_factor
from harness.certificate.compare import difference, equal
from harness.certificate.design import Design
from harness.certificate.evidence import Evidence
from harness.certificate.finding import MISSING
from harness.certificate.records import Lock
from harness.cost.flops import generate
from harness.identity import canonical
from harness.learner import RATIO_TOLERANCE as LEARNER_TOLERANCE
from harness.ledger import generation_from, shape_from
from harness.spec.load import check_spec
from harness.spec.schema import OptimizerSpec
from harness.train import rate_factor as rate_of_the_loop
from harness.tune import propose

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none
import certificate_fixture
from certificate_fixture import (
    SPEC,
    build,
    edit_json,
    edit_lock,
    forge,
    read,
)

Plant = Callable[[Path], Any]
Lines = list[dict[str, Any]]


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
        expected = difference_of_arms(parts(ARMS["grpo"]), parts(ARMS[name]))
        assert canonical(found) == canonical(expected)
    assert set(declared["ppo"]) == {"advantage", "aggregate", "kl", "whiten"}


@pytest.mark.parametrize("left", ARMS)
@pytest.mark.parametrize("right", ARMS)
def test_difference_is_that_of_the_arms(left: str, right: str):
    a, b = parts(ARMS[left]), parts(ARMS[right])
    assert difference(a, b) == difference_of_arms(a, b)


def test_the_certificate_is_deterministic_json(results: Path):
    first = write_certificate(results)
    text = (results / "certificate.json").read_text()
    assert json.loads(text)["certified"] is True
    write_certificate(results)
    assert (results / "certificate.json").read_text() == text
    assert json.loads(text) == json.loads(json.dumps(first.to_json()))


# -- planted violations ---------------------------------------------------------------------------


def steps(cell: str, change: Callable[[Lines], Any]) -> Plant:
    return lambda results: forge(results, cell, "steps.jsonl", change)


def evals(cell: str, change: Callable[[Lines], Any]) -> Plant:
    return lambda results: forge(results, cell, "evals.jsonl", change)


def run(cell: str, change: Callable[[dict[str, Any]], Any]) -> Plant:
    return lambda results: edit_json(results, f"runs/{cell}/run.json", change)


def put(path: str, value: Any) -> Callable[[Any], None]:
    """Set the value at a path; ``/`` between keys, numbers index lists."""

    def change(tree: Any) -> None:
        *parents, last = path.split("/")
        for key in parents:
            tree = tree[int(key) if isinstance(tree, list) else key]
        tree[last] = value(tree[last]) if callable(value) else value

    return change


def every_step(path: str, value: Any) -> Callable[[Lines], None]:
    def change(lines: Lines) -> None:
        for line in lines:
            put(path, value)(line)

    return change


def more_tokens(lines: Lines) -> None:
    """1 % more completion tokens from the last step on, mean length and totals made to fit."""
    step, before = lines[-1], lines[-2]["spent"]
    spent = step["spent"]
    more = math.ceil(0.01 * spent["completion_tokens"])
    spent["completion_tokens"] += more
    spent["tokens"] += more
    sampled = spent["completion_tokens"] - before["completion_tokens"]
    step["length_mean"] = sampled / (spent["completions"] - before["completions"])


def more_tokens_everywhere(lines: Lines) -> None:
    """The same, with lengths and FLOPs forged to fit: what was scored still tells."""
    more_tokens(lines)
    step, before = lines[-1], lines[-2]["spent"]
    drawn = step["lengths"]["policy/generate"]
    more = step["spent"]["completion_tokens"] - before["completion_tokens"] - drawn["sampled"]
    shape = shape_from(certificate_fixture.shape())
    cost = generate(shape, generation_from(drawn))
    drawn["sampled"] += more
    drawn["decoded"] += more
    extra = generate(shape, generation_from(drawn)) - cost
    step["flops"]["policy/generate"] += extra
    step["spent"]["flops"] += extra


def fewer_flops(lines: Lines) -> None:
    """A critic charged less than it cost, in every total alike."""
    for line in lines:
        less = line["flops"]["critic/train"] // 100
        line["flops"]["critic/train"] -= less
        line["spent"]["flops"] -= less


def one_step_more(lines: Lines) -> None:
    """A step after the budget, consistent in itself: what the last step spent, spent again."""
    last, before = lines[-1], lines[-2]
    extra = json.loads(json.dumps(last))
    extra["step"] += 1
    extra["prompts"] = {"drawn": 4, "cursor": last["prompts"]["cursor"] + 4, "stream": {}}
    for key in ("spent", "flops"):
        for name, value in last[key].items():
            extra[key][name] = 2 * value - before[key].get(name, 0)
    lines.append(extra)


def uncharged(lines: Lines) -> None:
    """A dropped group that was never paid for: drawn, dropped, and missing in the totals."""
    step = next(line for line in lines if line["dropped"]["groups"])
    step["dropped"] = {"groups": 0, "completions": 0}


def an_extra_trial(results: Path) -> None:
    trials = results / "runs/ppo"
    shutil.copytree(trials / "trial-002-seed-1000", trials / "trial-003-seed-1000")
    edit_json(results, "runs/ppo/trial-003-seed-1000/run.json", put("trial", 3))


def failed(results: Path) -> None:
    cell = results / "runs/grpo/seed-1"
    (cell / "done.json").unlink()
    (cell / "error.json").write_text('{"error": "loss is nan", "where": "x", "traceback": ""}')


def not_the_best(results: Path) -> None:
    """Final seeds of grpo run with another trial's settings, consistently."""
    chosen = json.loads((results / "runs/grpo/seed-0/run.json").read_text())["settings"]
    other = next(
        found
        for f in sorted(results.glob("runs/grpo/trial-*/run.json"))
        if (found := json.loads(f.read_text())["settings"]) != chosen
    )
    for cell in ("grpo/seed-0", "grpo/seed-1"):
        with_other_settings(results, cell, other)


def with_other_settings(results: Path, cell: str, settings: dict[str, Any]) -> None:
    def change(record: dict[str, Any]) -> None:
        record["settings"] = settings
        record["controls"]["optimizer"]["learning_rate"] = settings["optimizer.learning_rate"]
        record["parts"]["kl"]["kl_coef"] = settings["kl.kl_coef"]

    before = json.loads((results / "runs" / cell / "run.json").read_text())["settings"]
    factor = settings["optimizer.learning_rate"] / before["optimizer.learning_rate"]
    edit_json(results, f"runs/{cell}/run.json", change)

    def lines(lines: Lines) -> None:
        for line in lines:
            line["kl_coef"] = settings["kl.kl_coef"]
            line["effective"]["learning_rate"] *= factor

    forge(results, cell, "steps.jsonl", lines)


def selected_on_test(results: Path) -> None:
    """A trial was judged on the test split, under its name."""
    split = json.loads(yaml_lock(results))["evaluation_problems"]["test.sums"]

    def change(lines: Lines) -> None:
        lines[0]["split"], lines[0]["problems_sha256"] = "test.sums", split
        for i, problem in enumerate(lines[0]["problems"]):
            problem["id"] = f"test.sums-{i}"

    forge(results, "ppo/trial-001-seed-1000", "evals.jsonl", change)


def yaml_lock(results: Path) -> str:
    return json.dumps(yaml.safe_load((results / "spec.lock.yaml").read_text()))


def unequal_setting(results: Path) -> None:
    """One arm's trial tries another learning rate than its fellows, consistently."""
    cell = "grpo/trial-001-seed-1000"
    settings = json.loads((results / f"runs/{cell}/run.json").read_text())["settings"]
    with_other_settings(results, cell, settings | {"optimizer.learning_rate": 2e-3})


def cut_lines(results: Path) -> None:
    """The last step taken away with its chain, but not the end that done.json remembers."""
    path = results / "runs/grpo/seed-0/steps.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def edit_without_forging(results: Path) -> None:
    path = results / "runs/ppo/seed-1/steps.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[2] = lines[2].replace('"entropy": 0.', '"entropy": 1.')
    path.write_text("".join(lines))


def fewer_samples(lines: Lines) -> None:
    """The final evaluation took 3 samples a problem, and its counts fit."""
    line = lines[-1]
    line["protocol"]["samples"] = 3
    for problem in line["problems"]:
        problem |= {
            "n": 3, "correct": 1, "unparsed": 2, "answers": [["13", 1, True]],
            "outcomes": {"correct": 1, "no_answer": 2},
        }  # fmt: skip


def all_seeds(cell: str, plant: Callable[[str], Plant]) -> Plant:
    return lambda results: [plant(f"{cell}/seed-{seed}")(results) for seed in (0, 1)]


def group_of(size: int) -> Callable[[Lines], None]:
    """Other groups of the same completions, charged as such."""

    def change(lines: Lines) -> None:
        for line in lines:
            line["effective"]["completions_per_prompt"] = size
            line["completions_per_prompt"] = size

    return change


GRPO0, PPO0, DAPO0 = "grpo/seed-0", "ppo/seed-0", "dapo/seed-0"
LINE = "steps.jsonl line"
PLANTS: dict[str, tuple[Plant, str, str, str]] = {
    # name: (plant, check, cell, part of the key)
    "a prompt swapped": (
        steps(GRPO0, put("1/prompts/stream/8", "0" * 64)),
        "prompts", GRPO0, f"{LINE} 2: prompts.stream.8"),
    "prompts skipped": (
        steps(GRPO0, every_step("prompts/cursor", lambda n: n + 4)),
        "prompts", GRPO0, f"{LINE} 1: prompts.cursor"),
    "a stretch of prompts not hashed": (
        steps(GRPO0, put("1/prompts/stream", {})),
        "prompts", GRPO0, f"{LINE} 2: prompts.stream"),
    "another seed's prompts": (
        lambda r: edit_lock(r, lambda lock: lock["streams"].update({"1": lock["streams"]["0"]})),
        "prompts", "grpo/seed-1", f"{LINE} 1: prompts.stream.4"),
    "one per cent more tokens": (
        steps(GRPO0, more_tokens), "flops", GRPO0, "lengths.policy/generate.sampled"),
    "one per cent more tokens, and FLOPs to fit": (
        steps(GRPO0, more_tokens_everywhere), "flops", GRPO0, "lengths.policy/score"),
    "tokens that are no sum": (
        steps(GRPO0, put("-1/spent/tokens", lambda n: n + 1)), "budget", GRPO0, "spent.tokens"),
    "fewer FLOPs for the same lengths": (
        steps(PPO0, fewer_flops), "flops", PPO0, "flops.critic/train"),
    "FLOPs that are no sum": (
        steps(PPO0, put("-1/spent/flops", lambda n: n - 1000)), "budget", PPO0, "spent.flops"),
    "an uncharged critic": (
        steps(PPO0, every_step("lengths", lambda d: {
            k: v for k, v in d.items() if k != "critic/score"})),
        "flops", PPO0, f"{LINE} 1: lengths"),
    "an uncharged dropped group": (steps(DAPO0, uncharged), "graded", DAPO0, "used"),
    "a completion graded twice": (
        steps(GRPO0, put("-1/spent/reward_calls", lambda n: n + 1)),
        "graded", GRPO0, "spent.reward_calls"),
    "one step beyond the budget": (
        steps("ppo/seed-1", one_step_more), "budget", "ppo/seed-1", "spent.flops"),
    "a run stopped early": (
        steps("ppo/seed-1", lambda s: s.pop()), "budget", "ppo/seed-1", "spent.flops"),
    "a larger budget for one arm's trials": (
        run("ppo/trial-001-seed-1000", put("budget/limit", 4e7)),
        "budget", "ppo/trial-001-seed-1000", "budget.limit"),
    "one extra trial": (an_extra_trial, "matrix", "ppo/trial-003-seed-1000", "run.json"),
    "one trial missing": (
        lambda r: shutil.rmtree(r / "runs/ppo/trial-002-seed-1000"),
        "matrix", "ppo/trial-002-seed-1000", "run.json"),
    "a seed of another run": (run(GRPO0, put("seed", 1)), "matrix", GRPO0, "run.json: seed"),
    "a failed cell": (failed, "matrix", "grpo/seed-1", "done.json"),
    "another temperature": (
        run(GRPO0, put("controls/sampling/temperature", 0.7)),
        "pinned", GRPO0, "controls.sampling.temperature"),
    "another temperature in effect": (
        steps(GRPO0, every_step("effective/temperature", 0.7)),
        "effective", GRPO0, f"{LINE} 1: effective.temperature"),
    "another reward": (
        run(GRPO0, put("controls/reward/correct", 2.0)),
        "pinned", GRPO0, "controls.reward.correct"),
    "another reward in effect": (
        steps(GRPO0, every_step("score_mean", lambda x: x + 0.5)),
        "graded", GRPO0, "score_mean"),
    "another reward code": (
        run(GRPO0, put("hashes/reward", "f" * 64)), "hashes", GRPO0, "hashes.reward"),
    "other data": (
        run(GRPO0, put("hashes/data.train", "f" * 64)), "hashes", GRPO0, "hashes.data.train"),
    "other code": (run("base/seed-0", put("hashes/code", "f" * 64)),
                   "hashes", "base/seed-0", "hashes.code"),
    "another library version": (
        lambda r: edit_json(r, f"runs/{PPO0}/environment.json", put("packages/torch", "2.12.0")),
        "hashes", PPO0, "packages.torch"),
    "an entropy bonus among the controls": (
        run(GRPO0, lambda r: r["controls"].update(entropy_bonus=0.01)),
        "pinned", GRPO0, "controls.entropy_bonus"),
    "an entropy coefficient": (
        run(GRPO0, put("controls/entropy_coef", 0.01)), "pinned", GRPO0, "controls.entropy_coef"),
    "an entropy bonus in the loss alone": (
        steps(GRPO0, lambda s: s[2].update(
            {"loss/policy": s[2]["loss/policy"] - 0.01 * s[2]["entropy"]})),
        "effective", GRPO0, f"{LINE} 3: loss/policy"),
    "a KL loss that is not declared": (
        steps(DAPO0, lambda s: s[0].update(
            {"loss/kl": 0.01, "loss/policy": s[0]["loss/surrogate"] + 0.01})),
        "effective", DAPO0, f"{LINE} 1: loss/kl"),
    "another KL coefficient in effect": (
        steps(PPO0, every_step("kl_coef", lambda x: 2 * x)), "effective", PPO0, "kl_coef"),
    "another KL coefficient in the parts": (
        run(PPO0, put("parts/kl/kl_coef", 0.9)), "arms", PPO0, "parts.kl.kl_coef"),
    "another clip": (run(GRPO0, put("parts/clip/clip_high", 0.28)),
                     "arms", GRPO0, "parts.clip.clip_high"),
    "another clip in one arm's every cell": (
        lambda r: [edit_json(r, str(f.relative_to(r)), put("parts/clip/clip_high", 0.28))
                   for f in r.glob("runs/grpo/*/run.json")],
        "arms", GRPO0, "parts.clip.clip_high"),
    "another clip by a setting": (
        run(GRPO0, lambda r: (r["settings"].update({"clip.clip_high": 0.28}),
                              put("parts/clip/clip_high", 0.28)(r))),
        "tuning", GRPO0, "settings"),
    "an undeclared field of a part": (
        run(GRPO0, lambda r: r["parts"]["clip"].update(hidden=1)),
        "arms", GRPO0, "parts.clip.hidden"),
    "another declared arm": (
        run(GRPO0, put("declared_parts/advantage/ddof", 1)),
        "arms", GRPO0, "declared_parts.advantage.ddof"),
    "another learning rate in effect": (
        steps(GRPO0, every_step("effective/learning_rate", lambda x: 1.01 * x)),
        "effective", GRPO0, "effective.learning_rate"),
    "another learning rate of the critic": (
        steps(PPO0, every_step("effective/critic_learning_rate", lambda x: 1.01 * x)),
        "effective", PPO0, "effective.critic_learning_rate"),
    "more epochs": (
        steps(GRPO0, every_step("effective/epochs", 2)), "effective", GRPO0, "effective.epochs"),
    "updates that were not counted": (
        steps(GRPO0, every_step("spent/updates", lambda n: n // 2)),
        "effective", GRPO0, "spent.updates"),
    "another denominator of the loss": (
        steps(GRPO0, every_step("effective/weight_sum", [1.0, 1.1])),
        "effective", GRPO0, "effective.weight_sum"),
    "a stale first ratio": (
        steps(GRPO0, put("2/first_ratio_error", 0.02)), "effective", GRPO0, "first_ratio_error"),
    "a warm-up cut short": (
        steps(PPO0, put("1/phase", "train")), "effective", PPO0, f"{LINE} 2: phase"),
    "another group size": (
        steps(PPO0, group_of(8)), "graded", PPO0, "effective.completions_per_prompt"),
    "another model": (
        run(GRPO0, put("shapes/policy/layers", 1)), "pinned", GRPO0, "shapes.policy.layers"),
    "a critic of another size": (
        run(PPO0, put("shapes/critic/hidden", 8)), "pinned", PPO0, "shapes.critic"),
    "a trial judged on test": (
        selected_on_test, "tuning", "ppo/trial-001-seed-1000", "evals.jsonl line 1: split"),
    "not the best trial": (not_the_best, "tuning", GRPO0, "run.json: settings"),
    "another score than the evaluation's": (
        lambda r: edit_json(r, "runs/ppo/trial-001-seed-1000/done.json",
                            put("selected_metric/value", 0.999)),
        "tuning", "ppo/trial-001-seed-1000", "selected_metric.value"),
    "a trial that is not paired": (
        unequal_setting, "tuning", "grpo/trial-001-seed-1000", "optimizer.learning_rate"),
    "other problems": (
        evals(GRPO0, put("-1/problems_sha256", "f" * 64)), "evaluation", GRPO0, "problems_sha256"),
    "another problem under the same hash": (
        evals(GRPO0, put("-1/problems/1/id", "easy")), "evaluation", GRPO0, "problems[1]"),
    "fewer samples": (evals(GRPO0, fewer_samples), "evaluation", GRPO0, "protocol.samples"),
    "a cooler evaluation": (
        evals(GRPO0, put("-1/protocol/temperature", 0.6)),
        "evaluation", GRPO0, "protocol.temperature"),
    "other draws": (
        evals(GRPO0, put("-1/protocol/seed", 99)), "evaluation", GRPO0, "protocol.seed"),
    "no final evaluation": (evals(GRPO0, lambda s: s.pop()), "evaluation", GRPO0, "evals.jsonl"),
    "the best checkpoint instead of the last": (
        evals(GRPO0, lambda s: s[-1].update(step=2)), "evaluation", GRPO0, "step"),
    "one more right answer": (
        evals(GRPO0, put("-1/problems/0/correct", lambda n: n + 1 if n < 4 else n - 1)),
        "evaluation", GRPO0, "].correct"),
    "a base that was trained": (
        lambda r: edit_json(r, "runs/base/seed-0/done.json", put("spent/updates", 5)),
        "controls", "base/seed-0", "spent.updates"),
    "a placebo with settings of its own": (
        run("placebo/seed-0", put("settings/optimizer.learning_rate", 5e-3)),
        "controls", "placebo/seed-0", "settings"),
    "an edited line": (edit_without_forging, "records", "ppo/seed-1", f"{LINE} 3: chain"),
    "lines cut off": (cut_lines, "records", GRPO0, "last_chain"),
    "a total of another run": (
        lambda r: edit_json(r, f"runs/{GRPO0}/done.json", put("spent/tokens", 1)),
        "records", GRPO0, "done.json: spent.tokens"),
    "a lock edited afterwards": (
        lambda r: edit_lock(r, put("spec/evaluation/samples", 8)), "hashes", "", "hashes.spec"),
    "no steps": (
        lambda r: (r / "runs" / GRPO0 / "steps.jsonl").unlink(), MISSING, GRPO0, "steps.jsonl"),
    "NaN": (
        steps(GRPO0, lambda s: s[1].update(entropy=math.nan)), MISSING, GRPO0, "steps.jsonl"),
    "a number too large": (
        lambda r: (r / "runs" / GRPO0 / "memory.json").write_text('{"peak": 1e999}'),
        MISSING, GRPO0, "memory.json"),
    "a field of another type": (
        steps(GRPO0, put("1/used", "16")), MISSING, GRPO0, f"{LINE} 2: used"),
    "an unknown quantity in effect": (
        steps(GRPO0, lambda s: s[1]["effective"].update(entropy_coef=0.01)),
        MISSING, GRPO0, "effective.entropy_coef"),
    "an unreadable lock": (
        lambda r: (r / "spec.lock.yaml").write_text("a: [1"), MISSING, "", "spec.lock.yaml"),
    "no lock": (lambda r: (r / "spec.lock.yaml").unlink(), MISSING, "", "spec.lock.yaml"),
    "a seed whose prompts are not pinned": (
        lambda r: edit_lock(r, lambda lock: lock["streams"].pop("1")),
        MISSING, "grpo/seed-1", "streams.1"),
}  # fmt: skip


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


@pytest.mark.parametrize("model", [
    {}, {"gradient_checkpointing": True}, {"attention": "flash_attention_2"},
    {"lora": {"rank": 4}}, {"lora": {"rank": 4}, "gradient_checkpointing": True},
])  # fmt: skip
def test_the_convention_is_that_of_the_cells(model: dict[str, Any]):
    spec = check_spec(SPEC | {"model": SPEC["model"] | model}, "")
    assert convention_of(spec) == convention(spec)


def test_the_audit_loads_no_torch(sound: Path):
    code = (
        "import sys; from pathlib import Path; from harness.certificate import audit; "
        f"assert audit(Path({str(sound)!r})).certified; assert 'torch' not in sys.modules"
    )
    root = Path(__file__).parent.parent
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
