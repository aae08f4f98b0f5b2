"""Feeding mixed embeddings to a model that decodes, and recording what was fed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from harness.identity import stream_seed
from harness.parts.mixing import Neighbours, mixed_embeddings, neighbour_mixture
from harness.samplers.sampler import Decoding, uniforms


@dataclass(frozen=True)
class Mixer:
    """What is fed in place of some sampled tokens, for the rows of a draw.

    Attributes:
        table: the model's input embeddings, adapters included.
        neighbours: of the present weights.
        coin: uniform in [0, 1); below ``share`` a token's place is mixed.
        ids: what was mixed in place of each token; all 0 where nothing was.
        weights: in which shares; all 0 where the token itself was fed.
    """

    table: nn.Module
    neighbours: Neighbours
    share: float
    temperature: float
    coin: Float[Tensor, "B L"]
    ids: Int[Tensor, "B L K"]
    weights: Float[Tensor, "B L K"]

    @classmethod
    def of(cls, model: nn.Module, rows: int, decoding: Decoding, seed: int) -> Mixer | None:
        """A mixer for a draw of ``rows`` rows; None where the decoding mixes nothing.

        Its coins are a stream of their own: whether a token is mixed moves no sampling number.
        """
        mixing = decoding.mixing
        if mixing is None:
            return None
        table: Any = model.get_input_embeddings()  # type: ignore[operator]
        device = table.weight.device
        every = torch.arange(len(table.weight), device=device)
        neighbours = Neighbours(table(every), mixing.neighbours)
        shape = (rows, decoding.max_new_tokens)
        return cls(
            table=table,
            neighbours=neighbours,
            share=mixing.share,
            temperature=decoding.temperature,
            coin=uniforms(*shape, stream_seed(seed, "mixing")).to(device),
            ids=torch.zeros((*shape, neighbours.count), dtype=torch.long, device=device),
            weights=torch.zeros((*shape, neighbours.count), device=device),
        )

    def part(self, rows: slice) -> Mixer:
        """Some rows, recorded into the whole."""
        return dataclasses.replace(
            self, coin=self.coin[rows], ids=self.ids[rows], weights=self.weights[rows]
        )

    def mix(self, rows: Int[Tensor, "N"], t: int, logits: Float[Tensor, "N V"]) -> None:
        """Record what is fed in place of token ``t`` of these rows, drawn from these logits."""
        turn = self.coin[rows, t] < self.share
        if turn.any():
            ids, weights = neighbour_mixture(logits[turn], self.temperature, self.neighbours)
            self.ids[rows[turn], t], self.weights[rows[turn], t] = ids, weights.float()

    def fed(self, rows: Int[Tensor, "N"], t: int, token: Int[Tensor, "N"]) -> dict[str, Tensor]:
        """The model's input after token ``t`` of these rows: embeddings if any of them is mixed."""
        ids, weights = self.ids[rows, t, None], self.weights[rows, t, None]
        if not weights.any():
            return {"input_ids": token[:, None]}
        return {"inputs_embeds": mixed_embeddings(self.table, token[:, None], ids, weights)}
