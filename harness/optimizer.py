"""AdamW that keeps float32 copies of weights stored more narrowly.

A bfloat16 weight near 1 moves in steps of 1/128: at a learning rate of 1e-6 every update would be
rounded away. So the moments and the sum live in float32, and the model gets the rounded result
(mixed-precision Adam, 16 bytes a parameter).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from harness.spec.schema import OptimizerSpec

NARROW = (torch.bfloat16, torch.float16)


class MasterAdamW(torch.optim.AdamW):
    """AdamW over a model's trainable parameters, or over float32 masters of the narrow ones."""

    def __init__(self, model: nn.Module, spec: OptimizerSpec, learning_rate: float) -> None:
        self.weights = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.masters = {
            name: nn.Parameter(p.detach().float()) if p.dtype in NARROW else p
            for name, p in self.weights.items()
        }
        super().__init__(
            list(self.masters.values()),
            lr=learning_rate,
            betas=spec.betas,
            eps=spec.eps,
            weight_decay=spec.weight_decay,
        )

    def gather(self) -> list[nn.Parameter]:
        """The parameters that are stepped, holding the gradients of the model's weights."""
        for name, weight in self.weights.items():
            master = self.masters[name]
            if master is not weight:
                master.grad = None if weight.grad is None else weight.grad.float()
                weight.grad = None
        return list(self.masters.values())

    @torch.no_grad()
    def scatter(self) -> None:
        """Round the masters back into the model."""
        for name, weight in self.weights.items():
            if self.masters[name] is not weight:
                weight.copy_(self.masters[name])

    def tensors(self, who: str) -> Iterator[tuple[str, Tensor]]:
        """Weights (the masters, where there are any) and moments, by name."""
        for name, master in self.masters.items():
            yield f"{who}/{name}", master.data
            for key, value in self.state.get(master, {}).items():
                yield f"{who}.adam/{name}/{key}", value

    def restore(self, who: str, tensors: dict[str, Tensor]) -> None:
        """Put back what ``tensors`` gave."""
        for name, master in self.masters.items():
            master.data.copy_(tensors[f"{who}/{name}"])
            prefix = f"{who}.adam/{name}/"
            state: dict[str, Any] = {
                key.removeprefix(prefix): value.clone().to(
                    "cpu" if key.endswith("/step") else master.device
                )
                for key, value in tensors.items()
                if key.startswith(prefix)
            }
            if state:
                self.state[master] = state
        self.scatter()

    def bytes_held(self) -> int:
        """Bytes of moments, and of masters that are not the model's own weights."""
        moments = sum(
            v.numel() * v.element_size()
            for state in self.state.values()
            for v in state.values()
            if isinstance(v, Tensor)
        )
        masters = sum(
            m.numel() * m.element_size()
            for name, m in self.masters.items()
            if m is not self.weights[name]
        )
        return moments + masters
