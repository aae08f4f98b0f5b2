"""GSM8K (Cobbe et al. 2021): grade-school word problems; every answer is an integer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from harness.errors import InputError
from harness.tasks.source import Hub, Parsed, Row, SplitInfo, TaskSource, content_key
from harness.tasks.task import Problem

REPO = "openai/gsm8k"
REVISION = "740312add88f781978c0658806c59bc2815b9866"
_FINAL = re.compile(r"####\s*(-?[\d,]*\d)\s*$")
_CALCULATOR = re.compile(r"<<[^<>]*>>")


def parse(rows: Sequence[Row], split: str) -> Parsed:
    """Rows ``question``, ``answer`` (working, then ``#### NUMBER``) -> problems in file order.

    Commas leave the number, because ``1,000`` is also how a list of two numbers is written; the
    calculator notes ``<<3*4=12>>`` leave the worked solution.
    """
    origin = "test" if split == "test" else "train"
    problems, commas = [], 0
    for number, row in enumerate(rows, start=1):
        final = _FINAL.search(row["answer"])
        if final is None:
            raise InputError(
                f"gsm8k {split} row {number}: answer ends in {row['answer'][-30:]!r}; "
                "it must end in '#### NUMBER'"
            )
        commas += "," in final[1]
        problems.append(
            Problem(
                id=f"{origin}/{content_key(row['question'])}",
                question=row["question"],
                answer=final[1].replace(",", ""),
                solution=_CALCULATOR.sub("", row["answer"]),
            )
        )
    return Parsed(tuple(problems), (f"{commas} answers lost their thousands separators",))


def _split(file: str, rows: int, sha256: str) -> SplitInfo:
    hub = Hub(REPO, file, REVISION, configs=("main",))
    return SplitInfo(size=rows, rows=rows, path=f"gsm8k/{file}.jsonl", sha256=sha256, hub=hub)


_TRAIN = _split("train", 7473, "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465")
_TEST = _split("test", 1319, "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14")

GSM8K = TaskSource(
    name="gsm8k",
    parse=parse,
    splits={
        "train": replace(_TRAIN, size=6973, part="train"),
        "validation": replace(_TRAIN, size=500, part="validation"),
        "train_full": _TRAIN,
        "test": _TEST,
    },
)
