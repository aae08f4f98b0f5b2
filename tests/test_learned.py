"""A learned reward in the loop: who is told what, what is charged, what is recorded."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from tiny import make_loop, prompt_set
from torch import Tensor

from harness.arms import ARMS, BUILT_IN
from harness.collect import collect
from harness.cost.flops import Lengths, forward
from harness.errors import InputError
from harness.evaluate import Protocol, evaluate
from harness.loop import Loop
from harness.rewards.learned import LearnedGrader, LearnedJudge
from harness.samplers.sampler import Drawn
from harness.tasks.task import Problem
from harness.train import step

SUCCESS = 0.5


class Digits:
    """Gold: the share of digits in a completion."""

    version = 1

    def __call__(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


class TokenMean:
    """Proxy: the mean token id, over completions alone."""

    def score(
        self, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor, mask: Tensor,
        micro_batch: int,
    ) -> Tensor:  # fmt: skip
        ids = completion_ids.masked_fill(~mask, 0).double()
        return (ids.sum(1) / mask.sum(1)).float()


def grader() -> LearnedGrader:
    return LearnedGrader(Digits(), TokenMean(), success=SUCCESS, micro_batch=4)


def drawn(ids: list[list[int]], texts: Sequence[str]) -> Drawn:
    tokens = torch.tensor(ids)
    ones = torch.ones_like(tokens, dtype=torch.bool)
    return Drawn(
        tokens[:, :1], ones[:, :1], tokens, ones, torch.ones(len(ids), dtype=torch.bool),
        torch.zeros(tokens.shape), tuple(texts),
    )  # fmt: skip


def problems(count: int) -> list[Problem]:
    return [Problem(str(i), f"q{i}", "") for i in range(count)]


IDS = [[1, 3], [5, 5], [2, 2], [2, 2]]
TEXTS = ["7a", "ab", "12", "x1"]


def test_the_proxy_is_the_score_and_gold_is_the_verdict():
    judge = LearnedJudge(grader(), problems(2))
    verdicts, score, bonus, correct = judge([0, 0, 1, 1], drawn(IDS, TEXTS), seed=1)
    assert score.tolist() == [2.0, 5.0, 2.0, 2.0]
    assert not bonus.any()
    assert [v.correct for v in verdicts] == [True, False, True, True]  # 1/2, 0, 1, 1/2
    # What the arm is told follows from the proxy: above the group's mean, and equal ones are not.
    assert correct.tolist() == [False, True, False, False]


def test_an_arm_on_the_gold_reward_gets_it_on_the_proxys_scale():
    judge = LearnedJudge(grader(), problems(2), on_gold=True, gold_mean=0.5, gold_std=0.25)
    _, score, _, correct = judge([0, 0, 1, 1], drawn(IDS, TEXTS), seed=1)
    assert score.tolist() == [0.0, -2.0, 2.0, 0.0]
    assert correct.tolist() == [True, False, True, False]


def test_the_placebo_gets_scores_of_others_and_true_records():
    plain = LearnedJudge(grader(), problems(40))
    blind = replace(plain, placebo=True)
    ids = [[i, i + 1] for i in range(40)]
    texts = ["1" if i % 2 else "a" for i in range(40)]
    rows = list(range(40))
    _, score, _, _ = plain(rows, drawn(ids, texts), seed=3)
    verdicts, shuffled, _, _ = blind(rows, drawn(ids, texts), seed=3)
    assert sorted(shuffled.tolist()) == score.tolist()
    assert not torch.equal(shuffled, score)
    assert sum((shuffled == score).tolist()) < 8
    assert [v.correct for v in verdicts] == [bool(i % 2) for i in range(40)]


def learned_loop(arm: str = "grpo", **options: object) -> Loop:
    """A loop whose reward model is as large as the policy."""
    found = make_loop(BUILT_IN[arm], **options)  # type: ignore[arg-type]
    judge = LearnedJudge(grader(), found.prompts.prompts.problems, on_gold=arm.endswith("_gold"))
    ledger = found.ledger
    if not judge.on_gold:
        shapes = {"reward_model": replace(ledger.shapes["policy"], scalar_head=True)}
        ledger = replace(ledger, shapes={**ledger.shapes, **shapes})
    return replace(found, judge=judge, ledger=ledger)


@pytest.mark.parametrize("arm", ["ppo", "grpo", "dapo", "rloo", "ppo_gold", "grpo_gold"])
def test_an_arm_trains_on_it_and_pays_for_what_is_read(arm: str):
    run = learned_loop(arm)
    record = step(run)
    assert record["gold_mean"] is not None
    assert record["proxy_mean"] is not None
    assert record["accuracy"] is None
    if arm.endswith("_gold"):
        assert "reward_model/score" not in record["lengths"]
        assert record["score_mean"] == pytest.approx(record["gold_mean"], abs=1e-6)
        return
    assert record["score_mean"] == pytest.approx(record["proxy_mean"], rel=1e-6)
    read = record["lengths"]["reward_model/score"]
    lengths = Lengths(**read["lengths"])
    counts = record["spent"]
    assert lengths.sequences == counts["completions"] == 16
    size = record["completions_per_prompt"]
    assert lengths.tokens == size * counts["prompt_tokens"] + counts["completion_tokens"]
    assert read["head_tokens"] == lengths.tokens
    shape = run.ledger.shapes["reward_model"]
    assert record["flops"]["reward_model/score"] == forward(shape, lengths, lengths.tokens)


def test_dropped_completions_were_read_too():
    """DAPO drops groups of equal scores, whatever the gold scorer thinks of them."""
    run = learned_loop("dapo")

    class Flat(TokenMean):
        """Equal for the completions of a prompt that starts with an even token."""

        def score(self, prompt_ids: Tensor, prompt_mask: Tensor, *rest: object) -> Tensor:
            found = super().score(prompt_ids, prompt_mask, *rest)  # type: ignore[arg-type]
            last = prompt_ids[:, -1]
            odd = (torch.arange(len(found)) // 4) % 2 == 1  # every second group
            return torch.where(odd, found, last.float())

    judge = run.judge
    assert isinstance(judge, LearnedJudge)
    flat = LearnedGrader(Digits(), Flat(), success=SUCCESS, micro_batch=4)
    run = replace(run, judge=replace(judge, grader=flat))
    run.progress.step = 1
    run.ledger.start_step()
    record: dict = {}
    rollout = collect(run, record)
    assert rollout is not None
    assert record["dropped"]["completions"] > 0
    read = run.ledger.lengths
    sequences = read["reward_model/score"]["lengths"]["sequences"]
    assert sequences == record["used"] + record["dropped"]["completions"]
    shape, head = run.ledger.shapes["reward_model"], read["reward_model/score"]["head_tokens"]
    total = Lengths(**read["reward_model/score"]["lengths"])
    assert run.ledger.flops["reward_model/score"] == forward(shape, total, head)


def test_an_evaluation_holds_both_scores_of_every_sample():
    run = learned_loop()
    asked = prompt_set(3)
    protocol = Protocol(4, 1.0, 1.0, 5, (), 0, greedy=True)
    found = evaluate("test.t", asked, protocol, run.sampler, grader(), None)
    for row in found.record["problems"]:
        assert len(row["gold"]) == len(row["proxy"]) == row["n"] == 4
        assert sum(g >= SUCCESS for g in row["gold"]) == row["correct"]
        assert row["outcomes"].get("correct", 0) == row["correct"]
    assert {"gold_score", "proxy_score"} <= found.samples[0].keys()


def test_the_gold_reward_is_a_declared_difference():
    from harness.arm import parts
    from harness.identity import difference

    found = difference(parts(ARMS["ppo"]), parts(BUILT_IN["ppo_gold"]))
    assert {path.partition(".")[0] for path in found} == {"reward"}
    assert "reward" not in parts(ARMS["ppo"])
    with pytest.raises(InputError, match="reward is 'gold'"):
        replace(ARMS["ppo"], reward="gold")  # type: ignore[arg-type]
