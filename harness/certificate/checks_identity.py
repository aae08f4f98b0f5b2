"""That cells are the same but for what their arms declare: controls, parts, hashes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.certificate.compare import ABSENT, equal, leaves_that_differ, look_up
from harness.certificate.design import REWARD_MODEL, Design
from harness.certificate.evidence import BASE, Cell, Evidence
from harness.certificate.finding import MISSING, Violation, violation
from harness.certificate.records import Run
from harness.errors import InputError
from harness.identity import digest
from harness.ledger import shape_from
from harness.plugins import FILE, HASH_KEY, copy_name
from harness.spec.schema import ExperimentSpec, RangeSpec


def check_pinned(evidence: Evidence, design: Design) -> Iterator[Violation]:
    """The controls are the lock's, but for declared settings."""
    for path in sorted(design.shared):
        if look_up(design.controls, path) is ABSENT:
            yield violation(
                "pinned", (), f"spec.lock.yaml: spec.tuning.shared.{path}", "a control", path,
                "tuning may set a path that is no control",
            )  # fmt: skip
    for cell in evidence.cells:
        if cell.run is None:
            continue
        for path, expected, found in leaves_that_differ(
            design.controls_of(cell.run), cell.run.controls
        ):
            yield violation(
                "pinned", cell.id, f"run.json: controls.{path}", expected, found,
                "a control is not what the lock pins for all arms",
            )  # fmt: skip
        yield from _budget_fields(cell, cell.run, design)
    yield from _shapes(evidence, design)


def _budget_fields(cell: Cell, run: Run, design: Design) -> Iterator[Violation]:
    if cell.arm == BASE:
        return
    budget = design.spec.budget
    if run.budget is None:
        yield violation(
            MISSING, cell.id, "run.json: budget", "a budget", None, "the budget is not recorded",
        )  # fmt: skip
        return
    expected: dict[str, Any] = {
        "unit": budget.unit,
        "limit": design.limit_of(cell),
        "evaluate_at": list(budget.evaluate_at),
    }
    for key, value in expected.items():
        found = getattr(run.budget, key)
        if not equal(value, found):
            check = "pinned" if key == "evaluate_at" else "budget"
            yield violation(
                check, cell.id, f"run.json: budget.{key}", value, found,
                "the budget is not the lock's, or not the same share of it for every trial",
            )  # fmt: skip


def _shapes(evidence: Evidence, design: Design) -> Iterator[Violation]:
    """All cells train one model, and critic and reference have its trunk: FLOPs follow from it."""
    first: tuple[Cell, Any] | None = None
    rewarded: list[tuple[Cell, Any]] = []
    for cell, run, _ in evidence.trained():
        try:
            policy = shape_from(run.shapes.policy or {})
            others = {
                role: None if record is None else shape_from(record)
                for role, record in (
                    ("critic", run.shapes.critic), ("reference", run.shapes.reference)
                )
            }  # fmt: skip
        except (TypeError, KeyError, ValueError, InputError) as error:
            yield violation(
                MISSING, cell.id, "run.json: shapes", "ModelShape fields", str(error),
                "the model's dimensions cannot be read",
            )  # fmt: skip
            continue
        first = first or (cell, run.shapes.policy)
        for path, expected, found in leaves_that_differ(first[1], run.shapes.policy):
            yield violation(
                "pinned", (first[0].id, cell.id), f"run.json: shapes.policy.{path}",
                expected, found, "two cells train models of different shape",
            )  # fmt: skip
        needed = design.models_of(cell)
        yield from _reward_model(cell, run, needed, rewarded)
        needed -= {REWARD_MODEL}
        for role, shape in others.items():
            if (shape is not None) != (role in needed):
                yield violation(
                    "pinned", cell.id, f"run.json: shapes.{role}", sorted(needed),
                    sorted(name for name, found in others.items() if found is not None),
                    f"the arm needs a {role} and has none, or has one that it does not need",
                )  # fmt: skip
            if shape is None:
                continue
            # What may differ: the critic's head, and that a frozen model holds no adapters.
            same = replace(
                shape,
                **{name: getattr(policy, name) for name in _FREE},
            )
            if same != policy:
                yield violation(
                    "pinned", cell.id, f"run.json: shapes.{role}", run.shapes.policy,
                    getattr(run.shapes, role), f"the {role} has another trunk than the policy",
                )  # fmt: skip


