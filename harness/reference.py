"""What a policy is compared with: the base, or the policy that it was some steps ago."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from harness.cost.shape import ModelShape
from harness.models import Base, Policy, Reference
from harness.types import Rollout


class PastPolicy(Reference):
    """The policy as it was at some step; ``refresh`` makes it the policy of now.

    It holds copies of the trained weights alone (all of them, or the adapters), and puts them into
    the policy's own model while it scores. Before the first refresh they are the base's.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy.model, policy.temperature)
        self._trained = {n: p for n, p in policy.model.named_parameters() if p.requires_grad}
        self._held = {name: p.detach().clone() for name, p in self._trained.items()}

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the policy's weights."""
        for name, weight in self._trained.items():
            self._held[name].copy_(weight)

    def logprobs(self, x: Rollout) -> Float[Tensor, "B T"]:
        self._swap()
        try:
            return super().logprobs(x)
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, weight in self._trained.items():
            weight.data, self._held[name] = self._held[name], weight.data

    def bytes_held(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._held.values())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self._held.items():
            yield f"reference/{name}", weight

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        for name, weight in self._held.items():
            weight.copy_(tensors[f"reference/{name}"])


def build_reference(base: Base, policy: Policy, *, lora: bool, moves: bool) -> Reference:
    """The base, as what a policy is compared with; or one that follows the policy."""
    if moves:
        return PastPolicy(policy)
    model = policy.model if lora else base.model
    return Reference(model, policy.temperature, adapters_off=lora)


def reference_shape(reference: Reference, base: Base, policy: ModelShape) -> ModelShape:
    """The base's shape; that of the adapted policy, frozen, where the reference has adapters."""
    if isinstance(reference, PastPolicy) and policy.lora_rank:
        return dataclasses.replace(policy, trainable=0, trainable_tensors=0)
    return ModelShape.from_model(base.model)
