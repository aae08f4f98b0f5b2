"""Procedural film reviews in English words: the learned-reward task that needs no download.

A question is an opening such as ``i thought the acting was``; the completion goes on and ends with
a full stop. There is no right answer: completions are judged by a gold scorer (``rewards/gold``).
Written reviews hold what makes sentiment more than a count of words: negation (``not good``),
degree (``barely good``), contrast (``good but ...``, where what follows weighs more), and clauses
that say nothing either way.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator

from harness.errors import InputError, suggest
from harness.tasks.task import Problem

SPLITS = ("train", "validation", "test")
GENERATOR_VERSION = 1  # raise when a seed would give other openings or reviews
STOP = "."

_DEFAULT_COUNT = {"train": 512, "validation": 100, "test": 100}
_HELD_OUT = {0: "test", 1: "test", 2: "validation"}  # by hash modulo 10; the rest is train
_PATIENCE = 2000
_STREAM = f"reviews/{GENERATOR_VERSION}"


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS = _words(
    "film movie story plot acting cast music script ending dialogue pace picture lead sequel "
    "costumes drama scene opening direction camera"
)
GENRES = _words("noir family western spy silent musical science animated")
PEOPLE = _words("i we they reviewers viewers people")
GOOD = _words(
    "good great excellent wonderful brilliant amazing superb beautiful charming delightful "
    "enjoyable fun funny clever impressive perfect lovely nice fine entertaining"
)
BAD = _words(
    "bad terrible awful horrible boring dull weak poor stupid annoying disappointing ugly sad "
    "dreadful pathetic lame painful messy dumb ridiculous"
)
PLAIN = _words(
    "long short quiet slow loud simple ordinary new old dark familiar big small usual plain"
)
MORE = _words("very really extremely so totally")
LESS = _words("slightly somewhat barely almost")
NOT = _words("not never")
LIKED = _words("loved liked enjoyed admired praised")
LOATHED = _words("hated disliked regretted missed avoided")
SAW = _words("saw watched followed discussed rented")
_GLUE = _words(
    "the was a and but in for with it at time yesterday again on this last of , . thought "
    "said found felt seemed looked"
)

WORDS = tuple(
    dict.fromkeys(
        (*_GLUE, *NOUNS, *GENRES, *PEOPLE, *GOOD, *BAD, *PLAIN, *MORE, *LESS, *NOT, *LIKED,
         *LOATHED, *SAW)
    )
)  # fmt: skip
OPENINGS = {
    "verdict": "the {noun} was",
    "opinion": "{person} thought the {noun} was",
    "genre": "for a {genre} {noun} , it was",
    "impression": "{person} found the {noun}",
    "scene": "in this {genre} film , the {noun} was",
    "report": "{person} said the {noun} of this {genre} film was",
}


def _is(mood: str, rng: random.Random) -> str:
    """An adjective phrase of a mood; negation and degree leave the mood what it is."""
    words = {"good": GOOD, "bad": BAD, "plain": PLAIN}
    if mood != "plain" and rng.random() < 0.2:
        other = "bad" if mood == "good" else "good"
        return f"{rng.choice(NOT)} {rng.choice(words[other])}"
    degree = rng.random()
    adverb = f"{rng.choice(MORE)} " if degree < 0.2 else ""
    adverb = f"{rng.choice(LESS)} " if degree > 0.9 else adverb
    return f"{adverb}{rng.choice(words[mood])}"


def _clause(mood: str, rng: random.Random) -> str:
    """A whole clause."""
    if rng.random() < 0.35:
        verbs = {"good": LIKED, "bad": LOATHED, "plain": SAW}[mood]
        tail = rng.choice(("", "", " yesterday", " again", " last time"))
        return f"{rng.choice(PEOPLE)} {rng.choice(verbs)} the {rng.choice(NOUNS)}{tail}"
    verb = rng.choice(("was", "was", "seemed", "looked", "felt"))
    return f"the {rng.choice(NOUNS)} {verb} {_is(mood, rng)}"


def write(mood: float, rng: random.Random) -> str:
    """A completion of any opening.

    Args:
        mood: share of good among the clauses that are good or bad.
        rng: where chance comes from.
    """

    def draw() -> str:
        if rng.random() < 0.3:
            return "plain"
        return "good" if rng.random() < mood else "bad"

    text = _is(draw(), rng)
    for _ in range(rng.choice((0, 1, 1, 2))):
        text += f" {rng.choice(('and', 'but', ',', 'and'))} {_clause(draw(), rng)}"
    return f"{text} {STOP}"


def draw_opening(rng: random.Random) -> tuple[str, str]:
    """An opening and its kind."""
    kind = rng.choice(tuple(OPENINGS))
    noun, genre, person = rng.choice(NOUNS), rng.choice(GENRES), rng.choice(PEOPLE)
    return OPENINGS[kind].format(noun=noun, genre=genre, person=person), kind


def split_of(question: str) -> str:
    """The split an opening belongs to, by its text alone: splits cannot share an opening."""
    bucket = int.from_bytes(hashlib.sha256(question.encode()).digest()[:8], "big") % 10
    return _HELD_OUT.get(bucket, "train")


def stream(split: str, *, seed: int = 0) -> Iterator[Problem]:
    """Problems of one split without end; an opening may come again."""
    _check(split)
    rng = random.Random(f"{_STREAM}/{split}/{seed}")
    while True:
        question, kind = draw_opening(rng)
        if split_of(question) == split:
            yield Problem(f"reviews/{question}", question, "", subject=kind)


def load(split: str, *, seed: int = 0, limit: int | None = None) -> list[Problem]:
    """Distinct problems of one split; ``answer`` is empty, for none is right.

    Args:
        split: ``train``, ``validation`` or ``test``; disjoint by the opening's hash.
        seed: another seed draws other openings of the same split.
        limit: how many; 512 train, 100 validation and 100 test problems when None.

    Raises:
        InputError: an argument is out of range, or there are not so many distinct openings.
    """
    if limit is not None and limit < 1:
        raise InputError(f"reviews: limit is {limit}; give a number of problems of at least 1.")
    wanted = _DEFAULT_COUNT.get(split, 1) if limit is None else limit
    found: dict[str, Problem] = {}
    stale = 0
    for problem in stream(split, seed=seed):
        stale = stale + 1 if problem.id in found else 0
        found[problem.id] = problem
        if len(found) == wanted:
            return list(found.values())
        if stale >= _PATIENCE:
            break
    raise InputError(
        f"reviews: there are no more than {len(found)} {split} openings; lower limit (now {limit})"
    )


def _check(split: str) -> None:
    if split not in SPLITS:
        raise InputError(f"reviews: split is {split!r}.{suggest(split, SPLITS)}")
