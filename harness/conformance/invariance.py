"""What must not change an update: padding, gaps, order of rows, how it is cut and spread."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from harness.arm import Arm
from harness.conformance.finding import Verdict, failed, within
from harness.conformance.scene import (
    LIMIT,
    VOCABULARY,
    Scene,
    change,
    chosen,
    credit,
    losses,
    make_scene,
    shards,
    top,
    update,
    weigh,
    worst_gap,
)
from harness.types import Minibatch

TOLERANCE = 1e-9  # relative; float64 sums in another order differ by about 1e-15
WORLDS = (2, 3, 5)


def check_padding(arm: Arm) -> Verdict:
    """Whatever stands on padding, and however much of it there is, the update is the same."""
    scene = make_scene(arm)
    x, clean = weigh(arm, scene.x), update(arm, scene)
    worst = 0.0
    for junk in (math.nan, math.inf, 1e30):
        spoilt = spoil(scene, junk)
        bad = weigh(arm, spoilt.x)
        gap = (bad.advantages - x.advantages).abs().max()
        if not float(gap) <= TOLERANCE:
            return failed(f"advantages move by {float(gap):.1e} when padding holds {junk}")
        found = losses(
            arm, bad, _spoil(chosen(spoilt.table, bad), bad.mask, junk), spoilt.values,
            _spoil_top(spoilt, junk),
        )  # fmt: skip
        size, name = worst_gap(found, clean)
        if not size <= TOLERANCE:
            return failed(f"{name} moves by {size:.1e} (relative) when padding holds {junk}")
        worst = max(worst, size)
    wide = update(arm, widen(scene, 3))
    for name in ("gradient", "value_gradient"):
        if name in wide:
            if wide[name][:, LIMIT:].any():
                return failed(f"{name} reaches columns that are all padding")
            wide[name] = wide[name][:, :LIMIT]
    size, name = worst_gap(wide, clean)
    return within(TOLERANCE, max(worst, size), "NaN, inf, 1e30 and 3 more columns; largest gap")


def _spoil(field: Tensor, mask: Tensor, junk: float) -> Tensor:
    return torch.where(mask, field, torch.full_like(field, junk))


def _spoil_top(scene: Scene, junk: float) -> Tensor | None:
    found = top(scene.table, scene.x)
    return None if found is None else _spoil(found, scene.x.mask[:, :, None], junk)


def spoil(scene: Scene, junk: float) -> Scene:
    """The scene with junk in every field's padding."""
    x = scene.x
    fields: dict[str, Tensor | None] = {
        "completion_ids": torch.where(x.mask, x.completion_ids, VOCABULARY - 1)
    }
    if x.top_logprobs is not None:
        fields["top_logprobs"] = _spoil(x.top_logprobs, x.mask[:, :, None], junk)
    if x.step_ends is not None:
        fields["step_ends"] = x.step_ends | ~x.mask
    x = dataclasses.replace(change(x, lambda f: _spoil(f, x.mask, junk)), **fields)
    return Scene(x, scene.table, _spoil(scene.values, x.mask, junk))


def widen(scene: Scene, columns: int) -> Scene:
    """The scene with more columns of padding, NaN where a number may be."""

    def more(field: Tensor) -> Tensor:
        tail = (0, 0) * (field.dim() - 2)
        value = math.nan if field.is_floating_point() else 0
        return torch.nn.functional.pad(field, (*tail, 0, columns), value=value)

    x = change(scene.x, more)
    names = ("mask", "completion_ids", "step_ends", "top_ids", "top_logprobs")
    fields = {n: more(v) for n in names if (v := getattr(x, n)) is not None}
    return Scene(dataclasses.replace(x, **fields), scene.table, more(scene.values))


GAPS = (0, 1, 4, 5, 7, 8, 9)  # where each token goes: two columns after the second, one more later


def check_gaps(arm: Arm) -> Verdict:
    """Text of an environment between the tokens changes the update of none of them.

    Its columns hold junk, as padding does: an arm sees of it what models read, and nothing else.
    """
    scene = make_scene(arm)
    x, clean = weigh(arm, scene.x), update(arm, scene)
    apart = spread(scene)
    bad = weigh(arm, apart.x)
    gap = (bad.advantages[:, GAPS] - x.advantages).abs().max()
    if not float(gap) <= TOLERANCE:
        return failed(f"advantages move by {float(gap):.1e} when turns are apart")
    recorded = top(scene.table, scene.x)
    found = losses(
        arm, bad, _spread(chosen(scene.table, scene.x)), apart.values,
        None if recorded is None else _spread(recorded),
    )  # fmt: skip
    for name in ("gradient", "value_gradient"):
        if name in found:
            between = found[name].clone()
            between[:, GAPS] = 0
            if between.any():
                return failed(f"{name} reaches what was not sampled")
            found[name] = found[name][:, GAPS]
    size, name = worst_gap(found, clean)
    return within(TOLERANCE, size, f"largest gap with turns apart ({name})")


def _spread(field: Tensor) -> Tensor:
    width = (len(field), GAPS[-1] + 1, *field.shape[2:])
    junk = math.nan if field.is_floating_point() else 0
    wide = torch.full(width, junk, dtype=field.dtype, device=field.device)
    wide[:, GAPS] = field
    return wide


