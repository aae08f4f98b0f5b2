"""A reference that follows the policy: when it moves, what it costs, and that resuming keeps it."""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none

from certificate_plants import forge
from experiment_fixture import contents, save_model, write_spec
from tiny import double_model, make_loop, ragged, tiny_base, weights

import harness.train
from harness.arm import Arm, parts
from harness.arms.grpo import GRPO
from harness.arms.iterative import GRPO_ITERATIVE
from harness.arms.ppo import PPO
from harness.cell import CellRun, run_cell
from harness.certificate import audit
from harness.collect import collect
from harness.cost.memory import BF16_LORA_ADAM, FP32_ADAM, adapter_copy
from harness.cost.shape import ModelShape
from harness.errors import InputError
from harness.experiment import ensure_lock, open_context
from harness.identity import difference
from harness.job import Cell, Context
from harness.knobs import knobs, turn
from harness.lock import make_lock
from harness.loop import Loop
from harness.matrix import Matrix
from harness.models import Policy, Reference, trainable, weights_sha256
from harness.parts.kl import KLInLoss, KLInReward, Refresh
from harness.plan import make_plan
from harness.plan.cost import shapes_of
from harness.reference import PastPolicy, build_reference, reference_shape
from harness.rewards.judge import make_grader
from harness.rewards.maths import Outcome, Verdict
from harness.samplers.sampler import Drawn
from harness.spec.schema import LoraSpec
from harness.store import CellFolder
from harness.train import observe, refresh_reference, step

EVERY_2 = turn(GRPO_ITERATIVE, "kl.refresh.every", 2)
LORA = LoraSpec(rank=2)
full_or_lora = pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])


class EveryThird:
    """Verdicts by problem and row, whatever was written, so that every group has both."""

    def __call__(self, indices: list[int], drawn: Drawn, seed: int):
        correct = torch.tensor([(i + row) % 3 == 0 for row, i in enumerate(indices)])
        verdicts = [Verdict(Outcome.CORRECT if c else Outcome.WRONG, "1") for c in correct.tolist()]
        return verdicts, correct.float(), torch.zeros(len(correct)), correct


def busy_loop(arm: Arm, **options: Any) -> Loop:
    given = {"limit": 1e6, "optimizer": {"learning_rate": 1e-2}, "judge": EveryThird()}
    return make_loop(arm, **(given | options))


