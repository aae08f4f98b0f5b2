"""Fit a reward model to preferences, and measure it on those held out; run as a child process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from harness.cost.flops import Lengths, train
from harness.cost.shape import ModelShape
from harness.models import weights_sha256
from harness.preferences import Pair, Preferences, from_json
from harness.reward_model import PAIRS, RECORD, START, TOKENIZER, RewardModel, score_rows
from harness.spec.reward import RewardModelSpec

BINS = 10  # of the calibration table
CONFIDENCE = 0.95
NO_TOKEN = -1


@dataclass(frozen=True)
class Training:
    """What every reward model is trained with, beside what its spec says; kept in its record."""

    optimizer: str = "adamw_torch"
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    schedule: str = "linear"  # down to 0 at the last step, without warm-up
    max_grad_norm: float = 1.0
    log_every: int = 10  # optimizer steps


TRAINING = Training()


def fit(manifest: Mapping[str, Any], work: Path) -> None:
    """Fit the model in ``work`` to the pairs there; write ``work/model`` and what was measured."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.set_num_threads(1)
    torch.manual_seed(manifest["seed"])  # of the new head
    recipe = RewardModelSpec.model_validate(manifest["recipe"])
    data = json.loads((work / PAIRS).read_text(encoding="utf-8"))
    found = from_json(data["preferences"])
    tokenizer = AutoTokenizer.from_pretrained(work / TOKENIZER)
    model: Any = AutoModelForSequenceClassification.from_pretrained(
        work / START, num_labels=1, attn_implementation="eager", dtype=torch.float32
    )
    if not hasattr(model, "score"):
        raise SystemExit(f"{type(model).__name__} has no head called score; start from a decoder")
    gpu = manifest["device"] == "cuda"
    losses = _fit(model, tokenizer, found.train, recipe, work, gpu=gpu)
    if not all(bool(torch.isfinite(p).all()) for p in model.parameters()):
        raise SystemExit("the weights are not finite")
    model.eval()
    model.save_pretrained(work / "model")
    tokenizer.save_pretrained(work / "model")
    card = measure(model, found) | {
        "losses": losses,
        "training": vars(TRAINING),
        "model_sha256": weights_sha256(model),
        "pairs_sha256": data["sha256"],
        "notes": list(found.notes),
        "cost": data["cost"] | {"training_flops": _flops(model, found.train, recipe.epochs)},
    }
    (work / "model" / RECORD).write_text(json.dumps(card), encoding="utf-8")


