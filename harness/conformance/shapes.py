"""What parts return: shapes, finite numbers, nothing on padding."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.arm import Arm
from harness.conformance.finding import Verdict, failed, passed
from harness.conformance.scene import Scene, chosen, credit, make_scene, top, update, weigh
from harness.types import Batch, Minibatch, group_range


def check_shapes(arm: Arm) -> Verdict:
    """Every part returns what its signature says, finite on tokens and nothing on padding."""
    scene = make_scene(arm)
    batch = credit(arm, scene.x)
    x = weigh(arm, scene.x)
    fault = _selection(arm, scene, batch) or _credit(arm, batch) or _weights(x)
    fault = fault or _loss(arm, scene, x)
    if fault:
        return failed(fault)
    B, T = x.mask.shape
    kept = int(x.keep.sum())
    return passed(f"{B} completions of up to {T} tokens, {kept} of them kept in the loss")


def _selection(arm: Arm, scene: Scene, batch: Batch) -> str | None:
    keep = arm.sampling.keep(scene.x.correct, scene.x.group)
    for what, found in (("sampling.keep", keep), ("exclude.keep", batch.keep)):
        if found.shape != batch.score.shape or found.dtype != torch.bool:
            return f"{what} gives {_form(found)}, expected bool {list(batch.score.shape)}"
    if group_range(keep.double(), scene.x.group).any():
        return "sampling.keep splits a group"
    if not keep.any():
        return "sampling.keep drops every group, mixed ones too"
    if not (keep & batch.keep).any():
        return "exclude.keep leaves nothing of the groups that sampling keeps"
    return None


def _credit(arm: Arm, batch: Batch) -> str | None:
    for name in ("rewards", "advantages", "returns"):
        found = getattr(batch, name)
        if name == "returns" and arm.critic is None:
            continue
        if found is None:
            return f"there is a critic and {name} is None: it has nothing to learn from"
        if found.shape != batch.mask.shape or not found.is_floating_point():
            return f"{name} has {_form(found)}, expected floats {list(batch.mask.shape)}"
        if not torch.isfinite(found[batch.mask]).all():
            return f"{name} is not finite on a token"
        if found[~batch.mask].any():
            return f"{name} is not 0 on padding"
    return None


def _weights(x: Minibatch) -> str | None:
    for name in ("weights", "imitation_weights", "value_weights"):
        found = getattr(x, name)
        if found is None:
            continue
        if found.shape != x.mask.shape:
            return f"{name} has {_form(found)}, expected {list(x.mask.shape)}"
        if not torch.isfinite(found).all() or (found < 0).any():
            return f"{name} is negative or not finite"
        silent = ~x.mask if name == "value_weights" else ~(x.mask & x.keep[:, None])
        if found[silent].any():
            return f"{name} is not 0 on padding or on an excluded completion"
    return None


def _loss(arm: Arm, scene: Scene, x: Minibatch) -> str | None:
    coef = arm.kl.initial_coef
    loss, _ = arm.policy_loss(x, chosen(scene.table, x), coef, top(scene.table, x))
    if loss.shape != ():
        return f"the loss has {_form(loss)}, expected a number"
    for name, found in update(arm, scene, x).items():
        if not torch.isfinite(found).all():
            return f"{name} is not finite"
    return None


def _form(found: Tensor) -> str:
    return f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)}"
