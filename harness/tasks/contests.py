"""AIME 2024, 2025, 2026 and AMC 12 of 2023: small test sets; every answer is an integer.

They are for evaluation alone: no ``train`` split exists. The data sets name and order their rows
differently, so a problem's id (year, exam, number) comes from its own id or wiki address where it
has one, else from its place in the exam, and problems are put in contest order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from functools import partial

from harness.errors import InputError
from harness.tasks.source import Hub, Parsed, Row, SplitInfo, TaskSource
from harness.tasks.task import Problem

_WIKI = re.compile(r"(\d{4})_(?:AIME_(I{1,2})|AMC_(12[AB]))_Problems/Problem_(\d+)")
_OWN_ID = re.compile(r"(\d{4})-(I{1,2}|12[AB])-(\d+)")

Place = tuple[int, str, int]  # year, exam, number


def _place(row: Row, position: int, year: int) -> Place:
    """Where a problem stood: from its id, its wiki address, or its position (1-30) in the year."""
    if own := _OWN_ID.fullmatch(str(row.get("id", ""))):
        return int(own[1]), own[2], int(own[3])
    if wiki := _WIKI.search(str(row.get("url", ""))):
        return int(wiki[1]), wiki[2] or wiki[3], int(wiki[4])
    position = int(row.get("problem_idx") or position)
    return (year, "I", position) if position <= 15 else (year, "II", position - 15)


def _integer(answer: object, where: str) -> str:
    """``'073'``, ``27.0`` or ``'27'`` -> plain digits."""
    try:
        number = Decimal(str(answer).strip())
    except InvalidOperation:
        number = Decimal("NaN")
    if not number.is_finite() or number != int(number):
        raise InputError(f"{where}: answer {answer!r} is not an integer; mend the row")
    return str(int(number))


def parse(rows: Sequence[Row], split: str, *, name: str, year: int) -> Parsed:
    """Rows ``problem`` or ``question``, ``answer`` -> problems in contest order."""
    placed: dict[Place, Problem] = {}
    rewritten = 0
    for position, row in enumerate(rows, start=1):
        where = f"{name} {split} row {position}"
        place = _place(row, position, year)
        if place in placed or place[0] != year:
            raise InputError(f"{where}: {place} is a repeated problem or not of {year}; mend it")
        answer = _integer(row["answer"], where)
        rewritten += answer != str(row["answer"])
        question = row["problem"] if "problem" in row else row["question"]
        placed[place] = Problem(
            id="-".join(map(str, place)), question=question.strip(), answer=answer, subject=place[1]
        )
    note = f"{rewritten} answers rewritten as plain integers (leading zeros, '.0')"
    return Parsed(tuple(placed[p] for p in sorted(placed)), (note,))


def _source(name: str, year: int, rows: int, path: str, sha256: str, hub: Hub) -> TaskSource:
    test = SplitInfo(size=rows, rows=rows, path=path, sha256=sha256, hub=hub)
    return TaskSource(name, {"test": test}, parse=partial(parse, name=name, year=year))


AIME24 = _source(
    "aime24",
    2024,
    30,
    "aime/aime2024.jsonl",
    "963479f615e6ee5234ee22c44a968113a09bb5ec4bedb605f9a3ee360749c47b",
    Hub("HuggingFaceH4/aime_2024", "train", "2fe88a2f1091d5048c0f36abc874fb997b3dd99a"),
)
AIME25 = _source(
    "aime25",
    2025,
    30,
    "aime/aime2025.jsonl",
    "b13375c4ae5af7d318cc17dba8d867995b66d1cd2d19e25584354d7f65c7513f",
    Hub("math-ai/aime25", "test", "563bb8404243c5f09de6ec262f2db674fe5bce9b"),
)
AIME26 = _source(
    "aime26",
    2026,
    30,
    "aime/aime2026.jsonl",
    "4bb122ab2807bbc06e50d10239c210c6486fd5c567fcedcf405c401aedd55a68",
    Hub("MathArena/aime_2026", "train", "d2de22f3c656b4f56cf8981212186377d1e23bc3"),
)
AMC23 = _source(
    "amc23",
    2023,
    40,
    "amc23/amc23.jsonl",
    "81729469fd7e968471924812e8fe2fce6fcfa7418ef14dcdc8104c72a41e5eb9",
    Hub("math-ai/amc23", "test", "80815d37005feb82cd7f8fbc6901d5d3eff43057"),
)
