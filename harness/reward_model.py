"""The reward model: a scalar head on a trunk, fitted to preferences by trl's RewardTrainer.

It is an artefact of the cache like the embedded base: built once in a child process, named by the
hash of all that it depends on, and shared by all arms and seeds of an experiment. Its scores are
standardised on completions of the base, so that a KL coefficient means the same whatever scale
the training happened to give them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from harness.artefact import Artefact, Progress, ensure, keyed
from harness.cost.shape import ModelShape
from harness.data import PromptSet
from harness.errors import InputError
from harness.models import Base, positions, weights_sha256
from harness.preferences import VERSION as PREFERENCES_VERSION
from harness.preferences import Pair, Preferences, from_json, sampled_preferences, to_json
from harness.rewards.gold import gold_identity
from harness.rewards.learned import GoldScorer
from harness.samplers.hf import HFSampler
from harness.spec.reward import LearnedSpec, RewardModelSpec
from harness.spec.schema import ExperimentSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VERSION = 1  # raise when a recipe would give another model
RECORD = "reward_model.json"
FROM_BASE = "base"
_PAIRS, _BASE = "pairs.json", "base"
_ENGINE_BATCH = 1024


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
        (work / _PAIRS).write_text(json.dumps({
            "train": to_json(found.train), "heldout": to_json(found.heldout),
            "sha256": found.sha256, "cost": found.cost(),
        }))  # fmt: skip
        if learned.model.init == FROM_BASE:
            base.model.save_pretrained(work / _BASE)
        base.tokenizer.save_pretrained(work / "tokenizer")

    wanted = Artefact(
        kind="rewards",
        name=spec.name,
        title=f"the reward model of {spec.name}",
        manifest=manifest,
        record=RECORD,
        module="harness.reward_model",
        prepare=prepare,
    )
    return ensure(wanted, cache_dir=cache_dir, progress=progress)


def preferences(
    spec: ExperimentSpec, base: Base, sets: Mapping[str, PromptSet], gold: GoldScorer
) -> Preferences:
    """The experiment's pairs; the same ones every time."""
    assert spec.reward.learned is not None
    wanted = spec.reward.learned.model.preferences
    if wanted.source != "sampled":
        raise InputError(
            f"reward.learned.model.preferences.source {wanted.source!r} is not read yet; use "
            "sampled"
        )
    sampler = HFSampler(base.model, base.tokenizer, base.eos_token_ids, _ENGINE_BATCH)
    return sampled_preferences(
        wanted, sets["train"], sets["validation"], sampler, gold,
        max_new_tokens=spec.sampling.max_new_tokens, stop=spec.sampling.stop,
    )  # fmt: skip


def load_reward_model(folder: Path, device: torch.device | str) -> RewardModel:
    """A reward model that was built."""
    from transformers import AutoModelForSequenceClassification

    card = read_card(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager")
    model.requires_grad_(False)
    model.to(device)
    return RewardModel(model.eval(), card["raw_mean"], card["raw_std"], card)


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
            "gold": gold_identity(learned),
            "base": base.model_sha256,
            "tokenizer": base.tokenizer_sha256,
            "prompts": {name: sets[name].sha256 for name in ("train", "validation")},
            "max_new_tokens": spec.sampling.max_new_tokens,
            "stop": list(spec.sampling.stop),
        }
    )


# -- the child -------------------------------------------------------------------------------------


