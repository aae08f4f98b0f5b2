"""How much of a test set is in the training set: equal problems and shared word n-grams.

The n-gram test follows Brown et al. (2020, appendix C) in spirit: a test problem is flagged when
a large share of its word n-grams also stands somewhere in the training questions. Sibling
problems (one figure, other numbers) are flagged as well; equal problems are counted apart.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from harness.errors import InputError
from harness.tasks.source import collapse, words
from harness.tasks.task import Problem

Ngram = tuple[str, ...]


@dataclass(frozen=True)
class Offender:
    """A flagged test problem and the training problem that shares most of its n-grams."""

    test_id: str
    train_id: str
    share: float


@dataclass(frozen=True)
class ContaminationReport:
    """What `overlap` found.

    Attributes:
        train: number of training problems.
        test: number of test problems.
        n: words in an n-gram; ``None`` where only whole questions were compared.
        threshold: share of its n-grams from which a test problem is flagged.
        exact: (test id, train id) with one text, case and spacing aside.
        same_words: (test id, train id) with the same words and numbers but other signs or
            punctuation; these can be different problems (+ against -).
        flagged: number of test problems at or above the threshold, the exact ones included.
        flagged_share: the same over ``test``.
        worst: the flagged problems with the largest shares, at most ``worst_kept``.
    """

    train: int
    test: int
    n: int | None
    threshold: float
    exact: tuple[tuple[str, str], ...]
    same_words: tuple[tuple[str, str], ...]
    flagged: int
    flagged_share: float
    worst: tuple[Offender, ...]

    def __str__(self) -> str:
        how = f"at least {self.threshold:.0%} of their {self.n}-grams" if self.n else "their text"
        return (
            f"{len(self.exact)} of {self.test} test problems are in the {self.train} training "
            f"problems; {self.flagged} ({self.flagged_share:.1%}) share {how}"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values for a plan or a lock file."""
        return asdict(self)


def _text(problem: Problem) -> str:
    return collapse(problem.question).casefold()


def _ngrams(tokens: Sequence[str], n: int) -> set[Ngram]:
    return {tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)}


def _pairs(
    train: dict[str, str], test: dict[str, str], skip: set[str] | None = None
) -> tuple[tuple[str, str], ...]:
    """(test id, train id) of problems with equal text; ids -> texts."""
    first: dict[str, str] = {}
    for name, text in train.items():
        first.setdefault(text, name)
    return tuple(
        (name, first[text])
        for name, text in test.items()
        if text in first and name not in (skip or set())
    )


def overlap(
    train: Sequence[Problem],
    test: Sequence[Problem],
    n: int = 8,
    *,
    threshold: float = 0.5,
    whole: bool = False,
    worst_kept: int = 20,
) -> ContaminationReport:
    """Compare two sets of problems by their questions.

    A question with fewer than ``n`` words (letters, not numbers) is compared whole, with its
    signs: of ``3+4-2=`` and ``3-4+2=`` the n-grams would be the same.

    Args:
        train: problems trained on.
        test: problems evaluated on.
        n: words in an n-gram.
        threshold: share of a test problem's n-grams, in (0, 1], from which it is flagged.
        whole: compare whole questions only; for procedural tasks, whose questions share a
            template by design.
        worst_kept: how many flagged problems to list.

    Raises:
        InputError: for an empty set, ``n`` below 1 or a threshold outside (0, 1].
    """
    if not train or not test:
        raise InputError(
            f"contamination: {len(train)} training and {len(test)} test problems; "
            "neither may be empty"
        )
    if n < 1 or not 0 < threshold <= 1:
        raise InputError(
            f"contamination: n = {n}, threshold = {threshold}; need n >= 1 and 0 < threshold <= 1"
        )
    exact = _pairs({p.id: _text(p) for p in train}, {p.id: _text(p) for p in test})
    exact_ids = {name for name, _ in exact}
    offenders = [Offender(test_id, train_id, 1.0) for test_id, train_id in exact]
    same_words: tuple[tuple[str, str], ...] = ()
    if not whole:
        train_words = {p.id: words(p.question) for p in train}
        test_words = {p.id: words(p.question) for p in test}
        same_words = _pairs(
            {name: " ".join(tokens) for name, tokens in train_words.items()},
            {name: " ".join(tokens) for name, tokens in test_words.items()},
            skip=exact_ids,
        )
        rest = {
            name: tokens
            for name, tokens in test_words.items()
            if name not in exact_ids and _is_long(tokens, n)
        }
        offenders += _offenders(train_words, rest, n, threshold)
    offenders.sort(key=lambda o: (-o.share, o.test_id))
    return ContaminationReport(
        train=len(train),
        test=len(test),
        n=None if whole else n,
        threshold=threshold,
        exact=exact,
        same_words=same_words,
        flagged=len(offenders),
        flagged_share=len(offenders) / len(test),
        worst=tuple(offenders[:worst_kept]),
    )


def _is_long(tokens: Sequence[str], n: int) -> bool:
    return sum(token[0].isalpha() for token in tokens) >= n


def _offenders(
    train: dict[str, list[str]], test: dict[str, list[str]], n: int, threshold: float
) -> list[Offender]:
    """Test problems (id -> words) with at least ``threshold`` of their n-grams in training."""
    grams = {name: _ngrams(tokens, n) for name, tokens in test.items()}
    owners: dict[Ngram, list[str]] = defaultdict(list)  # test n-gram -> training problems with it
    wanted: set[Ngram] = set().union(*grams.values())
    for name, tokens in train.items():
        for gram in _ngrams(tokens, n) & wanted:
            owners[gram].append(name)
    found = []
    for name, mine in grams.items():
        share = sum(gram in owners for gram in mine) / len(mine)
        if share >= threshold:
            votes = Counter(owner for gram in mine for owner in owners.get(gram, ()))
            found.append(Offender(name, min(votes, key=lambda o: (-votes[o], o)), share))
    return found
