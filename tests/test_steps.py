"""Worked steps: which token ends each, who may judge them, and what a run makes of them."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none

from certificate_plants import forge
from experiment_fixture import contents, save_model, write_spec
from tiny import EOS, Rule, make_loop, prompt_set, tiny_model, tokenizer

from harness.arms.grpo import GRPO
from harness.arms.process import GRPO_PROCESS
from harness.cell import run_cell
from harness.certificate import audit
from harness.collect import collect
from harness.errors import InputError
from harness.experiment import ensure_lock, open_context
from harness.job import PLACEBO, Cell, Context
from harness.lock import make_lock
from harness.loop import Loop
from harness.matrix import Matrix
from harness.plan import make_plan
from harness.rewards.judge import MathsJudge
from harness.rewards.steps import StepJudge, steps_record
from harness.samplers.sampler import Drawn
from harness.spec.schema import RewardSpec
from harness.tasks import TASKS
from harness.tasks.arithmetic import STEP_SEPARATOR, ArithmeticSteps, load
from harness.tasks.task import Problem
from harness.train import step, train

QUESTION = "2+3*4-1="
WORKED = "3*4=12;2+12=14;14-1=13;A13"


ONE = (Problem("p", QUESTION, "13"),)


def judge(problems: Sequence[Problem] = ONE, grader: Any = None, **options: Any) -> StepJudge:
    given = {"tokenizer": tokenizer()} | options
    return StepJudge(grader or ArithmeticSteps(), problems, **given)


def spelt(text: str, *end: int) -> list[int]:
    return [*tokenizer()(text)["input_ids"], *end]  # type: ignore[misc]


def drawn(completions: list[list[int]]) -> Drawn:
    """A batch as a sampler gives it, of these tokens."""
    B, T = len(completions), max(map(len, completions))
    ids, mask = torch.zeros(B, T, dtype=torch.long), torch.zeros(B, T, dtype=torch.bool)
    for row, c in enumerate(completions):
        ids[row, : len(c)], mask[row, : len(c)] = torch.tensor(c), True
    finished = torch.tensor([c[-1] == EOS for c in completions])
    texts = tuple(tokenizer().decode(c, skip_special_tokens=True) for c in completions)
    return Drawn(ids, mask, ids, mask, finished, torch.zeros(B, T), texts)  # type: ignore[arg-type]


# -- where a step ends ----------------------------------------------------------------------------


def test_a_step_ends_with_its_separator_and_the_last_with_the_end_token():
    ids = spelt(WORKED, EOS)
    steps = judge().of_tokens(QUESTION, ids)
    assert steps == {6: 1.0, 14: 1.0, 22: 1.0, 26: 1.0}
    assert [WORKED[end] for end in list(steps)[:-1]] == [STEP_SEPARATOR] * 3
    assert ids[26] == EOS
    for problem in load("test", limit=40):
        assert problem.solution is not None
        found = judge().of_tokens(problem.question, spelt(problem.solution, EOS))
        separators = [i for i, c in enumerate(problem.solution) if c == STEP_SEPARATOR]
        assert found == dict.fromkeys([*separators, len(problem.solution)], 1.0)


@pytest.mark.parametrize(
    ("text", "end", "steps"),
    [
        ("3*4=12;2+12=15;A14", [EOS], {6: 1.0, 14: 0.0, 18: 0.0}),
        ("A13", [EOS], {3: 1.0}),
        ("A13", [], {2: 1.0}),  # cut at the limit, and yet said
        ("3*4=12;2+1", [], {6: 1.0, 9: 0.0}),  # cut within a step, which is then wrong
        ("3*4=12;", [], {6: 1.0}),  # cut after one: no further step
        ("3*4=12;", [EOS], {6: 1.0, 7: 0.0}),  # ended without an answer
        ("", [EOS], {0: 0.0}),
        (";;", [EOS], {0: 0.0, 1: 0.0, 2: 0.0}),
        ("A13;A13;A13", [EOS], {3: 1.0, 7: 0.0, 11: 0.0}),  # saying it again is worth nothing
    ],
)
def test_completions_that_are_no_solutions(text: str, end: list[int], steps: dict[int, float]):
    assert judge().of_tokens(QUESTION, spelt(text, *end)) == steps


def test_tokens_that_are_no_text_belong_to_their_step():
    """Padding or a beginning may be sampled in the middle; the text has none of it."""
    ids = spelt("3*4=12")
    ids = [1, *ids[:3], 0, *ids[3:], 0, *spelt(";"), 1, *spelt("A13"), 1, EOS]
    assert judge().of_tokens(QUESTION, ids) == {9: 1.0, 15: 1.0}


class Bytes:
    """A tokenizer of several bytes a token, some of which are half a character."""

    def __init__(self, *tokens: bytes) -> None:
        self.tokens = tokens

    def decode(self, ids: list[int], **_: Any) -> str:
        return b"".join(self.tokens[i] for i in ids).decode(errors="replace")


@dataclass(frozen=True)
class Sevens:
    """A step is right where it is a 7, whatever was asked."""

    separator: str = ";"
    version: int = 1

    def __call__(self, question: str, completion: str) -> list[bool]:
        return [piece == "7" for piece in completion.split(self.separator)]


@pytest.mark.parametrize(
    ("tokens", "steps"),
    [
        ([b"7", b";", b"7"], {1: 1.0, 2: 1.0}),
        ([b"7;", b"7", b";8"], {0: 1.0, 2: 0.0}),  # the last two end at one token: right if both
        ([b"7;7", b";7"], {0: 1.0, 1: 1.0}),
        ([b"7;8;7", b""], {0: 0.0, 1: 1.0}),
        ([b"7;", b";", b""], {0: 1.0, 1: 0.0, 2: 0.0}),
        ([b"8;7;"], {0: 0.0}),  # and nothing after it
        (["é".encode()[:1], "é".encode()[1:], b";", b"7"], {2: 0.0, 3: 1.0}),
        (["€".encode()[:2], "€".encode()[2:] + b";7", b";", b"8"], {1: 0.0, 2: 1.0, 3: 0.0}),
    ],
)
def test_any_tokenizer_gets_its_steps(tokens: list[bytes], steps: dict[int, float]):
    found = judge(grader=Sevens(), tokenizer=Bytes(*tokens)).of_tokens("", range(len(tokens)))
    assert found == steps


def test_a_separator_of_two_characters_may_be_split_between_tokens():
    @dataclass(frozen=True)
    class Lines(Sevens):
        separator: str = "\n\n"

    spelling = Bytes(b"7", b"\n", b"\n7", b"\n\n", b"8")
    found = judge(grader=Lines(), tokenizer=spelling).of_tokens("", [0, 1, 2, 3, 4])
    assert found == {2: 1.0, 3: 1.0, 4: 0.0}


def test_a_batch_of_completions():
    texts = [(WORKED, EOS), ("A12", EOS), ("3*4=12;2",)]
    batch = drawn([spelt(*t) for t in texts])
    steps = judge()([0, 0, 0], batch, 3)
    assert steps.ends.shape == steps.scores.shape == batch.mask.shape
    assert steps.ends.nonzero().tolist() == [
        [0, 6], [0, 14], [0, 22], [0, 26], [1, 3], [2, 6], [2, 7],
    ]  # fmt: skip
    assert steps.scores[steps.ends].tolist() == [1, 1, 1, 1, 0, 1, 0]
    assert steps.scores[~steps.ends].eq(0).all()


def test_a_grader_that_judges_other_pieces_is_an_error():
    class Broken(Sevens):
        def __call__(self, question: str, completion: str) -> list[bool]:
            return [True]

    with pytest.raises(ValueError, match="1 verdicts on 2 steps of '7;7'"):
        judge(grader=Broken()).of_tokens("", spelt("7;7"))


# -- the placebo ----------------------------------------------------------------------------------


def test_a_placebos_steps_are_scored_by_the_completion_that_gave_its_verdict():
    """Completions all right or all wrong, of one to four steps: the verdict tells the scores."""
    right, wrong = ["7", "7;7", "7;7;7;7"], ["8", "8;8;8"]
    batch = drawn([spelt(t, EOS) for t in (right + wrong) * 40])
    problems = (Problem("p", "1+6=", "7"),)
    own, other = (judge(problems, Sevens(), placebo=p)([0] * 200, batch, 5) for p in (False, True))
    assert torch.equal(own.ends, other.ends)
    grader: Any = Rule()
    _, _, _, correct = MathsJudge(grader, problems, RewardSpec(), placebo=True)([0] * 200, batch, 5)
    assert torch.equal(other.scores[other.ends], correct[other.ends.nonzero()[:, 0]].float())
    assert not torch.equal(own.scores, other.scores)
    again = judge(problems, Sevens(), placebo=True)([0] * 200, batch, 5)
    assert torch.equal(other.scores, again.scores)
    assert not torch.equal(
        other.scores, judge(problems, Sevens(), placebo=True)([0] * 200, batch, 6).scores
    )


def test_a_paid_placebo_is_paid_what_another_completion_earned():
    """Whatever it wrote: a completion of more steps is paid no more for having them."""
    texts = ["7", "7;7", "7;7;7;7", "8", "8;8;8"]
    batch = drawn([spelt(t, EOS) for t in texts * 200])
    problems = (Problem("p", "1+6=", "7"),)
    plain = judge(problems, Sevens())([0] * 1000, batch, 5)
    blind = dataclasses.replace(judge(problems, Sevens(), placebo=True), paid=True)
    steps = blind([0] * 1000, batch, 5)
    earned, told = plain.scores.sum(1), steps.scores.sum(1)
    assert torch.allclose(earned.sort().values, told.sort().values)
    assert torch.equal(plain.ends, steps.ends)
    by_length = told.view(200, 5).mean(0)  # by what was written
    assert float((by_length - earned.mean()).abs().max()) < 0.4
    assert float((earned.view(200, 5).mean(0) - earned.mean()).abs().max()) > 1.0


def test_a_placebo_tells_neither_by_number_nor_by_place():
    """Long completions start right and end wrong, short ones are half right: none of it shows."""
    long, short = "7;7;7;8", ("7", "8")
    batch = drawn([spelt(long if i % 2 else short[i // 2 % 2], EOS) for i in range(3000)])
    steps = judge((Problem("p", "1+6=", "7"),), Sevens(), placebo=True)([0] * 3000, batch, 0)
    rows = steps.scores[steps.ends]
    several = steps.ends.sum(1) == 4
    of_long = rows[several[steps.ends.nonzero()[:, 0]]].reshape(-1, 4)
    of_short = rows[~several[steps.ends.nonzero()[:, 0]]]
    # Of completions, as they come: (3/4 + 1/2) / 2 of the steps are right.
    for share in (*of_long.mean(0).tolist(), of_short.mean().item()):
        assert share == pytest.approx(0.625, abs=0.05)


# -- a run ----------------------------------------------------------------------------------------


def loop_of_sevens(**options: Any) -> Loop:
    problems = prompt_set(12, answer="no such text")
    loop = make_loop(
        GRPO_PROCESS, model=tiny_model(4, spread=0.02, layers=1), problems=problems,
        sampling={"prompts_per_step": 16, "completions_per_prompt": 8, "max_new_tokens": 3},
        optimizer={"learning_rate": 1e-2, "minibatches": 2, "micro_batch": 256},
        **options,
    )  # fmt: skip
    loop.step_judge = judge(problems.problems, Sevens())
    return loop


def test_steps_are_counted_and_charged():
    loop = loop_of_sevens(limit=1e6)
    record: dict[str, Any] = {}
    rollout = collect(loop, record)
    assert rollout is not None
    assert rollout.step_ends is not None
    assert rollout.step_scores is not None
    separators = int(((rollout.completion_ids == spelt(";")[0]) & rollout.mask).sum())
    last = rollout.completion_ids.gather(1, rollout.mask.sum(1, keepdim=True) - 1)
    cut_after_one = int((last == spelt(";")[0]).sum())
    graded = separators + 128 - cut_after_one
    assert record["worked_steps"] == steps_record(rollout)
    assert record["worked_steps"]["graded"] == graded == int(rollout.step_ends.sum()) > 128
    assert record["worked_steps"]["per_completion"] == graded / 128
    right = float(rollout.step_scores.sum()) / graded
    assert record["worked_steps"]["right_share"] == pytest.approx(right, rel=1e-12)
    assert loop.ledger.spent()["steps_graded"] == graded
    assert loop.ledger.spent()["reward_calls"] == 128
    second = step(loop)
    assert second["spent"]["steps_graded"] == graded + second["worked_steps"]["graded"]
    plain: dict[str, Any] = {}
    without = make_loop(GRPO)
    rollout = collect(without, plain)
    assert rollout is not None
    assert rollout.step_ends is rollout.step_scores is None
    assert "worked_steps" not in plain
    assert without.ledger.spent()["steps_graded"] == 0


def test_right_steps_are_learnt_where_no_verdict_ever_is():
    """No completion is ever correct: whatever is learnt is learnt from steps."""
    loop = loop_of_sevens(limit=128 * 24)
    records: list[dict[str, Any]] = []
    train(loop, records.append)
    shares = [r["worked_steps"]["right_share"] for r in records]
    assert shares[0] < 0.15
    assert shares[-1] > 0.5
    assert all(r["accuracy"] == 0 for r in records)


# -- experiments ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base") / "model")


def opened(model: Path, root: Path, **changes: Any) -> Context:
    arms = {"arms": ["grpo", "grpo_process"], "controls": {"placebo": "grpo_process"}}
    spec = write_spec(root / "t.yaml", model, **(arms | {"tuning": None} | changes))
    return open_context(spec, [], [], root / "results")


def test_an_arm_that_needs_steps_is_refused_where_none_are_judged(model: Path, tmp_path: Path):
    """By the plan (which is validation), by the lock and by the cell, before anything is loaded."""
    split = {"task": "gsm8k", "split": "train", "limit": 8}
    context = opened(model, tmp_path, data={"train": split})
    assert TASKS["gsm8k"].steps is None
    words = (
        r"^arm 'grpo_process' rewards each worked step, and task 'gsm8k' \(data.train.task\) can "
        r"judge final answers alone; train on arithmetic or arithmetic_dialogue, or take it out$"
    )
    for refuse in (make_plan, make_lock):
        with pytest.raises(InputError, match=words):
            refuse(context)
    cell = Cell("grpo_process", "seed", 0, 12)
    with pytest.raises(InputError, match=words):
        run_cell(context, cell)
    with pytest.raises(InputError, match=words):  # as would its placebo
        run_cell(context, Cell(PLACEBO, "seed", 0, 12))
    assert not list(context.results.rglob("run.json"))
    error = json.loads((context.results / "runs/grpo_process/seed-0/error.json").read_text())
    assert error["step"] == 0
    # Other arms are refused for its data alone: it is absent, or too much for the tiny tokenizer.
    with pytest.raises(InputError, match=r"gsm8k|data\.train") as caught:
        make_plan(opened(model, tmp_path, arms=["grpo"], controls={"placebo": None},
                         data={"train": split | {"source": "local"}}))  # fmt: skip
    assert "worked step" not in str(caught.value)


def test_an_experiment_on_steps_is_certified_and_a_lost_step_is_not(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A random model works nothing out, so a step is right here where it is a 7."""
    sevens = dataclasses.replace(TASKS["arithmetic"], steps=Sevens())
    monkeypatch.setitem(TASKS, "arithmetic", sevens)
    context = opened(model, tmp_path)
    context.results.mkdir()
    ensure_lock(context, make_lock(context))
    for cell in Matrix(context).known():
        run_cell(context, cell)
    found = audit(context.results)
    assert found.certified, found.violations
    lines = contents(context.results, "steps.jsonl")
    parsed = {
        name: [json.loads(line) for line in text.splitlines()] for name, text in lines.items()
    }
    mine, plain = (parsed[f"runs/{arm}/seed-0/steps.jsonl"] for arm in ("grpo_process", "grpo"))
    assert all(line["worked_steps"]["graded"] >= 8 for line in mine)
    assert mine[-1]["spent"]["steps_graded"] == sum(r["worked_steps"]["graded"] for r in mine)
    assert {line["spent"]["steps_graded"] for line in plain} == {0}
    blind = parsed["runs/placebo/seed-0/steps.jsonl"]
    assert blind[0]["worked_steps"]["graded"] == mine[0]["worked_steps"]["graded"]
    assert sum(r["grad_norm"] > 0 for r in mine) >= 3
    assert [r["grad_norm"] for r in blind] != [r["grad_norm"] for r in mine]

    def one_less(steps: list[dict[str, Any]]) -> None:
        steps[0]["worked_steps"]["graded"] -= 1

    forge(context.results, "grpo_process/seed-0", "steps.jsonl", one_less)
    (violation,) = audit(context.results).violations
    assert (violation.check, violation.key) == ("graded", "steps.jsonl line 1: spent.steps_graded")

    def gone(steps: list[dict[str, Any]]) -> None:
        del steps[0]["worked_steps"]

    forge(context.results, "grpo_process/seed-0", "steps.jsonl", gone)
    keys = {v.key for v in audit(context.results).violations}
    assert "steps.jsonl line 1: worked_steps" in keys
