"""The reward model: what it learns, how it is measured, that padding and caching move nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM

from harness import reward_training
from harness.cli import main
from harness.cli.reward_card import Found, best_of_curve
from harness.cost.shape import ModelShape
from harness.data import PromptSet, load_split, prompt_set, splits
from harness.errors import CellError, InputError
from harness.models import Base, load_base
from harness.preferences import Preferences, from_json, preference, to_json
from harness.recipes import RECIPES
from harness.reward_model import (
    RewardModel,
    _manifest,
    ensure_reward_model,
    load_reward_model,
    preferences,
    score_rows,
)
from harness.reward_training import (
    NO_TOKEN,
    Training,
    _fit,
    _flops,
    calibration,
    measure,
    padded_by_no_token,
)
from harness.rewards.gold import ReviewSentiment
from harness.spec.load import check_spec, merge
from harness.spec.schema import ExperimentSpec
from harness.tasks import reviews

pytestmark = pytest.mark.xdist_group("reward_model")  # one worker builds it once
GOLD = ReviewSentiment()


@dataclass(frozen=True)
class World:
    """A base that writes words at random, and the reward model that was built on it."""

    spec: ExperimentSpec
    base: Base
    sets: dict[str, PromptSet]
    cache: Path
    folder: Path
    model: RewardModel
    found: Preferences

    @property
    def card(self) -> Mapping[str, Any]:
        return self.model.card


def babbler(folder: Path) -> Path:
    tokenizer = RECIPES["reviews"].tokenizer()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64,
                num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=32,
                initializer_range=0.1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            )
        ).save_pretrained(folder)  # fmt: skip
    tokenizer.save_pretrained(folder)
    return folder


def make_spec(model: Path, **changes: Any) -> ExperimentSpec:
    def split(name: str, limit: int) -> dict[str, Any]:
        return {"task": "reviews", "split": name, "limit": limit}

    tree: dict[str, Any] = {
        "name": "tiny_reviews", "question": "?", "arms": ["grpo"], "seeds": [0],
        "model": {"name": str(model), "attention": "eager"},
        "data": {
            "train": split("train", 150), "validation": split("validation", 40),
            "test": {"reviews": split("test", 10)}, "prompt": "equation", "max_prompt_tokens": 16,
        },
        "reward": {"kind": "learned", "learned": {
            "gold": "review_sentiment", "success": 0.3,
            "model": {
                "preferences": {"pairs": 400, "heldout": 200, "label_scale": 8.0},
                "epochs": 5, "batch": 16, "learning_rate": 1e-2,
            },
        }},
        "sampling": {"prompts_per_step": 2, "completions_per_prompt": 4, "max_new_tokens": 5},
        "optimizer": {"learning_rate": 1e-3}, "budget": {"unit": "flops", "limit": 1e6},
        "evaluation": {"samples": 8},
    }  # fmt: skip
    return check_spec(merge(tree, changes), "test")


def learned(**changes: Any) -> dict[str, Any]:
    return {"reward": {"learned": {"model": changes}}}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    cache = tmp_path_factory.mktemp("cache")
    spec = make_spec(babbler(tmp_path_factory.mktemp("base")))
    base = load_base(spec.model, torch.device("cpu"))
    sets = {
        name: prompt_set(name, load_split(name, s).problems, spec, base.tokenizer, base.context)
        for name, s in splits(spec).items()
    }
    folder = ensure_reward_model(spec, base, sets, GOLD, cache_dir=cache)
    model = load_reward_model(folder, "cpu")
    return World(spec, base, sets, cache, folder, model, preferences(spec, base, sets, GOLD))


def margins(world: World) -> np.ndarray[Any, Any]:
    """Raw score of the chosen less that of the rejected, read by transformers one at a time."""
    reader: Any = AutoModelForSequenceClassification.from_pretrained(world.folder).eval()
    reader.config.pad_token_id = None  # the last token counts, whichever it is

    def read(*ids: tuple[int, ...]) -> float:
        with torch.no_grad():
            return float(reader(input_ids=torch.tensor([sum(ids, ())])).logits)

    return np.array([
        read(p.prompt_ids, p.chosen_ids) - read(p.prompt_ids, p.rejected_ids)
        for p in world.found.heldout
    ])  # fmt: skip


# -- what it learns, and how that is measured ------------------------------------------------------


def test_it_learns_what_the_labels_say_and_the_card_is_right_about_it(world: World):
    card, margin = world.card, margins(world)
    right = (margin > 0).mean()
    assert card["accuracy"] == pytest.approx(right)
    n, z = len(margin), 1.959964  # Wilson 1927
    centre = (right + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(right * (1 - right) / n + z**2 / (4 * n**2))
    assert card["accuracy_interval"] == pytest.approx([centre - half, centre + half], abs=1e-6)
    assert card["accuracy_interval"][0] > 0.55
    by_gold = np.array([p.chosen_gold - p.rejected_gold for p in world.found.heldout])
    expected = ((by_gold > 0) + 0.5 * (by_gold == 0)).mean()
    assert card["label_ceiling"] == pytest.approx(expected)
    assert card["label_ceiling"] > card["accuracy"]
    told = by_gold != 0
    agree = (np.sign(margin[told]) == np.sign(by_gold[told])).mean()
    assert card["gold_accuracy"] == pytest.approx(agree)
    steps, losses = zip(*card["losses"], strict=True)
    assert steps[-1] <= 5 * 400 / 16 < steps[-1] + 10
    assert losses[0] > 0.6 > losses[-1]


def test_calibration_is_how_sure_it_is_against_how_often_labels_agree(world: World):
    margin = margins(world)
    sure = 1 / (1 + np.exp(-np.abs(margin)))
    gap, counted = 0.0, 0
    for row in world.card["calibration"]:
        here = (sure >= row["from"]) & ((sure < row["to"]) | (row["to"] == 1))
        assert row["n"] == here.sum()
        assert row["predicted"] == pytest.approx(sure[here].mean(), abs=1e-5)
        assert row["observed"] == pytest.approx((margin[here] > 0).mean())
        gap += abs(sure[here].sum() - (margin[here] > 0).sum())
        counted += row["n"]
    assert counted == len(margin)
    assert world.card["ece"] == pytest.approx(gap / len(margin), abs=1e-5)


def test_labels_drawn_from_the_models_own_probabilities_are_calibrated():
    generator = torch.Generator().manual_seed(0)
    z = 2 * torch.randn(40_000, generator=generator, dtype=torch.float64)
    first = torch.rand(len(z), generator=generator, dtype=torch.float64) < torch.sigmoid(z)
    for row in calibration(torch.where(first, z, -z)):
        assert row["observed"] == pytest.approx(row["predicted"], abs=2 / math.sqrt(row["n"]))


def test_scores_are_of_mean_0_and_spread_1_on_the_bases_completions(world: World):
    samples = world.found.base
    scores = score_rows(world.model, [(s.prompt_ids, s.completion_ids) for s in samples]).double()
    assert float(scores.mean()) == pytest.approx(0, abs=1e-5)
    assert float(scores.std(unbiased=False)) == pytest.approx(1, abs=1e-5)
    gold = np.array([s.gold for s in samples])
    assert world.card["gold_mean"] == pytest.approx(gold.mean())
    assert world.card["gold_std"] == pytest.approx(gold.std())
    ranks = [np.unique(v, return_inverse=True) for v in (scores.numpy(), gold)]
    means = [  # the mean rank of equal values
        (np.cumsum(np.bincount(i)) - (np.bincount(i) - 1) / 2)[i] for _, i in ranks
    ]
    assert world.card["gold_spearman"] == pytest.approx(np.corrcoef(*means)[0, 1], abs=1e-4)
    assert world.card["gold_spearman"] > 0.3


def test_a_reward_without_contrast_is_no_reward(world: World):
    flat = replace(world.found, base=tuple(replace(s, gold=0.5) for s in world.found.base))
    with pytest.raises(SystemExit, match="the gold scorer gives all 400 completions of the base"):
        measure(world.model.model, flat)


# -- reading it ------------------------------------------------------------------------------------


def test_padding_and_batching_do_not_move_a_score(world: World):
    pairs = world.found.heldout[:40]
    rows = [(p.prompt_ids, p.chosen_ids) for p in pairs]
    alone = torch.cat([score_rows(world.model, [row]) for row in rows])
    assert len({round(x, 3) for x in alone.tolist()}) > 20
    generator = torch.Generator().manual_seed(1)
    left, right = 7, 9
    S, T = (max(len(r[side]) for r in rows) for side in (0, 1))
    ids = torch.randint(0, 143, (2, len(rows), S + left + T + right), generator=generator)
    prompt, completion = ids[0, :, : S + left].clone(), ids[1, :, : T + right].clone()
    prompt_mask, mask = torch.zeros_like(prompt).bool(), torch.zeros_like(completion).bool()
    for i, (p, c) in enumerate(rows):
        prompt[i, S + left - len(p) :], prompt_mask[i, S + left - len(p) :] = torch.tensor(p), True
        completion[i, : len(c)], mask[i, : len(c)] = torch.tensor(c), True
    for micro_batch in (1, 7, 64):
        found = world.model.score(prompt, prompt_mask, completion, mask, micro_batch)
        assert torch.allclose(found, alone, atol=1e-4)


def test_a_score_is_read_where_the_trainer_read_it_even_if_padding_is_the_end_token(world: World):
    """Of a model that pads with its end of sequence, transformers would read the token before."""
    from trl.trainer.reward_trainer import DataCollatorForPreference

    pairs = [p for p in world.found.train if p.chosen_ids[-1] == 2 or p.rejected_ids[-1] == 2][:8]
    assert pairs
    rows = [{"chosen_ids": [*p.prompt_ids, *p.chosen_ids],
             "rejected_ids": [*p.prompt_ids, *p.rejected_ids]} for p in pairs]  # fmt: skip
    reader: Any = AutoModelForSequenceClassification.from_pretrained(world.folder).eval()
    reader.config.pad_token_id = end = 2
    sides = [(p.prompt_ids, getattr(p, side)) for side in ("chosen_ids", "rejected_ids")
             for p in pairs]  # fmt: skip
    ours = score_rows(RewardModel(world.model.model, 0.0, 1.0, {}), sides)

    def theirs(pad: int) -> Tensor:
        with torch.no_grad():
            return reader(**DataCollatorForPreference(pad)(rows)).logits.squeeze(1)

    with padded_by_no_token(reader):
        assert torch.allclose(theirs(NO_TOKEN), ours, atol=1e-4)
    assert reader.config.pad_token_id == end
    assert not torch.allclose(theirs(end), ours, atol=1e-4)


def test_training_reads_a_score_where_it_is_read_afterwards(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The loss that the trainer logs at its first step is that of the scores that we read."""
    monkeypatch.setattr(reward_training, "TRAINING", Training(log_every=1))
    reader: Any = AutoModelForSequenceClassification.from_pretrained(world.folder)
    pairs = world.found.heldout[:48]  # ragged; a few end in the padding token
    chosen, rejected = (
        score_rows(
            RewardModel(reader, 0.0, 1.0, {}), [(p.prompt_ids, getattr(p, s)) for p in pairs]
        )
        for s in ("chosen_ids", "rejected_ids")
    )
    expected = -torch.nn.functional.logsigmoid(chosen - rejected).mean()
    recipe = world.spec.reward.learned.model  # type: ignore[union-attr]
    once = recipe.model_copy(update={"epochs": 1, "batch": len(pairs)})
    losses = _fit(reader, world.base.tokenizer, pairs, once, tmp_path)
    assert losses == [(1, pytest.approx(float(expected), rel=1e-4))]
    assert reader.config.pad_token_id == world.base.tokenizer.pad_token_id


