"""How long prompts and completions are: counted where possible, else estimated and said so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from harness.data import prompt_set, splits
from harness.errors import InputError
from harness.plan.cards import Architecture
from harness.spec.schema import ExperimentSpec
from harness.tasks import TASKS
from harness.tasks.loading import LoadedSplit
from harness.tasks.prompts import prompt_from_spec

CHARACTERS_PER_TOKEN = 3.5  # English and LaTeX in today's 100k+ vocabularies: 3 to 4
UNKNOWN_SHARE = 0.6  # of max_new_tokens
DEMONSTRATIONS = 1000


@dataclass(frozen=True)
class PromptLengths:
    """Prompt lengths of a split, in tokens.

    Attributes:
        mean, square: means of the length and of its square: all that a cost depends on.
        longest: the longest.
        counted: by the model's tokenizer; False for an estimate from characters.
        over_limit: prompts estimated to be longer than ``data.max_prompt_tokens``.
        given: mean of what an environment shows after the first turn, at most.
    """

    mean: float
    square: float
    longest: int
    counted: bool
    over_limit: int = 0
    given: float = 0.0

    @classmethod
    def of(cls, lengths: Sequence[int], limit: int, *, counted: bool) -> PromptLengths:
        n = len(lengths)
        return cls(
            sum(lengths) / n,
            sum(length * length for length in lengths) / n,
            max(lengths),
            counted,
            sum(length > limit for length in lengths),
        )


@dataclass(frozen=True)
class CompletionLength:
    """The mean length that costs are computed with, and what it rests on."""

    tokens: int
    basis: str


def check_context(spec: ExperimentSpec, context: int) -> None:
    """Refuse lengths that the model cannot hold.

    Raises:
        InputError: longest prompt + longest completion is above the context.
    """
    prompt, new = spec.data.max_prompt_tokens, spec.sampling.max_new_tokens
    if prompt + new > context:
        raise InputError(
            f"data.max_prompt_tokens {prompt} + sampling.max_new_tokens {new} is more than the "
            f"model's context of {context}; lower one of them"
        )


def prompt_lengths(
    spec: ExperimentSpec, loaded: Mapping[str, LoadedSplit], model: Architecture
) -> dict[str, PromptLengths]:
    """Prompt lengths of every split.

    Raises:
        InputError: a prompt that is empty or, counted by the tokenizer, above the limit.
    """
    limit = spec.data.max_prompt_tokens
    found = {}
    for name, data in loaded.items():
        if model.tokenizer is not None:
            prompts = prompt_set(name, data.problems, spec, model.tokenizer, model.context).prompts
            lengths = [len(ids) for ids in prompts]
        else:
            prompt = prompt_from_spec(spec.data.prompt, chat=spec.data.chat_template)
            texts = [prompt.render(p.question) for p in data.problems]
            lengths = [math.ceil(len(text) / CHARACTERS_PER_TOKEN) for text in texts]
        known = PromptLengths.of(lengths, limit, counted=model.tokenizer is not None)
        environment = TASKS[splits(spec)[name].task].environment
        if environment is not None:
            room = sum(environment.room(p) for p in data.problems)
            known = replace(known, given=room / len(data.problems))
        found[name] = known
    return found


def assumed_completion(spec: ExperimentSpec, model: Architecture) -> CompletionLength:
    """The mean completion length where no run of this experiment has measured it."""
    limit = spec.sampling.max_new_tokens
    if model.recipe is not None and spec.data.train.task in spec.model.name:  # what it was shown
        drawn = islice(model.recipe.episodes(spec.model.seed), DEMONSTRATIONS)
        tokenizer = model.recipe.tokenizer()
        ends = 1  # of each turn
        lengths = [len(tokenizer(text)["input_ids"]) + ends for turns in drawn for _, text in turns]
        mean = sum(lengths) / DEMONSTRATIONS
        tokens = min(limit, max(1, round(mean)))
        return CompletionLength(tokens, "the mean of the warm start's demonstrations")
    tokens = max(1, round(UNKNOWN_SHARE * limit))
    return CompletionLength(
        tokens, f"assumed: {UNKNOWN_SHARE:.0%} of sampling.max_new_tokens {limit}"
    )
