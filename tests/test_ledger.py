"""What a run is charged, recomputed from its records and counted by torch itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none

from tiny import as_rollout, make_loop, sampler, tiny_base, tiny_model

from harness.arms.dapo import DAPO
from harness.arms.grpo import GRPO
from harness.arms.ppo import PPO, PPO_UNGROUPED
from harness.cell import critic_shape
from harness.cost.flops import MODEL, Generation, Lengths
from harness.cost.shape import ModelShape
from harness.ledger import Ledger, generation_from, shape_from, step_flops
from harness.models import Policy, build_critic, trainable
from harness.samplers.sampler import Decoding
from harness.spec.schema import LoraSpec
from harness.train import step


def counted(work):
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=2)], ids=["full", "lora"])
def test_charges_are_what_torch_counts_on_an_unpadded_step(lora):
    """One prompt and one completion, so that nothing is padding: each role and phase in turn."""
    base = tiny_base(tiny_model(1, hidden=32))
    model = trainable(base.model, lora, 0)
    ledger = Ledger({"policy": ModelShape.from_model(model)})  # type: ignore[arg-type]
    prompt, decoding = [3, 9, 4, 5, 6, 7, 8], Decoding(1.0, 1.0, 40)
    engine, drawn = sampler(model), []
    seed = next(s for s in range(99) if engine.draw([prompt], 1, decoding, s).mask.sum() > 20)

    def draw():
        drawn.append(engine.draw([prompt], 1, decoding, seed))

    found = {"policy/generate": counted(draw)}
    x = as_rollout(drawn[0])
    length = int(x.mask.sum())
    policy = Policy(model, 1.0)
    critic = build_critic(base, "fresh_head", lora, 0)
    ledger.shapes["critic"] = critic_shape(critic, base, ledger.shapes["policy"])  # type: ignore[index]
    with torch.no_grad():
        found["policy/score"] = counted(lambda: policy.logprobs(x))
        found["critic/score"] = counted(lambda: critic.values(x))
    found["policy/train"] = counted(lambda: policy.logprobs(x).sum().backward())
    found["critic/train"] = counted(lambda: critic.values(x).sum().backward())
    ledger.charge_generation("policy", Generation.of([len(prompt)], [length]))
    sums = Lengths.of([len(prompt) + length])
    for role in ("policy", "critic"):
        ledger.charge_score(role, sums, length)
        ledger.charge_train(role, sums, length, epochs=1)
    assert ledger.flops == pytest.approx(found, rel=0.02)
    assert ledger.spent()["flops"] == sum(ledger.flops.values())


def test_a_group_reads_its_prompt_once():
    """Eight completions of one prompt cost torch what the charge with a shared prompt says."""
    model = tiny_model(1, hidden=32)
    drawn = []
    found = counted(
        lambda: drawn.append(
            sampler(model).draw([[3] * 30], 8, Decoding(1.0, 1.0, 2, greedy=True), seed=0)
        )
    )
    lengths = drawn[0].mask.sum(1).tolist()
    ledger = Ledger({"policy": ModelShape.from_model(model)})
    ledger.charge_generation("policy", Generation.of([30] * 8, lengths, shared_by=8))
    assert ledger.flops["policy/generate"] == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize("arm", [PPO, PPO_UNGROUPED, GRPO, DAPO], ids=lambda a: a.name)
def test_a_steps_charge_follows_from_its_record(arm):
    """From JSON alone, as an auditor reads it; and token by token."""
    loop = make_loop(arm, optimizer={"epochs": 2, "minibatches": 2}, limit=200)
    before: dict[str, int] = {}
    shapes = {
        role: shape_from(json.loads(json.dumps(vars(shape), default=vars)))
        for role, shape in loop.ledger.shapes.items()
    }
    totals = dict.fromkeys(("prompts", "completions", "completion_tokens"), 0)
    for _ in range(4):
        record = json.loads(json.dumps(step(loop)))
        charged = {k: v - before.get(k, 0) for k, v in record["flops"].items()}
        expected = step_flops(record["lengths"], shapes, MODEL)
        assert {k: v for k, v in charged.items() if v} == expected
        before = record["flops"]
        assert record["spent"]["flops"] == sum(record["flops"].values())
        drawn = generation_from(record["lengths"]["policy/generate"])
        totals["completions"] += sum(record["outcomes"].values())
        totals["prompts"] += record["prompts"]["drawn"]
        totals["completion_tokens"] += drawn.sampled
        assert record["spent"] | totals == record["spent"]
        assert drawn.prefill.sequences == record["prompts"]["drawn"]
        trained = record["lengths"].get("policy/train")
        if record["phase"] == "critic_warmup":
            assert trained is None
            assert "critic/train" in record["lengths"]
        elif record["used"]:
            assert trained["epochs"] == 2
            assert trained["lengths"]["sequences"] == record["used"]
    assert record["spent"]["reward_calls"] == record["spent"]["completions"]
    assert record["spent"]["tokens"] == (
        record["spent"]["prompt_tokens"] + record["spent"]["completion_tokens"]
    )


def test_a_ledger_goes_on_from_its_state():
    ledger = Ledger({"policy": ModelShape.from_model(tiny_model())})
    ledger.charge(prompts=3, completions=12, prompt_tokens=20, completion_tokens=50)
    ledger.charge_score("policy", Lengths.of([5, 6]), 4)
    with ledger.timing("sample"):
        pass
    again = Ledger(ledger.shapes)
    again.restore(json.loads(json.dumps(ledger.state())))
    assert again.spent() == ledger.spent()
    assert again.total_seconds == ledger.total_seconds
    for unit, amount in (("tokens", 70), ("completions", 12), ("updates", 0)):
        assert again.spent_in(unit) == amount
    assert again.spent_in("seconds") == ledger.total_seconds > 0
