"""Evaluation: the same draws for every moment and arm, exact counts, and a KL that is one."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none

from tiny import EOS, Rule, prompt_set, sampler, tiny_model

from harness.data import PromptSet
from harness.evaluate import Divergence, Protocol, count, evaluate
from harness.models import Policy, Reference, trainable
from harness.rewards.maths import MathGrader, Outcome, Verdict
from harness.spec.schema import LoraSpec

PROTOCOL = Protocol(
    samples=6, temperature=1.0, top_p=1.0, max_new_tokens=4, stop=(), seed=3, greedy=True
)


class Spy:
    """A sampler that notes what was drawn."""

    def __init__(self, model, engine_batch=1024):
        self.inner, self.drawn = sampler(model, engine_batch), []

    def draw(self, prompts, group_size, decoding, seed, episodes=None):
        self.drawn.append(self.inner.draw(prompts, group_size, decoding, seed, episodes))
        return self.drawn[-1]

    def load(self, model):
        self.inner.load(model)


def judged(model, problems=None, protocol=PROTOCOL, divergence=None, name="test.t", spy=None):
    spy = spy or Spy(model)
    grader: MathGrader = Rule()  # type: ignore[assignment]
    return evaluate(name, problems or prompt_set(5), protocol, spy, grader, divergence), spy


def test_every_moment_and_arm_is_judged_by_the_same_draws():
    first, a = judged(tiny_model())
    again, b = judged(tiny_model(), spy=Spy(tiny_model(), engine_batch=7))
    assert first.record["problems"] == again.record["problems"]
    assert first.samples == again.samples
    assert torch.equal(a.drawn[0].completion_ids, b.drawn[0].completion_ids)
    # Another split or seed has draws of its own; training in between moves none.
    assert judged(tiny_model(), name="test.u")[0].record["problems"] != first.record["problems"]
    torch.manual_seed(99)
    torch.rand(5)
    assert judged(tiny_model())[0] == first


def test_common_luck_makes_close_policies_agree():
    """A hair's change of the policy changes few draws; another seed changes most."""
    near = tiny_model()
    with torch.no_grad():
        for p in near.parameters():
            p.mul_(1.0005)
    _, a = judged(tiny_model())
    _, b = judged(near)
    other = Protocol(**(vars(PROTOCOL) | {"seed": 4}))
    _, c = judged(tiny_model(), protocol=other)
    same = [x == y for x, y in zip(a.drawn[0].texts, b.drawn[0].texts, strict=True)]
    apart = [x == y for x, y in zip(a.drawn[0].texts, c.drawn[0].texts, strict=True)]
    assert sum(same) >= 28
    assert sum(apart) < 15


def test_a_record_counts_its_samples():
    problems = prompt_set(5)
    found, spy = judged(tiny_model(), problems)
    drawn, greedy = spy.drawn
    for i, row in enumerate(found.record["problems"]):
        texts = drawn.texts[6 * i : 6 * i + 6]
        answer = problems.problems[i].answer
        assert row["id"] == f"p{i}"
        assert row["n"] == 6 == sum(row["outcomes"].values())
        assert row["correct"] == sum(t.startswith(answer) for t in texts)
        assert row["unparsed"] + sum(n for _, n, _ in row["answers"]) == 6
        assert row["greedy"] == greedy.texts[i].startswith(answer)
        real = drawn.mask[6 * i : 6 * i + 6]
        assert row["length_mean"] == float(real.sum(1).double().mean())
        cut = [
            EOS not in ids[m] for ids, m in zip(drawn.completion_ids[6 * i :], real, strict=False)
        ]
        assert row["truncated"] == sum(cut)
    assert found.record["problems_sha256"] == problems.sha256
    assert len(found.samples) == 5 * 4
    assert found.record["entropy"] == pytest.approx(
        -float(drawn.logprobs[drawn.mask].mean()), rel=1e-5
    )


def test_answer_classes_never_mix_right_and_wrong():
    verdicts = [
        Verdict(Outcome.CORRECT, "3"), Verdict(Outcome.CORRECT, "3"), Verdict(Outcome.WRONG, "4"),
        Verdict(Outcome.WRONG, "3"), Verdict(Outcome.TRUNCATED, None),
        Verdict(Outcome.NO_ANSWER, None),
    ]  # fmt: skip
    assert count(verdicts) == {
        "n": 6,
        "correct": 2,
        "answers": [["3", 2, True], ["3", 1, False], ["4", 1, False]],
        "unparsed": 2,
        "outcomes": {"correct": 2, "no_answer": 1, "truncated": 1, "wrong": 2},
    }


def test_greedy_is_left_out_where_the_protocol_does():
    found, spy = judged(tiny_model(), protocol=Protocol(**(vars(PROTOCOL) | {"greedy": False})))
    assert len(spy.drawn) == 1
    assert all(row["greedy"] is None for row in found.record["problems"])


# -- the divergence -------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=2)], ids=["full", "lora"])
def test_the_base_is_no_distance_from_itself(lora):
    base = tiny_model()
    model = trainable(base, lora, 0)
    reference = Reference(model if lora else base, 1.0, adapters_off=lora is not None)
    found, _ = judged(model, divergence=Divergence(Policy(model, 1.0), reference, 4, 8))
    kl = found.record["kl_to_base"]
    assert kl["n"] == 20
    assert kl["mean"] == pytest.approx(0, abs=1e-6)
    assert kl["se"] == pytest.approx(0, abs=1e-6)


def exact_kl(model, base, prompt, temperature):
    """Sequence KL over at most two tokens, by going through all of them."""

    def following(m, ids):
        with torch.no_grad():
            return (m(input_ids=ids).logits[:, -1].double() / temperature).log_softmax(1)

    start = torch.tensor([list(prompt)])
    p, q = following(model, start)[0], following(base, start)[0]
    V = len(p)
    longer = torch.cat([start.expand(V, -1), torch.arange(V)[:, None]], 1)
    p2, q2 = following(model, longer), following(base, longer)
    second = (p2.exp() * (p2 - q2)).sum(1)
    second[EOS] = 0.0  # nothing follows an end
    return float((p.exp() * (p - q + second)).sum())


@pytest.mark.parametrize(
    ("temperature", "evaluation"), [(1.0, {}), (0.7, {}), (1.0, {"temperature": 0.6, "top_p": 0.5})]
)
def test_the_estimate_is_the_kl_of_all_sequences(temperature, evaluation):
    """Also where evaluation samples otherwise than training: the policy is then sampled anew."""
    base, model = tiny_model(1, spread=0.2), copy.deepcopy(tiny_model(1, spread=0.2))
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    one = prompt_set(1)
    problems = PromptSet("t", one.problems * 40, one.prompts * 40, "x")  # one prompt, 40 estimates
    protocol = Protocol(100, temperature, 1.0, 2, (), 0, False)
    protocol = Protocol(**(vars(protocol) | evaluation))
    policy, reference = Policy(model, temperature), Reference(base, temperature)
    found, _ = judged(model, problems, protocol, Divergence(policy, reference, 100, 4000))
    kl = found.record["kl_to_base"]
    exact = exact_kl(model, base, problems.prompts[0], temperature)
    assert exact > 0.05
    assert kl["n"] == 4000
    assert abs(kl["mean"] - exact) < 4 * kl["se"] < 0.5 * exact
