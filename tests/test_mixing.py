"""N-GRPO: mixed embeddings while sampling, and the same inputs again in training."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none
from certificate_plants import forge
from experiment_fixture import SPEC, save_model, write_spec
from tiny import (
    PAD,
    as_rollout,
    double_model,
    make_loop,
    sampler,
    tiny_model,
    trained,
)

from harness.arm import parts
from harness.arms.grpo import GRPO
from harness.arms.n_grpo import N_GRPO
from harness.arms.shared_head import PPO_SHARED_HEAD
from harness.cell import run_cell
from harness.certificate import audit
from harness.errors import InputError
from harness.experiment import ensure_lock, open_context
from harness.identity import difference
from harness.lock import make_lock
from harness.matrix import Matrix
from harness.models import Policy, Reference, ValueHead, scored, trainable
from harness.parts.mixing import (
    NeighbourMixing,
    Neighbours,
    mixed_embeddings,
    neighbour_mixture,
)
from harness.parts.sampling import FixedGroups
from harness.plan.cost import step_amount
from harness.plan.lengths import PromptLengths
from harness.samplers.hf import HFSampler
from harness.samplers.sampler import Decoding, Drawn
from harness.spec.load import check_spec
from harness.spec.schema import LoraSpec
from harness.store import CellFolder
from harness.tasks.arithmetic import CHARACTERS
from harness.train import step
from harness.types import Rollout

PLAIN = Decoding(temperature=0.7, top_p=1.0, max_new_tokens=12)
V = 3 + len(CHARACTERS)
PROMPTS = [[4, 5, 6], [7, 8], [9]]


def often(share: float, name: str = "often"):
    """N-GRPO with another share."""
    return N_GRPO.but(name, sampling=FixedGroups(mixing=NeighbourMixing(share=share)))


def mixing(share: float, base: Decoding = PLAIN) -> Decoding:
    return dataclasses.replace(base, mixing=NeighbourMixing(neighbours=3, share=share))


def draw(share: float, model: nn.Module | None = None, engine_batch: int = 1024) -> Drawn:
    return sampler(model or tiny_model(), engine_batch).draw(PROMPTS, 4, mixing(share), 11)


def replay(found: Drawn) -> Rollout:
    """The draw as training sees it; the first of each four is right."""
    score = torch.tensor([1.0, 0.0, 0.0, 0.0] * len(PROMPTS))[: len(found.mask)]
    return dataclasses.replace(
        as_rollout(found, 4, score), mixed_ids=found.mixed_ids, mixed_weights=found.mixed_weights
    )


def embeddings(model: Any) -> torch.Tensor:
    return model.get_input_embeddings().weight


def where_mixed(x: Drawn | Rollout) -> torch.Tensor:
    assert x.mixed_weights is not None
    return x.mixed_weights.sum(2) > 0


# --- the mixture ---------------------------------------------------------------------------------


def test_the_mixture(golden):
    v = golden("ngrpo_neighbor_mixing")
    x, expected, exact = v["inputs"], v["expected"], v["tolerance"]
    embeddings = torch.tensor(x["embeddings"], dtype=torch.float64)
    logits = torch.tensor([x["logits"]], dtype=torch.float64)
    neighbours = Neighbours(embeddings, x["k"])
    ids, weights = neighbour_mixture(logits, x["tau"], neighbours)
    assert ids[0, 0].item() == expected["anchor"]
    assert ids[0].tolist() == expected["candidates"]
    assert weights[0].tolist() == pytest.approx(expected["weights"], abs=exact)
    table = nn.Embedding.from_pretrained(embeddings)
    got = mixed_embeddings(table, torch.tensor([[4]]), ids[None], weights[None])
    assert got[0, 0].tolist() == pytest.approx(expected["mixed_embedding"], abs=exact)
    cosine = torch.tensor(expected["cosine"])
    for k in range(1, 6):  # nearest first, however many are asked for
        found = Neighbours(embeddings, k).of(torch.tensor([expected["anchor"]]))
        assert found[0].tolist() == cosine.argsort(descending=True)[:k].tolist()


def test_a_published_average_is_what_its_columns_give(golden):
    v = golden("ngrpo_table_arithmetic")
    for name, scores in v["inputs"]["aime25_amc23_math500_pass32"].items():
        assert sum(scores) / 3 == pytest.approx(v["expected"][name], abs=v["tolerance"])


def test_a_token_of_no_length_and_a_small_vocabulary():
    """An embedding of zeros is near nothing, and itself its own anchor all the same."""
    table = torch.tensor([[0.0, 0.0], [1.0, 0.1], [-1.0, 0.0], [1.0, 0.0]])
    assert Neighbours(table, 2).of(torch.tensor([0, 1, 1, 3]))[:, 0].tolist() == [0, 1, 1, 3]
    assert Neighbours(table, 3).of(torch.tensor([1]))[0].tolist() == [1, 3, 0]
    assert Neighbours(table, 9).of(torch.tensor([2]))[0].tolist() == [2, 0, 1, 3]


def test_a_search_is_made_once_for_a_token():
    neighbours = Neighbours(torch.randn(50, 8, generator=torch.Generator().manual_seed(0)), 3)
    with FlopCounterMode(display=False) as counter:
        first = neighbours.of(torch.tensor([7, 7, 9]))
        again = neighbours.of(torch.tensor([9, 7]))
    assert counter.get_total_flops() == 2 * 50 * 8 * 2
    assert torch.equal(again, first[[2, 0]])


# --- sampling ------------------------------------------------------------------------------------


def test_the_arm_is_grpo_but_for_what_is_fed():
    assert difference(parts(GRPO), parts(N_GRPO)).keys() == {"sampling.mixing"}


def test_a_share_of_none_changes_no_bit():
    plain, found = sampler(tiny_model()).draw(PROMPTS, 4, PLAIN, 11), draw(0.0)
    assert torch.equal(found.completion_ids, plain.completion_ids)
    assert torch.equal(found.logprobs, plain.logprobs)
    assert not where_mixed(found).any()
    a, b = step(make_loop(often(0.0, "grpo"))), step(make_loop(GRPO))
    assert a.pop("mixed_share") == 0
    assert a == b


def test_the_coin_moves_no_sampling_number():
    """Rows go on as without mixing up to their first mixed input, and part ways after it."""
    plain, found = sampler(tiny_model()).draw(PROMPTS, 4, PLAIN, 11), draw(0.3)
    parted = 0
    for row, turns in enumerate(where_mixed(found)):
        first = int(turns.long().argmax()) if turns.any() else int(found.mask[row].sum()) - 1
        same = slice(0, first + 1)
        assert torch.equal(found.completion_ids[row, same], plain.completion_ids[row, same])
        assert torch.allclose(found.logprobs[row, same], plain.logprobs[row, same], atol=2e-5)
        after = found.logprobs[row, first + 1 :] - plain.logprobs[row, first + 1 : len(turns)]
        parted += bool(turns.any()) and float(after[:1].abs().sum()) > 1e-3
    assert parted >= 4


def test_what_was_fed_is_the_mixture_of_the_likeliest_token():
    """At each mixed place: its ids and weights from the logits there, by another way."""
    model, found = tiny_model(), draw(0.5)
    x, table = replay(found), embeddings(model).detach().double()
    cosine = nn.functional.cosine_similarity(table[:, None], table[None], dim=2)
    with torch.no_grad():
        logits = Policy(model, 0.7)._forward(x).logits[:, :-1].double()
    anchor = logits.argmax(2)
    turns = where_mixed(found) & (anchor != PAD)  # whose embedding is 0, and near to none
    assert turns.sum() > 20
    assert (anchor != x.completion_ids)[turns].any(), "the anchor is always the sampled token here"
    for row, t in turns.nonzero().tolist():
        nearest = cosine[anchor[row, t]].topk(3).indices
        weights = (logits[row, t, nearest] / 0.7).softmax(0)
        assert found.mixed_ids is not None
        assert found.mixed_weights is not None
        assert found.mixed_ids[row, t].tolist() == nearest.tolist()
        assert found.mixed_weights[row, t].tolist() == pytest.approx(weights.tolist(), abs=1e-4)


def test_a_share_is_a_share():
    """Of inputs: a completion's last token is not fed, so never mixed, and padding neither."""
    found = sampler(tiny_model()).draw(PROMPTS, 200, mixing(0.1), 3)
    lengths = found.mask.sum(1)
    fed = torch.arange(found.mask.shape[1])[None] < lengths[:, None] - 1
    turns = where_mixed(found)
    assert not turns[~fed].any()
    assert found.mixed_weights is not None
    assert found.mixed_weights[turns].sum(1) == pytest.approx(1.0, abs=1e-6)
    count = int(fed.sum())
    assert count > 1000
    assert abs(int(turns.sum()) - 0.1 * count) < 4 * (0.1 * 0.9 * count) ** 0.5
    always = draw(1.0)
    fed = torch.arange(always.mask.shape[1])[None] < always.mask.sum(1)[:, None] - 1
    assert torch.equal(where_mixed(always), fed)


