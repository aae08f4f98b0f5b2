"""Reading what other libraries leave behind: JSON, JSON lines, CSV, YAML and console output."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from harness.errors import InputError
from harness.store import read_json

STEP = "step"
# ``step:3 - actor/lr:0.000 - critic/score/mean:0.5``, after what Ray may print before it.
CONSOLE_STEP = re.compile(r"(?:^|[\s)])step:(\d+(?:\.0+)?) - ([^\s:]+:.*)$")
# A console that prints more than three decimals does not round.
EXACT = re.compile(r" - [^\s:]+:-?\d+\.\d{4,}")
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,(.*))?\}")

Row = dict[str, float]


def read_tree(path: Path) -> dict[str, Any]:
    """A configuration in JSON or YAML, as plain data.

    What W&B wraps as ``{key: {value: ...}}`` is unwrapped, keys with dots become nested ones, and
    numbers that YAML takes for text (``1e-6``) become numbers.

    Raises:
        InputError: it cannot be read, or is no mapping.
    """
    if path.suffix == ".json":
        tree = read_json(path)
    else:
        try:
            tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is not YAML: {error}") from error
    if not isinstance(tree, Mapping):
        raise InputError(f"{path}: a configuration is a mapping of keys; give the run's own file")
    own = {key: value for key, value in tree.items() if key not in ("_wandb", "wandb_version")}
    if own and all(isinstance(v, Mapping) and v.keys() <= {"value", "desc"} for v in own.values()):
        own = {key: value.get("value") for key, value in own.items()}
    return _nested(own)


def _nested(tree: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        node, parts = found, str(key).split(".")
        for part in parts[:-1]:
            below = node.setdefault(part, {})
            if not isinstance(below, dict):  # ``a: 1`` beside ``a.b: 2``
                below = node[part] = {}
            node = below
        clean = _nested(value) if isinstance(value, Mapping) else _number(value)
        if isinstance(clean, dict) and isinstance(node.get(parts[-1]), dict):
            clean = node[parts[-1]] | clean
        node[parts[-1]] = clean
    return found


def _number(value: Any) -> Any:
    if isinstance(value, list):
        return [_number(one) for one in value]
    if isinstance(value, str) and NUMBER.fullmatch(value):
        number = float(value)
        return int(number) if value.lstrip("+-").isdigit() else number
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no word for it
    return value


def at(tree: Mapping[str, Any], path: str, depth: int = 0) -> tuple[bool, Any]:
    """Whether there is a value at a dotted path, and which. Hydra's references are followed.

    A reference that cannot be followed counts as nothing there: its value is not known.
    """
    node: Any = tree
    for part in path.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return False, None
        node = node[part]
    if not isinstance(node, str) or "${" not in node:
        return True, node
    told = REFERENCE.fullmatch(node)
    if told is None or depth > 8:  # a piece of text around it, or a circle
        return False, None
    target, default = told.groups()
    if target.startswith("."):
        target = f"{path.rpartition('.')[0]}{target}".lstrip(".")
    there, value = at(tree, target, depth + 1)
    if there or default is None:
        return there, value
    return True, _number(yaml.safe_load(default))


def read_rows(path: Path) -> tuple[list[Row], list[str], bool]:
    """The steps of a log: JSON (lines), CSV, or what was printed on the console.

    Returns:
        The numbers of each step; what could not be read, a line each; whether the numbers are
        rounded, as some consoles print them.

    Raises:
        InputError: there is no such file, or no step in it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as text: {error}; give a log file") from error
    damaged: list[str] = []
    if path.suffix == ".csv":
        rows = [_numbers(row) for row in csv.DictReader(text.splitlines())]
    elif path.suffix in (".jsonl", ".json", ".ndjson"):
        rows = list(_json_rows(path, text, damaged))
    else:
        rows = [row for line in text.splitlines() if (row := _console_row(line))]
    if not rows and not damaged:
        raise InputError(f"{path}: no step found in it; give JSON lines, CSV or console output")
    printed = path.suffix not in (".csv", ".jsonl", ".json", ".ndjson")
    return rows, damaged, printed and not EXACT.search(text)


def _json_rows(path: Path, text: str, damaged: list[str]) -> Iterator[Row]:
    if path.suffix == ".json":
        found = read_json(path)
        yield from (_numbers(row) for row in found if isinstance(row, Mapping))
        return
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            damaged.append(f"{path.name} line {number}")
            continue
        if not isinstance(row, Mapping):
            damaged.append(f"{path.name} line {number}")
        elif isinstance(row.get("data"), Mapping):  # verl's FileLogger
            yield _numbers(row["data"]) | _numbers({STEP: row.get(STEP)})
        else:
            yield _numbers(row)


def _console_row(line: str) -> Row | None:
    found = CONSOLE_STEP.search(line.rstrip())
    if found is None:
        return None
    pairs = (piece.rpartition(":") for piece in found[2].split(" - "))
    return _numbers({key.strip(): value for key, _, value in pairs}) | {STEP: float(found[1])}


def _numbers(row: Mapping[str, Any]) -> Row:
    """The numbers of a row; text, tables and empty cells are left out."""
    found: Row = {}
    for key, value in row.items():
        if isinstance(value, bool) or value is None or key is None:
            continue
        try:
            found[key] = float(value)
        except (TypeError, ValueError):
            continue
    return found
