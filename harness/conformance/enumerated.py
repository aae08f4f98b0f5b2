"""A policy so small that every completion can be written down, with its exact probability.

A node is a prefix; its row of logits is the policy's choice of the next token. All expectations
below are finite sums: over completions, or over all batches that can be drawn of one prompt.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

END = 0  # the end of sequence; other tokens are 1, 2, ...


@dataclass(frozen=True)
class World:
    """Every completion of one prompt.

    Attributes:
        name: what the figures call it.
        ids, mask, node: [N, T]: tokens, which are real, and the prefix that each follows.
        logits: [nodes, tokens], -inf where a token cannot follow.
        ref_logits: those of the reference.
        right: [N], the verdicts.
    """

    name: str
    ids: Tensor
    mask: Tensor
    node: Tensor
    logits: Tensor
    ref_logits: Tensor
    right: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> Tensor:
        return self.mask.sum(1)

    def logprobs(self, logits: Tensor) -> Tensor:
        """[N, T] log-probs of each completion's tokens; 0 on padding."""
        found = logits.log_softmax(1)[self.node, self.ids]
        return found.masked_fill(~self.mask, 0.0)

    def probabilities(self, logits: Tensor) -> Tensor:
        """[N], summing to 1."""
        return self.logprobs(logits).sum(1).exp()

    def by_parameters(self, coefficients: Tensor) -> Tensor:
        """The sum over completions and tokens of coefficient times grad log pi, by the logits."""
        logits = self.logits.clone().requires_grad_()
        (self.logprobs(logits) * coefficients.masked_fill(~self.mask, 0.0)).sum().backward()
        assert logits.grad is not None
        return logits.grad

    def gradient_of_expected(self, score: Tensor) -> Tensor:
        """The exact policy gradient: that of the expected score, by the logits."""
        logits = self.logits.clone().requires_grad_()
        (self.probabilities(logits) * score).sum().backward()
        assert logits.grad is not None
        return logits.grad

    def choices(self, logits: Tensor) -> Tensor:
        """[nodes, tokens] log-probs of each next token; 0 where a token cannot follow."""
        return logits.log_softmax(1).masked_fill(logits.isinf(), 0.0)

    def gradient_of_kl(self, *, to_reference: bool) -> Tensor:
        """By the logits, of KL(pi || ref) or of KL(ref || pi) of the next token, summed over a
        completion, as if the policy had no say in which prefixes it meets."""
        logits = self.logits.clone().requires_grad_()
        ours, theirs = self.choices(logits), self.choices(self.ref_logits)
        here = (~self.logits.isinf()).double()
        p, q = ours.exp() * here, theirs.exp() * here
        kl = (p * (ours - theirs)) if to_reference else (q * (theirs - ours))
        (self.visits() * kl.sum(1)).sum().backward()
        assert logits.grad is not None
        return logits.grad

    def gradient_of_penalty(self, kind: str) -> Tensor:
        """By the logits, of the expected sum over a completion of k1, k2 or k3 of its tokens.

        That of k1 and of k3 is KL(pi || ref) of whole completions.
        """
        logits = self.logits.clone().requires_grad_()
        delta = self.logprobs(logits) - self.logprobs(self.ref_logits)
        k = {"k1": delta, "k2": delta**2 / 2, "k3": (-delta).exp() - 1 + delta}[kind]
        (self.probabilities(logits) * k.sum(1)).sum().backward()
        assert logits.grad is not None
        return logits.grad

    def visits(self) -> Tensor:
        """[nodes]: how likely a completion is to meet each prefix."""
        weight = self.probabilities(self.logits)[:, None].expand(self.mask.shape)
        none = torch.zeros(len(self.logits), dtype=torch.float64)
        return none.index_add(0, self.node[self.mask], weight[self.mask])

    def expected_later(self, rewards: Tensor) -> Tensor:
        """[N, T]: the exact value of each prefix: the mean sum of rewards from there on."""
        later = rewards.masked_fill(~self.mask, 0.0).flip(1).cumsum(1).flip(1)
        weighted = (self.probabilities(self.logits)[:, None] * later)[self.mask]
        none = torch.zeros(len(self.logits), dtype=torch.float64)
        total = none.index_add(0, self.node[self.mask], weighted)
        return (total / self.visits())[self.node].masked_fill(~self.mask, 0.0)


def make_world(name: str, tokens: int, longest: int, *, early: bool, closed: bool = True) -> World:
    """All completions of up to ``longest`` tokens, each of ``tokens`` ordinary ones or the end.

    Args:
        early: whether a completion may end before ``longest``.
        closed: whether the last of ``longest`` tokens is always the end.
    """
    rows: list[tuple[int, ...]] = []
    prefixes: dict[tuple[int, ...], int] = {}

    def grow(prefix: tuple[int, ...]) -> None:
        prefixes[prefix] = len(prefixes)
        last = len(prefix) == longest - 1
        if last or early:
            rows.append((*prefix, END))
        for token in range(1, tokens + 1):
            if not last:
                grow((*prefix, token))
            elif not closed:
                rows.append((*prefix, token))

    grow(())
    N, T = len(rows), longest
    ids, node = torch.zeros(N, T, dtype=torch.long), torch.zeros(N, T, dtype=torch.long)
    mask = torch.zeros(N, T, dtype=torch.bool)
    for row, completion in enumerate(rows):
        for t, token in enumerate(completion):
            ids[row, t], mask[row, t] = token, True
            node[row, t] = prefixes[completion[:t]]
    allowed = torch.full((len(prefixes), tokens + 1), -math.inf, dtype=torch.float64)
    allowed[node[mask], ids[mask]] = 0.0
    steps = torch.arange(1, allowed.numel() + 1, dtype=torch.float64).reshape(allowed.shape)
    return World(
        name=name,
        ids=ids,
        mask=mask,
        node=node,
        logits=allowed + torch.sin(1.3 * steps),
        ref_logits=allowed + torch.sin(1.3 * steps) + 0.7 * torch.sin(2.9 * steps),
        right=torch.sin(2.3 * torch.arange(N)) > 0.1,
    )


# Every completion of these ends well below the limit that shaping would read.
EQUAL = make_world("equal lengths", tokens=2, longest=3, early=False)  # 4 completions of 3
RAGGED = make_world("ragged lengths", tokens=2, longest=3, early=True)  # 7 of 1 to 3
ONE_TOKEN = make_world("one token", tokens=4, longest=1, early=True, closed=False)  # 5 of 1


def batches(probabilities: Tensor, size: int) -> Iterator[tuple[list[int], float]]:
    """Every batch of ``size`` independent completions, in one order, with its probability.

    Orders of the same completions are one batch, its probability theirs together: an update does
    not depend on the order of rows, which is checked by itself.
    """
    p = probabilities.tolist()
    for rows in itertools.combinations_with_replacement(range(len(p)), size):
        orders = math.factorial(size)
        for count in Counter(rows).values():
            orders //= math.factorial(count)
        yield list(rows), orders * math.prod(p[row] for row in rows)
