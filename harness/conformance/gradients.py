"""Gradients: against finite differences, at the first minibatch, of groups that agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from harness.arm import Arm
from harness.conformance.finding import Verdict, failed, not_applicable, passed, within
from harness.conformance.plain import (
    expected_imitation,
    expected_kl,
    expected_surrogate_gradient,
    expected_weights,
)
from harness.conformance.scene import (
    LIMIT,
    Scene,
    chosen,
    make_scene,
    relative,
    top,
    update,
    weigh,
)
from harness.types import Minibatch

MOVES = (3e-4, 0.1, 0.8)  # from inside a sequence ratio's clip to far outside a token ratio's
STEP = 1e-6
FD_TOLERANCE = 1e-6  # relative; central differences in float64 err by about 1e-9
EXACT = 1e-12


# --- finite differences --------------------------------------------------------------------------


class Held(TorchFunctionMode):
    """Holds what a computation takes for constant (``detach``, ``no_grad``) at its first values.

    A surrogate with a stop-gradient is no function whose slope is the gradient; with the stopped
    values held, it is one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Any] = []
        self.at: int | None = None  # None while recording

    @contextmanager
    def again(self) -> Iterator[None]:
        """Give the recorded values in the order in which they were recorded."""
        self.at = 0
        with self:
            yield

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        stopped = func in _STOPS or not torch.is_grad_enabled()
        if not stopped:
            return func(*args, **(kwargs or {}))
        if self.at is None:
            result = func(*args, **(kwargs or {}))
            self.results.append(result if isinstance(result, Tensor) else _RUN)
            return result
        result = self.results[self.at]
        self.at += 1
        return func(*args, **(kwargs or {})) if result is _RUN else result


_STOPS = (torch.Tensor.detach, torch.detach, torch.Tensor.data.__get__)  # pyright: ignore
_RUN = object()  # a call that gives no tensor is made every time


def slopes(f: Callable[[Tensor], Tensor], at: Tensor, where: Tensor, held: bool) -> Tensor:
    """Central differences of a number by each entry of a tensor where ``where`` is True."""
    mode = Held()
    if held:
        with mode:
            f(at)
    found = torch.zeros_like(at)
    for index in where.nonzero():
        ends = []
        for step in (STEP, -STEP):
            moved = at.clone()
            moved[tuple(index)] += step
            if held:
                with mode.again():
                    ends.append(f(moved))
            else:
                ends.append(f(moved))
        found[tuple(index)] = (ends[0] - ends[1]).detach() / (2 * STEP)
    return found


def check_finite_differences(arm: Arm) -> Verdict:
    """The gradient by each log-prob, and of the value loss by each value, is the loss's slope."""
    worst, clipped, tokens, held_any = 0.0, 0, 0, False
    for seed, move in enumerate(MOVES):
        scene = make_scene(arm, move=move, seed=seed)
        x = weigh(arm, scene.x)
        found = update(arm, scene, x)
        now, best = chosen(scene.table, x), top(scene.table, x)
        gap, held = _loss_gap(arm, x, now, best, found["gradient"])
        worst, held_any = max(worst, gap), held_any or held
        if arm.critic is not None:
            numeric = slopes(lambda v, x=x: arm.value_loss(x, v), scene.values, x.mask, False)
            worst = max(worst, relative(found["value_gradient"], numeric))
        clipped += int(found["sum/clip_fraction_high"] + found["sum/clip_fraction_low"])
        tokens += int((x.mask & x.keep[:, None]).sum())
    note = "stop-gradients held; " if held_any else ""
    return within(FD_TOLERANCE, worst, f"{note}{clipped} of {tokens} tokens clipped; largest gap")


def _loss_gap(
    arm: Arm, x: Minibatch, now: Tensor, best: Tensor | None, gradient: Tensor
) -> tuple[float, bool]:
    """The relative gap, and whether stopped values had to be held for it to be that small."""

    def loss(logprobs: Tensor) -> Tensor:
        return arm.policy_loss(x, logprobs.requires_grad_(), arm.kl.initial_coef, best)[0]

    plain = relative(gradient, slopes(loss, now.detach(), x.mask, held=False))
    if plain <= FD_TOLERANCE:
        return plain, False
    return relative(gradient, slopes(loss, now.detach(), x.mask, held=True)), True


# --- the first minibatch -------------------------------------------------------------------------


