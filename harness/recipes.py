"""What the embedded base models are made of: their shape, their training, what they are shown."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerFast

from harness.tasks import arithmetic, dialogue, reviews
from harness.tasks.task import Problem
from harness.tokenizer import build_tokenizer, build_word_tokenizer

WARMSTART_VERSION = 1  # raise when a recipe would give other weights


@dataclass(frozen=True, kw_only=True)
class Recipe(ABC):
    """Every number behind an embedded base model that does not belong to its task."""

    steps: int
    batch: int
    learning_rate: float
    warmup_steps: int = 50  # linear, then linearly down to 0 at the last step
    adam_betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    hidden_size: int = 64
    intermediate_size: int = 176
    layers: int = 3
    heads: int = 4
    context: int = 64
    initializer_range: float = 0.05
    threads: int = 1  # two threads add in another order and give other bits

    @property
    @abstractmethod
    def generator_version(self) -> int:
        """Of the task's generator, which the demonstrations depend on."""

    @abstractmethod
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The model's tokenizer."""

    @abstractmethod
    def demonstrations(self, seed: int) -> Iterator[tuple[Problem, str]]:
        """Problems of the train split with a completion each, without end."""

    def episodes(self, seed: int) -> Iterator[list[tuple[str, str]]]:
        """The same as turns: what is shown and what is written, pair by pair."""
        for problem, completion in self.demonstrations(seed):
            yield [(problem.question, completion)]


@dataclass(frozen=True)
class StrategyMix:
    """How the demonstrations of one subject are answered.

    Attributes:
        worked: share with worked steps under the standard convention.
        left_to_right: share with worked steps strictly from left to right; the rest is direct.
        direct_right: share of the direct answers that are right.
    """

    worked: float
    left_to_right: float
    direct_right: float


@dataclass(frozen=True, kw_only=True)
class EmbeddedRecipe(Recipe):
    """A base for the arithmetic task."""

    chain: StrategyMix
    precedence: StrategyMix
    levels: tuple[str, ...] = tuple(arithmetic.LEVELS)
    max_operand: int = 9
    guess_spread: int = 5  # a wrong direct answer is off by at most this much

    @property
    def generator_version(self) -> int:
        return arithmetic.GENERATOR_VERSION

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return build_tokenizer(arithmetic.CHARACTERS, max_length=self.context)

    def demonstrations(self, seed: int) -> Iterator[tuple[Problem, str]]:
        rng = random.Random(f"warmstart/{WARMSTART_VERSION}/{seed}")
        problems = arithmetic.stream(
            "train", seed=seed, levels=self.levels, max_operand=self.max_operand
        )
        for problem in problems:
            mix = self.chain if problem.subject == "chain" else self.precedence
            yield problem, demonstrate(problem, mix, self.guess_spread, rng)


@dataclass(frozen=True, kw_only=True)
class DialogueRecipe(Recipe):
    """A base for arithmetic over several turns: each turn's strategy is drawn anew.

    ``guess_spread``: as of the arithmetic base. Slips are carried on, as the environment does it.
    """

    mix: StrategyMix
    turns: int
    guess_spread: int = 5

    @property
    def generator_version(self) -> int:
        return dialogue.GENERATOR_VERSION

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return build_tokenizer(arithmetic.CHARACTERS, max_length=self.context)

    def demonstrations(self, seed: int) -> Iterator[tuple[Problem, str]]:
        """The turns one by one, each as a problem of its own."""
        for turns in self.episodes(seed):
            for shown, written in turns:
                yield asked(shown), written

    def episodes(self, seed: int) -> Iterator[list[tuple[str, str]]]:
        rng = random.Random(f"warmstart/dialogue/{WARMSTART_VERSION}/{seed}")
        environment = dialogue.ArithmeticDialogue()
        for problem in dialogue.stream("train", seed=seed, turns=self.turns):
            shown: str | None = environment.reset(problem)
            written: list[str] = []
            turns: list[tuple[str, str]] = []
            while shown is not None:
                written.append(demonstrate(asked(shown), self.mix, self.guess_spread, rng))
                turns.append((shown, written[-1]))
                shown, _ = environment.step(problem, written)
            yield turns


