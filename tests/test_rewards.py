"""Answer extraction and the grader's verdicts."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from harness.errors import InputError
from harness.rewards.extract import final_answer
from harness.rewards.maths import MathGrader, Outcome

# --- extraction ---------------------------------------------------------------------------------

EXTRACTIONS = [
    (r"So $\boxed{5}$.", "5"),
    (r"First \boxed{4}. Wait, that is wrong: the answer is \boxed{5}", "5"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{\left\{ x : x > \frac{1}{2} \right\}}", r"\left\{ x : x > \frac{1}{2} \right\}"),
    (r"\boxed 2$", "2"),
    (r"\fbox{7} ", "7"),
    (r"\boxed{\boxed{8}}", "8"),
    (r"\boxed{x + \fbox{2}}", r"x + \fbox{2}"),
    (r"\boxed{ }. #### 9", "9"),
    (r"\boxed{3} then \boxed{}", "3"),
    (r"\boxed{1} and \boxed{2}", "1,2"),
    (r"$x=\boxed{1}$ or $x=\boxed{2}$", "1,2"),
    (r"\boxed{1}. But no, rather \boxed{2}", "2"),
    (r"\boxed{12 and so \boxed{13}", "13"),
    (r"\boxed{a\}b}", r"a\}b"),
    ("3+4=7\n#### 7", "7"),
    ("#### 1,234\n", "1,234"),
    ("#### $18.", "18"),
    ("#### 72 clips", "72"),
    ("#### 5\nNo.\n#### 6", "6"),
    ("The answer is 5.", "5"),
    ("The answer is: 5", "5"),
    ("Answer: 5", "5"),
    ("**Answer:** 12", "12"),
    ("The final answer is **42**.", "42"),
    ("the answer to the question is $\\frac{3}{4}$.", r"\frac{3}{4}"),
    ("The answer is $18 per day", "18"),
    ("The answer is \\$18.50.", "18.50"),
    ("The answer is 5. No, the answer is 6.", "6"),
    ("The answer is 1,234 apples.", "1,234"),
    ("The answer is 50%.", "50%"),
    (r"The answer is 50\%.", r"50\%"),
    ("The answer is -3.", "-3"),
    ("The answer is −3.", "−3"),
    ("The answer is x = 5.", "x = 5"),
    ("The answer is 3.5.", "3.5"),
    ("The answer is 2/3 of it.", "2/3"),
    ("The answer is 5 because 2 + 3 = 5.", "5"),
    ("Answer: the total is 15 dollars.", "15"),
    ("The answer is $1$ and $2$.", "1,2"),
    ("The answer is (1, 2).", "(1, 2)"),
    ("The answer is Evelyn.", "Evelyn"),
    ("2 and 3 make 5 apples", "5"),
    ("Thus $x = 4$.", "x = 4"),
    (r"We get \(\frac{1}{2}\).", r"\frac{1}{2}"),
    ("It costs $5 and then $18", "18"),
    ("so it is -7", "-7"),
    ("which makes 3 1/2 hours.", "3 1/2"),
    ("it goes from 5 - 2 to 3 - 1", "1"),
    ("about 1,234.5 in all.", "1,234.5"),
    ("I cannot tell.", None),
    ("", None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "answer"), EXTRACTIONS)
def test_the_final_answer_is_found(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{5} is the", "5"),
        (r"\boxed{4}, rather \boxed{5", None),
        (r"\boxed{5", None),
        (r"\boxed 12", None),
        ("#### 12", None),
        ("#### 12\n", "12"),
        ("The answer is 12", None),
        ("The answer is 12. Now", "12"),
        ("The answer is", None),
        ("so 2 + 3 = 5 and", None),
    ],
)
def test_a_cut_completion_counts_only_a_complete_statement(text, answer):
    assert final_answer(text, finished=False) == answer


@pytest.mark.parametrize(
    ("text", "finished", "answer"),
    [
        ("3*4=12;12+2=14;A14", True, "14"),
        ("A3;A14", True, "14"),
        ("A-7", True, "-7"),
        ("3*4=12", True, None),
        ("3*4=12;A", True, None),
        ("A14", False, None),
        ("A14;", False, "14"),
    ],
)
def test_marker_format(text, finished, answer):
    assert final_answer(text, finished=finished, form="marker", marker="A") == answer


def test_forms_look_only_where_they_should():
    text = r"\boxed{1} #### 2" + "\nThe answer is 3. 4"
    found = {
        form: final_answer(text, form=form) for form in ("boxed", "gsm8k", "last_number", "auto")
    }  # type: ignore[arg-type]
    assert found == {"boxed": "1", "gsm8k": "2", "last_number": "4", "auto": "1"}
    assert final_answer("only 4", form="boxed") is None
    assert final_answer("only 4", form="gsm8k") is None


PIECES = [
    r"\boxed{",
    "{",
    "}",
    "$",
    "$1 ",
    r"\(",
    r"\[",
    "answer ",
    "answer is ",
    "#### ",
    "1,",
    "1 ",
]
PIECES += ["1/", ".", "-", r"\frac{", "A", "\\", " and ", "answer is 1, ", r"\boxed{1} or "]


@pytest.mark.parametrize("piece", PIECES)
def test_extraction_is_linear(piece):
    text = piece * (60_000 // len(piece))
    started = time.process_time()
    for form in ("auto", "last_number"):
        final_answer(text, form=form)
        final_answer(text, finished=False, form=form)
    assert time.process_time() - started < 5


def golds(data: Path, name: str) -> list[str]:
    lines = (data / name).read_text().splitlines()
    answers = [json.loads(line)["answer"] for line in lines]
    return [a.rsplit("####", 1)[-1].strip() for a in answers if a]


# --- verdicts -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grader():
    with MathGrader(workers=1) as grader:
        yield grader


VERDICTS = [
    ("5", r"\boxed{x = 5}", "correct"),
    ("5", r"\boxed{5\text{ cm}}", "correct"),
    ("5", r"\boxed{5^\circ}", "correct"),
    ("-5", "The answer is −5.", "correct"),
    ("1234", r"\boxed{1,234}", "correct"),
    ("1234", r"\boxed{1,235}", "wrong"),
    (r"\frac{3}{4}", r"\boxed{\dfrac34}", "correct"),
    (r"\frac{7}{2}", r"\boxed{3\frac{1}{2}}", "correct"),
    ("7/2", "The answer is 3 1/2.", "correct"),
    ("x^2+2x+1", r"\boxed{(x+1)^2}", "correct"),
    ("x^2+2x+1", r"\boxed{(x-1)^2}", "wrong"),
    ("1,2", r"\boxed{2, 1}", "correct"),
    ("1,2", r"\boxed{1} and \boxed{2}", "correct"),
    ("2", r"\boxed{1} or \boxed{2}", "wrong"),
    ("(1,2)", r"\boxed{(1, 2)}", "correct"),
    ("(1,2)", r"\boxed{(2, 1)}", "wrong"),
    ("[1,2]", r"\boxed{(1,2)}", "wrong"),
    (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}", "correct"),
    (r"\text{Evelyn}", r"\boxed{\text{Carla}}", "wrong"),
    ("0.5", r"\boxed{50\%}", "correct"),
    ("1/3", r"\boxed{0.333}", "wrong"),
    ("5", "no idea", "no_answer"),
    ("5", r"\boxed{}", "no_answer"),
    ("5", r"\boxed{\frac{}", "no_answer"),
]


@pytest.mark.parametrize(("gold", "completion", "outcome"), VERDICTS)
def test_verdicts(grader, gold, completion, outcome):
    assert grader.grade([gold], [completion])[0].outcome == outcome


def test_truncated_is_told_from_no_answer(grader):
    texts = ["2+3=", "two and three", r"\boxed{5} an", r"\boxed{5"]
    verdicts = grader.grade(["5"] * 4, texts, [False, True, False, False])
    assert [v.outcome for v in verdicts] == [
        Outcome.TRUNCATED, Outcome.NO_ANSWER, Outcome.CORRECT, Outcome.TRUNCATED,
    ]  # fmt: skip
    assert [v.extracted for v in verdicts] == [None, None, "5", None]


def test_cache_and_certain_rules_do_not_change_verdicts():
    cases = [(gold, text) for gold, text, _ in VERDICTS] * 2
    with MathGrader(cache_size=3) as small, MathGrader() as large:
        first = large.grade(*zip(*cases, strict=True))
        assert [v.outcome.value for v in first] == [v[2] for v in VERDICTS] * 2
        assert small.grade(*zip(*cases, strict=True)) == first
        verified = large.stats.verified
        assert large.grade(*zip(*cases, strict=True)) == first
        assert large.stats.verified == verified
        assert large.stats.cached > verified


def test_real_golds_are_accepted_and_equal_themselves(grader, real_data):
    answers = golds(real_data, "math/math500.jsonl")
    grader.check_golds([str(i) for i in range(len(answers))], answers)
    verdicts = grader.grade(answers, [f"so \\boxed{{{a}}}." for a in answers])
    assert all(v.correct for v in verdicts)


def test_real_solutions_earn_full_marks(grader, real_data):
    rows = [json.loads(line) for line in (real_data / "math/math500.jsonl").open()]
    verdicts = grader.grade([r["answer"] for r in rows], [r["solution"] for r in rows])
    assert [r["unique_id"] for r, v in zip(rows, verdicts, strict=True) if not v.correct] == []
    rows = [json.loads(line) for line in (real_data / "gsm8k/test.jsonl").open()]
    numbers = [r["answer"].rsplit("####", 1)[-1].strip() for r in rows]
    started = grader.stats.verified
    verdicts = grader.grade(numbers, [r["answer"] for r in rows])
    assert all(v.correct for v in verdicts)
    more = [str(int(n.replace(",", "")) + 1) for n in numbers]
    wrong = grader.grade(more, [r["answer"] for r in rows])
    assert not any(v.correct for v in wrong)
    assert grader.stats.verified == started  # GSM8K never needs math-verify


def test_golds_that_cannot_be_graded_are_named(grader):
    for gold in ["", "  ", "$ $", "."]:
        with pytest.raises(InputError, match="problem p2: its gold answer is empty"):
            grader.check_golds(["p1", "p2"], ["5", gold])
    with (
        MathGrader(timeout_seconds=0.3) as hasty,
        pytest.raises(InputError, match=r"problem p2: .*\(timeout\)"),
    ):
        hasty.check_golds(["p1", "p2"], ["5", "(" * 300 + "x" + ")" * 300])
    ids, golds_ = ["a", "b", "c", "d"], ["5", "05\\!:\\!00", r"\frac{1}{", "x+1"]
    assert grader.check_golds(ids, golds_) == ["b", "c"]


def test_bad_settings_are_refused():
    with pytest.raises(InputError, match=r"answer_format.*Did you mean 'boxed'"):
        MathGrader(answer_format="boxd")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="marker"):
        MathGrader(answer_format="marker", marker="")
    with pytest.raises(InputError, match="timeout_seconds: 0 is too small"):
        MathGrader(timeout_seconds=0)
    with MathGrader() as grader, pytest.raises(InputError, match="gold answer 1 is empty"):
        grader.grade(["5", ""], ["5", "5"])
    with MathGrader() as grader, pytest.raises(ValueError, match="2 golds, 1 texts"):
        grader.grade(["5", "6"], ["5"])
