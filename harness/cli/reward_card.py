"""An experiment's reward model, and what choosing by it does to both rewards."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.artefact import Progress
from harness.data import PromptSet, load_split, prompt_set, splits
from harness.errors import InputError
from harness.identity import stream_seed
from harness.metrics import best_of_k
from harness.models import Base, load_base, resolve_device
from harness.reward_model import RewardModel, ensure_reward_model, load_reward_model
from harness.rewards.gold import make_gold
from harness.rewards.learned import GoldScorer
from harness.samplers import make_sampler
from harness.samplers.sampler import Decoding
from harness.spec.schema import ExperimentSpec


@dataclass(frozen=True)
class Found:
    """A reward model and what it belongs to."""

    spec: ExperimentSpec
    base: Base
    sets: dict[str, PromptSet]
    gold: GoldScorer
    folder: Path
    model: RewardModel


def ensure_card(spec: ExperimentSpec, progress: Progress | None) -> Found:
    """Build the reward model of an experiment where the cache lacks it.

    Raises:
        InputError: the experiment's reward is no learned one.
    """
    learned = spec.reward.learned
    if learned is None:
        raise InputError(
            f"reward.kind {spec.reward.kind}: {spec.name} has no reward model; name an experiment "
            "whose reward is learned"
        )
    device = resolve_device(spec.runtime.device)
    base = load_base(spec.model, device, progress=progress)
    sets = {
        name: prompt_set(
            name, load_split(f"data.{name}", split).problems, spec, base.tokenizer, base.context
        )
        for name, split in splits(spec).items()
    }
    gold = make_gold(learned, str(device))
    folder = ensure_reward_model(spec, base, sets, gold, progress=progress)
    return Found(spec, base, sets, gold, folder, load_reward_model(folder, device))


def best_of_curve(found: Found, largest: int, prompts: int, spare: int) -> list[dict[str, Any]]:
    """Both rewards of the base's best of n by the reward model, for n = 1, 2, 4, ... ``largest``.

    Where the gold reward falls while the proxy still rises, the reward model is over-optimised
    (Gao et al., arXiv:2210.10760). ``kl``: log n - (n - 1) / n, the most that choosing the best of
    n moves the policy from the base, in nats a completion.

    Args:
        found: the model, and the base that is drawn from at the experiment's temperature.
        largest: the largest n.
        prompts: how many validation prompts at most; never test ones.
        spare: times ``largest`` completions are drawn for each, for an estimate with less noise.
    """
    spec, asked = found.spec, found.sets["validation"]
    count, n = min(prompts, len(asked.prompts)), largest * spare
    sampling = spec.sampling
    decoding = Decoding(sampling.temperature, 1.0, sampling.max_new_tokens, sampling.stop)
    sampler = make_sampler(spec, found.base.model, found.base)
    drawn = sampler.draw(asked.prompts[:count], n, decoding, stream_seed(0, "best-of"))
    proxy = found.model.score(
        drawn.prompt_ids, drawn.prompt_mask, drawn.completion_ids, drawn.mask,
        spec.optimizer.micro_batch,
    ).tolist()  # fmt: skip
    questions = [p.question for p in asked.problems[:count] for _ in range(n)]
    gold = [float(g) for g in found.gold(questions, drawn.texts)]
    groups = [slice(i * n, (i + 1) * n) for i in range(count)]
    sizes = [2**i for i in range(largest.bit_length()) if 2**i < largest] + [largest]
    return [
        {
            "n": k,
            "kl": math.log(k) - (k - 1) / k,
            "proxy": sum(best_of_k(proxy[g], proxy[g], k) for g in groups) / count,
            "gold": sum(best_of_k(proxy[g], gold[g], k) for g in groups) / count,
        }
        for k in sizes
    ]
