"""The sampling engines that ship."""

from __future__ import annotations

from torch import nn

from harness.arm import Arm
from harness.errors import InputError
from harness.external.arm import ExternalArm, OfflineArm
from harness.external.offline_settings import check_offline
from harness.external.settings import check_external
from harness.models import Base
from harness.samplers.hf import HFSampler
from harness.samplers.sampler import Sampler
from harness.spec.schema import ExperimentSpec
from harness.tasks import TASKS


def check_engine(spec: ExperimentSpec, arm: Arm) -> None:
    """Refuse what the engine cannot do for this arm.

    Raises:
        InputError: the arm feeds mixed embeddings, and the engine takes tokens alone; or another
            trainer trains the arm, and cannot in this experiment; or a task of several turns beside
            what takes one.
    """
    _check_turns(spec, arm)
    if isinstance(arm, OfflineArm):
        check_offline(arm, spec)
        return
    if isinstance(arm, ExternalArm):
        check_external(arm, spec)
    if arm.sampling.mixing is not None and spec.sampling.engine == "vllm":
        raise InputError(
            f"arm {arm.name!r} feeds mixed embeddings while sampling, and sampling.engine vllm "
            "takes tokens alone; use engine: hf, or take the arm out"
        )


def _check_turns(spec: ExperimentSpec, arm: Arm) -> None:
    """Refuse an environment where something cannot play it."""
    splits = (spec.data.train, spec.data.validation, *spec.data.test.values())
    tasks = (TASKS.get(split.task) for split in splits)
    played = next((t for t in tasks if t is not None and t.environment is not None), None)
    if played is None:
        return
    mixed = not isinstance(arm, OfflineArm) and arm.sampling.mixing is not None
    for what, found, mend in (
        ("sampling.engine vllm draws completions of one turn", spec.sampling.engine == "vllm",
         "use engine: hf"),
        ("sampling.stop ends a completion, where here the end token ends a turn",
         bool(spec.sampling.stop), "leave stop out"),
        ("a learned reward reads completions of one turn", spec.reward.learned is not None,
         "make the reward maths"),
        (f"arm {arm.name!r} is trained by TRL, which takes all of a completion for the policy's",
         isinstance(arm, ExternalArm), "take the arm out"),
        (f"arm {arm.name!r} feeds mixed embeddings, which was made for one turn", mixed,
         "take the arm out"),
    ):  # fmt: skip
        if found:
            raise InputError(
                f"task {played.name!r} has several turns with an environment's text between, and "
                f"{what}; {mend}, or take another task"
            )


def make_sampler(spec: ExperimentSpec, model: nn.Module, base: Base) -> Sampler:
    """The engine that a spec names, sampling from a model's present weights.

    Raises:
        InputError: the engine is not installed.
    """
    if spec.sampling.engine == "vllm":
        from harness.samplers.vllm import VLLMSampler

        return VLLMSampler(spec, model, base)
    return HFSampler(model, base.tokenizer, base.eos_token_ids, spec.sampling.engine_batch)
