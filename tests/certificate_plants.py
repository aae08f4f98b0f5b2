"""Ways to make a results folder wrong, each with the check, cell and key that must betray it.

Chains, totals and scores are forged to fit, so that only what the records say is left to tell.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import certificate_fixture
import yaml

from harness.certificate.finding import MISSING
from harness.cost.flops import generate
from harness.ledger import generation_from, shape_from
from harness.store import chained, write_json

Plant = Callable[[Path], Any]
Lines = list[dict[str, Any]]


def edit_json(results: Path, file: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON file in place."""
    path = results / file
    value = json.loads(path.read_text())
    change(value)
    write_json(path, value)


def edit_lock(results: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the lock in place."""
    path = results / "spec.lock.yaml"
    lock = yaml.safe_load(path.read_text())
    change(lock)
    path.write_text(yaml.safe_dump(lock, sort_keys=True))


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line, sort_keys=True) + "\n" for line in lines))


def forge(
    results: Path, cell: str, name: str, change: Callable[[list[dict[str, Any]]], Any]
) -> None:
    """Change the lines of a file, and make chains, totals and the trial's score fit again.

    What is left to betray the forgery is what the lines say.
    """
    folder = results / "runs" / cell
    lines = read(folder / name)
    change(lines)
    chain, forged = "", []
    for line in lines:
        content = {key: value for key, value in line.items() if key != "chain"}
        forged.append(chained(content, chain))
        chain = forged[-1]["chain"]
    write(folder / name, forged)

    def ending(done: dict[str, Any]) -> None:
        if name == "evals.jsonl":
            done["evals_chain"] = chain
        elif forged:
            done |= {"last_chain": chain, "steps": len(forged)}
            done |= {key: forged[-1][key] for key in ("spent", "flops") if key in forged[-1]}

    edit_json(results, f"runs/{cell}/done.json", ending)


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
    "text of an environment in a task that has none": (
        steps(GRPO0, lambda lines: lines[-1]["lengths"]["policy/generate"].update(given=3)),
        "flops", GRPO0, "lengths.policy/generate.given"),
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
        run(GRPO0, put("declared_parts/scale/ddof", 1)),
        "arms", GRPO0, "declared_parts.scale.ddof"),
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
