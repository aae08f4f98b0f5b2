"""Gold rewards: fixed scorers of text that judge completions and that no arm's model is.

A reward model is learned from preferences drawn by one of these, or from people's; the gap between
the two is what over-optimisation is about (Gao et al., arXiv:2210.10760).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from harness.errors import InputError, suggest
from harness.rewards.learned import GoldScorer
from harness.spec.reward import LearnedSpec
from harness.tasks.reviews import STOP


@dataclass(frozen=True)
class ReviewSentiment:
    """The sentiment of a review by VADER's human-rated lexicon, and a price on empty writing.

    gold = compound(first uses) - ``repetition`` x repeats - ``unfinished`` [no full stop], cut to
    [-1, 1]. ``compound`` is VADER's normalised sum over opening and completion (Hutto and Gilbert,
    ICWSM 2014), with its rules for negation, degree and ``but``. A rated word counts where it
    stands first; each further use of it, or of any word right after itself, is a repeat. So a
    string of praise earns little and costs much, which preferences between ordinary reviews
    hardly ever show.

    Attributes:
        repetition: price of each repeat.
        unfinished: price of a completion that does not end in a full stop.
    """

    version: ClassVar[int] = 1
    repetition: float = 0.2
    unfinished: float = 0.5

    def __call__(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        return [self._score(p, c) for p, c in zip(prompts, completions, strict=True)]

    def _score(self, prompt: str, completion: str) -> float:
        analyzer = _vader()
        kept: list[str] = []
        seen: set[str] = set()
        repeats, previous = 0, ""
        for word in f"{prompt} {completion}".lower().split():
            rated = word in analyzer.lexicon
            if word == previous or (rated and word in seen):
                repeats += 1
            else:
                kept.append(word)
            seen.add(word)
            previous = word
        score = analyzer.polarity_scores(" ".join(kept))["compound"]
        ended = completion.rstrip().endswith(STOP)
        score -= self.repetition * repeats + (0.0 if ended else self.unfinished)
        return max(-1.0, min(1.0, score))


@lru_cache(maxsize=1)
def _vader() -> Any:
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    return SentimentIntensityAnalyzer()


class ClassifierGold:
    """The log-odds of a text classifier's positive class, such as siebert's sentiment model.

    Log-odds and not the probability, which saturates: P(positive) of .999 and .9999 are one
    reward for a policy and two for a preference. Read on prompt and completion, joined by nothing.

    Args:
        name: of a sequence-classification model on the hub, or a local folder.
        revision: the commit of a model on the hub.
        device: where it runs.
        batch: texts read at once; moves memory, not numbers.

    Raises:
        InputError: it cannot be loaded, is on the hub and not pinned, or has no class that is
            called positive.
    """

    version: ClassVar[int] = 1

    def __init__(
        self, name: str, revision: str | None = None, device: str = "cpu", batch: int = 64
    ) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        if revision is None and not Path(name).is_dir():
            raise InputError(
                f"reward.learned.gold_model: {name!r} is no folder here; if it is a hub id, pin it "
                "with reward.learned.gold_revision (a commit hash)"
            )
        options: Any = {"revision": revision} if revision else {}
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(name, **options)
            model: Any = AutoModelForSequenceClassification.from_pretrained(
                name, dtype=torch.float32, **options
            )
        except (OSError, ValueError) as error:
            line = str(error).splitlines()[0]
            raise InputError(
                f"reward.learned.gold_model: {name!r} cannot be loaded ({line}); download it "
                f"(hf download {name}) or name a local folder"
            ) from error
        labels = {label.lower(): i for i, label in model.config.id2label.items()}
        positive = next((i for label, i in labels.items() if label in _POSITIVE), None)
        if positive is None:
            raise InputError(
                f"reward.learned.gold_model: {name!r} has classes {sorted(labels)}, none of them "
                f"{' or '.join(_POSITIVE)}"
            )
        self._model, self._positive, self._batch = model.to(device).eval(), positive, batch
        self._torch, self._device = torch, device

    def __call__(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        texts = [p + c for p, c in zip(prompts, completions, strict=True)]
        found: list[float] = []
        with self._torch.no_grad():
            for at in range(0, len(texts), self._batch):
                rows = self._tokenizer(
                    texts[at : at + self._batch], return_tensors="pt", padding=True,
                    truncation=True,
                ).to(self._device)  # fmt: skip
                logits = self._model(**rows).logits.float()
                other = logits.clone()
                other[:, self._positive] = float("-inf")
                odds = logits[:, self._positive] - self._torch.logsumexp(other, 1)
                found += odds.tolist()
        return found


_POSITIVE = ("positive", "pos", "label_1")
SCORERS: dict[str, type[ReviewSentiment]] = {"review_sentiment": ReviewSentiment}
CLASSIFIER = "classifier"


def make_gold(spec: LearnedSpec, device: str = "cpu") -> GoldScorer:
    """The gold scorer that a spec names.

    Raises:
        InputError: no such scorer, or ``gold_model`` missing or out of place.
    """
    if (spec.gold == CLASSIFIER) != (spec.gold_model is not None):
        raise InputError(
            f"reward.learned.gold {spec.gold!r} "
            + ("takes no gold_model" if spec.gold_model else "needs a gold_model; name one")
        )
    if spec.gold == CLASSIFIER:
        return ClassifierGold(str(spec.gold_model), spec.gold_revision, device)
    if spec.gold not in SCORERS:
        known = [*SCORERS, CLASSIFIER]
        raise InputError(
            f"reward.learned.gold: no scorer {spec.gold!r}.{suggest(spec.gold, known)}"
        )
    return SCORERS[spec.gold]()


def gold_identity(spec: LearnedSpec) -> dict[str, Any]:
    """What a gold reward is pinned by, without loading it; a local folder by its weights' bytes."""
    if spec.gold in SCORERS:
        scorer = SCORERS[spec.gold]()
        return {
            "gold": spec.gold, "version": scorer.version, "repetition": scorer.repetition,
            "unfinished": scorer.unfinished,
        }  # fmt: skip
    found = {"gold": spec.gold, "model": spec.gold_model, "version": ClassifierGold.version}
    folder = Path(str(spec.gold_model))
    if not folder.is_dir():
        return found | {"revision": spec.gold_revision}
    files = sorted((*folder.glob("*.safetensors"), *folder.glob("*.json")))
    return found | {"files": {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}}
