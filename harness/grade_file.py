"""Grade and measure JSON-lines files: what ``harness grade`` and ``harness metrics`` print."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.metrics import ProblemMetrics, Tie, dataset_metrics, problem_metrics
from harness.rewards.equal import canonical
from harness.rewards.extract import AnswerFormat
from harness.rewards.maths import MathGrader


def grade_rows(
    path: str | Path,
    *,
    workers: int = 1,
    timeout_seconds: float = 5.0,
    answer_format: AnswerFormat = "auto",
) -> list[dict[str, Any]]:
    """Grade a file of rows ``{id, gold, completion}``; an optional ``finished`` flags a cut one.

    Returns:
        A row ``{id, correct, outcome, extracted}`` for each, in order.

    Raises:
        InputError: naming file and line.
    """
    ids, golds, completions, finished = [], [], [], []
    for place, row in _rows(path):
        gold = _text(place, row, "gold", number_too=True)
        if not gold.strip():
            raise InputError(f"{place}: gold is empty; give the reference answer")
        identifier = _value(place, row, "id")
        if isinstance(identifier, bool) or not isinstance(identifier, str | int):
            raise InputError(f"{place}: id is {_shown(identifier)}; give a string or an integer")
        _no_near_miss(place, row, "finished")
        done = row.get("finished", True)
        if not isinstance(done, bool):
            raise InputError(f"{place}: finished is {_shown(done)}; give true or false")
        ids.append(identifier)
        golds.append(gold)
        completions.append(_text(place, row, "completion"))
        finished.append(done)
    with MathGrader(
        workers=workers, timeout_seconds=timeout_seconds, answer_format=answer_format
    ) as grader:
        verdicts = grader.grade(golds, completions, finished)
    return [
        {"id": i, "correct": v.correct, "outcome": v.outcome.value, "extracted": v.extracted}
        for i, v in zip(ids, verdicts, strict=True)
    ]


def metrics_rows(path: str | Path, ks: Sequence[int], *, tie: Tie = "random") -> dict[str, Any]:
    """Metrics of a file of rows ``{problem, correct, answer}``; a null answer is an unparsed one.

    Every value is an exact expectation over draws without replacement, averaged over problems.
    ``avg@k`` is the mean over a problem's samples, the same for every k.

    Returns:
        ``problems``, ``n`` (fewest and most samples a problem), ``pass@k``, ``maj@k`` and
        ``avg@k`` by k as floats, and each under a name of its own (``pass@4``), ``exact`` with the
        same values as fractions, ``per_problem``.

    Raises:
        InputError: naming file and line, or the problem that has fewer than k samples.
    """
    if not ks or any(k < 1 for k in ks):
        raise InputError(f"--k {','.join(map(str, ks))}: give one or more positive integers")
    ks = sorted(set(ks))
    samples = _samples(path)
    fewest = min(samples, key=lambda name: len(samples[name]))
    if ks[-1] > len(samples[fewest]):
        raise InputError(
            f"{path}: k = {ks[-1]} but problem {fewest!r} has {len(samples[fewest])} samples; "
            "draw more samples or lower --k"
        )
    measured = {
        name: problem_metrics([ok for ok, _ in rows], [_class(a) for _, a in rows], ks, tie)
        for name, rows in samples.items()
    }
    mean = dataset_metrics(list(measured.values()))
    sizes = [m.n for m in measured.values()]
    exact = _exact(ks, mean.pass_at, mean.maj_at, mean.avg)
    return {
        "problems": len(measured),
        "n": {"min": min(sizes), "max": max(sizes)},
        "tie": tie,
        **_floats(exact),
        **{
            f"{name}@{k}": value
            for name in ("pass", "maj", "avg")
            for k, value in _floats(exact)[f"{name}@k"].items()
        },
        "exact": {
            f"{name}@{k}": str(value)
            for name in ("pass", "maj", "avg")
            for k, value in exact[f"{name}@k"].items()
        },
        "per_problem": [_one_problem(name, m, ks) for name, m in measured.items()],
    }


def _class(answer: str | None) -> str | None:
    """The class that an answer votes in: equal numbers vote together, however written."""
    return None if answer is None else canonical(answer)


def _one_problem(name: str | int, found: ProblemMetrics, ks: Sequence[int]) -> dict[str, Any]:
    counts = {"problem": name, "n": found.n, "correct": found.correct, "unparsed": found.unparsed}
    return counts | _floats(_exact(ks, found.pass_at, found.maj_at, found.avg))


def _exact(ks: Sequence[int], passed: Any, voted: Any, avg: Fraction) -> dict[str, dict[str, Any]]:
    return {
        "pass@k": {str(k): passed[k] for k in ks},
        "maj@k": {str(k): voted[k] for k in ks},
        "avg@k": {str(k): avg for k in ks},
    }


def _floats(exact: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    return {name: {k: float(v) for k, v in values.items()} for name, values in exact.items()}


def _samples(path: str | Path) -> dict[str | int, list[tuple[bool, str | None]]]:
    """Each problem's (correct, answer), problems in order of first appearance."""
    samples: dict[str | int, list[tuple[bool, str | None]]] = {}
    verdict: dict[tuple[str | int, str], tuple[bool, str]] = {}
    for place, row in _rows(path):
        problem, ok = _value(place, row, "problem"), _value(place, row, "correct")
        answer = _value(place, row, "answer")
        if isinstance(problem, bool) or not isinstance(problem, str | int):
            raise InputError(f"{place}: problem is {_shown(problem)}; give a string or an integer")
        if not isinstance(ok, bool):
            raise InputError(f"{place}: correct is {_shown(ok)}; give true or false")
        if answer is not None:
            answer = _text(place, row, "answer", number_too=True)
            before, where = verdict.setdefault((problem, answer), (ok, place))
            if before is not ok:
                raise InputError(
                    f"{place}: answer {answer!r} of problem {problem!r} is both correct and wrong "
                    f"(see {where}); grade equal answers alike"
                )
        elif ok:
            raise InputError(f"{place}: correct is true but answer is null; give its answer")
        samples.setdefault(problem, []).append((ok, answer))
    return samples


def _rows(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each object of a JSON-lines file with its place, ``FILE:LINE``. Blank lines are skipped."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise InputError(f"{path}: cannot be read ({reason}); give a JSON-lines file") from None
    empty = True
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        empty, place = False, f"{path}:{number}"
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            reason = getattr(error, "msg", "too deeply nested")
            raise InputError(f"{place}: not JSON ({reason}); give one object a line") from None
        if not isinstance(row, dict):
            raise InputError(f"{place}: is {_shown(row)}; give an object")
        yield place, row
    if empty:
        raise InputError(f"{path}: holds no rows; give one JSON object a line")


def _no_near_miss(place: str, row: dict[str, Any], key: str) -> None:
    """A row may hold more than is read, but a misspelt optional key would be ignored unseen."""
    others = [name for name in row if name not in (key, "id", "gold", "completion")]
    if key not in row and (close := difflib.get_close_matches(key, others, n=1, cutoff=0.75)):
        raise InputError(f"{place}: unknown key {close[0]!r}; did you mean {key!r}?")


def _value(place: str, row: dict[str, Any], key: str) -> Any:
    if key not in row:
        present = ", ".join(row) or "nothing"
        raise InputError(f"{place}: key {key!r} is missing (found {present}); add it")
    return row[key]


def _text(place: str, row: dict[str, Any], key: str, *, number_too: bool = False) -> str:
    value = _value(place, row, key)
    if number_too and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise InputError(f"{place}: {key} is {_shown(value)}; give a string")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
