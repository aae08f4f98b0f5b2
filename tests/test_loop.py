"""The loop that all arms share: what is drawn, what is charged, what is learned, when it stops."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none

from tiny import Rule, make_loop, prompt_set, tiny_model, tokenizer, weights

from harness.arms.dapo import DAPO, DAPO_FILTERED
from harness.arms.grpo import GRPO, GRPO_CLIP_HIGHER
from harness.arms.ppo import PPO, PPO_UNGROUPED
from harness.collect import collect, join
from harness.errors import CellError
from harness.loop import Loop
from harness.parts.advantage import GAE
from harness.parts.critic import Critic
from harness.parts.kl import AdaptiveKL, KLInReward
from harness.parts.sampling import DynamicSampling
from harness.rewards.judge import MathsJudge
from harness.rewards.maths import Outcome, Verdict
from harness.samplers.sampler import Drawn
from harness.spec.schema import OptimizerSpec, RewardSpec
from harness.train import EMPTY_STEPS, observe, rate_factor, step, train

NO_WARMUP = PPO.but("ppo_at_once", advantage=GAE(critic=Critic(warmup_steps=0)))


class Fixed:
    """Verdicts by problem and row, whatever was written."""

    def __init__(self, rule: Callable[[int, int], bool]) -> None:
        self.rule, self.rows = rule, 0

    def __call__(self, indices: list[int], drawn: Drawn, seed: int):
        correct = torch.tensor([self.rule(i, row) for row, i in enumerate(indices)])
        verdicts = [Verdict(Outcome.CORRECT if c else Outcome.WRONG, "1") for c in correct.tolist()]
        return verdicts, correct.float(), torch.zeros(len(correct)), correct


def run(loop: Loop):
    records: list[dict] = []
    train(loop, records.append)
    return records


# -- one stream, one luck -------------------------------------------------------------------------


def test_every_arm_of_a_seed_reads_the_same_stream():
    hashes: dict[str, set[str]] = {}
    spans = {}
    for arm in (PPO, PPO_UNGROUPED, GRPO, GRPO_CLIP_HIGHER, DAPO):
        loop = make_loop(arm, limit=120, seed=3, judge=Fixed(lambda i, row: (i + row) % 3 == 0))
        records = run(loop)
        for at, value in (item for r in records for item in r["prompts"]["stream"].items()):
            hashes.setdefault(at, set()).add(value)
        spans[arm.name] = loop.progress.cursor
    assert all(len(values) == 1 for values in hashes.values())
    assert len(hashes) > 8
    assert spans["ppo_ungrouped"] == 4 * spans["ppo"]  # as many completions, of more prompts
    other = run(make_loop(GRPO, limit=16, seed=4))
    assert other[0]["prompts"]["stream"]["4"] not in hashes["4"]


def test_arms_of_a_seed_start_from_the_same_completions():
    drawn = []
    for arm in (PPO, GRPO, DAPO):
        loop = make_loop(arm, seed=5)
        loop.progress.step = 1
        rollout = collect(loop, {})
        first = collect(make_loop(arm.but("all", sampling=GRPO.sampling), seed=5), {})
        assert rollout is not None or arm is DAPO
        assert first is not None
        drawn.append(first.completion_ids)
    assert all(torch.equal(d, drawn[0]) for d in drawn)


def test_a_step_is_a_function_of_its_seed():
    a, b, c = (run(make_loop(PPO, seed=s)) for s in (1, 1, 2))
    assert json.dumps(a) == json.dumps(b)
    assert json.dumps(a) != json.dumps(c)


@pytest.mark.parametrize("arm", [PPO, GRPO, DAPO], ids=lambda a: a.name)
def test_a_resumed_run_goes_on_to_the_same_bits(arm):
    def fresh():
        return make_loop(
            arm, limit=1000, optimizer={"warmup_steps": 7, "schedule": "linear"},
            judge=Fixed(lambda i, row: (i + row) % 3 == 0),
        )  # fmt: skip

    straight, resumed = fresh(), fresh()
    for _ in range(4):
        step(straight)
    p, q = straight.progress, resumed.progress
    q.step, q.cursor, q.kl_coef = p.step, p.cursor, p.kl_coef
    q.optimizer_steps, q.policy_steps = p.optimizer_steps, p.policy_steps
    q.collected_nothing = p.collected_nothing
    q.stream.restore(p.stream.state())
    resumed.ledger.restore(json.loads(json.dumps(straight.ledger.state())))
    resumed.learner.restore({n: t.clone() for n, t in straight.learner.tensors()})
    for _ in range(3):
        assert json.dumps(step(straight)) == json.dumps(step(resumed))
    assert torch.equal(weights(straight.learner), weights(resumed.learner))


# -- budgets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["flops", "tokens", "completions", "updates", "seconds"])
def test_a_budget_ends_a_run_after_the_step_that_spends_it(unit):
    probe = make_loop(GRPO)
    step(probe)
    limit = 2.5 * probe.ledger.spent_in(unit) if unit != "seconds" else 0.05
    loop = make_loop(GRPO, unit=unit, limit=limit)
    totals = [r["spent"].get(unit) or 0 for r in run(loop)]
    if unit != "seconds":
        assert totals[-1] >= limit > totals[-2]
    assert loop.finished
    assert loop.share_spent == 1.0


def test_dropped_groups_are_charged_and_counted():
    """Every third problem alone has both right and wrong completions."""
    loop = make_loop(DAPO, limit=1000, judge=Fixed(lambda i, row: i % 3 == 0 and row % 2 == 0))
    record = step(loop)
    drawn = record["prompts"]["drawn"]
    assert record["used"] == 16
    assert record["dropped"] == {"groups": drawn - 4, "completions": 4 * (drawn - 4)}
    assert record["dropped"]["groups"] > 0
    assert record["spent"]["completions"] == 4 * drawn == sum(record["outcomes"].values())
    generated = record["lengths"]["policy/generate"]
    assert generated["sampled"] == record["spent"]["completion_tokens"]
    assert record["lengths"]["policy/train"]["head_tokens"] < generated["sampled"]
    assert record["zero_variance_share"] == pytest.approx((drawn - 4) / drawn)
    assert record["accuracy"] == 0.5  # of the used ones; the dropped ones are all wrong


def test_dynamic_sampling_stops_when_the_budget_is_gone():
    loop = make_loop(DAPO, limit=20, judge=Fixed(lambda i, row: False))
    record = step(loop)
    assert record["used"] == 0
    assert record["spent"]["completions"] == 32  # the second round passed the limit, no third came
    assert record["spent"]["updates"] == 0
    assert "effective" not in record


def test_dynamic_sampling_gives_up_at_its_rounds():
    arm = DAPO.but("short", sampling=DynamicSampling(max_rounds=3))
    loop = make_loop(arm, limit=1e6, judge=Fixed(lambda i, row: i == 0 and row % 2 == 0))
    records = [step(loop) for _ in range(4)]
    assert max(r["prompts"]["drawn"] for r in records) <= 12
    assert any(0 < r["used"] < 16 for r in records)


def test_twenty_empty_steps_are_an_error():
    loop = make_loop(
        DAPO.but("one_round", sampling=DynamicSampling(max_rounds=1)), limit=1e6,
        judge=Fixed(lambda i, row: True),
    )  # fmt: skip
    with pytest.raises(CellError, match="too hard or too easy"):
        run(loop)
    assert loop.progress.step == EMPTY_STEPS


def test_a_reward_that_is_no_number_names_its_problem():
    class Broken(Fixed):
        def __call__(self, indices, drawn, seed):
            verdicts, score, bonus, correct = super().__call__(indices, drawn, seed)
            score[5] = math.inf
            return verdicts, score, bonus, correct

    with pytest.raises(CellError, match="reward of problem 'p"):
        step(make_loop(GRPO, judge=Broken(lambda i, row: True)))


# -- what a record says ---------------------------------------------------------------------------


def test_a_record_is_what_its_tensors_say():
    loop = make_loop(NO_WARMUP, seed=2, judge=Fixed(lambda i, row: (i + row) % 3 == 0))
    loop.progress.step = 1
    record: dict = {"kl_coef": loop.progress.kl_coef}
    rollout = collect(loop, record)
    assert rollout is not None
    with torch.no_grad():  # a policy that has moved, and a critic with opinions
        for p in loop.learner.policy.parameters():
            p.mul_(1.1)
        assert loop.learner.critic is not None
        loop.learner.critic.head.weight.normal_(generator=torch.Generator().manual_seed(0))
    batch = observe(loop, rollout, record, warmup=False)
    m = batch.mask
    assert record["entropy"] == pytest.approx(-float(batch.behaviour_logprobs[m].mean()), rel=1e-5)
    assert batch.ref_logprobs is not None
    assert batch.values is not None
    assert batch.returns is not None
    rows = [
        float((batch.old_logprobs[i][m[i]] - batch.ref_logprobs[i][m[i]]).sum()) for i in range(16)
    ]
    assert record["kl_to_reference"] == pytest.approx(sum(rows) / 16, rel=1e-5)
    assert abs(record["kl_to_reference"]) > 0.01
    returns, values = batch.returns[m].double(), batch.values[m].double()
    explained = 1 - (returns - values).var() / returns.var()
    assert record["explained_variance"] == pytest.approx(float(explained), rel=1e-5)
    assert record["engine_gap"] > 1e-3  # the trainer has moved since the draw
    assert record["length_mean"] == float(m.sum(1).double().mean())
    assert record["truncated_share"] == float((~batch.finished).double().mean())
    # The KL is already off the rewards: score - 0.05 KL, completion by completion.
    total = batch.rewards.sum(1) + 0.05 * torch.tensor(rows)
    assert total.tolist() == pytest.approx(batch.score.tolist(), abs=1e-5)


def test_whitening_spans_the_whole_batch():
    loop = make_loop(NO_WARMUP, judge=Fixed(lambda i, row: (i + row) % 3 == 0))
    rollout = collect(loop, {})
    assert rollout is not None
    batch = observe(loop, rollout, {"kl_coef": 0.05}, warmup=False)
    valid = batch.advantages[batch.mask].double()
    assert float(valid.mean()) == pytest.approx(0, abs=1e-5)
    assert float(valid.var()) == pytest.approx(1, rel=1e-4)


def test_rollouts_of_several_rounds_are_joined_by_padding():
    loop = make_loop(GRPO, sampling={"max_new_tokens": 3})
    short = collect(loop, {})
    loop.progress.step = 1
    long = collect(make_loop(GRPO, problems=prompt_set(12), seed=1), {})
    assert short is not None
    assert long is not None
    both = join([short, long])
    assert len(both) == 32
    for offset, part in ((0, short), (16, long)):
        for i in range(16):
            row = both.select(torch.tensor([offset + i]))
            assert (
                row.completion_ids[row.mask].tolist()
                == part.completion_ids[i][part.mask[i]].tolist()
            )
            assert (
                row.prompt_ids[row.prompt_mask].tolist()
                == part.prompt_ids[i][part.prompt_mask[i]].tolist()
            )
            assert (
                row.behaviour_logprobs[row.mask].tolist()
                == part.behaviour_logprobs[i][part.mask[i]].tolist()
            )


def test_the_coefficient_in_force_is_the_one_before_the_step():
    """The controller sees this step's KL, and moves the next step's coefficient alone."""
    arm = NO_WARMUP.but("adaptive", kl=KLInReward(0.05, controller=AdaptiveKL(0.01, 100.0)))
    loop = make_loop(arm, limit=1000, optimizer={"learning_rate": 1e-2})
    expected = 0.05
    for _ in range(4):
        record = step(loop)
        assert record["kl_coef"] == expected
        error = min(max(record["kl_to_reference"] / 0.01 - 1, -0.2), 0.2)
        expected *= 1 + error * record["used"] / 100
    assert expected != 0.05


# -- rates and warm-up ----------------------------------------------------------------------------


def test_learning_rate_schedules():
    def spec(**options):
        return OptimizerSpec(learning_rate=1.0, **options)

    assert [rate_factor(spec(), n, 0.7) for n in (0, 9)] == [1, 1]
    warm = spec(warmup_steps=4)
    assert [rate_factor(warm, n, 0.0) for n in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    linear, cosine = spec(schedule="linear"), spec(schedule="cosine")
    assert [rate_factor(linear, 0, s) for s in (0, 0.25, 1)] == [1, 0.75, 0]
    assert [rate_factor(cosine, 0, s) for s in (0, 0.5, 1)] == pytest.approx([1, 0.5, 0])
    both = spec(schedule="linear", warmup_steps=4)
    assert rate_factor(both, 1, 0.5) == 0.25


def test_the_policys_warm_up_starts_with_the_policy():
    """After the critic's two steps PPO's policy starts where GRPO's did, not at the full rate."""
    found = {}
    for arm in (PPO, GRPO):
        loop = make_loop(arm, limit=1000, optimizer={"warmup_steps": 8, "learning_rate": 1e-3})
        before = weights(loop.learner)
        records = [step(loop) for _ in range(4)]
        rates = [r["effective"]["learning_rate"] for r in records if r["phase"] == "train"]
        found[arm.name] = rates[:2]
        if arm is PPO:
            assert [r["phase"] for r in records] == ["critic_warmup"] * 2 + ["train"] * 2
            critic = [r["effective"]["critic_learning_rate"] for r in records]
            assert critic == pytest.approx([1e-3 * n / 8 for n in (1, 3, 5, 7)])
            assert all("grad_norm" not in r for r in records[:2])
        assert not torch.equal(weights(loop.learner), before)
    assert found["ppo"] == found["grpo"] == pytest.approx([1e-3 / 8, 3e-3 / 8])


