"""MATH (Hendrycks et al. 2021) and MATH-500 (Lightman et al. 2023): competition problems.

``test`` holds all 5,000 test problems, ``math500`` 500 of them; a problem has one id in both.
Problems of ``train`` and ``test`` stand in the order of a hash of their ids: files and hub
configurations go subject by subject, so that their first N rows would all be algebra.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from harness.errors import InputError
from harness.tasks.math_answers import (
    ALSO_RIGHT,
    MENDS,
    NOT_FOR_TRAINING,
    join_thousands,
    last_box,
)
from harness.tasks.source import Hub, Parsed, Row, SplitInfo, TaskSource, content_key, hash_order
from harness.tasks.task import Problem

REPO, REVISION = "EleutherAI/hendrycks_math", "21a5633873b6a120296cce3e2df9d5550074f4a3"
REPO_500, REVISION_500 = "HuggingFaceH4/MATH-500", "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be"
SUBJECTS = {
    "Algebra": "algebra",
    "Counting & Probability": "counting_and_probability",
    "Geometry": "geometry",
    "Intermediate Algebra": "intermediate_algebra",
    "Number Theory": "number_theory",
    "Prealgebra": "prealgebra",
    "Precalculus": "precalculus",
}
_MEND_BY_KEY = {mend.key: mend for mend in MENDS.values()}
_ALSO_RIGHT_KEYS = {key for key, _ in ALSO_RIGHT.values()}


def _level(level: object) -> str | None:
    """``"Level 3"`` or ``3`` -> ``"Level 3"``; ``"Level ?"`` is no level."""
    digits = str(level).removeprefix("Level ")
    return f"Level {digits}" if digits.isdigit() else None


def _answer(row: Row, key: str, where: str, count: Counter[str]) -> str:
    """The key to grade against: the last box, mended where it is known to be unfit."""
    box = last_box(row["solution"])
    mend = _MEND_BY_KEY.get(key)
    if mend is not None:
        if (box or "") != mend.found:
            raise InputError(
                f"{where}: last box {box!r}, expected {mend.found!r}; the solution was edited: "
                "use the published row"
            )
        count[mend.why] += 1
        return mend.answer
    if not box:
        raise InputError(f"{where}: the solution has no \\boxed{{…}} answer; mend or drop the row")
    answer = join_thousands(box)
    count["comma in a number"] += answer != box
    return answer


def parse(rows: Sequence[Row], split: str) -> Parsed:
    """Rows ``problem``, ``solution``, ``level``, ``type`` or ``subject`` -> problems."""
    origin = "train" if split.startswith(("train", "validation")) else "test"
    count: Counter[str] = Counter()
    problems = []
    for number, row in enumerate(rows, start=1):
        where = f"math {split} row {number}"
        subject = row["type"] if "type" in row else row["subject"]
        if subject not in SUBJECTS:
            raise InputError(f"{where}: subject {subject!r} is not one of {', '.join(SUBJECTS)}")
        key = content_key(row["problem"], row["solution"])
        level = _level(row["level"])
        count["no level"] += level is None
        count["several right answers"] += key in _ALSO_RIGHT_KEYS
        problems.append(
            Problem(
                id=f"{origin}/{SUBJECTS[subject]}/{key}",
                question=row["problem"],
                answer=_answer(row, key, where, count),
                solution=row["solution"],
                level=level,
                subject=subject,
            )
        )
    if split != "math500":
        problems.sort(key=hash_order)
    return Parsed(tuple(problems), _notes(origin, split, count, problems))


def _notes(
    origin: str, split: str, count: Counter[str], problems: Sequence[Problem]
) -> tuple[str, ...]:
    """What was mended, and which known rows were not there to be mended."""
    notes = [f"{n} keys mended: {why}" for why, n in sorted(count.items()) if n and why in _WHYS]
    if count["no level"]:
        notes.append(f"{count['no level']} problems have no level in the source")
    if count["several right answers"]:
        notes.append(
            f"{count['several right answers']} problems have a second right answer, which is "
            "graded wrong"
        )
    if split != "math500":
        present = {p.id.rsplit("/", 1)[1] for p in problems}
        missing = [n for n, m in MENDS.items() if n.startswith(origin) and m.key not in present]
        if missing:
            notes.append(f"{len(missing)} keys NOT mended, row not found: {', '.join(missing)}")
    return tuple(notes)


_WHYS = {mend.why for mend in MENDS.values()}


def _split(file: str, rows: int, sha256: str) -> SplitInfo:
    hub = Hub(REPO, file, REVISION, configs=tuple(SUBJECTS.values()))
    return SplitInfo(size=rows, rows=rows, path=f"math/{file}.jsonl", sha256=sha256, hub=hub)


_TRAIN = _split("train", 7500, "28db67b585b997576e388b31df1bc408de97db5f74fae202875f774daed6618a")
_TEST = _split("test", 5000, "8a2395d43063bebabb4331bc5dafd15fec3eb67be9eb77c136ec496c6a18aef1")

MATH = TaskSource(
    name="math",
    parse=parse,
    splits={
        "train": replace(_TRAIN, size=7500 - 500 - len(NOT_FOR_TRAINING), part="train"),
        "validation": replace(_TRAIN, size=500, part="validation"),
        "train_full": _TRAIN,
        "test": _TEST,
        "math500": SplitInfo(
            size=500,
            rows=500,
            path="math/math500.jsonl",
            sha256="35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132",
            hub=Hub(REPO_500, "test", REVISION_500),
        ),
    },
    not_for_training={
        f"{name.rsplit('/', 1)[0]}/{key}": reason
        for name, (key, reason) in NOT_FOR_TRAINING.items()
    },
)
