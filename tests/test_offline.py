"""An arm that learns from pairs: DPO's loss, its order of pairs, its costs, and its records."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none
from experiment_fixture import SPEC
from test_external import SILENT
from tiny import EOS, make_loop, tiny_base, tiny_model

from harness.arm import parts
from harness.arms.dpo import DPO
from harness.arms.grpo import GRPO
from harness.cost.flops import Lengths, forward, train
from harness.errors import CellError, InputError
from harness.external import offline_settings, offline_trainer
from harness.external.arm import OfflineArm, TRLOffline
from harness.external.offline_run import train_offline
from harness.external.offline_settings import check_offline, offline_arguments, pair_batches
from harness.loop import Loop
from harness.models import Policy, weights_sha256
from harness.pairs import PairData, PairStream, TokenPair
from harness.parts.kl import KLInLoss
from harness.parts.preference import KLInPreference, SigmoidLoss
from harness.parts.scale import GroupStd
from harness.spec.load import check_spec, merge
from harness.spec.schema import ExperimentSpec, LoraSpec

OPTIMIZER = {"learning_rate": 3e-3, "minibatches": 2, "micro_batch": 4, "warmup_steps": 2}
SAMPLING = {"prompts_per_step": 4, "completions_per_prompt": 4}
GOLDEN = {
    v["name"]: v
    for v in json.loads((Path(__file__).parent / "golden/vectors.json").read_text())["vectors"]
}
VECTORS = ("dpo_loss_beta0.05", "dpo_loss_beta0.1", "dpo_loss_beta1.0", "dpo_loss_beta5.0")


def pairs_of(count: int = 20, seed: int = 0) -> list[TokenPair]:
    """Random pairs of ragged lengths."""
    rng = np.random.default_rng(seed)

    def ids(low: int, high: int) -> tuple[int, ...]:
        return tuple(int(i) for i in rng.integers(3, 18, rng.integers(low, high)))

    return [TokenPair(ids(2, 5), (*ids(1, 6), EOS), ids(1, 6)) for _ in range(count)]


def data_of() -> PairData:
    return PairData(pairs_of(), "d" * 64)


def spec_of(**changes: Any) -> ExperimentSpec:
    mine = {"optimizer": OPTIMIZER, "sampling": SAMPLING}
    return check_spec(merge(SPEC, merge(mine, changes)), "here")


def loop_of(arm: Any = DPO, limit: float = 12, lora: LoraSpec | None = None) -> Loop:
    return make_loop(arm, unit="updates", limit=limit, optimizer=OPTIMIZER, lora=lora)


def trained(loop: Loop, folder: Path, lora: LoraSpec | None = None, **changes: Any) -> list[Any]:
    """The records of a run to its end."""
    base = tiny_base()
    base = dataclasses.replace(base, model_sha256=weights_sha256(base.model))
    spec = spec_of(**changes, **({"model": {"lora": lora.model_dump()}} if lora else {}))
    records: list[dict[str, Any]] = []
    train_offline(loop, base, spec, data_of(), folder, records.append)
    return records


def weights(loop: Loop) -> Tensor:
    found = loop.learner.policy_optimizer.masters.values()
    return torch.cat([p.detach().flatten() for p in found])


# -- the loss -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VECTORS)
def test_the_loss_is_the_papers(name: str):
    given, expected = GOLDEN[name]["inputs"], GOLDEN[name]["expected"]
    policy = torch.tensor([given["policy_chosen"], given["policy_rejected"]], dtype=torch.float64)
    policy.requires_grad_()
    chosen, rejected = policy - torch.tensor([given["ref_chosen"], given["ref_rejected"]])
    rule, beta = SigmoidLoss(), given["beta"]
    loss = rule(chosen[None], rejected[None], beta)[0]
    loss.backward()
    assert policy.grad is not None
    found = {
        "margin": float(rule.margin(chosen, rejected, beta).detach()),
        "loss": float(loss.detach()),
        "grad_weight": float(policy.grad[1]),
        "implicit_reward_chosen": beta * float(chosen.detach()),
        "implicit_reward_rejected": beta * float(rejected.detach()),
    }
    assert found == pytest.approx(expected, abs=GOLDEN[name]["tolerance"])
    assert float(policy.grad[0]) == pytest.approx(-expected["grad_weight"], abs=1e-12)
    margin = beta * ((-12.0 + 13.0) - (-15.0 + 14.0))  # the formula again, in numpy
    assert -np.log(1 / (1 + np.exp(-margin))) == pytest.approx(expected["loss"], abs=1e-12)


class Told:
    """A model whose log-probs are given."""

    training = True

    def __init__(self, chosen: list[float], rejected: list[float]) -> None:
        self.logprobs = torch.tensor([chosen, rejected], dtype=torch.float64)

    def __call__(self, **_: Any) -> Any:
        zeros = torch.zeros_like(self.logprobs)
        return SimpleNamespace(
            log_probs=self.logprobs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool(),
            loss=None, aux_loss=None,
        )  # fmt: skip


@pytest.mark.parametrize("name", VECTORS)
def test_trls_loss_is_the_papers(name: str, tmp_path: Path):
    """The chosen completion has two tokens and the rejected one: TRL sums, and divides by none."""
    given = GOLDEN[name]["inputs"]
    arm = dataclasses.replace(DPO, kl=KLInPreference(given["beta"]))
    trainer: Any = offline_trainer.TokenDPOTrainer(
        model=tiny_model(), ref_model=tiny_model(),
        args=offline_trainer.DPOConfig(
            **offline_arguments(arm, spec_of(), folder=tmp_path, seed=0, cpu=True)
        ),
        train_dataset=offline_trainer._rows(PairStream(data_of(), 0), 0),
        processing_class=tiny_base().tokenizer,
    )  # fmt: skip
    trainer.ref_model = Told([0, given["ref_chosen"] / 4, given["ref_chosen"] * 3 / 4],
                             [0, given["ref_rejected"], 0])  # fmt: skip
    model = Told([0, given["policy_chosen"] / 2, given["policy_chosen"] / 2],
                 [0, given["policy_rejected"], 0])  # fmt: skip
    inputs = {
        "input_ids": torch.tensor([[3, 4, 5, 2], [3, 4, 6, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
        "completion_mask": torch.tensor([[0, 0, 1, 1], [0, 0, 1, 0]]),
    }
    loss = float(trainer._compute_loss(model, inputs, False))
    assert loss == pytest.approx(GOLDEN[name]["expected"]["loss"], abs=1e-9)


def by_hand(steps: int) -> tuple[Tensor, list[float]]:
    """DPO in a loop of its own: unpadded pairs one by one, the order from the stream."""
    model, base, pairs = tiny_model(), tiny_model(), pairs_of()
    stream = PairStream(data_of(), 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    losses = []

    def logprob(of: Any, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
        ids = torch.tensor([[*prompt, *completion]])
        logits = of(ids).logits[0, len(prompt) - 1 : -1].log_softmax(1)
        return logits.gather(1, torch.tensor(completion)[:, None]).sum()

    for update in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (update + 1) / 2)
        total = torch.zeros(())
        for index in stream.take(4 * update, 4):
            pair, margins = pairs[index], []
            for completion in (pair.chosen_ids, pair.rejected_ids):
                with torch.no_grad():
                    anchor = logprob(base, pair.prompt_ids, completion)
                margins.append(logprob(model, pair.prompt_ids, completion) - anchor)
            total = total + torch.nn.functional.softplus(-0.1 * (margins[0] - margins[1])) / 4
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(total.detach()))
    return torch.cat([p.detach().flatten() for p in model.parameters()]), losses


def test_the_trainer_takes_the_steps_that_the_formula_takes(tmp_path: Path):
    loop = loop_of()
    start = weights(loop).clone()
    records = trained(loop, tmp_path)
    expected, losses = by_hand(12)
    moved = float((expected - start).abs().max())
    assert moved > 0.02
    assert float((weights(loop) - expected).abs().max()) < 1e-5
    found = [r["loss/policy"] for r in records]
    assert found == pytest.approx([(a + b) / 2 for a, b in zip(*[iter(losses)] * 2, strict=True)],
                                  abs=1e-5)  # fmt: skip
    assert found[0] == pytest.approx(math.log(2), abs=0.02)
    assert found[-1] < 0.6
    assert records[-1]["preference_accuracy"] > records[0]["preference_accuracy"]


# -- order, costs and records ---------------------------------------------------------------------


def test_every_epoch_reads_every_pair_once_in_an_order_of_the_seed():
    data = data_of()
    one, two, other = PairStream(data, 0), PairStream(data, 0), PairStream(data, 1)
    order = one.take(0, 60)
    assert [sorted(order[i : i + 20]) for i in (0, 20, 40)] == [[*range(20)]] * 3
    assert order[:20] != order[20:40] != order[40:]
    assert order[13:47] == two.take(13, 34)
    assert order[:20] != other.take(0, 20)


def test_what_it_reads_is_what_it_pays(tmp_path: Path):
    loop = loop_of(limit=6)
    records = trained(loop, tmp_path)
    stream, shapes = PairStream(data_of(), 0), loop.ledger.shapes
    total = 0
    for number, record in enumerate(records):
        read = [stream.pairs[i] for i in stream.take(8 * number, 8)]
        rows = [(p.prompt_ids, c) for p in read for c in (p.chosen_ids, p.rejected_ids)]
        lengths = Lengths.of(len(prompt) + len(completion) for prompt, completion in rows)
        head = sum(len(completion) for _, completion in rows)
        total += forward(shapes["reference"], lengths, head)
        total += train(shapes["policy"], lengths, head, epochs=1)
        assert record["spent"]["flops"] == total
        assert record["pairs"]["cursor"] == 8 * (number + 1)
        assert record["loss_gap"] < 1e-6
    sampled = {k: v for k, v in records[-1]["spent"].items() if k not in ("updates", "flops")}
    assert set(sampled.values()) == {0}
    assert [r["spent"]["updates"] for r in records] == [2, 4, 6]
    assert [r["offline"]["learning_rate"] for r in records] == [0.0015, 0.003, 0.003]
    assert records[0]["offline"]["pairs_per_gradient_step"] == 4


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=2)], ids=["full", "lora"])
def test_a_run_goes_on_where_it_stood(lora: LoraSpec | None, tmp_path: Path):
    """From the middle of an epoch, with the optimizer's moments; the reference stays the base."""
    whole, first, second = loop_of(lora=lora), loop_of(limit=6, lora=lora), loop_of(lora=lora)
    records = trained(whole, tmp_path, lora)
    begun = trained(first, tmp_path, lora)
    assert begun == records[:3]
    second.learner.restore({k: v.clone() for k, v in first.learner.tensors()})
    second.ledger.restore(first.ledger.state())
    mine, its = second.progress, first.progress
    mine.step, mine.cursor, mine.policy_steps = its.step, its.cursor, its.policy_steps
    mine.stream.restore(its.stream.state())
    assert trained(second, tmp_path, lora) == records[3:]
    assert torch.equal(weights(second), weights(whole))


