"""Answer extraction, the certain rules against math-verify, verdicts and vote classes."""

from __future__ import annotations

import json
import logging
import random
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from math_verify import parse, verify

from harness.errors import InputError
from harness.rewards.equal import canonical, surely_equal, tidy
from harness.rewards.extract import final_answer
from harness.rewards.maths import MathGrader, Outcome
from harness.rewards.worker import compare

logging.getLogger("math_verify").setLevel(logging.CRITICAL)


def math_verify_says(gold: str, answer: str) -> bool:
    """math-verify called as its documentation shows, on the untidied answers."""
    left = parse(f"${gold}$", parsing_timeout=None)  # type: ignore[arg-type]
    right = parse(f"${answer}$", parsing_timeout=None)  # type: ignore[arg-type]
    return verify(left, right, timeout_seconds=None)


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


# --- the certain rules say what math-verify says ------------------------------------------------


def agree(gold: str, answer: str) -> bool:
    """Assert that a certain verdict is math-verify's; False where the rule abstains."""
    certain = surely_equal(tidy(gold), tidy(answer))
    if certain is None:
        return False
    assert certain == compare(tidy(gold), tidy(answer))[0], (gold, answer)
    if not answer.rstrip().endswith("."):  # math-verify takes "1/2." for text: a full stop counts
        assert certain == math_verify_says(gold, answer), (gold, answer)
    return True


def golds(data: Path, name: str) -> list[str]:
    lines = (data / name).read_text().splitlines()
    answers = [json.loads(line)["answer"] for line in lines]
    return [a.rsplit("####", 1)[-1].strip() for a in answers if a]


def perturbed(gold: str, rng: random.Random) -> list[str]:
    """The gold in other clothes, and wrong answers near it."""
    bare = gold.replace(",", "")
    forms = [
        "{}",
        "{}.",
        "{}.0",
        "0{}",
        "-{}",
        "{}1",
        "{}0",
        "{}/1",
        "{}.5",
        "\\${}",
        "\\frac{{{}}}1",
    ]
    variants = [form.format(bare) for form in forms]
    if bare.lstrip("-").isdigit():
        value = int(bare)
        fraction = f"{value * 3}/{3 + rng.randint(0, 1)}"
        variants += [str(value + 1), str(value - 1), f"{value * 2}/2", fraction]
        variants += [f"{value}.000001", f"{value}.00", f"\\dfrac{{{value * 5}}}{{5}}"]
        variants += [f"{value:,}".replace(",", comma) for comma in (",", "{,}", ",\\!")]
    return variants


def test_certain_rules_agree_on_real_golds(real_data):
    rng = random.Random(0)
    numbers = set(golds(real_data, "gsm8k/train.jsonl") + golds(real_data, "gsm8k/test.jsonl"))
    for name in ("aime/aime2024", "aime/aime2025", "aime/aime2026", "amc23/amc23"):
        numbers |= set(golds(real_data, f"{name}.jsonl"))
    decided = 0
    for gold in sorted(numbers):
        variants = perturbed(gold, rng)
        keep = [gold, *rng.sample(variants, 3)]
        decided += sum(agree(gold, answer) for answer in keep)
    assert len(numbers) > 900
    assert decided > 3 * len(numbers)


def test_certain_rules_agree_on_math_golds(real_data):
    rng = random.Random(1)
    answers = sorted(set(golds(real_data, "math/math500.jsonl")))
    decided = 0
    for gold in answers:
        others = perturbed(gold, rng)
        decided += sum(
            agree(gold, a) for a in [gold, *rng.sample(others, 3), *rng.sample(answers, 4)]
        )
    assert decided > 500


integers = st.integers(-(10**9), 10**9).map(str)
small = st.integers(-40, 40)
decimals = st.builds(
    lambda sign, whole, places: f"{sign}{whole}.{places}",
    st.sampled_from(["", "-"]),
    st.one_of(st.integers(0, 30), st.integers(0, 10**8 - 1)).map(str),
    st.text("0123456789", min_size=1, max_size=7),
)
fractions = st.builds(
    lambda form, top, bottom: form.format(top, bottom),
    st.sampled_from(["{}/{}", "\\frac{{{}}}{{{}}}", "-\\dfrac{{{}}}{{{}}}", "\\tfrac{{{}}}{{{}}}"]),
    st.one_of(small, st.integers(-(10**6), 10**6)),
    st.one_of(st.integers(1, 40), st.integers(1, 10**6)),
)
digit_fractions = st.builds("\\frac{}{}".format, st.integers(0, 9), st.integers(1, 9))
dressed = st.sampled_from(["{}", "0{}", "{}.", "{}0", "\\${}", " {} ", "{}.0", "{}.00"])
anything = st.one_of(integers, small.map(str), decimals, fractions, digit_fractions)
oddities = st.text("0123456789,.-/{}!\\$ +", min_size=1, max_size=8)