@pytest.mark.parametrize("engine_batch", [1, 3, 8])
def test_the_size_of_a_batch_is_no_part_of_a_draw(engine_batch):
    whole, found = draw(0.5), draw(0.5, engine_batch=engine_batch)
    assert torch.equal(found.completion_ids, whole.completion_ids)
    assert found.mixed_ids is not None
    assert whole.mixed_ids is not None
    assert torch.equal(found.mixed_ids, whole.mixed_ids)
    torch.testing.assert_close(found.mixed_weights, whole.mixed_weights, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.logprobs, whole.logprobs, rtol=0, atol=2e-5)


# --- training ------------------------------------------------------------------------------------


def adapted() -> nn.Module:
    """The tiny model with adapters that say something, on the embeddings too."""
    model = trainable(tiny_model(), LoraSpec(rank=2, target_modules=("q_proj", "embed_tokens")), 0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.normal_(generator=torch.Generator().manual_seed(0))
    return model


@pytest.mark.parametrize("build", [tiny_model, adapted, lambda: double_model().float()])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_training_scores_the_inputs_that_were_fed(share, build):
    """The log-probs of the rollout again, from whole sequences instead of a cache."""
    model = build()
    found = draw(share, model)
    x = replay(found)
    logprobs = scored(Policy(model, 0.7).logprobs, x, 5)
    torch.testing.assert_close(logprobs, found.logprobs, rtol=0, atol=5e-5)
    plain = scored(Policy(model, 0.7).logprobs, dataclasses.replace(x, mixed_weights=None), 5)
    assert float((plain - found.logprobs).abs().max()) > 1e-2


def test_the_reference_is_fed_the_same_from_its_own_embeddings():
    """With adapters the reference is the model without them, its embeddings too."""
    model, base = adapted(), tiny_model()
    x = replay(draw(1.0, model))
    found = Reference(model, 0.7, adapters_off=True).logprobs(x)
    torch.testing.assert_close(found, Reference(base, 0.7).logprobs(x), rtol=0, atol=1e-5)
    moved = scored(Policy(model, 0.7).logprobs, x, 64)
    assert float((moved - found).abs().max()) > 1e-2


def test_padding_and_micro_batches_change_nothing():
    """In float64, an update of everything; with garbage under the padding."""
    x = replay(draw(0.5, double_model(1).float()))

    def widened(fill: float) -> Rollout:
        """Three columns on either side, anything in them."""
        pad = {}
        for name, value in vars(x).items():
            if isinstance(value, torch.Tensor) and value.dim() >= 2:
                sides = (3, 0) if name.startswith("prompt") else (0, 3)
                more = (0, 0) * (value.dim() - 2) + sides
                garbage = False if value.dtype == torch.bool else fill
                pad[name] = nn.functional.pad(value, more, value=garbage)
        return dataclasses.replace(x, **pad)

    def update(rollout: Rollout, micro_batch: int) -> dict[str, float]:
        t = trained(often(0.5), rollout, micro_batch=micro_batch, temperature=0.7)
        minibatch = t.learner.arm.weigh(t.batch, max_new_tokens=12)
        found = t.learner.update(
            minibatch, kl_coef=0.04, rate=1.0, critic_rate=1.0, warmup=False, first=True
        )
        moved = torch.cat([p.detach().flatten() for p in t.learner.policy.parameters()])
        return found | {"moved": moved.square().sum().item()}

    expected = update(x, 1000)
    assert expected["loss/policy"] != 0
    for rollout, micro_batch in ((x, 1), (x, 5), (widened(1.0), 1000), (widened(2.0), 3)):
        assert update(rollout, micro_batch) == pytest.approx(expected, abs=1e-9)
    plain = update(dataclasses.replace(x, mixed_weights=None, mixed_ids=None), 1000)
    assert plain["grad_norm"] != pytest.approx(expected["grad_norm"], rel=1e-3)


def test_tokens_are_looked_up_by_the_model_where_nothing_is_mixed():
    model, fed = tiny_model(), []
    model.register_forward_pre_hook(
        lambda m, args, kwargs: fed.append("inputs_embeds" in kwargs), with_kwargs=True
    )
    x = replay(draw(0.5))
    turns = where_mixed(x).any(1)
    assert turns.any()
    assert not turns.all()
    for row in range(len(x)):
        Policy(model, 0.7).logprobs(x.select(torch.tensor([row])))
    assert fed == turns.tolist()


def test_the_gradient_reaches_the_neighbours():
    """d/dE by finite differences, at a token that was fed in mixtures alone."""
    model = double_model(1)
    x = replay(draw(1.0, double_model(1).float()))
    x = x.select(torch.tensor([8]))
    policy, table = Policy(model, 0.7), embeddings(model)
    assert x.mixed_ids is not None
    read = set(x.completion_ids[x.mask].tolist()) | set(x.prompt_ids[x.prompt_mask].tolist())
    token = next(i for i in x.mixed_ids[where_mixed(x)].flatten().tolist() if i not in read)
    untied: Any = model
    untied.lm_head.weight = nn.Parameter(table.detach().clone())  # to move the input alone
    policy.logprobs(x).sum().backward()
    gradient = table.grad
    assert gradient is not None
    values = []
    with torch.no_grad():
        for move in (1e-6, -2e-6):
            table[token, 3] += move
            values.append(policy.logprobs(x).sum().item())
    assert gradient[token, 3].item() == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-5)
    assert abs(gradient[token, 3].item()) > 1e-4


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=2)])
def test_a_step_of_the_loop(lora):
    """Ratio 1 at the first minibatch is asserted by the learner too."""
    record = step(make_loop(often(0.5), lora=lora))
    assert record["first_ratio_error"] < 1e-4
    assert record["engine_gap"] < 1e-4
    assert 0.2 < record["mixed_share"] < 0.8


