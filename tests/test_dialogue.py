"""The arithmetic of several turns: what is asked, carried on, paid, and shown to the base."""

from __future__ import annotations

import itertools

import pytest

from harness.errors import InputError
from harness.recipes import RECIPES
from harness.tasks import TASKS
from harness.tasks.dialogue import LARGEST, TURNS, ArithmeticDialogue, answer_of, load
from harness.tasks.task import Problem

PROBLEM = Problem("p", "9-3+4= -2+5= +1-4=", "10")
PLAY = ArithmeticDialogue()


@pytest.mark.parametrize("turns", TURNS)
def test_the_answer_is_the_value_of_all_turns_together(turns: int):
    problems = load("train", limit=200, turns=turns)
    assert len({p.id for p in problems}) == 200
    for p in problems:
        whole = p.question.replace("=", "").replace(" ", "")
        assert eval(whole) == int(p.answer)  # sums and differences alone: from left to right
        assert PLAY.turns(p) == turns == p.question.count("=")
        values = [eval(whole[: i + 1]) for i in range(len(whole)) if whole[i].isdigit()]
        assert all(0 <= value <= LARGEST for value in values)


def test_splits_share_no_question():
    found = [{p.question for p in load(split, limit=300)} for split in ("train", "test")]
    assert not found[0] & found[1]


def test_turns_go_on_from_what_was_answered():
    """By hand: 10 is right; 10 - 2 + 5 is 13, so 14 is a slip, from which 14 + 1 - 4 = 11."""
    assert PLAY.reset(PROBLEM) == "9-3+4="
    said = ["9-3=6;6+4=10;A10"]
    assert PLAY.step(PROBLEM, said) == ("10-2+5=", 1.0)
    said.append("A14")
    assert PLAY.step(PROBLEM, said) == ("14+1-4=", 0.0)
    assert PLAY.step(PROBLEM, [*said, "14+1=15;15-4=11;A11"]) == (None, 1.0)
    assert PLAY.step(PROBLEM, [*said, "A10"]) == (
        None,
        0.0,
    )  # the problem's, not the turn's


@pytest.mark.parametrize("text", ["", "10", "9-3=6", "A", "A-1", "A1000", "A10;", "A10;10", "A1A0"])
def test_what_is_no_answer_ends_the_episode(text: str):
    assert answer_of(text) is None
    assert PLAY.step(PROBLEM, [text]) == (None, 0.0)


def test_no_more_is_shown_than_is_announced():
    shown, said = 0, []
    for text in ("A999", "A998", "A0"):
        said.append(text)
        reply, _ = PLAY.step(PROBLEM, said)
        shown += len(reply or "")
    assert shown == PLAY.room(PROBLEM) == 16


def test_a_chain_of_one_turn_is_the_ordinary_task():
    for p in TASKS["arithmetic"].generate("test", seed=0, limit=50, levels=["Level 1"]):  # type: ignore[misc]
        assert (PLAY.reset(p), PLAY.turns(p), PLAY.room(p)) == (p.question, 1, 0)
        assert PLAY.step(p, [p.solution or ""]) == (None, 1.0)


def test_the_base_is_shown_what_the_environment_would_show():
    """Slips of a demonstration are carried on, also below 0, where the episode ends."""
    recipe = RECIPES["arithmetic_dialogue"]
    early = slips = 0
    for turns in itertools.islice(recipe.episodes(0), 3000):
        for (_, written), (shown, _) in itertools.pairwise(turns):
            assert shown.startswith(answer_of(written) or "never")
        early += len(turns) < 3
        slips += any(int(answer_of(w) or -1) != eval(s[:-1]) for s, w in turns)
        assert sum(len(s) for s, _ in turns) <= 22
        assert sum(len(s) + len(w) + 1 for s, w in turns) <= recipe.context
    assert 0 < early < 100
    assert slips > 500


def test_arguments_are_checked():
    for options, words in (({"turns": 5}, "1 to 4"), ({"limit": 0}, "at least 1")):
        with pytest.raises(InputError, match=words):
            load("train", **options)
    with pytest.raises(InputError, match="no fresh test question of 1 turns"):
        load("test", limit=2000, turns=1)
    with pytest.raises(InputError, match="Did you mean 'test'"):
        load("tests")