def check_first_minibatch(arm: Arm) -> Verdict:
    """Before any update every ratio is 1, no token clips, and loss and gradient are plain.

    Plain: minus the weighted sum of advantages, whose gradient is minus weight times advantage
    (spread over the completion where the ratio is the completion's), with the KL term and the
    likelihood term as their definitions give them. The weights are computed again by definition.
    """
    scene = make_scene(arm, move=0.0)
    x = weigh(arm, scene.x)
    now = chosen(scene.table, x)
    live = x.mask & x.keep[:, None]
    ratio = arm.ratio(now, now, x.mask)
    if not float((ratio - 1).abs().max()) <= EXACT:
        return failed(f"the ratio is {float(ratio.max())} before any update")
    found = update(arm, scene, x)
    for name in ("sum/approx_kl", "sum/clip_fraction_high", "sum/clip_fraction_low"):
        if float(found[name]) > EXACT:
            return failed(f"{name} is {float(found[name])} before any update")
    weights = expected_weights(arm, x, LIMIT)
    if weights is not None and relative(x.weights, weights) > EXACT:
        return failed(f"weights differ from their definition by {relative(x.weights, weights):.1e}")
    # An objective of A log pi says by its value nothing, and by its gradient the same.
    plain = -(x.weights * x.advantages * live).sum()
    held = -(x.weights * x.advantages * now * live).sum()
    surrogate = found["loss/surrogate"]
    gap = min(relative(surrogate, plain), relative(surrogate, held))
    if not gap <= EXACT:
        return failed(f"the surrogate is {float(surrogate):.9g}, expected {float(plain):.9g}")
    penalty, kl_gradient = expected_kl(arm, x, now)
    likelihood, pull = expected_imitation(arm, x, now)
    gap = relative(found["loss"], surrogate + penalty + likelihood)
    if not gap <= EXACT:
        return failed(f"loss {float(found['loss']):.9g} is not the sum of its terms: a hidden term")
    expected = expected_surrogate_gradient(arm, x, now) + kl_gradient + pull
    return within(
        EXACT, relative(found["gradient"], expected),
        f"ratio 1, loss {float(found['loss']):.6g} as by definition; gradient's largest gap",
    )  # fmt: skip


# --- groups that agree ---------------------------------------------------------------------------


def check_zero_variance(arm: Arm) -> Verdict:
    """With kl_coef 0, a group whose completions score alike does not move the policy."""
    if arm.advantage.min_group < 2:
        kind = type(arm.advantage).__name__
        return not_applicable(f"{kind} compares no completions of a group")
    arm = dataclasses.replace(arm, imitate=None)  # a likelihood term is no policy gradient
    flat = make_scene(arm, flat=True)
    alone = float(_without_kl(arm, flat).abs().max())
    if not alone <= EXACT:
        return failed(f"all groups agree, and the gradient is up to {alone:.1e}")
    # In company: one group that agrees among others that do not.
    score, correct = flat.x.score.clone(), flat.x.correct.clone()
    other = flat.x.group != 1
    odd = torch.arange(len(score)) % 2 == 0
    score[other], correct[other] = odd[other].double(), odd[other]
    fields: dict[str, Tensor] = {"score": score, "correct": correct}
    if flat.x.step_scores is not None:
        fields["step_scores"] = torch.where(
            other[:, None] & odd[:, None], 1 - flat.x.step_scores, flat.x.step_scores
        )
    mixed = dataclasses.replace(flat, x=dataclasses.replace(flat.x, **fields))
    found = _without_kl(arm, mixed)
    beside = float(found[~other].abs().max())
    if not found[other].any():
        return failed("groups that differ do not move the policy either")
    if not beside <= EXACT:
        if arm.scale is not None and _recentres(arm):
            kind = type(arm.scale).__name__
            return not_applicable(
                f"{kind} takes the batch's mean off, so that only a batch without any difference "
                f"is silent (it is: gradient {alone:.1g})"
            )
        return failed(f"a group that agrees has a gradient of up to {beside:.1e}")
    return passed(
        f"gradient {alone:.1g} in a batch of such groups, {beside:.1g} beside groups that differ"
    )


def _without_kl(arm: Arm, scene: Scene) -> Tensor:
    x = weigh(arm, scene.x, kl_coef=0.0)
    now = chosen(scene.table, x).detach().requires_grad_()
    loss, _ = arm.policy_loss(x, now, 0.0, top(scene.table, x))
    return torch.autograd.grad(loss, now)[0]


def _recentres(arm: Arm) -> bool:
    """Whether the scale turns a group's advantages of 0 into others."""
    assert arm.scale is not None
    advantages = torch.tensor([[1.0], [0.0], [0.0], [0.0]], dtype=torch.float64)
    mask, group = torch.ones(4, 1, dtype=torch.bool), torch.tensor([0, 0, 1, 1])
    return bool(arm.scale(advantages, advantages, mask, group)[2:].any())
