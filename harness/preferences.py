"""Preference data: pairs of a chosen and a rejected completion of one prompt, and what they cost.

Labels are drawn by Bradley and Terry's model from gold scores: P(first preferred) =
sigmoid(label_scale (gold_1 - gold_2)), so that they are as noisy as people are; or people's, from a
data set. One data set serves the reward model and every arm that learns from preferences directly.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from harness.cost.flops import Generation, generate
from harness.cost.shape import ModelShape
from harness.data import PromptSet
from harness.errors import InputError
from harness.identity import stream_seed
from harness.models import Base
from harness.preference_data import Encoded, read_pairs
from harness.rewards.learned import GoldScorer
from harness.samplers.hf import HFSampler
from harness.samplers.sampler import Decoding, Drawn
from harness.spec.reward import PreferenceSpec

VERSION = 2  # raise when a spec would give other pairs
_ROUNDS = 50  # of drawing, until there are enough pairs of different completions
_ENGINE_BATCH = 1024  # completions drawn at once; moves memory, not numbers


@dataclass(frozen=True)
class Pair:
    """Two completions of one prompt.

    Attributes:
        prompt_ids, chosen_ids, rejected_ids: tokens; completions with their end of sequence.
        chosen_gold, rejected_gold: their gold scores, whoever labelled them.
    """

    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]
    chosen_gold: float
    rejected_gold: float


@dataclass(frozen=True)
class Sample:
    """A completion of the base for one of the experiment's prompts, and its gold score."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    gold: float


@dataclass
class Bought:
    """What preferences cost.

    Attributes:
        completions, completion_tokens: drawn from the base, pairs of equal ones included.
        prompt_tokens: read for them, once for both completions of a prompt.
        labels: pairs that were compared.
        against: how many labels go against the gold scores.
        flops: of drawing.
    """

    completions: int = 0
    completion_tokens: int = 0
    prompt_tokens: int = 0
    labels: int = 0
    against: int = 0
    flops: int = 0


@dataclass(frozen=True)
class Preferences:
    """Pairs to train on and pairs held out, of other prompts.

    Attributes:
        base: completions of the base for held-out prompts, which scores are put to scale by.
        notes: what a data set held and was left out.
    """

    train: tuple[Pair, ...]
    heldout: tuple[Pair, ...]
    base: tuple[Sample, ...]
    bought: Bought = field(default_factory=Bought)
    notes: tuple[str, ...] = ()

    @property
    def sha256(self) -> str:
        """Content hash of all pairs and samples in their order."""
        rows = [[asdict(r) for r in rows] for rows in (self.train, self.heldout, self.base)]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    def cost(self) -> dict[str, Any]:
        """What was bought, for a report."""
        found = asdict(self.bought)
        against = found.pop("against")
        return {
            "pairs": len(self.train), "heldout_pairs": len(self.heldout), **found,
            "against_gold": against / (len(self.train) + len(self.heldout)),
        }  # fmt: skip


@dataclass(frozen=True)
class Draw:
    """What completions are drawn with, and judged by.

    Attributes:
        train, heldout: prompts; none is in both.
        decoding: the experiment's.
    """

    base: Base
    gold: GoldScorer
    train: PromptSet
    heldout: PromptSet
    decoding: Decoding

    def completions(
        self, prompts: PromptSet, rows: Sequence[int], size: int, temperature: float, seed: int
    ) -> tuple[Drawn, list[float], Bought]:
        """``size`` completions for each row, adjacent, their gold scores, and what they cost."""
        asked = [prompts.prompts[i] for i in rows]
        limit, stop = self.decoding.max_new_tokens, self.decoding.stop
        sampler = HFSampler(
            self.base.model, self.base.tokenizer, self.base.eos_token_ids, _ENGINE_BATCH
        )
        with _one_thread():
            drawn = sampler.draw(asked, size, Decoding(temperature, 1.0, limit, stop), seed)
        questions = [prompts.problems[i].question for i in rows for _ in range(size)]
        scores = [float(g) for g in self.gold(questions, drawn.texts)]
        lengths = drawn.mask.sum(1).tolist()
        work = Generation.of([len(p) for p in asked for _ in range(size)], lengths, shared_by=size)
        bought = Bought(
            completions=len(lengths),
            completion_tokens=sum(lengths),
            prompt_tokens=sum(map(len, asked)),
            flops=generate(ModelShape.from_model(self.base.model), work),
        )
        return drawn, scores, bought


