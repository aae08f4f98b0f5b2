"""The sampling engines that ship."""

from __future__ import annotations

from torch import nn

from harness.models import Base
from harness.samplers.hf import HFSampler
from harness.samplers.sampler import Sampler
from harness.spec.schema import ExperimentSpec


def make_sampler(spec: ExperimentSpec, model: nn.Module, base: Base) -> Sampler:
    """The engine that a spec names, sampling from a model's present weights.

    Raises:
        InputError: the engine is not installed.
    """
    if spec.sampling.engine == "vllm":
        from harness.samplers.vllm import VLLMSampler

        return VLLMSampler(spec, model, base)
    return HFSampler(model, base.tokenizer, base.eos_token_ids, spec.sampling.engine_batch)
