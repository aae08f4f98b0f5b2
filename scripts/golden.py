"""Write tests/golden/arms.json: loss and gradient norm of every shipped arm on one fixed batch.

The policy is a table of logits and the critic a table of values, in float64, and no random number
is drawn, so that the figures belong to the arms' mathematics alone. tests/test_learner.py compares
them with the arms, and with formulas written out again in numpy.

    python scripts/golden.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.arm import Arm, parts
from harness.arms import ARMS
from harness.types import Experience

FILE = Path(__file__).parent.parent / "tests/golden/arms.json"
VOCABULARY, LIMIT = 5, 6
LENGTHS = (3, 6, 2, 4, 5, 1, 6, 3)
SCORES = (1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0)


def wave(*shape: int, speed: float, height: float = 1.0) -> Tensor:
    """Numbers without pattern or randomness, in [-height, height]."""
    count = int(torch.tensor(shape).prod())
    steps = torch.arange(1, count + 1, dtype=torch.float64)
    return height * torch.sin(speed * steps + 0.1 * steps**1.5).reshape(shape)


def policy_table() -> Tensor:
    """Logits of the next token, by the token before."""
    return wave(VOCABULARY, VOCABULARY, speed=1.3, height=1.5)


def logprobs(table: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Log-probs of each token given the one before it; the first follows token 0."""
    before = torch.cat([torch.zeros_like(ids[:, :1]), ids[:, :-1]], 1)
    chosen = table.log_softmax(1)[before].gather(2, ids[:, :, None]).squeeze(2)
    return torch.where(mask, chosen, torch.zeros_like(chosen))


def values(table: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    before = torch.cat([torch.zeros_like(ids[:, :1]), ids[:, :-1]], 1)
    return torch.where(mask, table[before], torch.zeros_like(table[before]))


def recorded_top(arm: Arm, ids: Tensor, behaviour: Tensor) -> dict[str, Tensor]:
    """The sampled token and the next in the vocabulary, for an arm that compares distributions."""
    if arm.clip.top_k is None:
        return {}
    other = (1 - behaviour.exp()).clamp(min=1e-3).log() - 0.4
    return {
        "top_ids": torch.stack([ids, (ids + 1) % VOCABULARY], 2),
        "top_logprobs": torch.stack([behaviour, other], 2),
    }


def worked_steps(arm: Arm, mask: Tensor) -> dict[str, Tensor]:
    """Steps that end at every second token and the last but one, for an arm that rewards them."""
    if not arm.advantage.needs_steps:
        return {}
    last = mask.sum(1, keepdim=True) - 2  # the last token of all but the shortest is in no step
    at = torch.arange(LIMIT)
    ends = mask & ((at % 2 == 1) & (at < last) | (at == last.clamp(min=0)))
    right = wave(*mask.shape, speed=1.7) > 0
    return {"step_ends": ends, "step_scores": (ends & right).double()}


def top_logprobs(table: Tensor, x: Experience) -> Tensor | None:
    """Log-probs of the recorded tokens under the policy now."""
    if x.top_ids is None:
        return None
    before = torch.cat([torch.zeros_like(x.completion_ids[:, :1]), x.completion_ids[:, :-1]], 1)
    return table.detach().log_softmax(1)[before].gather(2, x.top_ids)


def fixed_experience(arm: Arm) -> Experience:
    """Two groups of four; old and reference policies a little away from the present one."""
    B = len(LENGTHS)
    mask = torch.arange(LIMIT)[None] < torch.tensor(LENGTHS)[:, None]
    ids = (wave(B, LIMIT, speed=2.1, height=1e3).long() % VOCABULARY) * mask
    score = torch.tensor(SCORES, dtype=torch.float64)
    near = wave(B, LIMIT, speed=0.7, height=0.45) * mask
    far = wave(B, LIMIT, speed=0.9, height=0.3) * mask
    now = logprobs(policy_table(), ids, mask)
    return Experience(
        prompt_ids=torch.zeros((B, 1), dtype=torch.long),
        prompt_mask=torch.ones((B, 1), dtype=torch.bool),
        completion_ids=ids,
        mask=mask,
        group=torch.arange(B) // 4,
        score=score,
        bonus=torch.zeros_like(score),
        correct=score > 0,
        finished=torch.tensor(LENGTHS) < LIMIT,
        behaviour_logprobs=now - near,
        old_logprobs=now - near,
        ref_logprobs=now - far if arm.kl.needs_reference else None,
        values=wave(B, LIMIT, speed=0.5, height=0.4) * mask if arm.critic else None,
        **recorded_top(arm, ids, now - near),
        **worked_steps(arm, mask),
    )


def measure(arm: Arm) -> dict[str, Any]:
    """Losses and gradient norms of an arm on the fixed batch."""
    x, coef = fixed_experience(arm), arm.kl.initial_coef
    batch = arm.credit(x, kl_coef=coef, max_new_tokens=LIMIT, warmup=False)
    minibatch = arm.weigh(batch, max_new_tokens=LIMIT)
    table = policy_table().requires_grad_()
    loss, stats = arm.policy_loss(
        minibatch, logprobs(table, x.completion_ids, x.mask), coef, top_logprobs(table, x)
    )
    (gradient,) = torch.autograd.grad(loss, table)
    found = {
        "loss": loss.item(),
        "surrogate": stats["loss/surrogate"].item(),
        "gradient_norm": gradient.norm().item(),
        "clipped": int(stats["sum/clip_fraction_high"] + stats["sum/clip_fraction_low"]),
    }
    if arm.critic is not None:
        heads = wave(VOCABULARY, speed=1.1, height=0.5).requires_grad_()
        value_loss = arm.value_loss(minibatch, values(heads, x.completion_ids, x.mask))
        (gradient,) = torch.autograd.grad(value_loss, heads)
        found |= {
            "value_loss": value_loss.item(),
            "critic_gradient_norm": gradient.norm().item(),
        }
    return found


def main() -> None:
    arms = {name: {"parts": parts(arm)} | measure(arm) for name, arm in ARMS.items()}
    FILE.write_text(json.dumps(arms, indent=1, sort_keys=True) + "\n")
    print(f"{FILE}: {', '.join(arms)}")


if __name__ == "__main__":
    main()