def test_other_pairs_than_the_streams_end_the_run(tmp_path, monkeypatch):
    rows = offline_trainer._rows
    monkeypatch.setattr(offline_trainer, "_rows", lambda stream, start: rows(stream, start + 1))
    with pytest.raises(CellError, match="other pairs than the 2 from position 0"):
        trained(loop_of(), tmp_path)


def test_pairs_without_a_prompt_are_refused(tmp_path):
    pair = dataclasses.replace(pairs_of()[0], prompt_ids=())
    with pytest.raises(InputError, match="no prompt"):
        train_offline(loop_of(), tiny_base(), spec_of(), PairData([pair], ""), tmp_path, print)


def test_another_loss_shows(tmp_path, monkeypatch):
    monkeypatch.setitem(offline_settings.DPO_OFF, "ld_alpha", 0.0)  # no tokens beyond the shorter
    gaps = [record["loss_gap"] for record in trained(loop_of(), tmp_path)]
    assert gaps[0] < 1e-6  # at the base every loss is log 2
    assert max(gaps) > 1e-2


# -- what is said, and what is refused ------------------------------------------------------------


def test_it_declares_no_part_of_an_arm_that_samples():
    declared = parts(DPO)
    absent = ("sampling", "advantage", "scale", "ratio", "clip", "aggregate", "imitate")
    assert all(declared[name] is None for name in absent)
    assert declared["kl"] == {"part": "KLInPreference", "version": 1, "kl_coef": 0.1}
    assert declared["arm"] == "OfflineArm"


