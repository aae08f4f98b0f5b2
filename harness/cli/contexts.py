"""From what a user names to the experiments, cases of a sweep and folders that are meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.spec.load import find_spec, read_tree
from harness.store import SWEEP_FILE

LOCK = "spec.lock.yaml"


def contexts(
    experiment: str,
    overrides: list[str] | None,
    plugins: list[Path] | None,
    results: Path | None,
    case: str | None = None,
) -> list[Any]:
    """The experiment that is named, or the cases of a sweep."""
    from harness.experiment import open_contexts

    return open_contexts(find_spec(experiment), overrides or [], plugins or [], results, case)


def context(
    experiment: str,
    overrides: list[str] | None,
    plugins: list[Path] | None,
    results: Path | None,
    case: str | None = None,
) -> Any:
    """The one experiment, or case of a sweep, that is meant."""
    found = contexts(experiment, overrides, plugins, results, case)
    if len(found) > 1:
        names = ", ".join(context.results.name for context in found)
        raise InputError(f"{experiment} is a sweep; choose one with --case: {names}")
    return found[0]


def recorded_contexts(
    experiment: str,
    overrides: list[str] | None,
    plugins: list[Path] | None,
    results: Path | None,
    case: str | None = None,
) -> list[Any]:
    """As ``contexts``; a folder that has a lock is read by it, whatever options made it."""
    from dataclasses import replace

    from harness.amendments import applied
    from harness.lock import locked, read_lock
    from harness.spec.load import check_spec

    found = contexts(experiment, overrides, plugins, results, case)
    for place, context in enumerate(found):
        lock = context.results / "spec.lock.yaml"
        if not overrides and not plugins and lock.exists():
            spec = check_spec(applied(read_lock(lock))["spec"], str(lock))
            found[place] = locked(replace(context, spec=spec))
    return found


def results_of(experiment: str, results: Path | None) -> list[Path]:
    """The folders of an experiment's results, of a sweep those of its cases that have begun.

    Args:
        experiment: a name or file, or a results folder itself.
        results: a results folder that is named.

    Raises:
        InputError: there is no such folder, or nothing in it.
    """
    path = results or Path(experiment)
    known = (path / LOCK).is_file() or (path / SWEEP_FILE).is_file()
    if results is None and not known:
        if len(Path(experiment).parts) > 1 and not experiment.endswith((".yaml", ".yml")):
            raise InputError(f"{experiment} is no results folder: it has no {LOCK}")
        path = Path("results") / _name_of(experiment)
    if not path.is_dir():
        raise InputError(f"no results at {path}; run `harness run {experiment}` first")
    path = path.resolve()
    if not (path / SWEEP_FILE).is_file():
        return [path]
    names = [case["name"] for case in json.loads((path / SWEEP_FILE).read_text())["cases"]]
    begun = [path / name for name in names if (path / name / LOCK).is_file()]
    if not begun:
        raise InputError(f"no case of {path} has begun; run `harness run {experiment}` first")
    return begun


def _name_of(experiment: str) -> str:
    """What the experiment's spec calls itself, which names its results folder."""
    try:
        return str(read_tree(find_spec(experiment)).get("name", Path(experiment).stem))
    except InputError:  # the spec is not here, or has changed; the results may still be
        return Path(experiment).stem