def _fit(
    model: Any,
    tokenizer: Any,
    pairs: Sequence[Pair],
    recipe: RewardModelSpec,
    work: Path,
    *,
    gpu: bool = False,
) -> list[tuple[int, float]]:
    """Train with trl's RewardTrainer; (step, mean loss since the last entry)."""
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl.trainer.reward_config import RewardConfig
    from trl.trainer.reward_trainer import DataCollatorForPreference, RewardTrainer

    losses: list[tuple[int, float]] = []
    parent = os.getppid()

    class Watch(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:
                losses.append((state.global_step, float(logs["loss"])))
                print(f"step {state.global_step}/{state.max_steps} loss {logs['loss']}", flush=True)
            if os.getppid() != parent:  # whoever waited for this model is gone
                raise SystemExit("the process that asked for this model has ended")

    arguments = RewardConfig(
        output_dir=str(work / "trainer"),
        num_train_epochs=recipe.epochs,
        per_device_train_batch_size=recipe.batch,
        learning_rate=recipe.learning_rate,
        optim=TRAINING.optimizer,
        adam_beta1=TRAINING.betas[0],
        adam_beta2=TRAINING.betas[1],
        weight_decay=TRAINING.weight_decay,
        lr_scheduler_type=TRAINING.schedule,
        max_grad_norm=TRAINING.max_grad_norm,
        max_length=None,
        disable_dropout=True,
        seed=recipe.seed,
        use_cpu=not gpu,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        logging_steps=TRAINING.log_every,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rows = [
        {
            "chosen_ids": [*p.prompt_ids, *p.chosen_ids],
            "rejected_ids": [*p.prompt_ids, *p.rejected_ids],
        }
        for p in pairs
    ]
    trainer = RewardTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        data_collator=DataCollatorForPreference(NO_TOKEN),
        callbacks=[Watch()],
    )
    trainer.remove_callback(PrinterCallback)  # Watch says it
    with padded_by_no_token(model):
        trainer.train()
    return losses


@contextmanager
def padded_by_no_token(model: Any) -> Iterator[None]:
    """Let padding be ``NO_TOKEN`` in what the model is fed.

    Transformers reads a score at the last token that is not padding. Where a model pads with its
    end of sequence, that would be the token before the end, and a policy's would be the end.
    """

    def look_up(module: Any, ids: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (ids[0].clamp(min=0), *ids[1:])  # any will do: attention masks it

    def declare(module: Any, *_: Any) -> None:
        module.config.pad_token_id = NO_TOKEN  # each time: the trainer puts the tokenizer's back

    before = model.config.pad_token_id
    hooks = (
        model.get_input_embeddings().register_forward_pre_hook(look_up),
        model.register_forward_pre_hook(declare),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        model.config.pad_token_id = before


def _flops(model: Any, pairs: Sequence[Pair], epochs: int) -> int:
    """Forward and backward passes over both sides of each pair, padding not charged."""
    lengths = Lengths.of(
        len(p.prompt_ids) + len(side) for p in pairs for side in (p.chosen_ids, p.rejected_ids)
    )
    return train(ModelShape.from_model(model, scalar_head=True), lengths, epochs=epochs)


def measure(model: Any, found: Preferences) -> dict[str, Any]:
    """Accuracy, calibration and agreement with the gold scores, on what was held out.

    ``accuracy`` is against the labels, noise and all; ``label_ceiling`` is what the gold scores
    themselves would reach, and ``gold_accuracy`` how often the model prefers what gold prefers.
    Calibration is of sigmoid(score difference): pairs fall into ten bins by how sure the model is
    of its favourite, and ``ece`` is the gap between that and how often labels agree, over all
    pairs. ``raw_mean`` and ``raw_std`` (ddof 0) are of its scores of the base's completions, as
    ``gold_mean`` and ``gold_std`` are of theirs. Equal scores count half.
    """
    from scipy.stats import spearmanr
    from statsmodels.stats.proportion import proportion_confint

    raw = RewardModel(model, 0.0, 1.0, {})
    chosen = score_rows(raw, [(p.prompt_ids, p.chosen_ids) for p in found.heldout]).double()
    rejected = score_rows(raw, [(p.prompt_ids, p.rejected_ids) for p in found.heldout]).double()
    margin = chosen - rejected
    by_gold = torch.tensor([p.chosen_gold - p.rejected_gold for p in found.heldout]).double()
    right, count = _right(margin), len(found.heldout)
    interval: Any = proportion_confint(right, count, alpha=1 - CONFIDENCE, method="wilson")
    bins = calibration(margin)
    base = score_rows(raw, [(s.prompt_ids, s.completion_ids) for s in found.base]).double()
    gold = torch.tensor([s.gold for s in found.base], dtype=torch.float64)
    for what, values in (("it", base), ("the gold scorer", gold)):
        if values.min() == values.max():
            raise SystemExit(f"{what} gives all {len(values)} completions of the base one score")
    rank: Any = spearmanr(base.numpy(), gold.numpy())
    told = by_gold != 0
    return {
        "accuracy": right / count,
        "accuracy_interval": [float(end) for end in interval],
        "label_ceiling": _right(by_gold) / count,
        "gold_accuracy": _right(margin[told] * by_gold[told].sign()) / max(int(told.sum()), 1),
        "calibration": bins,
        "ece": sum(b["n"] * abs(b["predicted"] - b["observed"]) for b in bins) / count,
        "base_samples": len(base),
        "raw_mean": float(base.mean()),
        "raw_std": float(base.std(unbiased=False)),
        "gold_mean": float(gold.mean()),
        "gold_std": float(gold.std(unbiased=False)),
        "gold_spearman": float(rank.statistic),
    }


def _right(margin: Float[Tensor, "P"]) -> float:
    return float((margin > 0).sum() + 0.5 * (margin == 0).sum())


def calibration(margin: Float[Tensor, "P"]) -> list[dict[str, Any]]:
    """Bins of equal width over [1/2, 1] of the model's own favourite; empty ones are left out.

    Args:
        margin: score of the chosen less that of the rejected completion.

    Returns:
        For each bin its ends, its number of pairs, the mean probability that the model gave its
        favourite (``predicted``), and how often the label named that one (``observed``).
    """
    sure = torch.sigmoid(margin.abs())
    agrees = (margin > 0).double() + 0.5 * (margin == 0).double()
    place = ((sure - 0.5) * 2 * BINS).long().clamp(max=BINS - 1)
    return [
        {
            "from": 0.5 + i / (2 * BINS),
            "to": 0.5 + (i + 1) / (2 * BINS),
            "n": int((place == i).sum()),
            "predicted": float(sure[place == i].mean()),
            "observed": float(agrees[place == i].mean()),
        }
        for i in range(BINS)
        if bool((place == i).any())
    ]


if __name__ == "__main__":
    fit(json.load(sys.stdin), Path.cwd())