def test_the_policy_stands_still_in_warm_up():
    loop = make_loop(PPO, limit=1000)
    before = [p.clone() for p in loop.learner.policy.parameters()]
    for _ in range(2):
        assert step(loop)["kl_to_reference"] == 0
    for p, q in zip(before, loop.learner.policy.parameters(), strict=True):
        assert torch.equal(p, q)
    step(loop)
    assert any(
        not torch.equal(p, q) for p, q in zip(before, loop.learner.policy.parameters(), strict=True)
    )


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("minibatches", [1, 4])
def test_each_completion_is_learned_from_once_an_epoch(epochs, minibatches):
    loop = make_loop(GRPO, optimizer={"epochs": epochs, "minibatches": minibatches})
    record = step(loop)
    effective = record["effective"]
    assert effective["gradient_steps"] == epochs * minibatches == record["spent"]["updates"]
    assert effective["minibatches"] == minibatches
    assert effective["weight_sum"] == pytest.approx([1.0] * (epochs * minibatches))
    assert record["first_ratio_error"] < 1e-4


# -- the placebo ----------------------------------------------------------------------------------


def test_the_placebo_is_as_often_right_and_blind():
    problems = prompt_set(12)
    drawn = Drawn(
        *(torch.zeros(400, 1, dtype=t) for t in (torch.long, torch.bool, torch.long, torch.bool)),
        torch.ones(400, dtype=torch.bool),
        torch.zeros(400, 1),
        tuple(str(i % 10) if i % 4 == 0 else "-" for i in range(400)),
    )
    indices = [i % 10 for i in range(400)]
    found = {}
    for placebo in (False, True):
        judge = MathsJudge(Rule(), problems.problems, RewardSpec(format=0.25), placebo)  # type: ignore[arg-type]
        found[placebo] = judge(indices, drawn, seed=5)
    verdicts, score, bonus, correct = found[False]
    shuffled = found[True]
    assert correct.tolist() == [i % 4 == 0 for i in range(400)]
    assert torch.equal(score, correct.float() + bonus)
    assert shuffled[0] == verdicts  # the record of outcomes is the true one
    assert shuffled[3].sum() == correct.sum() == 100
    assert torch.equal(shuffled[1], shuffled[3].float() + shuffled[2])
    assert sorted(shuffled[1].tolist()) == sorted(score.tolist())
    agree = float((shuffled[3] & correct).sum())
    assert 10 < agree < 45  # 25 by chance
    assert not torch.equal(
        shuffled[3],
        MathsJudge(Rule(), problems.problems, RewardSpec(), True)(indices, drawn, seed=6)[3],  # type: ignore[arg-type]
    )