def move(model: torch.nn.Module, seed: int = 0) -> None:
    """Stands for training: every trainable weight elsewhere."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn(p.shape, generator=rng))


# -- the past policy ------------------------------------------------------------------------------


@full_or_lora
def test_it_is_the_policy_of_its_last_refresh(lora: LoraSpec | None):
    base, x = double_model(), ragged()
    policy = Policy(trainable(base, lora, 5), 0.9)
    reference = PastPolicy(policy)
    first = Policy(base, 0.9).logprobs(x)
    torch.testing.assert_close(reference.logprobs(x), first, rtol=0, atol=1e-12)
    for seed in (1, 2):
        before = policy.logprobs(x).detach()
        stood = reference.logprobs(x)
        move(policy.model, seed)
        hash_ = weights_sha256(policy.model)
        assert torch.equal(reference.logprobs(x), stood)  # the policy moved, and it did not
        assert weights_sha256(policy.model) == hash_  # and scoring left the policy where it was
        after = policy.logprobs(x).detach()
        assert float((after - before).abs().max()) > 1e-2
        reference.refresh()
        assert torch.equal(reference.logprobs(x), after)
    assert not reference.logprobs(x).requires_grad
    assert policy.logprobs(x).requires_grad
    assert weights_sha256(base) == weights_sha256(double_model())


def test_a_failing_pass_puts_the_policy_back():
    policy = Policy(trainable(double_model(), None, 0), 1.0)
    reference = PastPolicy(policy)
    move(policy.model)
    hash_ = weights_sha256(policy.model)
    x = dataclasses.replace(ragged(), completion_ids=torch.full((8, 7), 10_000))
    with pytest.raises(IndexError):
        reference.logprobs(x)
    assert weights_sha256(policy.model) == hash_


@full_or_lora
def test_what_it_saves_is_what_it_was(lora: LoraSpec | None):
    base = double_model()
    a, b = (Policy(trainable(base, lora, 3), 1.0) for _ in range(2))
    past, restored = PastPolicy(a), PastPolicy(b)
    move(a.model)
    past.refresh()
    move(a.model, 2)
    saved = {name: tensor.clone() for name, tensor in past.tensors()}
    assert saved
    assert all(name.startswith("reference/") for name in saved)
    restored.restore(saved)
    assert torch.equal(past.logprobs(ragged()), restored.logprobs(ragged()))
    assert list(Reference(base, 1.0).tensors()) == []  # the base needs no saving


# -- its bytes and its shape ----------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "storage"), [(None, FP32_ADAM), ("bf16", BF16_LORA_ADAM)])
def test_adapters_are_held_twice(dtype: str | None, storage):
    base = tiny_base()
    if dtype:
        base.model.to(torch.bfloat16)  # type: ignore[arg-type]
    policy = Policy(trainable(base.model, LORA, 0), 1.0)
    reference = build_reference(base, policy, lora=True, moves=True)
    shape = reference_shape(reference, base, ModelShape.from_model(policy.model))
    assert shape.trainable == shape.trainable_tensors == 0
    assert adapter_copy("reference", shape, storage).bytes == reference.bytes_held() > 0
    fixed = build_reference(base, policy, lora=True, moves=False)
    assert fixed.bytes_held() == 0
    assert reference_shape(fixed, base, shape).lora_rank == 0


def test_a_whole_copy_is_as_large_as_the_base():
    base = tiny_base()
    policy = Policy(trainable(base.model, None, 0), 1.0)
    past, fixed = (build_reference(base, policy, lora=False, moves=m) for m in (True, False))
    assert (
        past.bytes_held()
        == fixed.bytes_held()
        == 4 * sum(p.numel() for p in base.model.parameters())
    )
    shape = ModelShape.from_model(policy.model)
    assert reference_shape(past, base, shape) == reference_shape(fixed, base, shape)


# -- when it moves --------------------------------------------------------------------------------


@full_or_lora
def test_the_policy_becomes_the_reference_every_n_steps(lora: LoraSpec | None):
    loop, plain = busy_loop(EVERY_2, lora=lora), busy_loop(GRPO, lora=lora)
    records, still = [step(loop) for _ in range(6)], [step(plain) for _ in range(6)]
    assert [r["reference_step"] for r in records] == [0, 0, 2, 2, 4, 4]
    assert [r["reference_step"] for r in still] == [0] * 6
    kl = [r["kl_to_reference"] for r in records]
    assert kl[2] == kl[4] == 0.0  # no distance at all from itself
    assert all(abs(kl[i]) > 1e-5 for i in (1, 3, 5))
    # Up to the first refresh it is grpo, and then no longer.
    same = ("loss/policy", "kl_to_reference", "grad_norm")
    for name in same:
        assert records[1][name] == pytest.approx(still[1][name], rel=1e-4)
    assert abs(still[2]["kl_to_reference"]) > 1e-5
    assert not torch.equal(weights(loop.learner), weights(plain.learner))


def test_the_kl_is_to_the_policy_of_that_step():
    loop = busy_loop(EVERY_2)
    for _ in range(2):
        step(loop)
    then = Policy(copy.deepcopy(loop.learner.policy.model), loop.learner.policy.temperature)
    step(loop)
    loop.progress.step += 1
    record: dict[str, Any] = {"kl_coef": loop.progress.kl_coef}
    refresh_reference(loop, record)
    rollout = collect(loop, record)
    assert rollout is not None
    batch = observe(loop, rollout, record, warmup=False)
    with torch.no_grad():
        expected = then.logprobs(rollout)
    assert record["reference_step"] == 2
    assert batch.ref_logprobs is not None
    torch.testing.assert_close(batch.ref_logprobs, expected, rtol=1e-5, atol=1e-5)
    mean = float(((batch.old_logprobs - expected) * batch.mask).sum(1).mean())
    assert record["kl_to_reference"] == pytest.approx(mean, rel=1e-3)
    assert abs(mean) > 1e-4


def test_a_critics_warm_up_counts_and_any_penalty_may_move():
    arm = PPO.but("moving", kl=KLInReward(refresh=Refresh(every=3)))
    loop = busy_loop(arm)
    records = [step(loop) for _ in range(7)]
    assert [r["phase"] for r in records[:3]] == ["critic_warmup", "critic_warmup", "train"]
    assert [r["reference_step"] for r in records] == [0, 0, 0, 3, 3, 3, 6]
    assert [r["kl_to_reference"] == 0 for r in records] == [True] * 4 + [False] * 2 + [True]


def test_the_arm_is_grpo_but_for_when():
    changed = difference(parts(GRPO), parts(GRPO_ITERATIVE))
    assert changed == {"kl.refresh": (None, {"part": "Refresh", "version": 1, "every": 10})}
    own = {"kl.kl_coef", "kl.refresh.every"}
    assert knobs(GRPO_ITERATIVE).keys() == own
    assert knobs(GRPO).keys() == {"kl.kl_coef"}
    assert 10 in (knobs(GRPO_ITERATIVE)["kl.refresh.every"].choices or ())
    for bad in (0, -5, 2.5, True):
        with pytest.raises(InputError, match=r"kl.refresh.every is .*; give a number of steps"):
            KLInLoss(refresh=Refresh(every=bad))  # type: ignore[arg-type]


# -- cells ----------------------------------------------------------------------------------------


class Stop(BaseException):
    """Stands for SIGKILL."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base") / "model")


