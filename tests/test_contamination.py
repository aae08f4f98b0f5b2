"""Contamination: shares worked by hand, and the known facts of the real data sets."""

from __future__ import annotations

import time

import pytest

from harness.errors import InputError
from harness.tasks.contamination import overlap
from harness.tasks.loading import data_root, load_problems
from harness.tasks.task import Problem

ROOT = data_root()
needs_data = pytest.mark.skipif(
    ROOT is None or not (ROOT / "math" / "train.jsonl").is_file(),
    reason="no local data (set HARNESS_DATA to the data folder)",
)


def problems(*questions: str, prefix: str) -> list[Problem]:
    return [Problem(id=f"{prefix}{i}", question=q, answer="0") for i, q in enumerate(questions)]


def test_share_is_the_fraction_of_the_test_problems_ngrams():
    train = problems("x y", "one two three four five six seven", prefix="train")
    # Its 3-grams: (one two three) (two three four) (three four ZERO) (four ZERO nine): 2 of 4.
    test = problems("One, two; THREE four zero nine", prefix="test")
    report = overlap(train, test, n=3, threshold=0.5)
    assert (report.flagged, report.flagged_share) == (1, 1.0)
    assert (report.worst[0].train_id, report.worst[0].share) == ("train1", 0.5)
    assert overlap(train, test, n=3, threshold=0.51).flagged == 0
    assert overlap(train, test, n=5).flagged == 0


def test_exact_ignores_case_and_spacing_only():
    train = problems("Find  $x+1$\nnow.", "Find $x-1$ now.", prefix="train")
    report = overlap(train, problems("find $x+1$ now.", "Find $x*1$ now!", prefix="test"))
    assert report.exact == (("test0", "train0"),)
    assert report.same_words == (("test1", "train0"),)
    assert report.flagged == 1


def test_short_questions_are_compared_whole_with_their_signs():
    train = problems("3+4-2+1+1+1+1+1+1+1=", prefix="train")
    test = problems("3-4+2+1+1+1+1+1+1+1=", "3+4-2+1+1+1+1+1+1+1=", prefix="test")
    report = overlap(train, test)
    assert report.exact == (("test1", "train0"),)
    assert report.flagged == 1


def test_whole_compares_text_alone():
    template = "State the final answer to the following arithmetic problem now: {} ="
    train = problems(*(template.format(f"1 + {i}") for i in range(9)), prefix="train")
    test = problems(template.format("1 + 3"), template.format("2 + 9"), prefix="test")
    assert overlap(train, test).flagged == 2  # the template alone
    report = overlap(train, test, whole=True)
    assert report.exact == (("test0", "train3"),)
    assert report.flagged == 1
    assert report.n is None


def test_the_worst_are_kept_in_order_and_the_report_is_plain_values():
    line = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p"]
    train = problems(" ".join(line), prefix="train")
    test = problems(*(" ".join([*line[:k], *"qrstuvwxyz"[: 16 - k]]) for k in (16, 14, 12)),
                    prefix="test")  # fmt: skip
    report = overlap(train, test, threshold=0.5, worst_kept=2)
    assert report.flagged == 3
    # Of 9 8-grams, those within the first k words: k - 7.
    assert [(o.test_id, o.share) for o in report.worst] == [("test0", 1.0), ("test1", 7 / 9)]
    assert report.to_json()["worst"][1]["train_id"] == "train0"
    assert str(report).startswith("1 of 3 test problems are in the 1 training problems; 3 (100.0%)")


@pytest.mark.parametrize(
    ("train", "test", "options", "message"),
    [
        ([], ["a"], {}, "neither may be empty"),
        (["a"], [], {}, "neither may be empty"),
        (["a"], ["a"], {"n": 0}, "n >= 1"),
        (["a"], ["a"], {"threshold": 0.0}, "0 < threshold <= 1"),
    ],
)
def test_bad_input_is_refused(train, test, options, message):
    with pytest.raises(InputError, match=message):
        overlap(problems(*train, prefix="a"), problems(*test, prefix="b"), **options)


@needs_data
def test_math_against_the_known_facts():
    full, train, test, half = (
        load_problems("math", s).problems for s in ("train_full", "train", "test", "math500")
    )
    start = time.perf_counter()
    report = overlap(full, test)
    assert time.perf_counter() - start < 20
    # One problem in common with spacing normalised, ten ignoring all punctuation.
    assert [t for t, _ in report.exact] == ["test/precalculus/a81b25da160f"]
    assert len(report.exact) + len(report.same_words) == 10
    small = overlap(full, half)
    assert small.exact == ()
    assert len(small.same_words) == 1
    # What a run trains on shares no problem with the test set.
    assert overlap(train, test).exact == ()
    assert overlap(test, half).flagged == 500


@needs_data
def test_gsm8k_splits_share_no_problem():
    train, test = (load_problems("gsm8k", s).problems for s in ("train", "test"))
    report = overlap(train, test)
    assert (report.exact, report.same_words) == ((), ())
    assert report.flagged <= 2


@needs_data
@pytest.mark.parametrize("contest", ["aime24", "aime25", "aime26", "amc23"])
def test_no_contest_problem_is_in_math(contest):
    train = load_problems("math", "train_full").problems
    report = overlap(train, load_problems(contest, "test").problems)
    assert (report.exact, report.same_words) == ((), ())
