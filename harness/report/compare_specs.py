"""In what the specs, parts and hashes of several experiments differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.report.load import Experiment
from harness.report.sweep_load import CaseResults
from harness.report.table_design import part_leaves, parts_of
from harness.report.tables import NOTHING, Table, setting

COLUMNS = 4  # experiments: of more, each has rows of its own, as columns would not fit
ARM = "arm "
ABSENT = object()
NAMES = ("name", "question")  # of a spec: they decide nothing


def specs_table(cases: Sequence[CaseResults]) -> Table:
    """Every setting, hash and part in which the experiments are not all alike."""
    differing = list(_differing("", [_settings(case.experiment) for case in cases]))
    # Parts of an arm that a single experiment has are no difference between two.
    shared = Counter(arm for case in cases for arm in case.experiment.shown)
    differing = [
        (path, values)
        for path, values in differing
        if not path.startswith(ARM) or shared[path.removeprefix(ARM).partition(".")[0]] > 1
    ]
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


def _settings(one: Experiment) -> dict[str, Any]:
    """What an experiment was: its spec, each arm's parts, and hashes of all that it read."""
    arms = (*one.arms, *(arm for arm in one.controls if arm == "placebo"))
    hashes = {key: str(value)[:12] for key, value in (one.lock.get("hashes") or {}).items()}
    hashes.pop("spec", None)  # it differs wherever anything else does, and with the name
    return {
        **{key: value for key, value in one.spec.items() if key not in NAMES},
        **{f"{ARM}{arm}": part_leaves(parts_of(one, arm)) for arm in arms},
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
