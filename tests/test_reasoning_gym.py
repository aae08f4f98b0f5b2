"""reasoning-gym families: plain answers, and splits that share no question."""

from __future__ import annotations

import re

import pytest

from harness.errors import InputError
from harness.tasks.loading import load_problems
from harness.tasks.reasoning_gym import FAMILIES, split_of


def gym(split: str, limit: int | None, seed: int = 0, **options):
    return load_problems("reasoning_gym", split, limit=limit, seed=seed, options=options)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_plain_number_answers_and_no_repeats(family):
    problems = gym("test", 40, family=family).problems
    number = r"-?\d+(\.\d+)?(/\d+)?"
    for problem in problems:
        assert re.fullmatch(number, problem.answer), problem
    assert len({p.question for p in problems}) == 40


@pytest.mark.parametrize("family", ["chain_sum", "simple_equations", "gsm_symbolic"])
def test_splits_are_disjoint_at_any_seed_and_deterministic(family):
    parts = {
        (split, seed): gym(split, 150, seed, family=family)
        for split in ("train", "validation", "test")
        for seed in (0, 1)
    }
    texts = {s: {p.question for key, v in parts.items() if key[0] == s for p in v.problems}
             for s in ("train", "validation", "test")}  # fmt: skip
    assert texts["train"].isdisjoint(texts["test"] | texts["validation"])
    assert texts["validation"].isdisjoint(texts["test"])
    assert parts["train", 0].sha256 == gym("train", 150, 0, family=family).sha256
    assert parts["train", 0].sha256 != parts["train", 1].sha256
    longer = gym("train", 200, 0, family=family).problems
    assert longer[:150] == parts["train", 0].problems
    assert gym("train", 50, 0, family=family).problems == longer[:50]


def test_offset_of_a_generator_skips_problems():
    whole = gym("train", 30)
    part = load_problems("reasoning_gym", "train", limit=10, offset=20)
    assert part.problems == whole.problems[20:]


def test_a_small_family_ends_in_an_error_not_in_repeats():
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    split = {s: gym(s, 20, family="chain_sum", config=config) for s in ("train", "test")}
    assert all(split_of(p.question) == s for s, v in split.items() for p in v.problems)
    with pytest.raises(InputError, match="limit 300, but its test split has only"):
        gym("test", 300, family="chain_sum", config=config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"family": "chain_sums"}, "unknown family 'chain_sums'. Did you mean 'chain_sum'"),
        ({"family": "calendar_arithmetic"}, "answers that are not plain numbers"),
        ({"config": {"terms": 3}}, "unexpected keyword argument 'terms'"),
        ({"config": {"min_terms": 9}}, "max_terms must be >= min_terms"),
        ({"config": {"seed": 1}}, "config.seed is set by the task"),
        ({"famly": "chain_sum"}, "unknown option 'famly'"),
    ],
)
def test_bad_generator_options_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        gym("train", 3, **options)


def test_a_generator_needs_a_limit_and_no_file():
    with pytest.raises(InputError, match="has no end; give it a limit"):
        gym("train", None)
    with pytest.raises(InputError, match="source 'local', but it is generated"):
        load_problems("reasoning_gym", "train", source="local", limit=3)
    with pytest.raises(InputError, match=r"sha256 .* expected 1111"):
        load_problems("reasoning_gym", "train", limit=3, sha256="1" * 64)
