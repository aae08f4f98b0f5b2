"""What a learned reward is pinned by: its gold scorer, its preference data, its model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from harness.spec.strict import Strict

Probability = Annotated[float, Field(ge=0, le=1)]


class NoiseSpec(Strict):
    """What an arm is told of the reward in place of the truth; evaluations see the truth.

    A right verdict is told as wrong with probability flip + (1 - flip) false_negative, a wrong one
    as right with flip + (1 - flip) false_positive. ``sigma`` is the standard deviation of what is
    added to each score, in units of the score.
    """

    flip: Probability = 0.0
    false_negative: Probability = 0.0
    false_positive: Probability = 0.0
    sigma: float = Field(default=0.0, ge=0)

    @property
    def turns(self) -> bool:
        """Whether any verdict is told otherwise."""
        return self.right_told_wrong + self.wrong_told_right > 0

    @property
    def right_told_wrong(self) -> float:
        return self.flip + (1 - self.flip) * self.false_negative

    @property
    def wrong_told_right(self) -> float:
        return self.flip + (1 - self.flip) * self.false_positive


class DenseSpec(Strict):
    """A reward that is paid along the way: ``steps`` for each right worked step, at the token that
    ends it, and ``outcome`` times the verdict's score at the end."""

    steps: float = Field(gt=0)
    outcome: float = Field(default=1.0, ge=0)


class PreferenceSpec(Strict):
    """Where pairs of a chosen and a rejected completion come from.

    ``sampled``: two completions of the base for each prompt, and a label drawn from
    P(the first is preferred) = sigmoid(label_scale (gold_1 - gold_2)) (Bradley and Terry).
    ``local`` and ``hub``: a data set of pairs.
    """

    source: Literal["sampled", "local", "hub"] = "sampled"
    pairs: int = Field(ge=1)  # to train on
    heldout: int = Field(ge=1)  # to measure accuracy and calibration on
    temperature: float = Field(default=1.0, gt=0)  # of the completions that are sampled
    label_scale: float = Field(default=1.0, gt=0)
    seed: int = 0
    dataset: str | None = None
    split: str = "train"
    revision: str | None = None

    @model_validator(mode="after")
    def _named(self) -> PreferenceSpec:
        if (self.source == "sampled") != (self.dataset is None):
            raise ValueError(
                f"source {self.source} "
                + ("takes no dataset" if self.dataset else "needs a dataset; name one")
            )
        return self


class RewardModelSpec(Strict):
    """A reward model: the base (or another model) with a scalar head, fitted to preferences."""

    init: str = "base"  # or a model's name or folder
    revision: str | None = None
    preferences: PreferenceSpec
    epochs: int = Field(default=1, ge=1)
    batch: int = Field(default=32, ge=1)  # pairs per optimizer step
    learning_rate: float = Field(gt=0)
    seed: int = 0


class LearnedSpec(Strict):
    """The gold reward, which only judges, and the model that arms train on.

    ``success``: the gold score from which a completion counts as right.
    """

    gold: str
    gold_model: str | None = None  # of a gold scorer that is a model itself: a name or folder
    gold_revision: str | None = None  # of one on the hub
    success: float
    model: RewardModelSpec
