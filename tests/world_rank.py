"""One rank of a real process group: its share of the rows, gradients summed, one optimizer step.

    python world_rank.py RANK WORLD RENDEZVOUS_FILE OUTPUT_FILE ARM...

A rank is a ``Learner`` whose gradients are summed over all ranks before its step; nothing else of
the harness knows that there are ranks, for each token's share of the loss is fixed before that.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from tiny import ragged, trained, weights

from harness.arms import ARMS
from harness.learner import Learner
from harness.optimizer import MasterAdamW

LIMIT = 12


class Ranked(Learner):
    """Sums gradients over ranks, as an unscaled data-parallel wrapper does."""

    def _step(self, optimizer: MasterAdamW, rate: float, who: str) -> float:
        for weight in optimizer.weights.values():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            dist.all_reduce(weight.grad)
        return super()._step(optimizer, rate, who)


def step(name: str, rank: int, world: int) -> dict[str, torch.Tensor]:
    """Two optimizer steps of an arm on this rank's rows: the rows, the weights, the losses."""
    arm = ARMS[name]
    t = trained(arm, ragged(), micro_batch=3)
    if world > 1:
        t.learner.__class__ = Ranked
    whole = arm.weigh(t.batch, max_new_tokens=LIMIT)
    rows = torch.arange(rank, len(whole), world)
    mine = whole.select(rows)
    given = {"kl_coef": arm.kl.initial_coef, "rate": 1.0, "critic_rate": 1.0, "warmup": False}
    first = t.learner.update(mine, first=True, **given)
    second = t.learner.update(mine, first=False, **given)
    losses = [s[k] for s in (first, second) for k in ("loss/policy", "loss/value") if k in s]
    norms = [s["grad_norm"] for s in (first, second)]
    return {
        "rows": rows,
        "weights": weights(t.learner),
        "losses": torch.tensor(losses, dtype=torch.float64),
        "norms": torch.tensor(norms, dtype=torch.float64),
    }


def main() -> None:
    rank, world, rendezvous, output, *names = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=int(world)
    )
    torch.save({name: step(name, int(rank), int(world)) for name in names}, output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