def test_no_default_of_the_installed_trl_is_used_unsaid(tmp_path: Path):
    said = offline_arguments(DPO, spec_of(), folder=tmp_path, seed=0, cpu=True)
    fields = {f.name for f in dataclasses.fields(offline_trainer.DPOConfig) if f.init}
    assert set(said) <= fields
    silent = (*SILENT.split(), "discopop_tau", "f_alpha_", "pad_token", "precompute_ref_batch")
    silent += ("label_smoothing_factor",)
    assert {f for f in fields - set(said) if not f.startswith(silent)} == set()


def test_a_step_reads_as_many_completions_as_a_rollout_batch():
    cut = pair_batches(spec_of(optimizer={"micro_batch": 5}))
    assert (cut.per_device, cut.accumulation, cut.minibatches) == (2, 2, 2)
    assert (cut.per_update, cut.pairs) == (4, 8)


LEARNED = {
    "kind": "learned",
    "learned": {
        "gold": "lexicon", "success": 0.5,
        "model": {"learning_rate": 1e-3, "preferences": {"pairs": 8, "heldout": 4}},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reward": {"kind": "maths", "learned": None}}, "reward.kind is maths"),
        ({"budget": {"unit": "completions"}}, "never spends a budget in completions"),
        ({"sampling": {"completions_per_prompt": 1, "prompts_per_step": 2}}, "no whole pairs"),
        ({"sampling": {"temperature": 0.7}}, "sampling.temperature 0.7"),
        ({"controls": {"placebo": "dpo"}}, "grades nothing"),
    ],
)
def test_experiments_that_it_cannot_be_in_are_refused(changes, words):
    whole = {"reward": LEARNED, "arms": ["dpo", "grpo"], "budget": {"unit": "flops"}}
    check_offline(DPO, spec_of(**whole))
    with pytest.raises(InputError, match=words):
        check_offline(DPO, spec_of(**merge(whole, changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"kl": KLInLoss()},
        {"preference": None},
        {"loop": "DPOTrainer"},
        {"scale": GroupStd()},
        {"sampling": GRPO.sampling},
    ],
)
def test_parts_of_other_arms_are_refused(changes):
    with pytest.raises(InputError, match=next(iter(changes))):
        dataclasses.replace(DPO, **changes)


def test_a_beta_of_nothing_is_refused():
    with pytest.raises(InputError, match="above 0"):
        KLInPreference(0.0)
    with pytest.raises(InputError, match="SFTTrainer"):
        TRLOffline("SFTTrainer")  # type: ignore[arg-type]
    assert isinstance(DPO, OfflineArm)
    assert isinstance(loop_of().learner.policy, Policy)
