"""TRL's DPOTrainer around a run's own model and optimizer, fed with token ids."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from datasets import IterableDataset
from datasets.iterable_dataset import ExamplesIterable
from torch import Tensor
from transformers import PrinterCallback
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer

from harness.errors import CellError
from harness.external.arm import OfflineArm
from harness.external.offline_settings import offline_arguments
from harness.external.trainer import (
    check_environment,
    one_device,
    quiet,
    stepped,
    without_adapter_copy,
)
from harness.loop import Loop
from harness.models import Base, weights_sha256
from harness.pairs import PairStream
from harness.spec.schema import ExperimentSpec

SEEDS = 2**32  # numpy takes no larger one


class Follower(Protocol):
    """Is shown every batch before, and its loss after."""

    def read(self, inputs: dict[str, Tensor]) -> None: ...
    def lost(self, loss: Tensor) -> None: ...


class TokenDPOTrainer(DPOTrainer):
    """Reads token ids as they are, where TRL would write and read text again."""

    follower: Follower | None = None

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        return dataset

    def _compute_loss(self, model: Any, inputs: Any, return_outputs: bool) -> Any:
        if self.follower is None:
            return super()._compute_loss(model, inputs, return_outputs)
        self.follower.read(inputs)
        found = super()._compute_loss(model, inputs, return_outputs)
        self.follower.lost((found[0] if return_outputs else found).detach())
        return found


def build_offline_trainer(
    loop: Loop,
    base: Base,
    arm: OfflineArm,
    spec: ExperimentSpec,
    folder: Path,
    stream: PairStream,
    *,
    follower: Any,
) -> TokenDPOTrainer:
    """A trainer that trains ``loop``'s policy by ``loop``'s optimizer from its cursor on.

    Args:
        loop: as a cell builds it; its policy's model and optimizer are the trainer's.
        base: what the reference is.
        arm: with its tuned settings put in.
        spec: the same.
        folder: for the trainer, which writes nothing.
        stream: the pairs in their order.
        follower: a ``Follower`` and callback.

    Raises:
        InputError: an environment that changes the trainer's settings.
        CellError: a reference that is not the base.
    """
    quiet()
    model: Any = loop.learner.policy.model
    device = next(model.parameters()).device
    config: Any = DPOConfig(
        **offline_arguments(
            arm, spec, folder=folder, seed=loop.controls.seed % SEEDS, cpu=device.type == "cpu"
        )
    )
    one_device(config)
    trainer = TokenDPOTrainer(
        model=model,
        ref_model=None if spec.model.lora else copy.deepcopy(base.model),
        args=config,
        train_dataset=_rows(stream, loop.progress.cursor),
        processing_class=base.tokenizer,
        callbacks=[follower],
        optimizers=(stepped(loop), None),  # type: ignore[arg-type]
    )
    trainer.remove_callback(PrinterCallback)
    without_adapter_copy(trainer)
    held: Any = trainer.ref_model
    if held is not None and weights_sha256(held) != base.model_sha256:
        raise CellError("the reference that TRL holds is not the base model")
    check_environment(trainer)
    trainer.follower = follower
    return trainer


def _rows(stream: PairStream, start: int) -> IterableDataset:
    """The pairs from a position on, without end."""

    def rows() -> Iterator[tuple[int, dict[str, list[int]]]]:
        position = start
        while True:
            pair = stream.pairs[stream.at(position)]
            yield (
                position,
                {
                    "prompt_ids": [*pair.prompt_ids],
                    "chosen_ids": [*pair.chosen_ids],
                    "rejected_ids": [*pair.rejected_ids],
                },
            )
            position += 1

    # from_generator() would hash the generator and keep a lock file in the user's cache.
    return IterableDataset(ExamplesIterable(rows, {}))
