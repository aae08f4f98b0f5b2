"""An arm whose loop is another library's: what it computes stays declared as parts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar, Literal

from harness.arm import PARTS, Arm
from harness.errors import InputError
from harness.external.objective import RULES, objective
from harness.parts.critic import ValueModel
from harness.parts.preference import KLInPreference, SigmoidLoss


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


@dataclass(frozen=True)
class TRLOffline:
    """A trainer of TRL that learns from a data set.

    Attributes:
        trainer: its class.
        library: its version; another one is another loop, and results of the two never mix.
    """

    version: ClassVar[int] = 1
    trainer: Literal["DPOTrainer"] = "DPOTrainer"
    library: str = field(default_factory=_installed)

    def __post_init__(self) -> None:
        if self.trainer != "DPOTrainer":
            raise InputError(f"loop.trainer {self.trainer!r} is not DPOTrainer")


@dataclass(frozen=True, kw_only=True)
class OfflineArm(Arm):
    """An arm that learns from the experiment's preference pairs, and samples nothing.

    It has none of the parts that turn samples into a loss. Its pairs are those that the
    experiment's reward model was fitted to; order, budget, optimizer and evaluation are pinned as
    for any arm.

    Attributes:
        kl: the reference and its beta.
        preference: the loss of a pair.
        loop: the trainer.

    Raises:
        InputError: a part of the wrong kind, or one of an arm that samples.
    """

    sampling: None = None  # type: ignore[assignment]
    kl: KLInPreference
    advantage: None = None  # type: ignore[assignment]
    scale: None = None
    ratio: None = None  # type: ignore[assignment]
    clip: None = None  # type: ignore[assignment]
    aggregate: None = None  # type: ignore[assignment]
    preference: SigmoidLoss
    loop: TRLOffline = field(default_factory=TRLOffline)

    def __post_init__(self) -> None:
        for name, kind in KINDS_OFFLINE.items():
            if not isinstance(getattr(self, name), kind):
                raise InputError(
                    f"arm {self.name!r}: {name} is {getattr(self, name)!r}; give a {kind.__name__}"
                )
        for name in PARTS:
            if name not in KINDS_OFFLINE and getattr(self, name) not in (None, ()):
                raise InputError(
                    f"arm {self.name!r}: it learns from pairs and samples nothing, so {name} would "
                    "do nothing; leave it out"
                )

    @property
    def critic(self) -> ValueModel | None:
        return None

    def group_size(self, control: int) -> int:
        return control

    def check(self, completions_per_prompt: int) -> None:
        """It draws no groups."""


KINDS_OFFLINE: dict[str, type] = {
    "kl": KLInPreference, "preference": SigmoidLoss, "loop": TRLOffline,
}  # fmt: skip
