"""The review task: its words, its splits, what its demonstrations are worth."""

from __future__ import annotations

import random
import statistics
from itertools import islice

import pytest

from harness.errors import InputError
from harness.recipes import RECIPES
from harness.rewards.gold import ReviewSentiment
from harness.tasks import reviews
from harness.tasks.loading import load_problems


def gold(mood: float, count: int = 600) -> list[float]:
    rng = random.Random(1)
    openings = [reviews.draw_opening(rng)[0] for _ in range(count)]
    return ReviewSentiment()(openings, [reviews.write(mood, rng) for _ in range(count)])


def test_the_splits_share_no_opening_and_every_seed_draws_its_own():
    drawn = {
        split: {p.question for seed in (0, 1) for p in reviews.load(split, seed=seed)}
        for split in reviews.SPLITS
    }
    assert not drawn["train"] & drawn["test"]
    assert not drawn["train"] & drawn["validation"]
    assert not drawn["validation"] & drawn["test"]
    first, again, other = (reviews.load("train", seed=s) for s in (0, 0, 1))
    assert first == again
    assert first != other
    assert len({p.id for p in first}) == len(first) == 512
    assert {p.subject for p in first} == set(reviews.OPENINGS)
    assert {p.answer for p in first} == {""}


def test_streams_go_on_for_ever_and_are_what_load_draws_from():
    stream = list(islice(reviews.stream("test", seed=3), 2000))
    assert {reviews.split_of(p.question) for p in stream} == {"test"}
    distinct = list(dict.fromkeys(stream))
    assert reviews.load("test", seed=3) == distinct[:100]


def test_every_word_is_in_the_vocabulary_and_comes_back_from_its_tokens():
    tokenizer = RECIPES["reviews"].tokenizer()
    rng = random.Random(0)
    for _ in range(500):
        text = f"{reviews.draw_opening(rng)[0]} {reviews.write(0.5, rng)}"
        assert set(text.split()) <= set(reviews.WORDS)
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == len(reviews.WORDS) + 3


def test_demonstrations_fit_and_end_and_leave_room_on_both_sides():
    tokenizer = RECIPES["reviews"].tokenizer()
    rows = list(islice(RECIPES["reviews"].demonstrations(0), 1000))
    assert {reviews.split_of(p.question) for p, _ in rows} == {"train"}
    lengths = [len(tokenizer(text)["input_ids"]) + 1 for _, text in rows]  # and the end
    assert sum(n <= 24 for n in lengths) / len(lengths) > 0.97
    assert all(text.endswith(" .") for _, text in rows)
    scores = ReviewSentiment()([p.question for p, _ in rows], [text for _, text in rows])
    assert abs(statistics.mean(scores)) < 0.2
    assert statistics.pstdev(scores) > 0.3
    assert sum(s > 0.5 for s in scores) > 50
    assert sum(s < -0.5 for s in scores) > 50


def test_a_reviews_mood_is_what_the_gold_scorer_reads():
    low, middle, high = (statistics.mean(gold(mood)) for mood in (0.0, 0.5, 1.0))
    assert low < -0.3 < middle < 0.3 < high


def test_written_reviews_negate_grade_and_contrast():
    rng = random.Random(0)
    texts = [f" {reviews.write(0.5, rng)} " for _ in range(2000)]
    for kind in (reviews.NOT, reviews.MORE, reviews.LESS, ("but",)):
        assert sum(any(f" {word} " in text for word in kind) for text in texts) > 100


def test_bad_arguments_are_refused():
    with pytest.raises(InputError, match="Did you mean 'train'"):
        reviews.load("trian")
    with pytest.raises(InputError, match="limit is 0"):
        reviews.load("train", limit=0)
    with pytest.raises(InputError, match=r"no more than \d+ test openings; lower limit"):
        reviews.load("test", limit=100_000)


def test_the_loader_takes_a_task_without_answers():
    found = load_problems("reviews", "validation", limit=20, seed=5)
    assert found.source == "generated"
    assert len(found.problems) == 20