def test_a_head_on_the_trunk_judges_what_was_fed():
    arm = PPO_SHARED_HEAD.but("both", sampling=FixedGroups(mixing=NeighbourMixing(share=1.0)))
    assert step(make_loop(arm))["first_ratio_error"] < 1e-4
    model = tiny_model()
    x, head = replay(draw(1.0, model)), ValueHead(Policy(model, 0.7), 16, "fresh_head", 0)
    plain = head.with_logprobs(dataclasses.replace(x, mixed_weights=None))
    logprobs, _, values = head.with_logprobs(x)
    torch.testing.assert_close(logprobs, x.behaviour_logprobs, rtol=0, atol=5e-5)
    assert torch.equal(values[:, 0], plain[2][:, 0]), "the prompt is not mixed"
    assert float((values - plain[2]).detach().abs().max()) > 1e-2


# --- the experiment ------------------------------------------------------------------------------


def test_a_search_is_charged_as_torch_counts_it():
    """A step of the loop, its draw counted, against the same step without mixing.

    Both completions fill the limit, so that they differ in the search alone.
    """
    counted, records = [], []
    for arm in (GRPO, often(1.0)):
        loop = make_loop(arm, sampling={"max_new_tokens": 9})
        loop.sampler = engine = sampler(loop.learner.policy.model)
        engine.eos = torch.tensor([-1])  # nothing ends a completion
        plain = engine.draw

        def draw(*args, plain=plain):
            with FlopCounterMode(display=False) as counter:
                found = plain(*args)
            counted.append(counter.get_total_flops())
            return found

        engine.draw = draw  # type: ignore[method-assign]
        records.append(step(loop))
    flops = [record["flops"]["policy/generate"] for record in records]
    without, lengths = (record["lengths"]["policy/generate"] for record in records)
    assert lengths == without | {"searched": lengths["searched"]}
    assert without["searched"] == 0
    assert 1 < lengths["searched"] <= V, "each token of the vocabulary at most once"
    assert lengths["decoded"] == 16 * 8
    assert flops[1] - flops[0] == counted[1] - counted[0] == 2 * V * 16 * lengths["searched"]