def _reward_model(
    cell: Cell, run: Run, needed: set[str], rewarded: list[tuple[Cell, Any]]
) -> Iterator[Violation]:
    """Every arm that trains on scores of a reward model pays for the same one."""
    shape = run.shapes.reward_model
    if (shape is not None) != (REWARD_MODEL in needed):
        yield violation(
            "pinned", cell.id, "run.json: shapes.reward_model", REWARD_MODEL in needed,
            shape is not None, "the arm needs a reward model and has none, or does not need one",
        )  # fmt: skip
    if shape is None:
        return
    rewarded.append((cell, shape))
    for path, expected, found in leaves_that_differ(rewarded[0][1], shape):
        yield violation(
            "pinned", (rewarded[0][0].id, cell.id), f"run.json: shapes.reward_model.{path}",
            expected, found, "two cells were scored by reward models of different shape",
        )  # fmt: skip


_FREE = (
    "parameters", "trainable", "trainable_tensors", "scalar_head", "tied",
    "lora_rank", "lora_targets",
)  # fmt: skip


def check_arms(evidence: Evidence, design: Design) -> Iterator[Violation]:
    """A cell runs its arm as declared, with knobs set and nothing else."""
    for cell in evidence.cells:
        if cell.run is None or cell.arm == BASE:
            continue
        locked = design.lock.arms.get(design.arm_of(cell))
        if locked is None:
            continue  # the matrix has no such arm, and says so
        run = cell.run
        if run.parts is None or run.declared_parts is None:
            yield violation(
                MISSING, cell.id, "run.json: parts", "the arm's parts", None,
                "the parts that ran are not recorded",
            )  # fmt: skip
            continue
        for path, expected, found in leaves_that_differ(locked.parts, run.declared_parts):
            yield violation(
                "arms", cell.id, f"run.json: declared_parts.{path}", expected, found,
                "the arm declared is not the arm locked",
            )  # fmt: skip
        if run.origin != locked.origin:
            yield violation(
                "arms", cell.id, "run.json: origin", locked.origin, run.origin,
                "the arm comes from another place than the one locked",
            )  # fmt: skip
        as_set = design.parts_of(cell, run)
        for path, expected, found in leaves_that_differ(as_set, run.parts):
            yield violation(
                "arms", cell.id, f"run.json: parts.{path}", expected, found,
                "a part that ran is not the declared one with its settings applied",
            )  # fmt: skip
        yield from _settings(cell, run, design)


def _settings(cell: Cell, run: Run, design: Design) -> Iterator[Violation]:
    """Settings touch what tuning may touch, within its ranges."""
    arm = design.arm_of(cell)
    locked, tuning = design.lock.arms[arm], design.spec.tuning
    if tuning is None:
        by_hand = design.set_by_hand(arm)
        if run.settings != by_hand:
            yield violation(
                "arms", cell.id, "run.json: settings", by_hand, run.settings,
                "without tuning, settings are those that the spec declares",
            )  # fmt: skip
        return
    spaces = design.spaces(arm)
    for path, value in run.settings.items():
        is_shared = path in design.shared
        tree: Mapping[str, Any] = design.controls if is_shared else locked.parts
        default = look_up(tree, path)
        declared = locked.knobs is None or path in locked.knobs or path in spaces
        if default is ABSENT or isinstance(default, (dict, list)) or not (is_shared or declared):
            yield violation(
                "arms", cell.id, f"run.json: settings.{path}", "a declared knob", value,
                "tuning set what the arm does not declare as a knob",
            )  # fmt: skip
            continue
        space = spaces.get(path)
        if space is not None and not _within(space, value, default):
            yield violation(
                "arms", cell.id, f"run.json: settings.{path}", space.model_dump(mode="json"),
                value, "the setting lies outside its search range",
            )  # fmt: skip


