"""In what the specs, parts and hashes of several experiments differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.report.load import Experiment
from harness.report.sweep_load import CaseResults
from harness.report.table_design import part_leaves, parts_of
from harness.report.tables import NOTHING, Table, setting

COLUMNS = 4  # experiments: of more, each has rows of its own, as columns would not fit
ABSENT = object()
NAMES = ("name", "question")  # of a spec: they decide nothing


def specs_table(cases: Sequence[CaseResults]) -> Table:
    """Every setting, hash and part in which the experiments are not all alike."""
    differing = _all_differing(cases)
    records: list[dict[str, Any]] = [
        {"kind": path.partition(".")[0], "setting": path, "experiment": case.name, "value": value}
        for path, values in differing
        for case, value in zip(cases, values, strict=True)
    ]
    wide = len(cases) <= COLUMNS
    rows = [[path, *values] for path, values in differing]
    if not wide:
        rows = [
            [
                path,
                value,
                ", ".join(c.name for c, v in zip(cases, values, strict=True) if v == value),
            ]
            for path, values in differing
            for value in dict.fromkeys(values)
        ]
    columns = [case.name for case in cases] if wide else ["value", "experiments"]
    return Table(
        "compare_specs",
        "What the experiments differ in",
        f"Settings as locked, with amendments; the parts of arms that several have, as they ran, "
        f"after tuning; hashes of what was read. {NOTHING}: the experiment has no such setting or "
        "arm, or was locked before there was one. What all have alike is left out.",
        ("setting", *columns),
        rows,
        records,
        labels=1 + len(columns),
    )


def _all_differing(cases: Sequence[CaseResults]) -> list[tuple[str, list[str]]]:
    """(path, the value of each experiment); an arm's parts among the experiments that have it."""
    found = list(_differing("", [_settings(case.experiment) for case in cases]))
    parts = [_arms(case.experiment) for case in cases]
    for arm in dict.fromkeys(arm for own in parts for arm in own):
        holders = [place for place, own in enumerate(parts) if arm in own]
        for path, values in _differing(f"arm {arm}", [parts[place][arm] for place in holders]):
            row = [NOTHING] * len(cases)
            for place, value in zip(holders, values, strict=True):
                row[place] = value
            found.append((path, row))
    return found


def _arms(one: Experiment) -> dict[str, Mapping[str, str]]:
    """Each trained arm's parts, as they ran."""
    arms = (*one.arms, *(arm for arm in one.controls if arm == "placebo"))
    return {arm: part_leaves(parts_of(one, arm)) for arm in arms}


def _settings(one: Experiment) -> dict[str, Any]:
    """What an experiment was: its spec, and hashes of all that it read."""
    hashes = {key: str(value)[:12] for key, value in (one.lock.get("hashes") or {}).items()}
    hashes.pop("spec", None)  # it differs wherever anything else does, and with the name
    return {
        **{key: value for key, value in one.spec.items() if key not in NAMES},
        "sha256": hashes,
    }


def _differing(path: str, values: Sequence[Any]) -> Iterator[tuple[str, list[str]]]:
    """(path, the value of each) where not all are alike; absent is ``NOTHING``.

    A branch that one of them lacks is one line: its leaves would say nothing more.
    """
    if all(value == values[0] for value in values):
        return
    if not all(isinstance(value, Mapping) for value in values):
        yield path, [_compact(value) for value in values]
        return
    for key in dict.fromkeys(key for value in values for key in value):
        below = f"{path}.{key}" if path else str(key)
        yield from _differing(below, [value.get(key, ABSENT) for value in values])


def _compact(value: Any) -> str:
    if value is ABSENT:
        return NOTHING
    if not isinstance(value, Mapping):
        return setting(value)
    inner = {key: item for key, item in value.items() if item not in (None, {}, [])}
    shown = [
        f"{key} ({_compact(item)})" if isinstance(item, Mapping) else f"{key} {setting(item)}"
        for key, item in inner.items()
    ]
    return ", ".join(shown) or "none"
