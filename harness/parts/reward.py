"""Whose scores an arm trains on, where an experiment has two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class GoldReward:
    """The gold reward itself, rather than the model that was learned from it.

    An upper bound beside arms that see the learned reward alone (PPO-GT: Rafailov et al.,
    arXiv:2305.18290 sec. 6.1). Only experiments with a learned reward have two.
    """

    version: ClassVar[int] = 1
