"""What a sampling engine is: it draws completions, and takes new weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from harness.parts.mixing import NeighbourMixing
from harness.samplers.dialogue import Episodes


@dataclass(frozen=True)
class Decoding:
    """How completions are drawn, and what is recorded of it.

    ``greedy`` takes the likeliest token, whatever the rest says. ``record_top``: how many of the
    likeliest tokens to record at each position (fewer where the vocabulary is smaller), 0 for none.
    ``mixing``: what is fed in place of sampled tokens.
    """

    temperature: float
    top_p: float
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    greedy: bool = False
    record_top: int = 0
    mixing: NeighbourMixing | None = None


@dataclass(frozen=True)
class Drawn:
    """Completions of a batch of prompts; a group's rows are adjacent.

    Where an environment answers the turns, ``texts`` are those of last turns, and empty where the
    last turn was not reached: what verdicts are on.
    """

    prompt_ids: Int[Tensor, "B S"]
    prompt_mask: Bool[Tensor, "B S"]
    completion_ids: Int[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]  # True on sampled tokens
    finished: Bool[Tensor, "B"]
    logprobs: Float[Tensor, "B T"]  # at the temperature, before top-p
    texts: tuple[str, ...]
    top_ids: Int[Tensor, "B T K"] | None = None
    top_logprobs: Float[Tensor, "B T K"] | None = None  # as ``logprobs``; both 0 on padding
    mixed_ids: Int[Tensor, "B T K"] | None = None  # mixed and fed in place of token t
    mixed_weights: Float[Tensor, "B T K"] | None = None  # 0 where token t itself was fed
    given: Bool[Tensor, "B T"] | None = None  # True on what an environment wrote
    turns: tuple[dict[int, float], ...] | None = None  # by row: token that ends a turn -> its score
    transcripts: tuple[str, ...] | None = None  # whole episodes, to be read

    @property
    def present(self) -> Bool[Tensor, "B T"]:
        """Where there is a token at all, sampled or given."""
        return self.mask if self.given is None else self.mask | self.given

    @property
    def searched(self) -> int:
        """Tokens whose neighbours were looked for: each anchor once."""
        if self.mixed_ids is None or self.mixed_weights is None:
            return 0
        return len(self.mixed_ids[(self.mixed_weights > 0).any(2)][:, 0].unique())


class Sampler(Protocol):
    """An engine. The same seed, weights and prompts give the same completions."""

    def draw(
        self,
        prompts: Sequence[Sequence[int]],
        group_size: int,
        decoding: Decoding,
        seed: int,
        episodes: Episodes | None = None,
    ) -> Drawn: ...

    def load(self, model: nn.Module) -> None:
        """Sample from these weights from now on."""
        ...


def left_pad(prompts: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Prompts as one left-padded tensor, and its mask."""
    width = max(len(p) for p in prompts)
    ids = torch.full((len(prompts), width), pad, dtype=torch.long)
    mask = torch.zeros((len(prompts), width), dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, width - len(prompt) :] = True
    return ids, mask


def uniforms(rows: int, length: int, seed: int) -> Float[Tensor, "rows length"]:
    """One number in [0, 1) for each row and position, whatever batches the rows are drawn in."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand((rows, length), generator=generator, dtype=torch.float64)
