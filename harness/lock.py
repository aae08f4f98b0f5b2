"""``spec.lock.yaml``: what was promised before the first cell ran, with the hash of every input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from harness.amendments import GROWING, amended, amendments, applied, spec_changes
from harness.arm import parts
from harness.data import PromptSet, PromptStream, StreamHash, load_split, prompt_set, splits
from harness.errors import InputError, shown
from harness.grading import check_reward, open_grader
from harness.identity import difference, tree
from harness.job import Context
from harness.models import load_base, resolve_device
from harness.plugins import recorded_origin
from harness.record import input_hashes
from harness.rewards.steps import step_grader
from harness.samplers import check_engine
from harness.spec.load import read_yaml
from harness.spec.schema import ExperimentSpec
from harness.store import ResultStore, write_text
from harness.tasks.contamination import overlap
from harness.tune import check_settings, own_knobs, space

STREAM_EPOCHS = 8  # of the training split, as far as the promised stream hashes reach
STREAM_BLOCKS = 1000


def make_lock(context: Context) -> dict[str, Any]:
    """Resolve and hash everything; refuse what could not run.

    Raises:
        InputError: an arm, model, data file or gold answer that will not do.
    """
    spec = context.spec
    found = context.arms()
    for arm in found.values():
        arm.arm.check(spec.sampling.completions_per_prompt)
        _check_groups(spec, arm.arm.name, arm.arm.group_size(spec.sampling.completions_per_prompt))
        step_grader(spec, arm.arm)
        check_reward(spec, arm.arm)
        check_engine(spec, arm.arm)
        if spec.tuning:
            space(spec, arm.arm)
    for named, arm in zip(spec.arms, found.values(), strict=True):
        check_settings(arm.arm, spec.settings.get(named, {}))
    base = load_base(spec.model, resolve_device(spec.runtime.device))
    loaded = {name: load_split(f"data.{name}", split) for name, split in splits(spec).items()}
    sets = {
        name: prompt_set(name, data.problems, spec, base.tokenizer, base.context)
        for name, data in loaded.items()
    }
    with open_grader(spec, base, sets) as grader:
        for problems in sets.values():
            grader.check_golds(
                [p.id for p in problems.problems], [p.answer for p in problems.problems]
            )
    return {
        "format": 1,
        "spec": spec.model_dump(mode="json"),
        "arms": {
            name: {
                "named": named,  # as the spec has it, which may be module:NAME
                "origin": recorded_origin(arm.origin),
                "source": arm.arm.source,
                "parts": parts(arm.arm),
                "knobs": {path: tree(asdict(r)) for path, r in own_knobs(spec, arm.arm).items()},
            }
            for named, (name, arm) in zip(spec.arms, found.items(), strict=True)
        },
        "hashes": input_hashes(context, base, sets),
        "data": {
            name: {
                "problems": len(data.problems),
                "from": data.description,
                "file_sha256": data.file_sha256,
                "revision": data.revision,
                "notes": list(data.notes),
            }
            for name, data in loaded.items()
        },
        "streams": {
            str(seed): promised_stream(spec, sets["train"], seed)
            for seed in (*spec.seeds, *(spec.tuning.seeds if spec.tuning else ()))
        },
        "evaluation_problems": {name: problems.sha256 for name, problems in sets.items()},
        "contamination": contamination(spec, loaded),
    }


def contamination(spec: ExperimentSpec, loaded: dict[str, Any]) -> dict[str, Any]:
    """How much of each held-out split stands in the training split."""
    from harness.tasks import TASKS

    train = loaded["train"]
    return {
        name: overlap(
            train.problems,
            data.problems,
            spec.data.contamination_ngram,
            whole=TASKS[data.task].procedural,
        ).to_json()
        for name, data in loaded.items()
        if name != "train"
    }


def promised_stream(spec: ExperimentSpec, train: PromptSet, seed: int) -> dict[str, str]:
    """Hashes of the first N prompts that this seed's training will draw."""
    every = spec.sampling.prompts_per_step
    stream, running = PromptStream(train, seed), StreamHash(every)
    blocks = min(max(1, STREAM_EPOCHS * len(train.problems) // every), STREAM_BLOCKS)
    ids = [train.problems[i].id for i in stream.take(0, blocks * every)]
    return running.add(ids)


def _check_groups(spec: ExperimentSpec, name: str, size: int) -> None:
    s = spec.sampling
    batch = s.prompts_per_step * s.completions_per_prompt
    if batch % size:
        raise InputError(
            f"arm {name!r}: its group of {size} does not divide the batch of {batch} completions "
            f"(sampling.prompts_per_step {s.prompts_per_step} x completions_per_prompt "
            f"{s.completions_per_prompt}); change one of them"
        )


def write_lock(path: Path, lock: Mapping[str, Any]) -> None:
    header = "# Written before the first cell ran. Do not edit: results are checked against it.\n"
    write_text(
        path, header + yaml.safe_dump(dict(lock), sort_keys=True, width=120, allow_unicode=True)
    )


def read_lock(path: Path) -> dict[str, Any]:
    """The lock of a results folder.

    Raises:
        InputError: missing or malformed.
    """
    lock = read_yaml(path)
    if not isinstance(lock, dict) or lock.get("format") != 1:
        raise InputError(f"{path} is not a lock of this version")
    return lock


def agree(old: Mapping[str, Any], new: Mapping[str, Any], path: Path) -> None:
    """Refuse to add results of one spec to a folder of another.

    Args:
        old: the folder's lock, with any amendments.
        new: what the spec and the code at hand would lock.

    Raises:
        InputError: naming the first key that differs.
    """
    before = applied(old)
    free, bound = spec_changes(before["spec"], new["spec"])
    if bound or free:
        raise _other("spec", {**bound, **free}, path, mend=_mend(bound, amendable=not bound))
    for part in ("arms", "hashes"):
        was, now = dict(before.get(part, {})), dict(new[part])
        if part == "hashes":  # of the spec as first locked, by which cells are known
            was.pop("spec", None)
            now.pop("spec", None)
        if found := difference(was, now):
            raise _other(part, found, path)


def _mend(bound: Mapping[str, Any], *, amendable: bool) -> str:
    if amendable:
        return (
            "this changes nothing that a cell computes: `harness amend EXP --why REASON` records "
            "it, and marks what it touches as exploratory; or restore the spec"
        )
    shrunk = next(iter(bound)) in GROWING
    return ("seeds and arms may be added at the end, never taken away; " if shrunk else "") + MEND


MEND = "move the folder away, name another with --results, or restore what made it"


def _other(part: str, found: Mapping[str, Any], path: Path, mend: str = MEND) -> InputError:
    key, (was, given) = next(iter(found.items()))
    return InputError(
        f"{path}: was made by another {part}: {part}.{key} is {shown(given)}, there "
        f"{shown(was)}; {mend}"
    )


def locked(context: Context) -> Context:
    """The context by which this folder's cells are known: amendments do not change what they are.

    A cell's ``hashes.spec`` is that of the spec as first locked.
    """
    lock = read_lock(context.results / "spec.lock.yaml")
    return replace(context, spec_sha256=lock["hashes"]["spec"])


def amend(context: Context, why: str) -> dict[str, Any]:
    """Append to the folder's lock what the spec now says otherwise; the new amendment.

    Raises:
        InputError: nothing is locked yet, nothing changed, the change would alter what cells
            compute, no reason is given, or another process is on the folder.
    """
    path = context.results / "spec.lock.yaml"
    if not path.exists():
        raise InputError(f"{path} does not exist: nothing is locked yet, so just edit the spec")
    if not why.strip():
        raise InputError("--why is empty; say in a sentence why the declaration changes")
    new = make_lock(context)
    store = ResultStore(context.results)
    with store.exclusive():
        lock = read_lock(path)
        before = applied(lock)
        free, bound = spec_changes(before["spec"], new["spec"])
        if not free or bound:
            agree(lock, new, path)  # refuses what is bound
            raise InputError(f"{path}: nothing to amend; the spec is as the lock has it")
        agree(applied_to(lock, new), new, path)  # of the rest nothing may have changed
        cells = store.cells().values()
        after = amended(
            lock, new, free, why=" ".join(why.split()),
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            begun=len(cells), done=sum(cell.done for cell in cells),
        )  # fmt: skip
        write_lock(path, after)
    return dict(amendments(after)[-1])


def applied_to(lock: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The lock as it would be with the new spec and the arms that it adds."""
    before = applied(lock)
    arms = {**{n: a for n, a in new["arms"].items() if n not in before["arms"]}, **before["arms"]}
    return {**before, "spec": new["spec"], "arms": arms, "amendments": []}