def test_it_costs_what_the_planner_and_torch_say(world: World):
    from torch.utils.flop_counter import FlopCounterMode

    config = world.base.model.config
    assert world.model.shape == ModelShape.from_config(config, scalar_head=True, trained=False)
    model: Any = AutoModelForSequenceClassification.from_pretrained(
        world.folder, attn_implementation="eager"
    )
    pairs = world.found.train[:4]
    counter = FlopCounterMode(display=False)
    with counter:
        for p in pairs:
            for side in (p.chosen_ids, p.rejected_ids):
                model(input_ids=torch.tensor([[*p.prompt_ids, *side]])).logits.sum().backward()
    assert _flops(model, pairs, 3) == 3 * counter.get_total_flops()


# -- the pairs -------------------------------------------------------------------------------------


def test_pairs_are_counted_disjoint_and_come_back_from_their_file(world: World):
    found = world.found
    cost = world.card["cost"]
    assert (len(found.train), len(found.heldout), cost["labels"]) == (400, 200, 600)
    assert cost["completions"] >= 1200
    assert cost["completion_tokens"] >= sum(
        len(p.chosen_ids) + len(p.rejected_ids) for p in (*found.train, *found.heldout)
    )
    train, heldout = ({p.prompt_ids for p in rows} for rows in (found.train, found.heldout))
    assert train <= set(world.sets["train"].prompts)
    assert heldout <= set(world.sets["validation"].prompts)
    assert not (train | heldout) & set(world.sets["test.reviews"].prompts)
    back = from_json(json.loads(json.dumps(to_json(found))))
    assert back == found
    assert back.sha256 == world.card["pairs_sha256"]
    for p in found.train:
        assert p.chosen_ids != p.rejected_ids
        text = world.base.tokenizer.decode(p.chosen_ids, skip_special_tokens=True)
        question = world.base.tokenizer.decode(p.prompt_ids)
        assert p.chosen_gold == GOLD([question], [text])[0]


