"""Mixed input embeddings while sampling (N-GRPO, arXiv:2606.10768)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class NeighbourMixing:
    """With probability ``share`` (rho), what is fed after a token is a mixture of neighbours.

    The anchor is the likeliest token, which need not be the sampled one; its company are the
    ``neighbours`` - 1 (k - 1) tokens closest to it by the cosine of input embeddings; the weights
    are the softmax of their logits at the sampling temperature. The recorded token stays the
    sampled one, as in the released code (the paper writes the anchor into the text). Evaluation
    never mixes. Paper: k = 3, rho = 0.1, temperature 0.7.
    """

    version: ClassVar[int] = 1
    neighbours: int = 3
    share: float = 0.1


class Neighbours:
    """The tokens nearest to a token, itself first; searched once for each token that is asked for.

    Good for one version of the weights. An embedding of norm 0 has cosine 0 with all others.

    Args:
        embeddings: the input embeddings; a copy in float32 or wider is held.
        count: tokens to find, the token itself included; all where the vocabulary has fewer.
    """

    def __init__(self, embeddings: Float[Tensor, "V d"], count: int) -> None:
        table = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
        norm = table.norm(dim=1, keepdim=True)
        self.directions = torch.where(norm > 0, table / norm, 0.0)
        self.count = min(count, len(table))
        shape = (len(table), self.count)
        self.found = torch.full(shape, -1, dtype=torch.long, device=table.device)

    def of(self, tokens: Int[Tensor, "B"]) -> Int[Tensor, "B K"]:
        """The nearest tokens of each token, nearest first."""
        new = tokens.unique()
        new = new[self.found[new, 0] < 0]
        if len(new):
            cosine = self.directions[new] @ self.directions.T
            cosine.scatter_(1, new[:, None], torch.inf)  # itself first, whatever rounding says
            self.found[new] = cosine.topk(self.count, dim=1).indices
        return self.found[tokens]


def neighbour_mixture(
    logits: Float[Tensor, "B V"], temperature: float, neighbours: Neighbours
) -> tuple[Int[Tensor, "B K"], Float[Tensor, "B K"]]:
    """The tokens to mix, the anchor first, and their weights, which sum to 1 (eq. 6-10)."""
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    ids = neighbours.of(scaled.argmax(1))
    return ids, scaled.gather(1, ids).softmax(1)


def mixed_embeddings(
    table: Callable[[Tensor], Tensor],
    ids: Int[Tensor, "B T"],
    mixed_ids: Int[Tensor, "B T K"],
    weights: Float[Tensor, "B T K"],
) -> Float[Tensor, "B T d"]:
    """Each token's embedding, or where there are weights the mixture that was fed in its place.

    Sums are taken in float32 or wider, so that sampling and training feed the same. Gradient flows
    to the embeddings of what was fed, and not to the weights, which are constants.
    """
    embedded = table(ids)
    where = (weights > 0).any(2)
    candidates = table(mixed_ids[where])
    wide = torch.promote_types(candidates.dtype, torch.float32)
    mixture = (weights[where][:, :, None].to(wide) * candidates.to(wide)).sum(1)
    return embedded.index_put((where,), mixture.to(embedded.dtype))
