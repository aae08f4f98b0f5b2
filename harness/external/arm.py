"""An arm whose loop is another library's: what it computes stays declared as parts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar, Literal

from harness.arm import Arm
from harness.errors import InputError
from harness.external.objective import RULES, objective


def _installed() -> str:
    try:
        return f"trl {version('trl')}"
    except PackageNotFoundError:
        return "trl, not installed"


@dataclass(frozen=True)
class TRLLoop:
    """A trainer of TRL: sampling, losses, gradients and updates are its own code.

    Attributes:
        trainer: its class.
        sampler: who draws completions. ``trl``: transformers' ``generate``, on torch's generator.
            ``harness``: the experiment's engine, which then draws what an arm of our own would
            draw, as long as the weights agree.
        library: its version; another one is another loop, and results of the two never mix.
    """

    version: ClassVar[int] = 1
    trainer: Literal["GRPOTrainer", "RLOOTrainer"]
    sampler: Literal["trl", "harness"] = "trl"
    library: str = field(default_factory=_installed)

    def __post_init__(self) -> None:
        if self.trainer not in RULES:
            raise InputError(f"loop.trainer {self.trainer!r} is none of {', '.join(RULES)}")
        if self.sampler not in ("trl", "harness"):
            raise InputError(f"loop.sampler {self.sampler!r} is neither trl nor harness")


@dataclass(frozen=True, kw_only=True)
class ExternalArm(Arm):
    """An arm that ``loop`` trains, told to compute what the parts say.

    The parts are the single source of what the trainer is told (``objective``), so costs, tuning
    and the certificate treat it like any arm; that the trainer does as it is told is tested on
    its own losses and weights (tests/parity) and, for the advantages, measured in every step.

    Raises:
        InputError: a part that the trainer cannot be told.
    """

    loop: TRLLoop

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.loop, TRLLoop):
            raise InputError(f"arm {self.name!r}: loop is {self.loop!r}; give a TRLLoop")
        objective(self, self.loop.trainer)

    @classmethod
    def of(cls, arm: Arm, name: str, *, loop: TRLLoop, source: str, **changes: Any) -> ExternalArm:
        """An arm of our own, some parts exchanged, trained by ``loop``."""
        same = {f.name: getattr(arm, f.name) for f in dataclasses.fields(Arm)}
        return cls(**(same | changes | {"name": name, "source": source, "loop": loop}))