def _within(space: RangeSpec, value: Any, default: Any) -> bool:
    """In the range, widened to hold the default that trial 0 tries."""
    if equal(value, default):
        return True
    if space.choices is not None:
        return any(equal(value, choice) for choice in space.choices)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    assert space.low is not None
    assert space.high is not None
    low, high = min(space.low, default), max(space.high, default)
    slack = 1e-12 * max(abs(low), abs(high))  # low * (high / low) ** quantile rounds
    return low - slack <= value <= high + slack


def check_hashes(evidence: Evidence, design: Design) -> Iterator[Violation]:
    """Every cell used the locked data, model, tokenizer, reward and code."""
    needed = {"spec", "model", "tokenizer", "code", "reward", "data.train", "data.validation"}
    needed |= {f"data.test.{name}" for name in design.spec.data.test}
    for key in sorted(needed - design.lock.hashes.keys()):
        yield violation(
            MISSING, (), f"spec.lock.yaml: hashes.{key}", "a hash", None,
            "the lock does not pin it",
        )  # fmt: skip
    yield from _lock(evidence, design)
    yield from _plugins(evidence, design)
    for cell in evidence.cells:
        if cell.run is None:
            continue
        for key in sorted(design.lock.hashes.keys() | cell.run.hashes.keys()):
            expected, found = design.lock.hashes.get(key), cell.run.hashes.get(key)
            if expected is None or expected != found:
                yield violation(
                    "hashes", cell.id, f"run.json: hashes.{key}", expected, found,
                    "the cell used other content than the lock pins",
                )  # fmt: skip
    yield from _packages(evidence)


def _lock(evidence: Evidence, design: Design) -> Iterator[Violation]:
    """The lock agrees with itself; its hashes are of the spec as first locked."""
    locked = design.spec
    if design.lock.amendments:
        locked = ExperimentSpec.model_validate(evidence.raw_lock["spec"])
    spec = digest(locked.model_dump(mode="json", exclude={"runtime"}))
    problems = {f"data.{split}": value for split, value in design.lock.evaluation_problems.items()}
    for key, expected in ({"spec": spec} | problems).items():
        found = design.lock.hashes.get(key)
        if found != expected:
            yield violation(
                "hashes", (), f"spec.lock.yaml: hashes.{key}", expected, found,
                "the lock was changed after it was written",
            )  # fmt: skip


def _plugins(evidence: Evidence, design: Design) -> Iterator[Violation]:
    """The files that define arms are kept, as they were when the cells ran."""
    hashes, origins = design.lock.hashes, [arm.origin for arm in design.lock.arms.values()]
    files = {origin.removeprefix(FILE) for origin in origins if origin.startswith(FILE)}
    files |= {Path(path).name for path in design.spec.plugins}
    for key in sorted(HASH_KEY + name for name in files):
        if key not in hashes:
            yield violation(
                MISSING, (), f"spec.lock.yaml: hashes.{key}", "a hash", None,
                "the lock does not pin a file that defines arms",
            )  # fmt: skip
    for key in sorted(key for key in hashes if key.startswith(HASH_KEY)):
        copy = copy_name(key.removeprefix(HASH_KEY), hashes[key])
        found = evidence.plugins.get(copy)
        if found != hashes[key]:
            yield violation(
                MISSING if found is None else "hashes", (), f"plugins/{copy}", hashes[key], found,
                "the copy of the plugin is not there" if found is None
                else "the copy is not the plugin that the cells ran",
            )  # fmt: skip


def _packages(evidence: Evidence) -> Iterator[Violation]:
    """One version of every library: another torch is another sampler."""
    first: tuple[Cell, Any] | None = None
    for cell in evidence.cells:
        if cell.environment is None:
            continue
        packages = cell.environment.get("packages")
        if not isinstance(packages, dict) or not packages:
            yield violation(
                MISSING, cell.id, "environment.json: packages", "name: version", packages,
                "the library versions are not recorded",
            )  # fmt: skip
            continue
        first = first or (cell, packages)
        for path, expected, found in leaves_that_differ(first[1], packages):
            yield violation(
                "hashes", (first[0].id, cell.id), f"environment.json: packages.{path}",
                expected, found, "two cells ran on different versions of a library",
            )  # fmt: skip
