"""Pass@k, Maj@k and Avg@k against golden vectors, brute force and exact fractions."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import InputError
from harness.grade_file import grade_rows, metrics_rows
from harness.metrics import (
    TIES,
    avg_at_k,
    best_of_k,
    dataset_metrics,
    maj_at_k,
    maj_at_k_exact,
    pass_at_k,
    pass_at_k_exact,
    problem_clustered_se,
    problem_metrics,
    zero_variance_probability,
)


def test_pass_at_k_golden(golden):
    vector = golden("pass_at_k_unbiased")
    found = [pass_at_k(n, c, k) for n, c, k in vector["inputs"]["n_c_k"]]
    assert found == pytest.approx(vector["expected"]["pass_at_k"], abs=vector["tolerance"])


def test_average_over_problems_golden(golden):
    vector = golden("pass_at_k_two_problem_average")
    n, cs, k = (vector["inputs"][key] for key in ("n", "c", "k"))
    problems = [problem_metrics([True] * c + [False] * (n - c), ["x"] * c + ["y"] * (n - c), [k])
                for c in cs]  # fmt: skip
    expected = vector["expected"]
    assert float(dataset_metrics(problems).pass_at[k]) == pytest.approx(expected["mean_of_passk"])
    pooled = pass_at_k(2 * n, sum(cs), k)
    assert pooled == pytest.approx(expected["wrong_passk_of_pooled"])
    assert pooled != pytest.approx(expected["mean_of_passk"], abs=0.1)


def test_maj_at_k_golden(golden):
    vector = golden("maj_at_k_exact_without_replacement")
    votes = Counter(vector["inputs"]["answers"])
    flags = [answer == vector["inputs"]["correct"] for answer in votes]
    for name, by_tie in vector["expected"].items():
        for tie in TIES:
            found = maj_at_k(list(votes.values()), flags, 0, int(name[1:]), tie)
            assert found == pytest.approx(by_tie[f"tie_{tie}"], abs=vector["tolerance"]), name


def test_avg_at_k_golden(golden):
    vector = golden("avg_at_k")
    rows, expected = vector["inputs"]["correct"], vector["expected"]
    per_problem = [avg_at_k(len(row), sum(row), len(row)) for row in rows]
    assert per_problem == pytest.approx(expected["per_problem"])
    assert sum(per_problem) / 2 == pytest.approx(expected["avg_at_4"])
    assert problem_clustered_se(rows) == pytest.approx(expected["problem_clustered_se"])
    assert math.isnan(problem_clustered_se(rows[:1]))


def test_zero_variance_golden(golden):
    vector = golden("zero_variance_group_probability")
    for i, p in enumerate(vector["inputs"]["p"]):
        for j, size in enumerate(vector["inputs"]["G"]):
            found = zero_variance_probability(p, size)
            assert found == pytest.approx(
                vector["expected"]["p_zero_variance"][i][j], rel=vector["tolerance"]
            )
            assert 1 / (1 - found) == pytest.approx(
                vector["expected"]["expected_groups_sampled_per_kept"][i][j], rel=1e-9
            )


@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_enumerated_share(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k_exact(n, c, k) == Fraction(sum(map(any, subsets)), len(subsets))


@pytest.mark.parametrize("n", [2_001, 40_000, 1_000_000])
def test_large_n_agrees_with_exact_fractions(n):
    for c, k in [(1, 1), (1, n // 2), (3, 7), (n // 1000, 64), (n - 1, 1), (n // 2, 2), (2, n - 2),
                 (n // 3, 20), (20, n // 3), (n - 70, 64), (300, 900)]:  # fmt: skip
        few, many = sorted((c, k))  # C(n-c,k)/C(n,k) is symmetric in c and k
        miss = Fraction(math.perm(n - many, few), math.perm(n, few)) if n - c >= k else Fraction(0)
        exact = 1 - miss
        error = abs(Fraction(pass_at_k(n, c, k)) - exact) / exact
        assert error < Fraction(1, 10**12), (n, c, k, float(error))


def test_small_and_large_n_formulas_join():
    # either side of the switch between the two formulas
    assert pass_at_k(2_000, 7, 100) == pytest.approx(float(pass_at_k_exact(2_000, 7, 100)))
    assert pass_at_k(2_001, 7, 100) == pytest.approx(
        float(pass_at_k_exact(2_001, 7, 100)), rel=1e-13
    )
    assert pass_at_k(10**6, 0, 10**6) == 0.0
    assert pass_at_k(10**6, 1, 10**6) == 1.0


def enumerate_majority(votes: list[tuple[str, bool]], k: int, tie: str) -> Fraction:
    """Maj@k by looking at every subset: the definition, written out."""
    total, subsets = Fraction(0), 0
    for subset in combinations(range(len(votes)), k):
        tally = Counter(votes[i] for i in subset)
        best = max(tally.values())
        winners = [ok for (_, ok), count in tally.items() if count == best]
        total += {
            "random": Fraction(sum(winners), len(winners)),
            "optimistic": Fraction(any(winners)),
            "pessimistic": Fraction(all(winners)),
        }[tie]
        subsets += 1
    return total / subsets


@settings(max_examples=150, deadline=None)
@given(
    counts=st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=5),
    unparsed=st.integers(0, 4),
    tie=st.sampled_from(TIES),
    data=st.data(),
)
def test_maj_at_k_is_the_enumerated_expectation(counts, unparsed, tie, data):
    while sum(c for c, _ in counts) + unparsed > 10:
        if counts:
            counts = counts[1:]
        else:
            unparsed -= 1
    votes = [(f"c{i}", ok) for i, (c, ok) in enumerate(counts) for _ in range(c)]
    votes += [(f"unparsed{i}", False) for i in range(unparsed)]
    if not votes:
        return
    k = data.draw(st.integers(1, len(votes)))
    found = maj_at_k_exact([c for c, _ in counts], [ok for _, ok in counts], unparsed, k, tie)
    assert found == enumerate_majority(votes, k, tie)


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    unparsed=st.integers(0, 20),
    data=st.data(),
)
def test_maj_at_k_invariants(counts, unparsed, data):
    n = sum(counts) + unparsed
    k = data.draw(st.integers(1, n))
    right = [i == 0 for i in range(len(counts))]
    low, mid, high = (
        maj_at_k_exact(counts, right, unparsed, k, tie)
        for tie in ("pessimistic", "random", "optimistic")
    )
    assert 0 <= low <= mid <= high <= pass_at_k_exact(n, counts[0], k)
    assert maj_at_k_exact(counts, right, unparsed, 1) == Fraction(counts[0], n)
    # every answer class right once: the shares of all winners sum to one
    each = sum(
        maj_at_k_exact(counts, [i == j for i in range(len(counts))], 0, min(k, sum(counts)))
        for j in range(len(counts))
    )
    assert each == 1


def test_many_classes_are_fast_and_exact():
    counts = [40, 38, 20, 12] + [2] * 20 + [1] * 6
    unparsed = 256 - sum(counts)
    right = [True] + [False] * (len(counts) - 1)
    started = time.process_time()
    value = maj_at_k_exact(counts, right, unparsed, 128)
    assert time.process_time() - started < 2
    assert 0.3 < value < 0.7
    assert maj_at_k_exact(counts, right, unparsed, 256) == 1


def test_unparsed_answers_never_pool_into_a_class():
    # nine unparsed against two votes for the right answer: all drawn, the two win
    assert maj_at_k_exact([2], [True], 9, 11) == 1
    # one right vote among three single votes: a three-way tie
    assert maj_at_k_exact([1], [True], 2, 3) == Fraction(1, 3)
    assert maj_at_k_exact([], [], 3, 2) == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda: pass_at_k(4, 1, 5),
        lambda: pass_at_k(4, 5, 1),
        lambda: pass_at_k(4, 1, 0),
        lambda: maj_at_k([2], [True], 1, 4),
        lambda: maj_at_k([2], [True, False], 1, 2),
        lambda: maj_at_k([2], [True], 1, 2, "first"),  # type: ignore[arg-type]
        lambda: avg_at_k(4, 1, 5),
        lambda: zero_variance_probability(1.5, 4),
        lambda: dataset_metrics([]),
    ],
)
def test_impossible_inputs_are_refused(call):
    with pytest.raises(InputError):
        call()


def write(path: Path, rows: list) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n")
    return path


def sample(problem: str, correct: bool, answer: str | None) -> dict:
    return {"problem": problem, "correct": correct, "answer": answer}


def test_metrics_file_gives_exact_values(tmp_path):
    rows = [sample("p", a == "A", a) for a in "AAABBC"]
    rows += [sample("q", False, None)] * 4 + [sample("q", True, "7")] * 2
    found = metrics_rows(write(tmp_path / "f.jsonl", rows), [2, 1])
    # p: Pass@2 = 1 - 3/15, Maj@2 = 1/2 (golden); q: Pass@2 = 1 - 6/15 and
    # Maj@2 = [1 of both 7s + 8 mixed pairs, tied] / 15 = (1 + 4) / 15
    assert found["exact"] == {
        "pass@1": "5/12", "pass@2": "7/10", "maj@1": "5/12", "maj@2": "5/12",
        "avg@1": "5/12", "avg@2": "5/12",
    }  # fmt: skip
    assert found["pass@k"] == {"1": 5 / 12, "2": 0.7}
    assert found["problems"] == 2
    assert found["n"] == {"min": 6, "max": 6}
    assert found["per_problem"][1]["maj@k"]["2"] == pytest.approx(1 / 3)
    assert found["per_problem"][1]["unparsed"] == 4


@pytest.mark.parametrize(
    ("rows", "ks", "says"),
    [
        ([sample("p", True, "1"), sample("p", False, "1")], [1], "f.jsonl:2: answer '1'"),
        ([sample("p", True, "1")], [2], "problem 'p' has 1 samples"),
        ([sample("p", True, None)], [1], "f.jsonl:1: correct is true but answer is null"),
        ([{"problem": "p", "correct": 1, "answer": "1"}], [1], "f.jsonl:1: correct is 1"),
        ([{"problem": "p", "correct": True}], [1], "f.jsonl:1: key 'answer' is missing"),
        ([{"problem": ["p"], "correct": True, "answer": "1"}], [1], 'f.jsonl:1: problem is ["p"]'),
        ([sample("p", True, "1"), "{"], [1], "f.jsonl:2: not JSON"),
        (["[1]"], [1], "f.jsonl:1: is [1]"),
        ([], [1], "f.jsonl: holds no rows"),
        ([sample("p", True, "1")], [0], "--k 0"),
        ([sample("p", True, "1")], [], "--k"),
    ],
)
def test_bad_metrics_files_name_file_and_line(tmp_path, rows, ks, says):
    with pytest.raises(InputError) as caught:
        metrics_rows(write(tmp_path / "f.jsonl", rows), ks)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_grade_file_keeps_order_and_tells_outcomes_apart(tmp_path):
    rows = [
        {"id": "a", "gold": "1/2", "completion": "so \\boxed{0.50}"},
        {"id": 7, "gold": "72", "completion": "#### 73"},
        {"id": "c", "gold": "72", "completion": "I do not know"},
        {"id": "d", "gold": 72, "completion": "first, 70 + 2 is 7", "finished": False},
    ]
    found = grade_rows(write(tmp_path / "f.jsonl", rows))
    assert found == [
        {"id": "a", "correct": True, "outcome": "correct", "extracted": "1/2"},
        {"id": 7, "correct": False, "outcome": "wrong", "extracted": "73"},
        {"id": "c", "correct": False, "outcome": "no_answer", "extracted": None},
        {"id": "d", "correct": False, "outcome": "truncated", "extracted": None},
    ]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"id": "a", "gold": " ", "completion": ""}, "f.jsonl:1: gold is empty"),
        ({"id": "a", "gold": None, "completion": ""}, "f.jsonl:1: gold is null"),
        ({"id": "a", "gold": "1"}, "f.jsonl:1: key 'completion' is missing"),
        ({"id": None, "gold": "1", "completion": ""}, "f.jsonl:1: id is null"),
        ({"id": "a", "gold": "1", "completion": "", "finished": 0}, "f.jsonl:1: finished is 0"),
        (
            {"id": "a", "gold": "1", "completion": "", "finishd": False},
            "f.jsonl:1: unknown key 'finishd'; did you mean 'finished'?",
        ),
    ],
)
def test_bad_grade_files_name_file_and_line(tmp_path, row, says):
    with pytest.raises(InputError) as caught:
        grade_rows(write(tmp_path / "f.jsonl", [row]))
    assert says in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.jsonl: cannot be read"):
        grade_rows(tmp_path / "nowhere.jsonl")


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(-9, 9)), min_size=1, max_size=7),
    st.integers(1, 7),
)
@settings(max_examples=100, deadline=None)
def test_best_of_k_is_the_mean_over_all_draws(samples, k):
    k = min(k, len(samples))
    scores, worth = zip(*samples, strict=True)
    drawn = []
    for rows in combinations(range(len(samples)), k):
        top = max(scores[i] for i in rows)
        tied = [worth[i] for i in rows if scores[i] == top]
        drawn.append(Fraction(sum(tied), len(tied)))
    expected = float(sum(drawn) / len(drawn))
    assert best_of_k(scores, worth, k) == pytest.approx(expected, abs=1e-12)


def test_best_of_k_ends_where_it_must():
    scores, worth = [3.0, 1.0, 2.0, 0.5], [0.1, 0.9, 0.4, 0.2]
    assert best_of_k(scores, worth, 1) == pytest.approx(0.4)
    assert best_of_k(scores, worth, 4) == 0.1
    assert best_of_k(list(range(3000)), [1.0] * 3000, 1500) == pytest.approx(1.0)
    with pytest.raises(InputError, match="draw more samples or lower k"):
        best_of_k(scores, worth, 5)
    with pytest.raises(InputError, match="4 scores and 3 worths"):
        best_of_k(scores, worth[:3], 2)
