"""Preference data: pairs of a chosen and a rejected completion of one prompt, and what they cost.

Labels are drawn by Bradley and Terry's model from gold scores: P(first preferred) =
sigmoid(label_scale (gold_1 - gold_2)), so that they are as noisy as people are. One data set serves
the reward model and every arm that learns from preferences directly.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from harness.data import PromptSet
from harness.errors import InputError
from harness.identity import stream_seed
from harness.rewards.learned import GoldScorer
from harness.samplers.sampler import Decoding, Sampler
from harness.spec.reward import PreferenceSpec

VERSION = 1  # raise when a spec would give other pairs
_ROUNDS = 50  # of drawing, until there are enough pairs of different completions


@dataclass(frozen=True)
class Pair:
    """Two completions of one prompt.

    Attributes:
        prompt_ids, chosen_ids, rejected_ids: tokens; completions with their end of sequence.
        chosen_gold, rejected_gold: their gold scores; None where people labelled them.
    """

    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]
    chosen_gold: float | None = None
    rejected_gold: float | None = None


@dataclass(frozen=True)
class Preferences:
    """Pairs to train on and pairs held out, of other prompts.

    Attributes:
        completions: how many were sampled for them, pairs of equal ones included.
        completion_tokens: their tokens.
        labels: how many pairs were labelled.
        flipped: share of labels that go against the gold scores; None where there are none.
    """

    train: tuple[Pair, ...]
    heldout: tuple[Pair, ...]
    completions: int = 0
    completion_tokens: int = 0
    labels: int = 0
    flipped: float | None = None

    @property
    def sha256(self) -> str:
        """Content hash of all pairs in their order."""
        text = json.dumps([[asdict(p) for p in pairs] for pairs in (self.train, self.heldout)])
        return hashlib.sha256(text.encode()).hexdigest()

    def cost(self) -> dict[str, Any]:
        """What was bought, for a report."""
        return {
            "pairs": len(self.train), "heldout_pairs": len(self.heldout), "labels": self.labels,
            "completions": self.completions, "completion_tokens": self.completion_tokens,
            "flipped": self.flipped,
        }  # fmt: skip


def sampled_preferences(
    spec: PreferenceSpec,
    train: PromptSet,
    heldout: PromptSet,
    sampler: Sampler,
    gold: GoldScorer,
    *,
    max_new_tokens: int,
    stop: tuple[str, ...] = (),
) -> Preferences:
    """Two completions of the base for each prompt, labelled by the gold scores with noise.

    Prompts come in a shuffled order of their own, again and again until there are enough pairs.
    Two equal completions are no pair; they are drawn, counted, and left out.

    Raises:
        InputError: the base hardly ever writes two different completions.
    """
    decoding = Decoding(spec.temperature, 1.0, max_new_tokens, stop)
    counts = {"completions": 0, "completion_tokens": 0, "against": 0}
    found = {
        name: _draw(spec, name, count, prompts, sampler, gold, decoding, counts)
        for name, count, prompts in (
            ("train", spec.pairs, train), ("heldout", spec.heldout, heldout)
        )
    }  # fmt: skip
    labels = spec.pairs + spec.heldout
    return Preferences(
        found["train"],
        found["heldout"],
        counts["completions"],
        counts["completion_tokens"],
        labels,
        counts["against"] / labels,
    )


def _draw(
    spec: PreferenceSpec,
    name: str,
    count: int,
    prompts: PromptSet,
    sampler: Sampler,
    gold: GoldScorer,
    decoding: Decoding,
    counts: dict[str, int],
) -> tuple[Pair, ...]:
    pairs: list[Pair] = []
    coin = torch.Generator().manual_seed(stream_seed(spec.seed, "labels", name))
    for round_ in range(_ROUNDS):
        order = torch.Generator().manual_seed(stream_seed(spec.seed, "pairs", name, round_))
        rows = torch.randperm(len(prompts.prompts), generator=order).tolist()
        rows = rows[: count - len(pairs)]
        asked = [prompts.prompts[i] for i in rows]
        drawn = sampler.draw(
            asked, 2, decoding, stream_seed(spec.seed, "preferences", name, round_)
        )
        questions = [prompts.problems[i].question for i in rows for _ in range(2)]
        scores = gold(questions, drawn.texts)
        lengths = drawn.mask.sum(1).tolist()
        counts["completions"] += len(lengths)
        counts["completion_tokens"] += sum(lengths)
        ids = [
            tuple(row[:n]) for row, n in zip(drawn.completion_ids.tolist(), lengths, strict=True)
        ]
        for i, prompt in enumerate(asked):
            a, b = 2 * i, 2 * i + 1
            luck = float(torch.rand((), generator=coin, dtype=torch.float64))
            if ids[a] == ids[b]:
                continue
            first = luck < _sigmoid(spec.label_scale * (scores[a] - scores[b]))
            best, worst = (a, b) if first else (b, a)
            counts["against"] += scores[best] < scores[worst]
            pairs.append(Pair(prompt, ids[best], ids[worst], scores[best], scores[worst]))
        if len(pairs) >= count:
            return tuple(pairs)
    raise InputError(
        f"reward.learned.model.preferences: {len(pairs)} of {count} {name} pairs after {_ROUNDS} "
        "passes over the prompts; ask for fewer pairs, give more prompts (data), or raise the "
        "temperature"
    )


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def to_json(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Pairs as plain data, for a process that trains on them."""
    return [asdict(pair) for pair in pairs]


def from_json(rows: Sequence[dict[str, Any]]) -> tuple[Pair, ...]:
    """The inverse of ``to_json``."""
    ids = ("prompt_ids", "chosen_ids", "rejected_ids")
    return tuple(Pair(**{**row, **{key: tuple(row[key]) for key in ids}}) for row in rows)
