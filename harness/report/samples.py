"""What the arms write: their completions of the same few problems, side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.report.load import Experiment
from harness.store import read_json, read_lines

PROBLEMS = 4
LONGEST = 700  # characters of a completion that are shown
EXCERPT = Path("tables") / "samples.json"


@dataclass(frozen=True)
class Written:
    """One completion and its verdict."""

    arm: str
    completion: str
    outcome: str
    extracted: str | None
    folder: str


@dataclass(frozen=True)
class Comparison:
    """One problem, and each arm's first completion of it."""

    problem: str
    question: str
    gold: str
    written: tuple[Written, ...]


def side_by_side(experiment: Experiment) -> list[Comparison]:
    """Problems at even distances through the first test set, under the first seed that has them.

    Completions stay out of version control, so the excerpt is kept beside the tables: where
    ``samples.jsonl`` is gone, the kept excerpt is read.
    """
    split = f"test.{next(iter(experiment.spec['data']['test']))}"
    for seed in experiment.seeds:
        found = {arm: _of_cell(experiment, arm, seed, split) for arm in experiment.drawn}
        found = {arm: samples for arm, samples in found.items() if samples}
        if found:
            return _compare(found)
    kept = experiment.path / EXCERPT
    return [_restored(c) for c in read_json(kept)] if kept.exists() else []


def excerpt(comparisons: Sequence[Comparison]) -> str:
    """The JSON text that ``side_by_side`` reads again."""
    return json.dumps([asdict(c) for c in comparisons], indent=1, ensure_ascii=False) + "\n"


def _restored(record: Mapping[str, Any]) -> Comparison:
    written = tuple(Written(**w) for w in record["written"])
    return Comparison(record["problem"], record["question"], record["gold"], written)


def _of_cell(
    experiment: Experiment, arm: str, seed: int, split: str
) -> dict[str, tuple[Mapping[str, Any], str]]:
    """Problem id -> its first sample and the folder it is from."""
    found: dict[str, tuple[Mapping[str, Any], str]] = {}
    for cell in experiment.seed_cells(arm):
        if cell.seed == seed:
            for sample in read_lines(experiment.path / cell.folder / "samples.jsonl"):
                if sample.get("split") == split:
                    found.setdefault(sample["problem"], (sample, cell.folder))
    return found


def _compare(found: Mapping[str, dict[str, tuple[Mapping[str, Any], str]]]) -> list[Comparison]:
    first = next(iter(found.values()))
    shared = [p for p in first if all(p in samples for samples in found.values())]
    step = max(1, len(shared) // PROBLEMS)
    chosen = shared[::step][:PROBLEMS]
    return [
        Comparison(
            problem,
            _shortened(first[problem][0]["question"]),
            str(first[problem][0]["gold"]),
            tuple(
                Written(
                    arm,
                    _shortened(sample["completion"]),
                    sample["outcome"],
                    sample.get("extracted"),
                    folder,
                )
                for arm, samples in found.items()
                for sample, folder in [samples[problem]]
            ),
        )
        for problem in chosen
    ]


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST else text[:LONGEST] + " …"
