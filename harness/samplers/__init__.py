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


def check_engine(spec: ExperimentSpec, arm: Arm) -> None:
    """Refuse what the engine cannot do for this arm.

    Raises:
        InputError: the arm feeds mixed embeddings, and the engine takes tokens alone; or another
            trainer trains the arm, and cannot in this experiment.
    """
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


def make_sampler(spec: ExperimentSpec, model: nn.Module, base: Base) -> Sampler:
    """The engine that a spec names, sampling from a model's present weights.

    Raises:
        InputError: the engine is not installed.
    """
    if spec.sampling.engine == "vllm":
        from harness.samplers.vllm import VLLMSampler

        return VLLMSampler(spec, model, base)
    return HFSampler(model, base.tokenizer, base.eos_token_ids, spec.sampling.engine_batch)
