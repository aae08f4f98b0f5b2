"""The certain rules against math-verify's own verdicts, and the classes of a vote."""

from __future__ import annotations

import json
import logging
import random
import re
from fractions import Fraction
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st
from math_verify import parse, verify

from harness.rewards.equal import canonical, surely_equal, tidy
from harness.rewards.worker import compare

logging.getLogger("math_verify").setLevel(logging.CRITICAL)


def math_verify_says(gold: str, answer: str) -> bool:
    """math-verify called as its documentation shows, on the untidied answers."""
    left = parse(f"${gold}$", parsing_timeout=None)  # type: ignore[arg-type]
    right = parse(f"${answer}$", parsing_timeout=None)  # type: ignore[arg-type]
    return verify(left, right, timeout_seconds=None)


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
    places = len(gold.partition(".")[2])
    assert agree(gold, gold) is (places <= 6)  # math-verify rounds the rest


@settings(max_examples=60, deadline=None)
@given(st.fractions(-1000, 1000, max_denominator=64), st.integers(1, 9))
def test_certain_rules_agree_on_equal_values_in_other_forms(value, factor):
    top, bottom = value.numerator, value.denominator
    forms = [f"{top}/{bottom}", f"{top * factor}/{bottom * factor}", f"\\frac{{{top}}}{{{bottom}}}"]
    if bottom in (1, 2, 4, 5, 8, 10, 16, 20, 25, 32, 40, 50, 64):
        forms += [f"{float(value):.6f}", f"{float(value)}"]
    for gold in forms:
        for answer in forms:
            assert agree(gold, answer)
            assert surely_equal(gold, answer) is True


@settings(max_examples=200, deadline=None)
@given(oddities, st.one_of(oddities, anything))
@example("$62$", "62")
@example("1,000", "1{,}000")
def test_certain_rules_agree_on_malformed_numbers(answer, gold):
    decided = agree(gold, answer)
    assert re.search(r"\d", answer) or not decided
    agree(answer, answer)
    assert surely_equal(tidy(answer), tidy(answer)) is not False


def test_a_malformed_number_is_left_to_math_verify_and_a_sound_one_is_not():
    malformed = ["", "-", ".", "1..2", "1/", "/2", "1,23", "--5", "1 2", "{5", "-.5", "0/0", "+5"]
    assert {text: surely_equal("5", tidy(text)) for text in malformed} == dict.fromkeys(malformed)
    sound = {"5.": True, "$5$": True, r"\$5": True, "05": True, "5.00": True, "50": False}
    assert {text: surely_equal("5", tidy(text)) for text in sound} == sound


def test_certain_rules_abstain_where_math_verify_rounds():
    assert surely_equal("1/3", "0.333333") is None
    assert math_verify_says("1/3", "0.333333")
    assert surely_equal("1/3", "0.3333") is False
    assert surely_equal("50", r"50\%") is None
    assert surely_equal("1,23", "123") is None
    assert surely_equal("1/0", "1/0") is None


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