@settings(max_examples=150, deadline=None)
@given(anything, anything, dressed)
@example("0.333333", "1/3", "{}")
@example("1/3", "0.33", "{}")
@example("12345678.123456", "12345678.123457", "{}")
@example("0.1", "1/10", "{}")
@example("5", "5.0", "{}")
@example("0", "-0", "{}")
@example("0.0", "-0.0", "{}")
@example("1/100000", "0.00001", "{}")
def test_certain_rules_agree_on_random_numbers(gold, answer, dress):
    agree(gold, answer)
    agree(gold, dress.format(answer))
    agree(gold, dress.format(gold))


@settings(max_examples=60, deadline=None)
@given(st.fractions(-1000, 1000, max_denominator=64), st.integers(1, 9))
def test_certain_rules_agree_on_equal_values_in_other_forms(value, factor):
    top, bottom = value.numerator, value.denominator
    forms = [f"{top}/{bottom}", f"{top * factor}/{bottom * factor}", f"\\frac{{{top}}}{{{bottom}}}"]
    if bottom in (1, 2, 4, 5, 8, 10, 16, 20, 25, 32, 40, 50, 64):
        forms += [f"{float(value):.6f}", f"{float(value)}"]
    for gold in forms:
        for answer in forms:
            agree(gold, answer)


@settings(max_examples=200, deadline=None)
@given(oddities, st.one_of(oddities, anything))
def test_certain_rules_agree_on_malformed_numbers(answer, gold):
    agree(gold, answer)
    agree(answer, answer)


def test_certain_rules_abstain_where_math_verify_rounds():
    assert surely_equal("1/3", "0.333333") is None
    assert math_verify_says("1/3", "0.333333")
    assert surely_equal("1/3", "0.3333") is False
    assert surely_equal("50", r"50\%") is None
    assert surely_equal("1,23", "123") is None
    assert surely_equal("1/0", "1/0") is None


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


# --- classes for the majority vote --------------------------------------------------------------

CLASSES = [
    ["0.50", "1/2", r"\frac12", r"\frac{1}{2}", r"\dfrac{2}{4}", ".5", "$0.5$", "x = 1/2"],
    ["1,234", "1234", "01234", "1234.0", r"1{,}234", r"1,\!234", r"\$1234", "1234."],
    ["-5", "−5", "$-5$", "y=-5"],
    ["7/2", "3 1/2", r"3\frac{1}{2}", "3.5"],
    ["5", r"5\text{ cm}", "5 cm"],
    ["(1,2)", "(1, 2)", r"\left(1,2\right)"],
    [r"\text{Evelyn}", "Evelyn"],
    ["0.333333"],
    ["1/3"],
    [r"50\%"],
    ["x+1"],
]


def test_equal_answers_share_a_class_and_others_do_not():
    keys = [{canonical(answer) for answer in answers} for answers in CLASSES]
    assert [len(k) for k in keys] == [1] * len(CLASSES)
    assert len(set.union(*keys)) == len(CLASSES)


@settings(max_examples=200, deadline=None)
@given(st.fractions(-50, 50, max_denominator=20), st.fractions(-50, 50, max_denominator=20))
def test_number_classes_are_values(a: Fraction, b: Fraction):
    latex = f"\\frac{{{a.numerator}}}{{{a.denominator}}}"
    assert canonical(latex) == canonical(f"{a.numerator}/{a.denominator}") == str(a)
    assert (canonical(str(a)) == canonical(str(b))) == (a == b)


def test_real_golds_of_one_class_are_equal_to_math_verify(real_data):
    by_class: dict[str, set[str]] = {}
    for gold in golds(real_data, "math/test.jsonl"):
        by_class.setdefault(canonical(gold), set()).add(gold)
    pairs = [sorted(group) for group in by_class.values() if len(group) > 1]
    assert len(pairs) > 20
    unequal = [g for g in pairs for other in g[1:] if not compare(tidy(g[0]), tidy(other))[0]]
    assert unequal == []
