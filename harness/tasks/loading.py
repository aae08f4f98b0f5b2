"""Load a split of a task: from local files, the hub, or a generator; checked, hashed, noted."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from harness.errors import InputError, shown, suggest
from harness.tasks import TASKS
from harness.tasks.source import Hub, Row, SplitInfo, TaskSource, hash_order, words
from harness.tasks.task import Problem, problems_sha256

Source = Literal["auto", "local", "hub", "generated"]
SOURCES = ("auto", "local", "hub", "generated")


@dataclass(frozen=True)
class LoadedSplit:
    """Problems of a split and the evidence of what they are.

    Attributes:
        task: name of the task.
        split: name of the split.
        problems: after ``offset`` and ``limit``, in an order that depends on the content alone.
        source: where they came from: ``local``, ``hub`` or ``generated``.
        description: the same in words, for plans and reports.
        sha256: content hash of ``problems`` (`harness.tasks.task.problems_sha256`).
        path: the local file.
        file_sha256: hash of its bytes.
        repo: the hub data set.
        revision: the commit it was read at.
        notes: caveats honoured: how many rows were mended or left out, and why.
    """

    task: str
    split: str
    problems: tuple[Problem, ...]
    source: Literal["local", "hub", "generated"]
    description: str
    sha256: str
    path: Path | None = None
    file_sha256: str | None = None
    repo: str | None = None
    revision: str | None = None
    notes: tuple[str, ...] = ()


def data_root() -> Path | None:
    """The folder of local data: ``$HARNESS_DATA``, or ``../shared/data`` where it exists.

    Raises:
        InputError: if ``HARNESS_DATA`` names something that is not a folder.
    """
    if named := os.environ.get("HARNESS_DATA"):
        if not Path(named).is_dir():
            raise InputError(f"HARNESS_DATA: {named!r} is not a folder; mend or unset it")
        return Path(named)
    repository = Path(__file__).resolve().parents[2]
    for parent in (repository.parent, Path.cwd().parent):
        if (parent / "shared" / "data").is_dir():
            return parent / "shared" / "data"
    return None


def load_problems(
    task: str,
    split: str,
    *,
    source: Source = "auto",
    limit: int | None = None,
    offset: int = 0,
    sha256: str | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> LoadedSplit:
    """Load problems ``offset`` to ``offset + limit`` of a split.

    Args:
        task: a name in `harness.tasks.TASKS`.
        split: a name among the task's splits.
        source: ``auto`` takes the local file where it exists and the hub otherwise.
        limit: number of problems; ``None`` is all that follow ``offset``.
        offset: problems to skip.
        sha256: expected hash: of the local file's bytes, or (hub, generated) of the problems.
        seed: of a generator; files ignore it.
        options: a generator's own settings, or ``revision`` (40 hex digits) for the hub.

    Raises:
        InputError: for an unknown name, a missing or altered file, a wrong number of rows, an
            empty selection, or a limit beyond the end of the split.
    """
    known = _known_task(task)
    if split not in known.splits:
        raise InputError(f"task {task}: unknown split {split!r}.{suggest(split, known.splits)}")
    if source not in SOURCES:
        raise InputError(f"task {task}: unknown source {source!r}.{suggest(source, SOURCES)}")
    if offset < 0 or (limit is not None and limit < 1):
        raise InputError(
            f"task {task}, split {split}: offset {offset}, limit {limit} select nothing; "
            "give an offset of 0 or more and a limit of 1 or more"
        )
    if known.generate is not None:
        loaded = _generated(known, split, source, limit, offset, seed, dict(options or {}))
    else:
        loaded = _stored(known, split, source, dict(options or {}))
        loaded = _cut(loaded, limit, offset)
    _check_hash(loaded, sha256)
    return loaded


def _known_task(task: str) -> TaskSource:
    if task not in TASKS:
        raise InputError(f"task: unknown name {task!r}.{suggest(task, TASKS)}")
    return TASKS[task]


def _generated(
    task: TaskSource,
    split: str,
    source: Source,
    limit: int | None,
    offset: int,
    seed: int,
    options: dict[str, Any],
) -> LoadedSplit:
    if source not in ("auto", "generated"):
        raise InputError(f"task {task.name}: source {source!r}, but it is generated; use 'auto'")
    if limit is None:
        raise InputError(f"task {task.name}, split {split}: has no end; give it a limit")
    assert task.generate is not None
    try:
        problems = tuple(task.generate(split, seed=seed, limit=offset + limit, **options))[offset:]
    except TypeError as error:  # an option that the generator does not have
        if "unexpected keyword argument" not in str(error):
            raise
        key = str(error).rsplit("'", 2)[-2]
        raise InputError(f"task {task.name}: unknown option {key!r}; {error}") from None
    if len(problems) != limit:
        raise InputError(
            f"task {task.name}, split {split}: {len(problems)} problems from offset {offset}, "
            f"expected {limit}; lower limit"
        )
    settings = ", ".join(f"{k} {_listed(v)}" for k, v in sorted(options.items()))
    return LoadedSplit(
        task=task.name,
        split=split,
        problems=problems,
        source="generated",
        description=f"{task.name} {split}, generated from seed {seed}"
        + (f" ({settings})" if settings else ""),
        sha256=problems_sha256(problems),
    )


def _listed(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else shown(value)


def _stored(task: TaskSource, split: str, source: Source, options: dict[str, Any]) -> LoadedSplit:
    """The whole split, from a file or the hub."""
    if unknown := sorted(set(options) - {"revision"}):
        raise InputError(
            f"task {task.name}: unknown option {unknown[0]!r}.{suggest(unknown[0], ['revision'])}"
        )
    if source == "generated":
        raise InputError(f"task {task.name}: source 'generated', but it is stored; use 'auto'")
    info = task.splits[split]
    root = data_root() if source != "hub" else None
    path = root / info.path if root is not None and info.path is not None else None
    if path is not None and path.is_file():
        return _from_file(task, split, info, path)
    if source == "local":
        place = path or f"../shared/data/{info.path}"
        raise InputError(
            f"task {task.name}: file {place} is missing; set HARNESS_DATA to the data folder "
            "or use source: hub"
        )
    return _from_hub(task, split, info, options.get("revision"), looked_at=path)


def _from_file(task: TaskSource, split: str, info: SplitInfo, path: Path) -> LoadedSplit:
    content = path.read_bytes()
    rows = _read_jsonl(content, path)
    digest = hashlib.sha256(content).hexdigest()
    notes = ()
    if digest != info.sha256:
        notes = (f"file differs from the one that was checked (sha256 {info.sha256})",)
    problems, parsed = _problems(task, split, info, rows, str(path))
    return LoadedSplit(
        task=task.name,
        split=split,
        problems=problems,
        source="local",
        description=f"{task.name} {split} from {path}",
        sha256=problems_sha256(problems),
        path=path,
        file_sha256=digest,
        notes=notes + parsed,
    )


def _read_jsonl(content: bytes, path: Path) -> list[Row]:
    rows: list[Row] = []
    # Not splitlines(): the texts hold U+2028 and the like, which do not end a row.
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}, line {number}: not JSON ({error}); mend the line") from None
        if not isinstance(row, dict):
            raise InputError(f"{path}, line {number}: {type(row).__name__}, expected an object")
        rows.append(row)
    return rows


def _from_hub(
    task: TaskSource, split: str, info: SplitInfo, revision: str | None, looked_at: Path | None
) -> LoadedSplit:
    hub = info.hub
    assert hub is not None  # every stored split names its hub copy
    revision = revision or hub.revision
    if not re.fullmatch(r"[0-9a-f]{40}", str(revision)):
        raise InputError(
            f"task {task.name}: revision {revision!r} is no commit; give its 40 hex digits"
        )
    rows = _read_hub(hub, revision, task.name, looked_at)
    problems, notes = _problems(task, split, info, rows, f"{hub.repo} ({hub.split})")
    return LoadedSplit(
        task=task.name,
        split=split,
        problems=problems,
        source="hub",
        description=f"{task.name} {split} from hub {hub.repo}@{revision[:12]} ({hub.split})",
        sha256=problems_sha256(problems),
        repo=hub.repo,
        revision=revision,
        notes=notes,
    )


def _read_hub(hub: Hub, revision: str, task: str, looked_at: Path | None) -> list[Row]:
    import datasets

    rows: list[Row] = []
    for config in hub.configs:
        try:
            found = datasets.load_dataset(hub.repo, config, split=hub.split, revision=revision)
        except Exception as error:  # the hub client raises dozens of types, all meaning "no data"
            first = (str(error).splitlines() or [type(error).__name__])[0][:160]
            local = f"{looked_at} is missing and " if looked_at else ""
            raise InputError(
                f"task {task}: {local}hub {hub.repo}@{revision[:12]} cannot be read ({first}); "
                "set HARNESS_DATA to a folder with the files, or mend the connection"
            ) from None
        rows.extend(dict(row) for row in found)  # pyright: ignore[reportArgumentType]
    return rows


def _problems(
    task: TaskSource, split: str, info: SplitInfo, rows: Sequence[Row], where: str
) -> tuple[tuple[Problem, ...], tuple[str, ...]]:
    """Rows -> the problems of the split, with the row count and ids checked."""
    if len(rows) != info.rows:
        raise InputError(
            f"{where}: {len(rows)} rows, expected {info.rows} for {task.name} {split}; "
            "get the complete file"
        )
    assert task.parse is not None
    try:
        parsed = task.parse(rows, split)
    except KeyError as error:
        raise InputError(
            f"{where}: no column {error.args[0]!r} (found {', '.join(rows[0])}); "
            f"this is not the form of {task.name}"
        ) from None
    repeated = [i for i, n in Counter(p.id for p in parsed.problems).items() if n > 1]
    if repeated:
        raise InputError(f"{where}: {len(repeated)} repeated rows ({repeated[0]}); drop the copies")
    if info.part == "all":
        return parsed.problems, parsed.notes
    problems, note = _part(task, info, parsed.problems)
    return problems, (*parsed.notes, *note)


def _part(
    task: TaskSource, info: SplitInfo, problems: Sequence[Problem]
) -> tuple[tuple[Problem, ...], tuple[str, ...]]:
    """``train`` or ``validation``: which is which depends on the problems' ids alone.

    A problem that is in the training file twice (also in other punctuation) stays on the training
    side, so that no copy of a validation problem is trained on.
    """
    kept = [p for p in problems if p.id not in task.not_for_training]
    texts = [" ".join(words(p.question)) for p in kept]
    times = Counter(texts)
    unique = [p for p, text in zip(kept, texts, strict=True) if times[text] == 1]
    held_out = {p.id for p in sorted(unique, key=hash_order)[: task.validation_size]}
    wanted = info.part == "validation"
    chosen = tuple(p for p in kept if (p.id in held_out) == wanted)
    notes = [f"{len(held_out)} problems of the training file held out as validation"]
    notes += [f"left out: {name} ({reason})" for name, reason in task.not_for_training.items()]
    return chosen, tuple(notes)


def _cut(loaded: LoadedSplit, limit: int | None, offset: int) -> LoadedSplit:
    size = len(loaded.problems)
    end = size if limit is None else offset + limit
    if offset >= size or end > size:
        asked = f"offset {offset}" + ("" if limit is None else f" + limit {limit}")
        raise InputError(
            f"task {loaded.task}, split {loaded.split}: {asked}, but it has {size} problems; "
            "lower them"
        )
    problems = loaded.problems[offset:end]
    return replace(loaded, problems=problems, sha256=problems_sha256(problems))


def _check_hash(loaded: LoadedSplit, expected: str | None) -> None:
    if expected is None:
        return
    found = loaded.file_sha256 or loaded.sha256
    if found != expected.lower():
        what = loaded.path or f"problems of {loaded.description}"
        raise InputError(
            f"{what}: sha256 {found}, expected {expected}; restore the data or mend the hash"
        )