def asked(question: str) -> Problem:
    """A question of one turn as a problem."""
    return Problem(question, question, str(arithmetic.work(question)[-1].value))


@dataclass(frozen=True, kw_only=True)
class ReviewRecipe(Recipe):
    """A base that writes reviews.

    ``good``: share of good among the clauses that are good or bad.
    """

    good: float

    @property
    def generator_version(self) -> int:
        return reviews.GENERATOR_VERSION

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return build_word_tokenizer(reviews.WORDS, max_length=self.context)

    def demonstrations(self, seed: int) -> Iterator[tuple[Problem, str]]:
        rng = random.Random(f"warmstart/reviews/{WARMSTART_VERSION}/{seed}")
        for problem in reviews.stream("train", seed=seed):
            yield problem, reviews.write(self.good, rng)


RECIPES: dict[str, Recipe] = {
    "arithmetic": EmbeddedRecipe(
        chain=StrategyMix(worked=0.36, left_to_right=0.0, direct_right=0.6),
        precedence=StrategyMix(worked=0.20, left_to_right=0.30, direct_right=0.6),
        steps=1300,
        batch=64,
        learning_rate=5e-3,
    ),
    # For smoke runs and tests: Level 1 alone, and built in seconds rather than well.
    "arithmetic-tiny": EmbeddedRecipe(
        chain=StrategyMix(worked=0.40, left_to_right=0.0, direct_right=0.8),
        precedence=StrategyMix(worked=0.20, left_to_right=0.30, direct_right=0.6),
        steps=240,
        batch=64,
        learning_rate=1e-2,
        warmup_steps=20,
        levels=("Level 1",),
        hidden_size=48,
        intermediate_size=128,
        layers=2,
    ),
    "arithmetic_dialogue": DialogueRecipe(
        mix=StrategyMix(worked=0.36, left_to_right=0.0, direct_right=0.6),
        turns=3,
        steps=700,
        batch=64,
        learning_rate=5e-3,
        context=128,
    ),
    "reviews": ReviewRecipe(good=0.4, steps=350, batch=64, learning_rate=5e-3),
    "reviews-tiny": ReviewRecipe(
        good=0.4,
        steps=150,
        batch=64,
        learning_rate=1e-2,
        warmup_steps=20,
        hidden_size=48,
        intermediate_size=128,
        layers=2,
    ),
}


def demonstrate(problem: Problem, mix: StrategyMix, spread: int, rng: random.Random) -> str:
    """One completion for an arithmetic problem, by a strategy drawn from the mix."""
    draw = rng.random()
    if draw < mix.worked:
        return arithmetic.write(arithmetic.work(problem.question))
    if draw < mix.worked + mix.left_to_right:
        return arithmetic.write(arithmetic.work(problem.question, arithmetic.LEFT_TO_RIGHT))
    answer = gold = int(problem.answer)
    if rng.random() >= mix.direct_right:
        near = range(max(0, gold - spread), max(0, gold) + spread + 1)
        answer = rng.choice([value for value in near if value != gold])
    return f"{arithmetic.ANSWER_MARKER}{answer}"


def recipe_from_json(content: dict[str, Any]) -> Recipe:
    """A recipe from its fields, which tell its kind."""
    tuples = {key: tuple(content[key]) for key in ("levels", "adam_betas") if key in content}
    if "good" in content:
        return ReviewRecipe(**{**content, **tuples})
    if "turns" in content:
        mix = StrategyMix(**content["mix"])
        return DialogueRecipe(**{**content, **tuples, "mix": mix})
    mixes = {key: StrategyMix(**content[key]) for key in ("chain", "precedence")}
    return EmbeddedRecipe(**{**content, **mixes, **tuples})
