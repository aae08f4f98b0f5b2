"""The reward model: a scalar head on a trunk, fitted to preferences by trl's RewardTrainer.

It is an artefact of the cache like the embedded base: built once in a child process, named by the
hash of all that it depends on, and shared by all arms and seeds of an experiment. Its scores are
standardised on completions of the base, so that a KL coefficient means the same whatever scale
the training happened to give them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from harness.artefact import Artefact, Progress, ensure, keyed
from harness.cost.shape import ModelShape
from harness.data import PromptSet
from harness.errors import CellError, InputError
from harness.models import Base, load_base, positions, weights_sha256
from harness.preference_data import data_identity
from harness.preferences import VERSION as PREFERENCES_VERSION
from harness.preferences import Draw, Preferences, collect_preferences, to_json
from harness.rewards.gold import gold_identity
from harness.rewards.learned import GoldScorer
from harness.samplers.sampler import Decoding
from harness.spec.reward import LearnedSpec, RewardModelSpec
from harness.spec.schema import ExperimentSpec, ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VERSION = 4  # raise when a recipe would give another model
RECORD = "reward_model.json"
FROM_BASE = "base"
PAIRS, START, TOKENIZER = "pairs.json", "start", "tokenizer"  # what the child is given


class RewardModel:
    """A reward model as the loop reads it.

    Attributes:
        model: a sequence-classification model with one output, whose head is called ``score``.
        mean, std: of its raw scores on the base's completions.
        card: what was recorded of it.
    """

    def __init__(
        self, model: PreTrainedModel, mean: float, std: float, card: Mapping[str, Any]
    ) -> None:
        self.model, self.mean, self.std, self.card = model, mean, std, card

    @property
    def shape(self) -> ModelShape:
        """What its FLOPs follow from."""
        return ModelShape.from_model(self.model, scalar_head=True)

    @property
    def sha256(self) -> str:
        """Of its weights."""
        return weights_sha256(self.model)

    @torch.no_grad()
    def score(
        self,
        prompt_ids: Int[Tensor, "B S"],
        prompt_mask: Bool[Tensor, "B S"],
        completion_ids: Int[Tensor, "B T"],
        mask: Bool[Tensor, "B T"],
        micro_batch: int,
    ) -> Float[Tensor, "B"]:
        """The standardised score at each completion's last token, whatever the padding holds."""
        device = next(self.model.parameters()).device
        ids = torch.cat([prompt_ids, completion_ids], 1).to(device)
        real = torch.cat([prompt_mask, mask], 1).to(device)
        ids = ids.masked_fill(~real, 0)
        found = [
            self._raw(ids[rows], real[rows])
            for rows in torch.arange(len(ids), device=device).split(micro_batch)
        ]
        return (torch.cat(found) - self.mean) / self.std

    def _raw(self, ids: Int[Tensor, "B N"], real: Bool[Tensor, "B N"]) -> Float[Tensor, "B"]:
        start = int(real.int().argmax(1).min())  # the longest prompt's first token
        ids, real = ids[:, start:], real[:, start:]
        model: Any = self.model
        hidden = model.base_model(
            input_ids=ids,
            attention_mask=real.long(),
            position_ids=positions(real),
            use_cache=False,
        ).last_hidden_state
        scores = model.score(hidden).squeeze(-1)
        place = torch.arange(real.shape[1], device=real.device)
        last = (place * real).argmax(1)
        return scores[torch.arange(len(ids), device=ids.device), last].float()