def _train(manifest: Mapping[str, Any], work: Path) -> None:
    """Fit the model to the pairs in ``work``; write ``work/model`` with what was measured."""
    from datasets import Dataset
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        PrinterCallback,
        TrainerCallback,
    )
    from trl.trainer.reward_config import RewardConfig
    from trl.trainer.reward_trainer import RewardTrainer

    torch.set_num_threads(1)
    torch.manual_seed(manifest["seed"])
    recipe = RewardModelSpec.model_validate(manifest["recipe"])
    data = json.loads((work / _PAIRS).read_text())
    train, heldout = from_json(data["train"]), from_json(data["heldout"])
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    start = work / _BASE if recipe.init == FROM_BASE else recipe.init
    model = AutoModelForSequenceClassification.from_pretrained(
        start, num_labels=1, revision=recipe.revision, attn_implementation="eager"
    )
    model.config.pad_token_id = tokenizer.pad_token_id
    losses: list[float] = []

    class Watch(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:
                losses.append(float(logs["loss"]))
                print(f"step {state.global_step}/{state.max_steps} loss {logs['loss']}", flush=True)

    arguments = RewardConfig(
        output_dir=str(work / "trainer"),
        num_train_epochs=recipe.epochs,
        per_device_train_batch_size=recipe.batch,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type="linear",
        weight_decay=0.0,
        max_length=None,
        disable_dropout=True,
        seed=manifest["seed"],
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = RewardTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(
            [
                {
                    "chosen_ids": [*p.prompt_ids, *p.chosen_ids],
                    "rejected_ids": [*p.prompt_ids, *p.rejected_ids],
                }
                for p in train
            ]
        ),
        processing_class=tokenizer,
        callbacks=[Watch()],
    )
    trainer.remove_callback(PrinterCallback)  # Watch says it
    trainer.train()
    if not all(bool(torch.isfinite(p).all()) for p in model.parameters()):
        raise SystemExit("the weights are not finite")
    model.eval()
    model.save_pretrained(work / "model")
    tokenizer.save_pretrained(work / "model")
    card = measure(model, heldout) | {"losses": losses}
    card |= {"pairs_sha256": data["sha256"], "cost": data["cost"]}
    (work / "model" / RECORD).write_text(json.dumps(card))


def measure(model: Any, pairs: Sequence[Pair]) -> dict[str, Any]:
    """Accuracy, calibration and agreement with the gold scores, on held-out pairs.

    ``raw_mean`` and ``raw_std`` are of its scores of all held-out completions. Calibration is of
    P(chosen preferred) = sigmoid(score difference) against how often the label agrees: pairs are
    put into ten bins by the preferred side's probability, and ``ece`` is the mean gap, weighted by
    bin size. The accuracy's interval is Wilson's at 95 %.
    """
    from scipy.stats import spearmanr
    from statsmodels.stats.proportion import proportion_confint

    raw = RewardModel(model, 0.0, 1.0, {})
    chosen, rejected = (
        _scores(raw, [(p.prompt_ids, getattr(p, side)) for p in pairs])
        for side in ("chosen_ids", "rejected_ids")
    )
    every = torch.cat([chosen, rejected])
    right = int((chosen > rejected).sum())
    interval: Any = proportion_confint(right, len(pairs), method="wilson")
    found: dict[str, Any] = {
        "accuracy": right / len(pairs),
        "accuracy_interval": [float(end) for end in interval],
        "raw_mean": float(every.double().mean()),
        "raw_std": float(every.double().std(unbiased=False)) or 1.0,
        "calibration": _calibration((chosen - rejected).double()),
    }
    bins = found["calibration"]
    found["ece"] = sum(b["n"] * abs(b["predicted"] - b["observed"]) for b in bins) / len(pairs)
    golds = [g for side in ("chosen_gold", "rejected_gold") for p in pairs
             if (g := getattr(p, side)) is not None]  # fmt: skip
    if len(golds) == len(every):
        gold = torch.tensor(golds, dtype=torch.float64)
        found["gold_mean"] = float(gold.mean())
        found["gold_std"] = float(gold.std(unbiased=False)) or 1.0
        rank: Any = spearmanr(every.numpy(), golds)
        found["gold_spearman"] = float(rank.statistic)
    return found


def _calibration(margin: Float[Tensor, "P"]) -> list[dict[str, float]]:
    """Ten bins of the model's own favourite: how sure it was, and how often the label agrees."""
    sure = torch.sigmoid(margin.abs())
    agrees = (margin > 0).double()
    place = ((sure - 0.5) * 20).long().clamp(max=9)
    return [
        {
            "n": int((place == i).sum()),
            "predicted": float(sure[place == i].mean()),
            "observed": float(agrees[place == i].mean()),
        }
        for i in range(10)
        if bool((place == i).any())
    ]


def _scores(raw: RewardModel, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Tensor:
    S, T = max(len(p) for p, _ in rows), max(len(c) for _, c in rows)
    prompt, completion = (torch.zeros(len(rows), n, dtype=torch.long) for n in (S, T))
    prompt_mask, mask = prompt.bool(), completion.bool()
    for i, (p, c) in enumerate(rows):
        prompt[i, S - len(p) :], prompt_mask[i, S - len(p) :] = torch.tensor(p), True
        completion[i, : len(c)], mask[i, : len(c)] = torch.tensor(c), True
    return raw.score(prompt, prompt_mask, completion, mask, 256).cpu()


if __name__ == "__main__":
    _train(json.load(sys.stdin), Path.cwd())
