"""Mixed input embeddings while sampling (N-GRPO, arXiv:2606.10768)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class NeighbourMixing:
    """With probability ``share``, the next input is a mixture of a token's neighbours.

    The anchor is the likeliest token (not the sampled one), its company the ``neighbours`` - 1
    tokens closest to it by the cosine of input embeddings, the weights the softmax of their logits
    at the sampling temperature. The recorded token stays the sampled one, as in the released code
    (the paper writes the anchor into the text). Paper: k = 3, share 0.1. Evaluation never mixes.
    """

    version: ClassVar[int] = 1
    neighbours: int = 3
    share: float = 0.1


@torch.no_grad()
def neighbour_mixture(
    logits: Float[Tensor, "B V"],
    embeddings: Float[Tensor, "V d"],
    temperature: float,
    neighbours: int,
) -> tuple[Int[Tensor, "B K"], Float[Tensor, "B K"]]:
    """The tokens to mix, the anchor first, and their weights, which sum to 1."""
    scaled = logits.float() / temperature
    anchor = scaled.argmax(1)
    table = embeddings.float()
    table = table / table.norm(dim=1, keepdim=True).clamp(min=1e-12)
    cosine = table[anchor] @ table.T
    cosine[torch.arange(len(anchor)), anchor] = float("inf")  # first, whatever rounding says
    ids = cosine.topk(min(neighbours, len(table)), dim=1).indices
    return ids, scaled.gather(1, ids).softmax(1)


def mixed(
    embedded: Float[Tensor, "B T d"],
    neighbours: Float[Tensor, "B T K d"],
    weights: Float[Tensor, "B T K"],
) -> Float[Tensor, "B T d"]:
    """The mixture where there are weights, the token's own embedding elsewhere."""
    mixture = (weights[..., None].to(neighbours.dtype) * neighbours).sum(2)
    return torch.where((weights > 0).any(2, keepdim=True), mixture, embedded)
