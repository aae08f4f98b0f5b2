"""Who judges an experiment's completions: the grader of its reward, and the judge of an arm."""

from __future__ import annotations

from collections.abc import Mapping

from harness.arm import Arm
from harness.artefact import Progress
from harness.cost.shape import ModelShape
from harness.data import PromptSet
from harness.errors import InputError
from harness.identity import digest
from harness.models import Base
from harness.parts.shaping import SignedScore
from harness.reward_model import RewardModel, ensure_reward_model, load_reward_model, read_card
from harness.rewards.gold import gold_identity, make_gold
from harness.rewards.judge import Judge, MathsJudge, make_grader, reward_identity
from harness.rewards.learned import JUDGE_VERSION, LearnedGrader, LearnedJudge
from harness.rewards.maths import MathGrader
from harness.rewards.noise import NoisyJudge
from harness.spec.schema import ExperimentSpec


def open_grader(
    spec: ExperimentSpec,
    base: Base,
    sets: Mapping[str, PromptSet],
    progress: Progress | None = None,
) -> MathGrader | LearnedGrader:
    """The grader of an experiment; a reward model is built first where there is none yet."""
    learned = spec.reward.learned
    if learned is None:
        return make_grader(spec.reward)
    device = str(next(base.model.parameters()).device)
    gold = make_gold(learned, device)
    folder = ensure_reward_model(spec, base, sets, gold, progress=progress)
    model = load_reward_model(folder, device)
    return LearnedGrader(
        gold, model, success=learned.success, micro_batch=spec.optimizer.micro_batch
    )


def make_judge(
    spec: ExperimentSpec,
    arm: Arm,
    grader: MathGrader | LearnedGrader,
    train: PromptSet,
    *,
    placebo: bool,
) -> Judge:
    """What tells an arm how its completions scored, with the spec's noise on it."""
    plain = _plain_judge(spec, arm, grader, train, placebo=placebo)
    if spec.reward.noise is None:
        return plain
    reward = spec.reward
    gain = None if reward.learned else reward.correct - reward.wrong
    return NoisyJudge(plain, spec.reward.noise, gain, placebo, reward.wrong)


def _plain_judge(
    spec: ExperimentSpec,
    arm: Arm,
    grader: MathGrader | LearnedGrader,
    train: PromptSet,
    *,
    placebo: bool,
) -> Judge:
    if isinstance(grader, LearnedGrader):
        model = grader.model
        assert isinstance(model, RewardModel)
        return LearnedJudge(
            grader, train.problems, placebo=placebo, on_gold=arm.reward is not None,
            gold_mean=model.card["gold_mean"], gold_std=model.card["gold_std"],
        )  # fmt: skip
    return MathsJudge(grader, train.problems, spec.reward, placebo=placebo)


def check_reward(spec: ExperimentSpec, arm: Arm) -> None:
    """Refuse an arm that asks of the reward what it is not.

    Raises:
        InputError: a gold reward where there is one reward, or a rule for verdicts where the
            reward is a score; or a rule that the spec's noise would not reach.
    """
    _check_noise(spec, arm)
    _check_dense(spec, arm)
    if spec.reward.learned is None:
        if arm.reward is not None:
            raise InputError(
                f"arm {arm.name!r} trains on the gold reward behind a learned one, and reward.kind "
                "is maths, which has one reward only; take the arm out, or make the reward learned"
            )
        return
    for part, what in ((arm.imitate, "imitates right completions"), (_signed(arm), "scores signs")):
        if part is not None:
            raise InputError(
                f"arm {arm.name!r} {what}, and a learned reward is a score without right and "
                "wrong; take the arm out"
            )


def _check_dense(spec: ExperimentSpec, arm: Arm) -> None:
    """Refuse a dense reward beside an arm that would not be paid by it."""
    if spec.reward.dense is None:
        return
    for lost, what in (
        (arm.advantage is None, "learns from given pairs and not from the reward"),
        (_signed(arm) is not None, "scores signs of verdicts"),
    ):
        if lost:
            raise InputError(
                f"arm {arm.name!r} {what}, so reward.dense would pay it nothing along the way; "
                "take the arm out, or the dense reward"
            )


def _check_noise(spec: ExperimentSpec, arm: Arm) -> None:
    """Refuse noise beside an arm that it would spare: the others would bear it alone."""
    noise = spec.reward.noise
    if noise is None or not (noise.turns or noise.sigma):
        return
    reads: dict[str, bool] = {
        "learns from given pairs and not from the reward": arm.advantage is None,
        "learns from worked steps, which are graded apart": (
            arm.advantage is not None and arm.advantage.needs_steps
        ),
        "scores signs of verdicts, which sigma does not reach": (
            noise.sigma > 0 and _signed(arm) is not None
        ),
        "imitates by verdicts, which sigma does not reach": (
            noise.sigma > 0 and arm.imitate is not None
        ),
    }
    for what, spared in reads.items():
        if spared:
            raise InputError(
                f"arm {arm.name!r} {what}, so reward.noise would spare it and no other arm; take "
                "the arm or the noise out"
            )


def _signed(arm: Arm) -> SignedScore | None:
    return next((rule for rule in arm.shaping if isinstance(rule, SignedScore)), None)


def reward_hashes(
    spec: ExperimentSpec, base: Base, sets: Mapping[str, PromptSet]
) -> dict[str, str]:
    """What pins the reward: its rule, and the weights and data of a model."""
    learned = spec.reward.learned
    if learned is None:
        return {"reward": digest(reward_identity(spec.reward))}
    gold = make_gold(learned, str(next(base.model.parameters()).device))
    card = read_card(ensure_reward_model(spec, base, sets, gold))
    rule = {
        "judge": JUDGE_VERSION,
        "gold": gold_identity(learned),
        "recipe": learned.model_dump(mode="json"),
    }
    if spec.reward.noise is not None:
        rule["noise"] = spec.reward.noise.model_dump(mode="json")
    return {
        "reward": digest(rule),
        "reward_model": card["weights_sha256"],
        "preferences": card["pairs_sha256"],
    }


def reward_shape(grader: LearnedGrader) -> ModelShape:
    """What the reward model costs to read."""
    assert isinstance(grader.model, RewardModel)
    return grader.model.shape