def test_labels_are_as_noisy_as_bradley_and_terry_have_it(world: World):
    assert preference(0.5, 2.0) == pytest.approx(1 / (1 + math.exp(-1)))
    assert preference(-800.0, 2.0) == 0.0
    wanted = {"preferences": {"pairs": 4000, "heldout": 1, "label_scale": 2.0}}
    spec = make_spec(Path(world.spec.model.name), **learned(**wanted))
    pairs = preferences(spec, world.base, world.sets, GOLD).train
    margin = np.array([p.chosen_gold - p.rejected_gold for p in pairs])
    chance = 1 / (1 + np.exp(-2.0 * np.abs(margin)))  # of the better one
    told = margin != 0
    for low, high in ((0.5, 0.6), (0.6, 0.75), (0.75, 0.9), (0.9, 1.0)):
        here = told & (chance > low) & (chance <= high)
        error = math.sqrt((chance[here] * (1 - chance[here])).sum()) / here.sum()
        assert here.sum() > 50
        assert (margin[here] > 0).mean() == pytest.approx(chance[here].mean(), abs=4 * error)


def test_pairs_of_a_file_train_it_and_the_base_still_sets_its_scale(world: World, tmp_path: Path):
    path = tmp_path / "mine.jsonl"
    rows = [
        {"prompt": f"the {noun} was", "chosen": f"{good} .", "rejected": f"{bad} ."}
        for noun in reviews.NOUNS
        for good, bad in zip(reviews.GOOD, reviews.BAD, strict=True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    wanted = {"source": "local", "dataset": str(path), "pairs": 60, "heldout": 100}
    spec = make_spec(Path(world.spec.model.name), **learned(preferences=wanted))
    found = preferences(spec, world.base, world.sets, GOLD)
    assert (len(found.train), len(found.heldout), len(found.base)) == (60, 100, 100)
    assert all(p.chosen_gold > p.rejected_gold for p in found.train)
    assert found.cost()["against_gold"] == 0
    assert found.cost()["completions"] == 100
    assert {s.prompt_ids for s in found.base} == set(world.sets["validation"].prompts)
    key = _manifest(spec, spec.reward.learned, world.base, world.sets)["key"]  # type: ignore[arg-type]
    path.write_text(path.read_text().replace("good .", "great ."))
    assert _manifest(spec, spec.reward.learned, world.base, world.sets)["key"] != key  # type: ignore[arg-type]


# -- the cache -------------------------------------------------------------------------------------


def test_it_is_built_once_and_again_to_the_same_weights(world: World, tmp_path: Path):
    said: list[str] = []
    again = ensure_reward_model(
        world.spec, world.base, world.sets, GOLD, cache_dir=world.cache, progress=said.append
    )
    assert (again, said) == (world.folder, [])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(11)
            other = ensure_reward_model(
                world.spec, world.base, world.sets, GOLD, cache_dir=tmp_path, progress=said.append
            )
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert said
    assert load_reward_model(other, "cpu").sha256 == world.model.sha256
    assert {f.suffix for f in (tmp_path / "rewards").iterdir()} == {".lock", other.suffix}
    (other / "model.safetensors").write_bytes(b"short")  # of no use any more: built anew
    card = json.loads((world.folder / "reward_model.json").read_text())
    assert card["model_sha256"] == world.model.sha256


def test_the_key_holds_everything_that_moves_a_weight(world: World):
    def key(changes: Mapping[str, Any] | None = None, **other: Any) -> str:
        spec = make_spec(Path(world.spec.model.name), **(changes or {}))
        base, sets = other.get("base", world.base), other.get("sets", world.sets)
        return _manifest(spec, spec.reward.learned, base, sets)["key"]  # type: ignore[arg-type]

    moved = {**world.sets, "train": replace(world.sets["train"], sha256="x")}
    keys = [
        key(),
        key(learned(epochs=3)),
        key(learned(seed=1)),
        key(learned(preferences={"label_scale": 2.0})),
        key(learned(preferences={"seed": 1})),
        key({"sampling": {"max_new_tokens": 6}}),
        key(base=replace(world.base, model_sha256="x")),
        key(sets=moved),
    ]
    assert len(set(keys)) == len(keys)
    assert key({"optimizer": {"learning_rate": 1e-4}}) == keys[0]  # the policy's


def test_changed_weights_and_foreign_tokens_are_refused(world: World, tmp_path: Path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(world.folder, copy)
    card = json.loads((copy / "reward_model.json").read_text())
    (copy / "reward_model.json").write_text(json.dumps(card | {"model_sha256": "0"}))
    with pytest.raises(CellError, match="its weights are not those recorded"):
        load_reward_model(copy, "cpu")
    foreign = babbler(tmp_path / "foreign")
    tokens = (foreign / "tokenizer.json").read_text()
    (foreign / "tokenizer.json").write_text(tokens.replace('"good"', '"goods"'))
    spec = make_spec(Path(world.spec.model.name), **learned(init=str(foreign)))
    with pytest.raises(InputError, match="its tokenizer is not the policy's"):
        ensure_reward_model(spec, world.base, world.sets, GOLD, cache_dir=tmp_path)


# -- the command -----------------------------------------------------------------------------------


def test_the_best_of_n_by_the_proxy(world: World):
    found = Found(world.spec, world.base, world.sets, GOLD, world.folder, world.model)
    curve = best_of_curve(found, 12, prompts=30, spare=2)
    assert [row["n"] for row in curve] == [1, 2, 4, 8, 12]
    assert [row["kl"] for row in curve[:2]] == pytest.approx([0, math.log(2) - 0.5])
    proxies, golds = ([row[name] for row in curve] for name in ("proxy", "gold"))
    assert proxies == sorted(proxies)
    assert abs(proxies[0]) < 0.3  # 720 completions of mean 0 and spread 1, over 30 prompts
    assert golds[-1] > golds[0]  # it learnt something
    assert curve == best_of_curve(found, 12, prompts=30, spare=2)


def test_the_command_prints_the_card(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("HARNESS_CACHE", str(world.cache))
    path = tmp_path / "spec.yaml"
    path.write_text(json.dumps(world.spec.model_dump(mode="json")))

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["reward-model", str(path), *arguments])
        return int(ended.value.code or 0), *capfd.readouterr()

    code, out, err = run("--json")
    assert (code, err) == (0, "")
    printed = json.loads(out)
    assert printed["folder"] == str(world.folder)
    assert printed["accuracy"] == world.card["accuracy"]
    code, out, _ = run("--best-of", "2")
    assert code == 0
    low, high = world.card["accuracy_interval"]
    assert f"{world.card['accuracy']:.1%} [{low:.1%}, {high:.1%}]" in out
    assert "400 to train on, 200 held out; drawn from the base" in out
    assert "labels agree" in out
    assert "the base's best of n" in out
    path.write_text(json.dumps(make_plain(world.spec)))
    code, _, err = run()
    assert code == 2
    assert "reward.kind maths: tiny_reviews has no reward model" in err


def make_plain(spec: ExperimentSpec) -> dict[str, Any]:
    tree = spec.model_dump(mode="json")
    return {**tree, "reward": {"kind": "maths"}}


@pytest.mark.parametrize("seen", [None, "1"])
def test_the_child_sees_a_gpu_only_where_the_policy_is_on_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seen: str | None
):
    from harness.artefact import Artefact, _child_environment

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    made = Artefact("rewards", "r", "r", {}, "r.json", "harness.reward_training")
    assert _child_environment(made, tmp_path)["CUDA_VISIBLE_DEVICES"] == ""
    on_gpu = replace(made, gpu=True)
    assert _child_environment(on_gpu, tmp_path).get("CUDA_VISIBLE_DEVICES") == seen
