"""What a run held in memory, by role: predicted from shapes, and measured on its tensors."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from harness.cost.memory import (
    BF16_LORA_ADAM,
    FP32_ADAM,
    MIXED_ADAM,
    Load,
    PeakMeter,
    Resident,
    Storage,
    adapter_copy,
    measured_static,
    peak_bytes,
    predict,
)
from harness.cost.shape import ModelShape
from harness.loop import Loop
from harness.spec.schema import ExperimentSpec


def storage_of(spec: ExperimentSpec) -> Storage:
    """Bytes per parameter in this experiment's precision."""
    if spec.model.dtype == "float32":
        return FP32_ADAM
    return BF16_LORA_ADAM if spec.model.lora else MIXED_ADAM


def predicted_memory(spec: ExperimentSpec, shapes: dict[str, ModelShape]) -> dict[str, Any]:
    """Bytes by role and kind, from the spec's limits: the longest prompt and completion."""
    sampling, micro = spec.sampling, spec.optimizer.micro_batch
    rows = sampling.prompts_per_step * sampling.completions_per_prompt
    length = spec.data.max_prompt_tokens + sampling.max_new_tokens
    storage = storage_of(spec)
    residents = [
        Resident(role, shape, storage)  # type: ignore[arg-type]
        for role, shape in shapes.items()
        if not (role == "reference" and spec.model.lora)  # the policy without its adapters
    ]
    load = Load(
        train_rows=min(micro, rows),
        score_rows=min(micro, rows),
        generate_rows=min(sampling.engine_batch, rows),
        length=length,
        completion=sampling.max_new_tokens,
        fused=spec.model.attention == "flash_attention_2",
        recompute=spec.model.gradient_checkpointing,
    )
    items = predict(residents, load)
    reference = shapes.get("reference")
    if reference is not None and reference.lora_rank:  # a past policy: the base with old adapters
        items.append(adapter_copy("reference", reference, storage))
    return {"items": [asdict(item) for item in items], "peak": peak_bytes(items)}


def memory_record(spec: ExperimentSpec, loop: Loop, meter: PeakMeter) -> dict[str, Any]:
    """``memory.json`` of a finished run."""
    predicted = predicted_memory(spec, dict(loop.ledger.shapes))
    learner = loop.learner
    models: list[tuple[str, Any, Any]] = [
        ("policy", learner.policy.model, learner.policy_optimizer)
    ]
    if learner.critic is not None:
        models.append(("critic", learner.critic, learner.critic_optimizer))
    measured = []
    for role, model, optimizer in models:
        # Gradients are freed after every optimizer step, so there are none to measure here.
        held = {"parameters": measured_static(model)["parameters"]}
        held["optimizer"] = optimizer.bytes_held() if optimizer else 0
        measured += [{"role": role, "kind": k, "bytes": n} for k, n in held.items()]
    if loop.reference is not None and (weights := loop.reference.bytes_held()):
        measured.append({"role": "reference", "kind": "parameters", "bytes": weights})
    return {
        "predicted": predicted["items"],
        "predicted_peak": predicted["peak"],
        "measured": measured,
        "peak": {"bytes": meter.above_entry, "method": meter.source},
    }