def spread(scene: Scene) -> Scene:
    """The scene with an environment's text between tokens, NaN where a number may be."""
    x = change(scene.x, _spread)
    names = ("mask", "completion_ids", "step_ends", "top_ids", "top_logprobs")
    fields = {n: _spread(v) for n in names if (v := getattr(x, n)) is not None}
    later = fields["mask"].flip(1).cumsum(1).flip(1) > 0
    x = dataclasses.replace(x, **fields, given=~fields["mask"] & later)
    return Scene(x, scene.table, _spread(scene.values))


def check_micro_batches(arm: Arm) -> Verdict:
    """Loss, gradients and statistics of the pieces add up to those of the minibatch."""
    scene = make_scene(arm)
    x, whole = weigh(arm, scene.x), update(arm, scene)
    rng = torch.Generator().manual_seed(1)
    cuts = [list(range(len(x))), [row // 5 for row in range(len(x))]]
    cuts += [torch.randint(4, (len(x),), generator=rng).tolist() for _ in range(3)]
    worst, name = 0.0, ""
    for cut in cuts:
        totals = {name: torch.zeros_like(value) for name, value in whole.items()}
        for rows in shards(len(x), cut):
            piece = update(arm, scene.select(rows), x.select(rows))
            for key, value in piece.items():
                if key.endswith("gradient"):
                    totals[key][rows] += value
                else:
                    totals[key] = totals[key] + value
        worst, name = max((worst, name), worst_gap(totals, whole))
    return within(TOLERANCE, worst, f"{len(cuts)} ways to cut {len(x)} rows; largest gap")


def check_row_order(arm: Arm) -> Verdict:
    """Rows in another order, their groups under other numbers: the same update."""
    scene = make_scene(arm)
    batch, clean = credit(arm, scene.x), update(arm, scene)
    # The order decides the sign of an advantage that is 0 but for rounding, and where it counts.
    tiny = (batch.advantages.abs() < TOLERANCE) & (batch.advantages != 0)
    worst = 0.0
    for seed in range(3):
        order = torch.randperm(len(scene.x), generator=torch.Generator().manual_seed(seed))
        moved = scene.select(order)
        x = dataclasses.replace(moved.x, group=17 - 3 * moved.x.group)
        found = update(arm, Scene(x, moved.table, moved.values))
        for name in ("gradient", "value_gradient"):
            if name in found:
                found[name] = torch.zeros_like(found[name]).index_copy(0, order, found[name])
        expected = clean
        if tiny.any():
            expected = {k: v for k, v in clean.items() if not k.startswith("sum/clip")}
        size, name = worst_gap(found, expected)
        if not size <= TOLERANCE:
            return failed(f"{name} moves by {size:.1e} (relative) with the order of rows")
        worst = max(worst, size)
    return within(TOLERANCE, worst, "3 orders, groups renamed; largest gap")


def check_world_size(arm: Arm) -> Verdict:
    """Rows spread over W ranks, their gradients summed: the parameters' gradient is the same.

    Credit and weights are fixed before rows are spread, as they are before micro-batches are cut;
    each rank pads to its own longest completion.
    """
    scene = make_scene(arm)
    x = weigh(arm, scene.x)
    whole = _parameter_gradients(arm, scene, x)
    worst = 0.0
    for world in WORLDS:
        total = {name: torch.zeros_like(value) for name, value in whole.items()}
        for rows in shards(len(x), [row % world for row in range(len(x))]):
            share = _parameter_gradients(arm, scene.select(rows), _trim(x.select(rows)))
            total = {name: value + share[name] for name, value in total.items()}
        size, name = worst_gap(total, whole)
        if not size <= TOLERANCE:
            return failed(f"{world} ranks: the {name}'s gradient moves by {size:.1e} (relative)")
        worst = max(worst, size)
    return within(TOLERANCE, worst, f"{', '.join(map(str, WORLDS))} ranks; largest gap")


def _parameter_gradients(arm: Arm, scene: Scene, x: Minibatch) -> dict[str, Tensor]:
    """Gradients by the policy's table, and by a critic's table of values of the last token."""
    table = scene.table.detach().requires_grad_()
    coef = arm.kl.initial_coef
    loss, _ = arm.policy_loss(x, chosen(table, x), coef, top(table, x))
    found = {"policy": _by(loss, table)}
    if arm.critic is not None:
        heads = torch.linspace(-1, 1, VOCABULARY, dtype=torch.float64).requires_grad_()
        values = heads[x.completion_ids]
        found["critic"] = _by(arm.value_loss(x, values), heads)
    return found


def _by(loss: Tensor, parameter: Tensor) -> Tensor:
    if not loss.requires_grad:
        return torch.zeros_like(parameter)
    return torch.autograd.grad(loss, parameter)[0]


def _trim(x: Minibatch) -> Minibatch:
    """Without the columns that are padding in every row."""
    longest = int(x.mask.sum(1).max())
    fields = {
        f.name: value[:, :longest]
        for f in dataclasses.fields(x)
        if isinstance(value := getattr(x, f.name), Tensor)
        and value.dim() >= 2
        and not f.name.startswith("prompt")
    }
    return dataclasses.replace(x, **fields)