@contextmanager
def _one_thread() -> Iterator[None]:
    """Two threads add in another order, and may draw another token."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def collect_preferences(spec: PreferenceSpec, draw: Draw) -> Preferences:
    """The pairs of a spec; the same ones every time.

    Raises:
        InputError: the base hardly ever writes two different completions, or a data set cannot be
            read, or has too few pairs.
    """
    if spec.source == "sampled":
        return _sampled(spec, draw)
    return _labelled(spec, draw)


def _sampled(spec: PreferenceSpec, draw: Draw) -> Preferences:
    """Two completions of the base for each prompt, labelled by the gold scores with noise.

    Prompts come in a shuffled order of their own, again and again until there are enough pairs.
    Two equal completions are no pair; they are drawn, counted, and left out.
    """
    bought = Bought()
    train = _draw(spec, draw, "train", spec.pairs, bought)
    heldout = _draw(spec, draw, "heldout", spec.heldout, bought)
    samples = [
        Sample(p.prompt_ids, ids, gold)
        for p in heldout
        for ids, gold in ((p.chosen_ids, p.chosen_gold), (p.rejected_ids, p.rejected_gold))
    ]
    return Preferences(train, heldout, tuple(samples), bought)


def _draw(
    spec: PreferenceSpec, draw: Draw, name: str, count: int, bought: Bought
) -> tuple[Pair, ...]:
    prompts = draw.train if name == "train" else draw.heldout
    pairs: list[Pair] = []
    coin = torch.Generator().manual_seed(stream_seed(spec.seed, "labels", name))
    for round_ in range(_ROUNDS):
        rows = _shuffled(prompts, spec.seed, "pairs", name, round_)[: count - len(pairs)]
        seed = stream_seed(spec.seed, "preferences", name, round_)
        drawn, scores, spent = draw.completions(prompts, rows, 2, spec.temperature, seed)
        _add(bought, spent)
        ids = _real(drawn)
        for i, row in enumerate(rows):
            a, b = 2 * i, 2 * i + 1
            luck = float(torch.rand((), generator=coin, dtype=torch.float64))
            if ids[a] == ids[b]:
                continue
            first = luck < preference(scores[a] - scores[b], spec.label_scale)
            best, worst = (a, b) if first else (b, a)
            bought.labels += 1
            bought.against += scores[best] < scores[worst]
            prompt = prompts.prompts[row]
            pairs.append(Pair(prompt, ids[best], ids[worst], scores[best], scores[worst]))
        if len(pairs) >= count:
            return tuple(pairs)
    raise InputError(
        f"reward.learned.model.preferences: {len(pairs)} of {count} {name} pairs after {_ROUNDS} "
        "passes over the prompts; ask for fewer pairs, give more prompts (data), or raise the "
        "temperature"
    )


def _labelled(spec: PreferenceSpec, draw: Draw) -> Preferences:
    """Pairs of a data set, and what the base writes for the experiment's held-out prompts."""
    read = read_pairs(spec, draw.base)
    train, heldout = (_scored(rows, draw.gold) for rows in (read.train, read.heldout))
    rows: list[int] = []
    for round_ in range(-(-spec.heldout // len(draw.heldout.prompts))):
        rows += _shuffled(draw.heldout, spec.seed, "pairs", "base", round_)
    rows = rows[: spec.heldout]
    seed = stream_seed(spec.seed, "preferences", "base")
    drawn, scores, bought = draw.completions(draw.heldout, rows, 1, spec.temperature, seed)
    samples = [
        Sample(draw.heldout.prompts[row], ids, gold)
        for row, ids, gold in zip(rows, _real(drawn), scores, strict=True)
    ]
    bought.labels = len(train) + len(heldout)
    bought.against = sum(p.chosen_gold < p.rejected_gold for p in (*train, *heldout))
    return Preferences(train, heldout, tuple(samples), bought, read.notes)


def _scored(rows: Sequence[Encoded], gold: GoldScorer) -> tuple[Pair, ...]:
    """Pairs that people labelled, with what the gold reward thinks of them."""
    prompts = [row.prompt for row in rows]
    chosen = gold(prompts, [row.chosen for row in rows])
    rejected = gold(prompts, [row.rejected for row in rows])
    return tuple(
        Pair(row.prompt_ids, row.chosen_ids, row.rejected_ids, float(a), float(b))
        for row, a, b in zip(rows, chosen, rejected, strict=True)
    )


def _shuffled(prompts: PromptSet, *names: Any) -> list[int]:
    order = torch.Generator().manual_seed(stream_seed(*names))
    return torch.randperm(len(prompts.prompts), generator=order).tolist()


def _real(drawn: Drawn) -> list[tuple[int, ...]]:
    """Completions without their padding."""
    ids, lengths = drawn.completion_ids.tolist(), drawn.mask.sum(1).tolist()
    return [tuple(row[:n]) for row, n in zip(ids, lengths, strict=True)]


def _add(total: Bought, more: Bought) -> None:
    for name, value in vars(more).items():
        setattr(total, name, getattr(total, name) + value)


def preference(margin: float, scale: float) -> float:
    """Bradley and Terry's probability that the first of two, better by ``margin``, is preferred."""
    x = scale * margin
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def to_json(found: Preferences) -> dict[str, Any]:
    """Preferences as plain data, for a process that trains on them."""
    return asdict(found)


def from_json(content: Mapping[str, Any]) -> Preferences:
    """The inverse of ``to_json``."""

    def row(kind: Any, values: Mapping[str, Any]) -> Any:
        return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})

    return Preferences(
        train=tuple(row(Pair, r) for r in content["train"]),
        heldout=tuple(row(Pair, r) for r in content["heldout"]),
        base=tuple(row(Sample, r) for r in content["base"]),
        bought=Bought(**content["bought"]),
        notes=tuple(content["notes"]),
    )