# -- learning -------------------------------------------------------------------------------------


def bandit(arm, *, placebo=False, seed=0) -> list[float]:
    """Accuracy by step where one digit, chosen at about 1 in 8 at first, is always the answer."""
    loop = make_loop(
        arm,
        seed=seed,
        model=tiny_model(4, spread=0.02, layers=1),
        problems=prompt_set(12, answer="7"),
        placebo=placebo,
        unit="completions",
        limit=128 * 24,
        sampling={"prompts_per_step": 16, "completions_per_prompt": 8, "max_new_tokens": 1},
        optimizer={"learning_rate": 1e-2, "minibatches": 2, "micro_batch": 256},
    )
    found: list[float] = []

    def note(record):
        outcomes = record["outcomes"]
        found.append(outcomes.get("correct", 0) / sum(outcomes.values()))

    train(loop, note)
    return found


@pytest.mark.parametrize("arm", [PPO, GRPO, DAPO, DAPO_FILTERED], ids=lambda a: a.name)
def test_every_arm_learns_a_bandit(arm):
    # Overlong punishment and filtering are about cut completions, and here all are cut.
    if arm is DAPO_FILTERED:
        arm = arm.but("dapo_kept", exclude=None)
    accuracy = bandit(arm)
    assert accuracy[0] < 0.3
    assert accuracy[-1] > 0.7


def test_the_placebo_learns_nothing():
    accuracy = bandit(GRPO, placebo=True)
    assert accuracy[0] < 0.3
    assert max(accuracy) < 0.3


def test_the_answer_of_the_bandit_is_a_token():
    assert tokenizer()("7")["input_ids"] == [10]