SAMPLING = {"prompts_per_step": 4}  # enough for every step to have something to learn


def opened(base: Path, root: Path, /, **changes: Any) -> Context:
    given = {"arms": ["grpo", "grpo_iterative"], "controls": {"placebo": None}, "tuning": None}
    given |= {"sampling": SAMPLING}
    spec = write_spec(root / "t.yaml", base, **(given | changes))
    return open_context(spec, [], [], root / "results")


def iterative(every: int) -> Cell:
    return Cell("grpo_iterative", "seed", 1, 12, (("kl.refresh.every", every),))


def records(context: Context, cell: Cell) -> dict[str, bytes]:
    folder = context.results / "runs" / cell.arm / cell.name
    return contents(folder, "steps.jsonl", "evals.jsonl", "samples.jsonl", "done.json")


@pytest.mark.parametrize(("every", "stop", "lora"), [(1, 4, None), (3, 5, None), (3, 5, LORA)])
def test_a_run_killed_between_two_references_goes_on_to_the_same_bytes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, stop: int, lora
):
    """Checkpoints fall after ``every`` steps; references change after 2 and 4."""
    more = {"model": {"lora": {"rank": 2}}} if lora else {}
    runtime = {"checkpoint_every": every}
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole, cut = (opened(model, tmp_path / n, runtime=runtime, **more) for n in ("whole", "cut"))
    cell = iterative(2)
    run_cell(whole, cell)
    real, calls = harness.train.step, []

    def stopping(loop: Any) -> Any:
        calls.append(loop)
        if len(calls) == stop:
            raise Stop
        return real(loop)

    with monkeypatch.context() as patch:
        patch.setattr(harness.train, "step", stopping)
        with pytest.raises(Stop):
            run_cell(cut, cell)
    run_cell(cut, cell)
    assert records(cut, cell) == records(whole, cell)
    lines = [json.loads(line) for line in records(whole, cell)["steps.jsonl"].splitlines()]
    assert [line["reference_step"] for line in lines] == [0, 0, 2, 2, 4, 4]
    assert [line["kl_to_reference"] == 0 for line in lines] == [True, False] * 3


def test_a_checkpoint_without_its_reference_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As one of an arm whose reference stays would be: it cannot pass for one that moved."""
    context, cell = opened(model, tmp_path), iterative(2)
    run = CellRun(context, cell, CellFolder(context.results / "runs/grpo_iterative/seed-0"))
    assert run.arm is not None
    with make_grader(run.spec.reward) as grader:
        loop = run.build(run.arm, grader)
    assert isinstance(loop.reference, PastPolicy)
    with pytest.raises(KeyError, match="reference/"):
        loop.reference.restore(dict(loop.learner.tensors()))


def test_evaluation_measures_the_kl_to_the_base(model: Path, tmp_path: Path):
    """Where the reference is last step's policy, the base is what has been left behind."""
    context, cell = opened(model, tmp_path), iterative(1)
    run_cell(context, cell)
    found = records(context, cell)
    steps = [json.loads(line) for line in found["steps.jsonl"].splitlines()]
    evals = [json.loads(line) for line in found["evals.jsonl"].splitlines()]
    assert all(line["kl_to_reference"] == 0 for line in steps)
    assert all(line["kl_to_base"]["mean"] > 0.01 for line in evals)
    run = CellRun(context, cell, CellFolder(tmp_path / "other"))
    assert run.arm is not None
    with make_grader(run.spec.reward) as grader:
        loop = run.build(run.arm, grader)
    judged_against = run.divergence(loop.learner.policy).base
    assert judged_against.model is run.base.model
    assert not isinstance(judged_against, PastPolicy)


