"""Episodes in the loop: drawn, scored, credited, charged and audited with an environment's text."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from certificate_plants import forge
from experiment_fixture import contents, save_model, write_spec
from tiny import (
    as_rollout,
    double_model,
    make_loop,
    prompt_set,
    sampler,
    tiny_base,
    tiny_model,
    tokenizer,
    trained,
    weights,
)

from harness.arms import ARMS, BUILT_IN
from harness.cell import run_cell
from harness.certificate import audit
from harness.collect import collect
from harness.cost.flops import Generation, Lengths
from harness.data import PromptSet
from harness.errors import CellError, InputError
from harness.experiment import ensure_lock, open_context
from harness.lock import make_lock
from harness.matrix import Matrix
from harness.models import Policy, build_critic, scored
from harness.parts.advantage import GAE, ReturnToGo
from harness.plan import make_plan
from harness.rewards.steps import TurnJudge
from harness.samplers.dialogue import Episodes
from harness.samplers.sampler import Decoding, Drawn, uniforms
from harness.spec.reward import DenseSpec
from harness.tasks import TASKS
from harness.tasks.dialogue import ArithmeticDialogue
from harness.tasks.task import Problem
from harness.train import observe, step
from harness.types import Rollout

LIMIT = 12
PLAIN = Decoding(1.0, 1.0, LIMIT)
SHOWN = ("7+", "8-1=", "9=")


@dataclasses.dataclass(frozen=True)
class Talk:
    """Goes on to fixed texts whatever was said; a turn of an even number of characters is right."""

    version: int = 1
    count: int = 3

    def reset(self, problem: Problem) -> str:
        return problem.question

    def turns(self, problem: Problem) -> int:
        return self.count

    def room(self, problem: Problem) -> int:
        return sum(map(len, SHOWN[: self.count - 1]))

    def step(self, problem: Problem, texts: Sequence[str]) -> tuple[str | None, float]:
        shown = SHOWN[len(texts) - 1] if len(texts) < self.count else None
        return shown, float(len(texts[-1]) % 2 == 0)


def talkative() -> Any:
    """A tiny model that ends a turn with every third token or so."""
    model = tiny_model(3)
    head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size)
    with torch.no_grad():
        head.weight.copy_(0.3 * model.lm_head.weight)
        head.bias.zero_()
        head.bias[2] = 2.3
    model.lm_head = head
    return model


def play(model: Any, count: int = 6, engine_batch: int = 1024, **talk: Any) -> Drawn:
    problems = prompt_set(count)
    episodes = Episodes(Talk(**talk), problems.problems)
    return sampler(model, engine_batch).draw(problems.prompts, 4, PLAIN, 5, episodes)


def episode_set(environment: Any, count: int = 12) -> PromptSet:
    return dataclasses.replace(prompt_set(count), environment=environment)


# --- drawing -------------------------------------------------------------------------------------


def test_every_token_is_the_one_that_its_number_draws_after_all_that_stands_before():
    """Each row played again by plain forward passes: one number for each token that is sampled."""
    model, drawn = talkative(), play(talkative())
    chance, problems = uniforms(24, LIMIT, 5), prompt_set(6)
    assert drawn.given is not None
    turns = []
    for row in range(24):
        history, written, used = list(problems.prompts[row // 4]), [""], 0
        expected: list[tuple[int, bool]] = []
        while True:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([history])).logits[0, -1]
            ladder = logits.float().log_softmax(0).double().exp().cumsum(0)
            token = int(torch.searchsorted(ladder, chance[row, used] * ladder[-1], right=True))
            history.append(token)
            expected.append((token, True))
            used += 1
            if token != 2:
                written[-1] += tokenizer().decode([token], skip_special_tokens=True)
            if used == LIMIT or (token == 2 and len(written) == 3):
                break
            if token == 2:
                shown = tokenizer()(SHOWN[len(written) - 1])["input_ids"]
                written.append("")
                history += shown
                expected += [(i, False) for i in shown]
        present = drawn.present[row]
        assert drawn.completion_ids[row][present].tolist() == [token for token, _ in expected]
        assert drawn.mask[row][present].tolist() == [mine for _, mine in expected]
        assert bool(drawn.finished[row]) == (expected[-1][0] == 2 and len(written) == 3)
        last = written[-1] if len(written) == 3 else ""
        assert drawn.texts[row] == last
        turns.append(len(written))
    assert set(turns) == {1, 2, 3}
    assert not drawn.finished.all()


def test_the_batch_is_no_part_of_an_episode():
    model = talkative()
    whole, alone = play(model), play(model, engine_batch=1)
    for name in ("completion_ids", "mask", "given", "finished"):
        assert torch.equal(getattr(whole, name), getattr(alone, name))
    assert (whole.turns, whole.texts) == (alone.turns, alone.texts)


def test_turns_are_scored_at_their_last_token():
    drawn = play(talkative())
    assert drawn.turns is not None
    assert drawn.transcripts is not None
    for row, turns in enumerate(drawn.turns):
        ids, mask = drawn.completion_ids[row].tolist(), drawn.mask[row]
        assert all(mask[token] for token in turns)
        start = 0
        for token, score in turns.items():
            text = "".join(
                tokenizer().decode([i], skip_special_tokens=True)
                for i, mine in zip(ids[start : token + 1], mask[start : token + 1], strict=True)
                if mine
            )
            assert score == (ids[token] == 2 and len(text) % 2 == 0)  # a turn that is cut has none
            start = token + 1
        assert len(drawn.transcripts[row].split("\n")) == 2 * len(turns) - 1
    assert {score for turns in drawn.turns for score in turns.values()} == {0.0, 1.0}


def test_engine_and_trainer_agree_on_log_probs_across_gaps():
    model = talkative()
    drawn = play(model)
    x = dataclasses.replace(as_rollout(drawn), given=drawn.given)
    again = scored(Policy(model, 1.0).logprobs, x, 7)
    assert float((again - drawn.logprobs).abs().max()) < 2e-5
    blind = scored(Policy(model, 1.0).logprobs, as_rollout(drawn), 7)
    assert float((blind - drawn.logprobs).abs().max()) > 1e-2  # what is given is read


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"step": lambda self, p, texts: (None, 2.0)}, r"scores a turn of problem 'p\d' 2.0"),
        ({"step": lambda self, p, texts: ("1" * 9, 0.0)}, "9 tokens in all; it announced 1 to 6"),
        ({"step": lambda self, p, texts: ("", 0.0)}, "it announced 1 to 6"),
    ],
)
def test_an_environment_that_breaks_its_word_is_named(wrong: dict[str, Any], words: str):
    odd = type("Odd", (Talk,), wrong)()
    problems = prompt_set(2)
    with pytest.raises(CellError, match=words):
        sampler(talkative()).draw(problems.prompts, 4, PLAIN, 5, Episodes(odd, problems.problems))


# --- one turn is the ordinary path ---------------------------------------------------------------


@pytest.mark.parametrize("arm", ["grpo", "ppo"])
def test_one_turn_is_the_ordinary_path_to_the_bit(arm: str):
    plain, played = (
        make_loop(ARMS[arm]),
        make_loop(ARMS[arm], problems=episode_set(ArithmeticDialogue())),
    )
    for _ in range(3):
        expected, found = step(plain), step(played)
        assert {**found, "flops": None} == {**expected, "flops": None}
        assert found["flops"] == expected["flops"]
    assert torch.equal(weights(played.learner), weights(plain.learner))


# --- credit --------------------------------------------------------------------------------------

MASK = torch.tensor([[True, True, False, False, True, True, False]])
REWARDS = torch.tensor([[0.0, 0.5, 9.0, 9.0, 0.0, 1.0, 9.0]], dtype=torch.float64)
VALUES = torch.tensor([[0.1, 0.2, 7.0, 7.0, 0.3, 0.4, 7.0]], dtype=torch.float64)
NO_GROUP = torch.zeros(1, dtype=torch.long)


def at(*numbers: float) -> Tensor:
    """Numbers on the sampled tokens, 0 elsewhere."""
    found = torch.zeros(1, 7, dtype=torch.float64)
    found[MASK] = torch.tensor(numbers, dtype=torch.float64)
    return found


def test_gae_goes_from_one_sampled_token_to_the_next_by_hand():
    """gamma .9, lambda .8. The second token's next value is .3, that of the first token of turn 2.

    d4 = 1 - .4 = .6;  d3 = .9 x .4 - .3 = .06;  d2 = .5 + .9 x .3 - .2 = .57;
    d1 = .9 x .2 - .1 = .08;  A = d + .72 A_next.
    """
    part = GAE(gamma=0.9, gae_lambda=0.8)
    advantages, returns = part(REWARDS, MASK, NO_GROUP, VALUES)
    expected = at(0.7454528, 0.92424, 0.492, 0.6)
    assert torch.allclose(advantages, expected, atol=1e-12)
    assert returns is not None
    assert torch.allclose(returns, expected + at(0.1, 0.2, 0.3, 0.4), atol=1e-12)


def test_returns_to_go_take_no_time_in_gaps_by_hand():
    """gamma .5: 1; .5; .5 + .25 = .75; .375."""
    advantages, _ = ReturnToGo(gamma=0.5)(REWARDS, MASK, NO_GROUP, None)
    assert torch.allclose(advantages, at(0.375, 0.75, 0.5, 1.0), atol=1e-12)
    whole = GAE(gamma=0.5).monte_carlo(REWARDS, MASK)
    assert torch.allclose(whole, at(0.375, 0.75, 0.5, 1.0), atol=1e-12)


# --- models: what is given is context, and nothing else ------------------------------------------


def two_turns(shown: Sequence[int] = (11, 12, 13)) -> Rollout:
    """Four rows: a prompt of 3, a turn of 3, what is shown, a turn of 2; float64 models read it."""
    generator = torch.Generator().manual_seed(0)
    B, G = 4, len(shown)
    drawn = torch.randint(3, 18, (B, 8), generator=generator)
    told = torch.tensor(shown).expand(B, -1)
    mask = torch.tensor([[True] * 3 + [False] * G + [True] * 2]).expand(B, -1).clone()
    score = torch.tensor([1.0, 0.0, 0.0, 1.0])
    return Rollout(
        prompt_ids=drawn[:, :3],
        prompt_mask=torch.ones(B, 3, dtype=torch.bool),
        completion_ids=torch.cat([drawn[:, 3:6], told, drawn[:, 6:]], 1),
        mask=mask,
        given=~mask,
        group=torch.zeros(B, dtype=torch.long),
        score=score,
        bonus=torch.zeros(B),
        correct=score > 0,
        finished=torch.ones(B, dtype=torch.bool),
        behaviour_logprobs=torch.zeros(mask.shape),
    )


def as_prompt(x: Rollout, start: int, until: int) -> Rollout:
    """The tokens from ``start`` to ``until`` alone, with all before them as the prompt."""
    ids = torch.cat([x.prompt_ids, x.completion_ids[:, :start]], 1)
    kept = x.completion_ids[:, start:until]
    return dataclasses.replace(
        x, prompt_ids=ids, prompt_mask=torch.ones_like(ids, dtype=torch.bool), completion_ids=kept,
        mask=torch.ones_like(kept, dtype=torch.bool), given=None,
        behaviour_logprobs=torch.zeros(kept.shape),
    )  # fmt: skip


def test_a_second_turn_is_scored_and_valued_as_after_one_long_prompt():
    x = two_turns()
    policy = Policy(double_model(1), 0.8)
    critic = build_critic(tiny_base(double_model(2)), "fresh_head", None, 0).double()
    for score in (policy.logprobs, critic.values):
        whole = score(x)
        parts = [score(as_prompt(x, 0, 3)), torch.zeros(4, 3), score(as_prompt(x, 6, 8))]
        assert torch.allclose(whole, torch.cat([p.double() for p in parts], 1), atol=1e-12)


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_padding_beside_gaps_and_micro_batches_change_no_update(name: str):
    """Rows of unequal episodes, padded and trimmed in other company."""
    long, short = two_turns(), two_turns(shown=(11,))
    wide = {
        n: torch.nn.functional.pad(getattr(short, n), (0, 2), value=v)
        for n, v in (("completion_ids", 5), ("mask", False), ("given", False))
    }
    short = dataclasses.replace(short, **wide, behaviour_logprobs=torch.zeros(4, 8))
    both = Rollout(**{
        k: None if v is None else torch.cat([v, getattr(short, k)]) for k, v in vars(long).items()
    })  # fmt: skip
    both = dataclasses.replace(both, group=torch.arange(8) // 4)
    found = []
    for micro in (1000, 1, 3):
        run = trained(ARMS[name], both, micro_batch=micro)
        minibatch = ARMS[name].weigh(run.batch, max_new_tokens=12)
        run.learner.update(
            minibatch, kl_coef=0.1, rate=1.0, critic_rate=1.0, warmup=False, first=True
        )
        found.append(weights(run.learner))
    assert torch.allclose(found[0], found[1], atol=1e-12)
    assert torch.allclose(found[0], found[2], atol=1e-12)


# --- the loop ------------------------------------------------------------------------------------


def dense_loop(arm: str = "grpo", **options: Any) -> Any:
    run = make_loop(
        ARMS[arm], problems=episode_set(Talk()), model=talkative(),
        sampling={"max_new_tokens": LIMIT}, limit=64, **options,
    )  # fmt: skip
    run.step_judge, run.dense = TurnJudge(paid=True), DenseSpec(steps=0.25, outcome=1.0)
    return run


def test_turns_are_paid_where_they_end_and_charged_as_what_they_are():
    run, record = dense_loop(), {}
    x = collect(run, record)
    assert x is not None
    assert x.given is not None
    assert x.step_ends is not None
    assert x.paid is not None
    assert x.step_scores is not None
    assert not (x.step_ends & ~x.mask).any()
    assert torch.equal(x.paid, 0.25 * x.step_scores)
    assert torch.allclose(x.score, x.correct.float() + x.paid.sum(1))
    spent, given = run.ledger.spent(), int(x.given.sum())
    assert given > 0
    assert spent["completion_tokens"] == int(x.mask.sum())
    assert spent["prompt_tokens"] == 4 * 4 + given  # four prompts of four tokens
    assert spent["steps_graded"] == int(x.step_ends.sum())
    batch = observe(run, x, record, warmup=False)
    assert torch.allclose(batch.rewards.sum(1), x.score)
    ends = batch.rewards != 0
    assert not (ends & ~(x.step_ends | _last(x.mask))).any()
    assert record["length_mean"] == pytest.approx(float(x.mask.sum(1).double().mean()))
    assert record["worked_steps"]["graded"] == int(x.step_ends.sum())


def _last(mask: Tensor) -> Tensor:
    return mask & (mask.flip(1).cumsum(1).flip(1) == 1)


def test_reading_an_environment_costs_what_reading_does_by_hand():
    """Prompts of 4, shared by 2; 5 and 3 tokens of which 2 were given: 6 sampled, 6 fed back."""
    found = Generation.of([4, 4], [5, 3], shared_by=2, given=2)
    contexts = (5 + 6 + 7 + 8) + (5 + 6)
    assert found == Generation(Lengths(1, 4, 16), 6, 6, contexts, 0, 2)


def test_a_placebo_is_paid_the_sum_of_another_episode():
    run, record = dense_loop(), {}
    run.step_judge = TurnJudge(placebo=True, paid=True)
    x, plain = collect(run, record), collect(dense_loop(), {})
    assert x is not None
    assert plain is not None
    assert x.paid is not None
    assert plain.paid is not None
    assert torch.equal(x.completion_ids, plain.completion_ids)
    mine, theirs = x.paid.sum(1), plain.paid.sum(1)
    assert torch.allclose(mine.sort().values, theirs.sort().values)
    assert not torch.allclose(mine, theirs)


@pytest.mark.parametrize("name", ["ppo", "grpo_process", "rloo"])
def test_arms_learn_from_episodes(name: str):
    run = dense_loop(name)
    before = weights(run.learner)
    warm = run.arm.critic_warmup_steps
    records = [step(run) for _ in range(warm + 2)]
    assert not torch.equal(weights(run.learner), before)
    assert all(r["first_ratio_error"] < 1e-4 for r in records[warm:])
    assert all(r["engine_gap"] < 1e-5 for r in records)


# --- experiments ---------------------------------------------------------------------------------


def opened(tmp_path: Path, **changes: Any) -> Any:
    split = {"task": "arithmetic_dialogue", "options": {"turns": 3}}
    data = {
        "train": split, "validation": split, "test": {"arithmetic": split},
        "max_prompt_tokens": 24,
    }  # fmt: skip
    sampling = {"max_new_tokens": 20}
    spec = write_spec(
        tmp_path / "turns.yaml", save_model(tmp_path / "model"),
        **({"data": data, "sampling": sampling, "tuning": None} | changes),
    )  # fmt: skip
    return open_context(spec, [], [], tmp_path / "results")


def test_an_experiment_of_episodes_is_certified_and_one_that_reads_for_free_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source = TASKS["arithmetic_dialogue"]
    monkeypatch.setitem(
        TASKS, "arithmetic_dialogue", dataclasses.replace(source, environment=Talk())
    )
    monkeypatch.setattr(Talk, "reset", lambda self, problem: problem.question.split(" ")[0])
    context = opened(
        tmp_path, arms=["ppo", "grpo", "grpo_process"],
        reward={"dense": {"steps": 0.25}, "format": 0.5},
        budget={"limit": 6, "evaluate_at": [1.0]},
    )  # fmt: skip
    ensure_lock(context, make_lock(context))
    for cell in Matrix(context).known():
        run_cell(context, cell)
    found = audit(context.results)
    assert found.certified, found.violations
    lines = {
        name: [json.loads(line) for line in text.splitlines()]
        for name, text in contents(context.results, "steps.jsonl").items()
    }
    given = [
        line["lengths"]["policy/generate"]["given"] for steps in lines.values() for line in steps
    ]
    assert sum(given) > 20
    (samples,) = [
        text for name, text in contents(context.results, "samples.jsonl").items() if "/ppo/" in name
    ]
    assert any("\n7+\n" in json.loads(line)["completion"] for line in samples.splitlines())

    def free(steps: list[dict[str, Any]]) -> None:
        for line in steps:
            line["lengths"]["policy/generate"]["given"] = 0

    forge(context.results, "grpo/seed-0", "steps.jsonl", free)
    violations = audit(context.results).violations
    assert {v.check for v in violations} == {"flops"}
    assert any("prompt tokens read" in v.message for v in violations)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sampling": {"engine": "vllm"}}, "engine vllm draws completions of one turn"),
        ({"sampling": {"stop": [";"]}}, "sampling.stop ends a completion"),
        ({"arms": ["grpo", "n_grpo"]}, "'n_grpo' feeds mixed embeddings"),
        ({"arms": ["grpo", "trl_grpo_trainer"]}, "'trl_grpo_trainer' is trained by TRL"),
        ({"data": {"max_prompt_tokens": 21}}, "6 tokens and up to 16 that its environment shows"),
    ],
)
def test_what_cannot_play_is_refused(tmp_path: Path, changes: dict[str, Any], words: str):
    from harness.spec.load import merge

    split = {"task": "arithmetic_dialogue"}
    base = {
        "data": {
            "train": split, "validation": split, "test": {"arithmetic": split},
            "max_prompt_tokens": 24,
        },
        "sampling": {"max_new_tokens": 20},
    }  # fmt: skip
    context = opened(tmp_path, **merge(base, changes))
    for refuse in (make_plan, make_lock):
        with pytest.raises(InputError, match=words):
            refuse(context)


def test_only_a_task_of_turns_has_gaps():
    assert {name for name, task in TASKS.items() if task.environment} == {"arithmetic_dialogue"}
    assert len(BUILT_IN) > 60  # all of them pass the check on gaps: tests/test_conformance.py