def test_the_plan_expects_the_search():
    """At most a search for each mixed input, and for each token of the vocabulary."""
    spec = check_spec(SPEC | {"sampling": SPEC["sampling"] | {"max_new_tokens": 5}}, "here")
    shapes, prompts = make_loop(GRPO).ledger.shapes, PromptLengths(4.0, 16.0, 4, True)
    for share, searched in ((0.25, 8), (1.0, V)):  # of 8 completions x 4 inputs, of V tokens
        arms = (GRPO, often(share))
        amounts = [step_amount(spec, a, shapes, prompts, 5.0, warmup=False) for a in arms]
        assert amounts[1].total_flops - amounts[0].total_flops == 2 * V * 16 * searched


def test_an_engine_that_takes_tokens_alone_is_refused(tmp_path: Path):
    spec = write_spec(
        tmp_path / "tiny.yaml", save_model(tmp_path / "model"), arms=["grpo", "n_grpo"],
        tuning=None, sampling={"engine": "vllm"},
    )  # fmt: skip
    context = open_context(spec, [], [], tmp_path / "results")
    with pytest.raises(InputError, match=r"'n_grpo' feeds mixed embeddings .* use engine: hf"):
        make_lock(context)


def test_an_experiment_is_certified_and_another_share_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Steps mix and evaluations do not; mixing other than declared is found in the records."""
    asked, plain = [], HFSampler.draw

    def draw(self, prompts, group_size, decoding, seed, episodes=None):
        asked.append(decoding.mixing)
        return plain(self, prompts, group_size, decoding, seed, episodes)

    monkeypatch.setattr(HFSampler, "draw", draw)
    spec = write_spec(
        tmp_path / "tiny.yaml", save_model(tmp_path / "model"), arms=["grpo", "n_grpo"],
        controls={"base": True, "placebo": "n_grpo"}, tuning=None,
    )  # fmt: skip
    context = open_context(spec, [], [], tmp_path / "results")
    ensure_lock(context, make_lock(context))
    for cell in Matrix(context).known():
        run_cell(context, cell)
    found = audit(context.results)
    assert found.certified, found.violations
    lines = list(CellFolder(context.results / "runs/n_grpo/seed-0").lines("steps.jsonl"))
    assert asked.count(N_GRPO.sampling.mixing) == 2 * len(lines)  # its placebo mixes too
    assert asked.count(None) > len(lines)
    assert 0 < sum(line["mixed_share"] for line in lines) / len(lines) < 0.3
    for cell, name, value in (
        ("n_grpo", "mixed_share", 1.0),
        ("n_grpo", "mixed_share", None),
        ("grpo", "mixed_share", 0.5),
        ("n_grpo", "searched", 1000),
    ):
        copy = tmp_path / f"{cell}-{name}-{value}"
        shutil.copytree(context.results, copy)

        def pretend(lines, name=name, value=value):
            for line in lines:
                (line["lengths"]["policy/generate"] if name == "searched" else line)[name] = value

        forge(copy, f"{cell}/seed-0", "steps.jsonl", pretend)
        keys = {v.key.split(": ")[-1] for v in audit(copy).violations}
        assert any(key.endswith(name) for key in keys), keys