def ensure_reward_model(
    spec: ExperimentSpec,
    base: Base,
    sets: Mapping[str, PromptSet],
    gold: GoldScorer,
    *,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """The folder of an experiment's reward model, trained first where the cache lacks it.

    Args:
        spec: with ``reward.learned``.
        base: what pairs are sampled from, and what the model starts from unless it names another.
        sets: the ``train`` prompts are paired to train on, the ``validation`` ones to measure on.
        gold: draws the labels.
        cache_dir: ``$HARNESS_CACHE``, else ``~/.cache/harness``, when None.
        progress: called with one line of text now and then while building.

    Raises:
        InputError: pairs cannot be had, or the cache folder cannot be written.
        CellError: the training failed.
    """
    learned = spec.reward.learned
    assert learned is not None
    manifest = _manifest(spec, learned, base, sets)

    def prepare(work: Path) -> None:
        found = preferences(spec, base, sets, gold)
        (work / PAIRS).write_text(json.dumps({
            "preferences": to_json(found), "sha256": found.sha256, "cost": found.cost(),
        }))  # fmt: skip
        start = _start(spec, learned.model, base)
        start.save_pretrained(work / START)
        base.tokenizer.save_pretrained(work / TOKENIZER)

    wanted = Artefact(
        kind="rewards",
        name="reward_model",  # not the experiment's: two may share one
        title=f"the reward model of {spec.name}",
        manifest=manifest,
        record=RECORD,
        module="harness.reward_training",
        gpu=manifest["device"] == "cuda",
        prepare=prepare,
    )
    return ensure(wanted, cache_dir=cache_dir, progress=progress)


def _start(spec: ExperimentSpec, wanted: RewardModelSpec, base: Base) -> PreTrainedModel:
    """The language model whose trunk is fitted.

    Raises:
        InputError: it is another one than the base, and reads other tokens.
    """
    if wanted.init == FROM_BASE:
        return base.model
    named = ModelSpec(
        name=wanted.init, revision=wanted.revision, attention=spec.model.attention,
        pad_token=spec.model.pad_token, seed=spec.model.seed,
    )  # fmt: skip
    try:
        found = load_base(named, torch.device("cpu"))
    except InputError as error:
        raise InputError(f"reward.learned.model.init: {error}") from error
    if found.tokenizer_sha256 != base.tokenizer_sha256:
        raise InputError(
            f"reward.learned.model.init {wanted.init!r}: its tokenizer is not the policy's, whose "
            "tokens it would read; name a model of the same family, or base"
        )
    return found.model


def preferences(
    spec: ExperimentSpec, base: Base, sets: Mapping[str, PromptSet], gold: GoldScorer
) -> Preferences:
    """The experiment's pairs; the same ones every time.

    Raises:
        InputError: as `harness.preferences.collect_preferences`.
    """
    assert spec.reward.learned is not None
    sampling = spec.sampling
    decoding = Decoding(sampling.temperature, 1.0, sampling.max_new_tokens, sampling.stop)
    draw = Draw(base, gold, sets["train"], sets["validation"], decoding)
    return collect_preferences(spec.reward.learned.model.preferences, draw)


def load_reward_model(folder: Path, device: torch.device | str) -> RewardModel:
    """A reward model that was built.

    Raises:
        CellError: its weights are not those that were recorded.
    """
    from transformers import AutoModelForSequenceClassification

    card = read_card(folder)
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    model.requires_grad_(False)
    model.to(device)
    found = RewardModel(model.eval(), card["raw_mean"], card["raw_std"], card)
    if found.sha256 != card["model_sha256"]:
        raise CellError(f"{folder}: its weights are not those recorded in {RECORD}; delete it")
    return found


def read_card(folder: Path) -> dict[str, Any]:
    """What is recorded of a reward model: its recipe, accuracy, calibration and data."""
    return json.loads((folder / RECORD).read_text())


def _manifest(
    spec: ExperimentSpec, learned: LearnedSpec, base: Base, sets: Mapping[str, PromptSet]
) -> dict[str, Any]:
    return keyed(
        {
            "version": VERSION,
            "preferences_version": PREFERENCES_VERSION,
            "seed": learned.model.seed,
            "recipe": learned.model.model_dump(mode="json"),
            "data": data_identity(learned.model.preferences),
            "gold": gold_identity(learned),
            "device": next(base.model.parameters()).device.type,
            "base": base.model_sha256,
            "tokenizer": base.tokenizer_sha256,
            "prompts": {name: sets[name].sha256 for name in ("train", "validation")},
            "max_new_tokens": spec.sampling.max_new_tokens,
            "stop": list(spec.sampling.stop),
        }
    )


def score_rows(
    model: RewardModel, rows: Sequence[tuple[Sequence[int], Sequence[int]]], micro_batch: int = 256
) -> Float[Tensor, "B"]:
    """Scores of (prompt, completion) token ids, on the CPU."""
    S, T = (max(1, *(len(row[side]) for row in rows)) for side in (0, 1))
    prompt, completion = (torch.zeros(len(rows), n, dtype=torch.long) for n in (S, T))
    prompt_mask, mask = prompt.bool(), completion.bool()
    for i, (p, c) in enumerate(rows):
        prompt[i, S - len(p) :], prompt_mask[i, S - len(p) :] = torch.tensor(p), True
        completion[i, : len(c)], mask[i, : len(c)] = torch.tensor(c), True
    return model.score(prompt, prompt_mask, completion, mask, micro_batch).cpu()
