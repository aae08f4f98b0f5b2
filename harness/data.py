"""The problems of an experiment as prompts, and the stream in which training draws them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from harness.errors import InputError
from harness.identity import digest, stream_seed
from harness.samplers.dialogue import Episodes
from harness.spec.schema import ExperimentSpec, SplitSpec
from harness.tasks import TASKS
from harness.tasks.loading import LoadedSplit, load_problems
from harness.tasks.prompts import Prompt, prompt_from_spec
from harness.tasks.task import Environment, Problem


@dataclass(frozen=True)
class PromptSet:
    """Problems and their prompts as token ids, in the order of the data.

    ``environment``: answers the policy's turns; None where there is one turn.
    """

    name: str
    problems: tuple[Problem, ...]
    prompts: tuple[tuple[int, ...], ...]
    sha256: str  # of problems, template and token ids: what the model is really asked
    environment: Environment | None = None

    def episodes(self, indices: Sequence[int] | None = None) -> Episodes | None:
        """What the sampler needs to play these problems; None where there is one turn."""
        if self.environment is None:
            return None
        rows = range(len(self.problems)) if indices is None else indices
        return Episodes(self.environment, [self.problems[i] for i in rows])


def load_split(where: str, split: SplitSpec) -> LoadedSplit:
    """The problems of one split of a spec; errors name its key."""
    try:
        return load_problems(
            split.task,
            split.split,
            source=split.source,
            limit=split.limit,
            offset=split.offset,
            sha256=split.sha256,
            seed=split.seed,
            options=split.options,
        )
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def splits(spec: ExperimentSpec) -> dict[str, SplitSpec]:
    """Every split that a spec names, by its key: ``train``, ``validation``, ``test.NAME``."""
    tests = {f"test.{name}": split for name, split in spec.data.test.items()}
    return {"train": spec.data.train, "validation": spec.data.validation} | tests


def prompt_set(
    name: str,
    problems: tuple[Problem, ...],
    spec: ExperimentSpec,
    tokenizer: PreTrainedTokenizerBase,
    context: int,
) -> PromptSet:
    """Problems asked by the spec's template.

    Raises:
        InputError: an empty prompt, or one longer than the limit or the context. What an
            environment shows later counts as prompt.
    """
    prompt = prompt_from_spec(spec.data.prompt, chat=spec.data.chat_template)
    limit = spec.data.max_prompt_tokens
    if limit + spec.sampling.max_new_tokens > context:
        raise InputError(
            f"data.max_prompt_tokens {limit} + sampling.max_new_tokens "
            f"{spec.sampling.max_new_tokens} is more than the model's context of {context}"
        )
    source = TASKS.get(splits(spec)[name].task) if name in splits(spec) else None
    environment = source and source.environment
    encoded = tuple(_encode_problem(name, prompt, p, tokenizer, environment) for p in problems)
    for problem, ids in zip(problems, encoded, strict=True):
        room = environment.room(problem) if environment else 0
        if len(ids) + room > limit:
            later = f" and up to {room} that its environment shows later" if room else ""
            raise InputError(
                f"data.{name}: the prompt of problem {problem.id!r} has {len(ids)} tokens{later}, "
                f"data.max_prompt_tokens is {limit}; raise it, or leave the problem out"
            )
        if not ids:
            raise InputError(f"data.{name}: the prompt of problem {problem.id!r} is empty")
    content: list[Any] = [
        [p.id, p.answer, list(ids)] for p, ids in zip(problems, encoded, strict=True)
    ]
    if environment is not None:
        content.append([type(environment).__name__, environment.version])
    return PromptSet(name, problems, encoded, digest(content), environment)


def _encode_problem(
    name: str,
    prompt: Prompt,
    problem: Problem,
    tokenizer: PreTrainedTokenizerBase,
    environment: Environment | None,
) -> tuple[int, ...]:
    try:
        question = environment.reset(problem) if environment else problem.question
        return _encode(prompt, question, tokenizer)
    except InputError:
        raise
    except Exception as error:  # tokenizers raises bare Exception, as for an unknown character
        raise InputError(
            f"data.{name}: the model's tokenizer cannot encode the prompt of problem "
            f"{problem.id!r} ({error}); use another task, prompt or model"
        ) from error


def _encode(prompt: Prompt, question: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    if prompt.chat:
        if tokenizer.chat_template is None:
            raise InputError(
                "data.chat_template: the model's tokenizer has no chat template; use a plain prompt"
            )
        text: Any = tokenizer.apply_chat_template(
            prompt.messages(question), add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        ids = tokenizer(prompt.render(question))["input_ids"]
    return tuple(int(i) for i in ids)  # type: ignore[union-attr]


class PromptStream:
    """The order in which one seed's training draws prompts: shuffled epochs, the same for all arms.

    An arm that spends its budget faster sees a shorter part of the same stream.
    """

    def __init__(self, prompts: PromptSet, seed: int) -> None:
        self.prompts = prompts
        self.seed = seed
        self._orders: dict[int, list[int]] = {}

    def at(self, position: int) -> int:
        """The index of the problem at a position of the stream."""
        epoch, offset = divmod(position, len(self.prompts.problems))
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(stream_seed(self.seed, "data", epoch))
            order = torch.randperm(len(self.prompts.problems), generator=generator).tolist()
            last = {e: o for e, o in self._orders.items() if e == epoch - 1}
            self._orders = last | {epoch: order}
        return self._orders[epoch][offset]

    def take(self, cursor: int, count: int) -> list[int]:
        return [self.at(position) for position in range(cursor, cursor + count)]


@dataclass
class StreamHash:
    """A hash of all prompt ids drawn so far, noted at every multiple of ``every``."""

    every: int
    value: str = ""
    count: int = 0

    def add(self, ids: list[str]) -> dict[str, str]:
        """Take ids in; the hashes at the multiples newly passed, by their number of prompts."""
        passed = {}
        for problem in ids:
            self.value = hashlib.sha256(f"{self.value}|{problem}".encode()).hexdigest()
            self.count += 1
            if self.count % self.every == 0:
                passed[str(self.count)] = self.value
        return passed

    def state(self) -> dict[str, Any]:
        return {"value": self.value, "count": self.count}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.value, self.count = state["value"], state["count"]
