"""Pairs of a chosen and a rejected completion, and the order in which a run reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from harness.identity import stream_seed


class Pair(Protocol):
    """Two completions of one prompt as token ids; end tokens included where they ended."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def chosen_ids(self) -> Sequence[int]: ...
    @property
    def rejected_ids(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class TokenPair:
    """A ``Pair`` and nothing else."""

    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]


def pair_ids(pair: Pair) -> list[list[int]]:
    """Prompt, chosen and rejected completion."""
    return [[*pair.prompt_ids], [*pair.chosen_ids], [*pair.rejected_ids]]


@dataclass(frozen=True)
class PairData:
    """Pairs to learn from, and the hash that pins them."""

    pairs: Sequence[Pair]
    sha256: str


class PairStream:
    """The order in which one seed's training reads pairs: shuffled epochs, without end."""

    def __init__(self, data: PairData, seed: int) -> None:
        self.pairs, self.seed, self.sha256 = data.pairs, seed, data.sha256
        self._orders: dict[int, list[int]] = {}

    def at(self, position: int) -> int:
        """The index of the pair at a position of the stream."""
        epoch, offset = divmod(position, len(self.pairs))
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(stream_seed(self.seed, "pairs", epoch))
            order = torch.randperm(len(self.pairs), generator=generator).tolist()
            last = {e: o for e, o in self._orders.items() if e == epoch - 1}
            self._orders = last | {epoch: order}
        return self._orders[epoch][offset]

    def take(self, cursor: int, count: int) -> list[int]:
        return [self.at(position) for position in range(cursor, cursor + count)]