@full_or_lora
def test_a_matrix_is_certified_and_a_reference_that_stayed_is_not(
    model: Path, tmp_path: Path, lora: LoraSpec | None
):
    plugin = tmp_path / "often.py"
    plugin.write_text(
        "from harness.arms.iterative import GRPO_ITERATIVE\n"
        "from harness.parts.kl import KLInLoss, Refresh\n"
        "OFTEN = GRPO_ITERATIVE.but('often', kl=KLInLoss(refresh=Refresh(every=2)))\n"
    )
    more = {"model": {"lora": {"rank": 2}}} if lora else {}
    context = opened(model, tmp_path, arms=["grpo", "often"], plugins=[str(plugin)], **more)
    context.results.mkdir()
    ensure_lock(context, make_lock(context))
    for cell in Matrix(context).known():
        run_cell(context, cell)
    found = audit(context.results)
    assert found.certified, found.violations
    assert found.declared_differences["often"].keys() == {"kl.refresh"}
    folder = CellFolder(context.results / "runs/often/seed-0")
    _memory_is_as_predicted(folder, lora)
    config = json.loads((model / "config.json").read_text())
    planned = shapes_of(context.spec, context.arms()["often"].arm, config)
    shapes = folder.json("run.json")["shapes"]
    assert shapes["reference"] == json.loads(json.dumps(dataclasses.asdict(planned["reference"])))
    assert bool(shapes["reference"]["lora_rank"]) == bool(lora)
    for change, key in (
        (lambda lines: lines[3].update(reference_step=0), "line 4: reference_step"),
        (lambda lines: lines[2].update(kl_to_reference=0.5), "line 3: kl_to_reference"),
        (lambda lines: lines[5].pop("reference_step"), "line 6: reference_step"),
    ):
        lines = (folder.path / "steps.jsonl").read_bytes()
        done = (folder.path / "done.json").read_bytes()
        forge(context.results, "often/seed-0", "steps.jsonl", change)
        assert {v.key for v in audit(context.results).violations} == {f"steps.jsonl {key}"}
        (folder.path / "steps.jsonl").write_bytes(lines)
        (folder.path / "done.json").write_bytes(done)
    forge(context.results, "grpo/seed-0", "steps.jsonl",
          lambda lines: lines[2].update(reference_step=2))  # fmt: skip
    (violation,) = audit(context.results).violations
    assert "the arm declares no refresh" in violation.message


def _memory_is_as_predicted(folder: CellFolder, lora: LoraSpec | None) -> None:
    memory = folder.json("memory.json")
    predicted, measured = (
        {(i["role"], i["kind"]): i["bytes"] for i in memory[name]}
        for name in ("predicted", "measured")
    )
    key = ("reference", "parameters")
    assert predicted[key] == measured[key] > 0
    assert (measured[key] < measured["policy", "parameters"]) == bool(lora)


def test_a_plan_says_where_no_reference_is_ever_replaced(model: Path, tmp_path: Path):
    """Trials of 10 steps, runs of 20, and a new reference after 10."""
    tuning = {
        "trials": 2, "budget_fraction": 0.5, "seeds": [1000], "samples": 2,
        "shared": {"optimizer.learning_rate": {"low": 1e-3, "high": 1e-2, "log": True}},
    }  # fmt: skip
    context = opened(model, tmp_path, budget={"limit": 40}, tuning=tuning)
    found = [w for w in make_plan(context).warnings if "replaces its reference" in w]
    assert found == [
        "arm grpo_iterative: a trial has 10 steps and replaces its reference after 10, so it "
        "never does; lower kl.refresh.every or raise the budget"
    ]
