"""The plan: costs as the ledger will charge them, steps as the loop will take them, refusals."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

import harness.plan.speed
from harness.arms import ARMS
from harness.cell import run_cell
from harness.cost.flops import Generation, Lengths
from harness.cost.shape import ModelShape
from harness.data import load_split
from harness.errors import InputError
from harness.experiment import open_context
from harness.job import Context
from harness.ledger import Ledger, convention
from harness.matrix import Matrix
from harness.plan import Plan, describe, make_plan
from harness.plan.cards import CARDS, find_architecture
from harness.plan.cost import shapes_of, step_amount, steps_within
from harness.plan.lengths import PromptLengths
from harness.plan.speed import CPU_SHARES
from harness.plan.wall import Job, wall_seconds
from harness.spec.schema import ModelSpec
from harness.tasks import arithmetic, reviews
from harness.tokenizer import build_tokenizer, build_word_tokenizer
from harness.warmstart import RECIPES

ROOT = Path(__file__).parent.parent
PEAK = 1e11  # FLOP/s that the tests take this machine to have


@pytest.fixture(autouse=True)
def _known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness.plan.speed, "matmul_peak", lambda threads: PEAK)


@pytest.fixture(autouse=True)
def _neither_weights_nor_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def opened(*overrides: str, spec: str = "matched_math", results: Path | None = None) -> Context:
    place = results or Path.cwd() / "results"
    return open_context(ROOT / f"experiments/{spec}.yaml", overrides, [], place)


def planned(*overrides: str, **where: Any) -> Plan:
    return make_plan(opened(*overrides, **where), width=2)


# -- models without weights --------------------------------------------------------------------

PUBLISHED = {  # parameters as the hub counts them
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-Math-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-Math-7B": 7_615_616_512,
    "Qwen/Qwen3-1.7B-Base": 1_720_574_976,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
}


def test_cards_give_the_published_parameter_counts():
    assert {n: ModelShape.from_config(c).parameters for n, c in CARDS.items()} == PUBLISHED


@pytest.mark.parametrize("name", RECIPES)
def test_the_embedded_architecture_is_that_of_the_built_model(name: str):
    """Each number of the config against a model made as the warm start makes it."""
    found, recipe = find_architecture(ModelSpec(name=f"embedded/{name}")), RECIPES[name]
    if name.startswith("reviews"):
        tokenizer = build_word_tokenizer(reviews.WORDS, max_length=recipe.context)
    else:
        tokenizer = build_tokenizer(arithmetic.CHARACTERS, max_length=recipe.context)
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer),
                hidden_size=recipe.hidden_size,
                intermediate_size=recipe.intermediate_size,
                num_hidden_layers=recipe.layers,
                num_attention_heads=recipe.heads,
                num_key_value_heads=recipe.heads,
                max_position_embeddings=recipe.context,
            )
        )
    assert ModelShape.from_config(found.config) == ModelShape.from_model(model)
    assert found.context == recipe.context
    assert found.tokenizer is not None
    assert len(found.tokenizer) == len(tokenizer)


def test_planning_builds_no_model_and_writes_nothing(tmp_path: Path):
    planned()
    assert list(tmp_path.iterdir()) == []


# -- costs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("warmup", [False, True], ids=["step", "warm-up"])
@pytest.mark.parametrize("name", ARMS)
def test_a_step_costs_what_the_ledger_charges(name: str, warmup: bool, lora: bool):
    """Where all lengths are equal, means lose nothing and the two must agree to the last FLOP."""
    more = ["model.lora={rank: 4}", "optimizer.epochs=2"] if lora else []
    spec, arm, prompt, completion = opened(*more).spec, ARMS[name], 7, 11
    config = find_architecture(spec.model).config
    shapes = shapes_of(spec, arm, config)
    size = arm.group_size(8)
    ledger = Ledger(shapes, convention(spec.model))
    ledger.start_step()
    rows = 32 * 8
    searched = shapes["policy"].vocab if arm.sampling.mixing else 0  # 256 mixed inputs are more
    drawn = Generation.of([prompt] * rows, [completion] * rows, shared_by=size, searched=searched)
    ledger.charge_generation("policy", drawn)
    lengths, head = Lengths.of([prompt + completion] * rows), rows * completion
    for role in shapes:
        ledger.charge_score(role, lengths, head)
    for role in ("policy", "critic"):
        if role in shapes and not (warmup and role == "policy"):
            ledger.charge_train(role, lengths, head, spec.optimizer.epochs)
    prompts = PromptLengths.of([prompt] * 3, 16, counted=True)
    amount = step_amount(spec, arm, shapes, prompts, completion, warmup=warmup)
    assert amount.flops == ledger.flops
    assert amount.completions == rows
    assert amount.prompts == rows / size
    assert amount.prompt_tokens == prompt * rows / size
    assert amount.updates == spec.optimizer.minibatches * spec.optimizer.epochs


@pytest.mark.parametrize("limit", [1, 9.9, 10, 10.1, 20, 25, 26, 31, 99])
@pytest.mark.parametrize("warmups", [0, 2])
def test_steps_are_those_that_the_loop_takes(limit: float, warmups: int):
    """The loop goes on while what it has spent is below the limit."""
    spent, steps = 0.0, 0
    while spent < limit:
        spent += 10 if steps < warmups else 6
        steps += 1
    assert steps_within(limit, warmups, 10, 6) == steps


def test_a_resampling_arm_is_charged_for_what_it_drops():
    spec, arm = opened().spec, ARMS["dapo"]
    shapes = shapes_of(spec, arm, find_architecture(spec.model).config)
    prompts = PromptLengths.of([7], 16, counted=True)
    one, two = (
        step_amount(spec, arm, shapes, prompts, 11, warmup=False, resampling=r) for r in (1, 2)
    )
    assert one.flops
    assert two.flops
    assert two.flops["policy/generate"] == 2 * one.flops["policy/generate"]
    assert two.flops["policy/train"] == one.flops["policy/train"]
    assert two.completions == 2 * one.completions


def test_time_is_flops_over_stated_rates():
    plan = planned()
    cell = plan.arms[1].cells[0]
    work = cell.training + cell.evaluation
    expected = sum(work.phase_flops(phase) / (PEAK * share) for phase, share in CPU_SHARES.items())
    assert cell.seconds == pytest.approx(expected)
    assert plan.time.hours == pytest.approx(sum(a.seconds for a in plan.arms) / 3600, abs=1e-3)
    assert plan.time.hours / 2 <= plan.time.wall_hours[2] <= plan.time.hours


def test_the_wall_clock_waits_for_trials():
    a, b = Job("a", 3.0), Job("b", 2.0)
    late = Job("c", 4.0, frozenset({"a", "b"}))
    assert wall_seconds([late, a, b], 1) == 9
    assert wall_seconds([late, a, b], 2) == 7
    assert wall_seconds([a, b, Job("d", 1.0)], 2) == 3
    with pytest.raises(ValueError, match="c waits for"):
        wall_seconds([late], 2)


# -- a plan against what then happens -----------------------------------------------------------


@pytest.fixture
def local_model(tmp_path: Path) -> Path:
    """A random model small enough to train in a test."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer(arithmetic.CHARACTERS, max_length=64)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_plan_comes_true(local_model: Path, tmp_path: Path):
    """Steps, work and FLOPs of a run against its plan, before and after lengths are known."""
    context = opened(
        f"model.name={local_model}", "arms=[ppo]", "baseline=null", "tuning=null", "seeds=[0]",
        "controls={base: false, placebo: null}", "sampling.prompts_per_step=4",
        "sampling.completions_per_prompt=2", "sampling.max_new_tokens=12",
        "optimizer.minibatches=2", "data.train.limit=16",
        "data.validation.limit=4", "data.test.arithmetic.limit=4",
        "evaluation={samples: 2, curve_samples: 1, k: [1], greedy: false}",
        "budget={unit: completions, limit: 60, evaluate_at: [1.0]}",
        results=tmp_path / "results",
    )  # fmt: skip
    before = make_plan(context).arms[0].cells[0]
    for cell in Matrix(context).known():
        run_cell(context, cell)
    done = json.loads((tmp_path / "results/runs/ppo/seed-0/done.json").read_text())
    assert (before.steps, before.warmup_steps) == (done["steps"], 2) == (8, 2)
    for unit in ("prompts", "completions", "updates"):
        assert getattr(before.training, unit) == done["spent"][unit], unit
    after = make_plan(context)
    cell = after.arms[0].cells[0]
    assert after.time.measured
    assert "measured" in after.assumptions[0]
    assert cell.training.completion_tokens == pytest.approx(
        done["spent"]["completion_tokens"], rel=0.05
    )
    assert cell.training.total_flops == pytest.approx(done["spent"]["flops"], rel=0.05)
    assert cell.training.flops is not None
    for key, flops in done["flops"].items():
        assert cell.training.flops[key] == pytest.approx(flops, rel=0.08), key


def test_runs_of_other_sampling_settings_measure_nothing(tmp_path: Path):
    results = tmp_path / "results"
    folder = results / "runs/grpo/seed-0"
    folder.mkdir(parents=True)
    spec = opened().spec
    flops = {"policy/generate": 100, "policy/score": 200, "policy/train": 600}
    step = {"step": 1, "spent": {"completions": 256, "completion_tokens": 2560}, "flops": flops}
    seconds = {"sample": 1.5, "grade": 0.5, "score": 1.0, "update": 3.0}
    (folder / "steps.jsonl").write_text(json.dumps(step) + "\n")
    (folder / "timing.jsonl").write_text(json.dumps({"step": 1, "seconds": seconds}) + "\n")
    controls = {n: getattr(spec, n).model_dump(mode="json") for n in ("model", "sampling")}
    (folder / "run.json").write_text(json.dumps({"controls": controls}))
    found = harness.plan.speed.measure(results, spec)
    assert found is not None
    assert found.rates == {"generate": 50.0, "score": 200.0, "train": 200.0}
    assert found.completion == {"grpo": 10.0}
    hotter = opened("sampling.temperature=0.9").spec
    assert harness.plan.speed.measure(results, hotter) is None


# -- the shipped experiments ---------------------------------------------------------------------


def test_matched_math_is_counted_whole():
    plan = planned()
    trials, seeds = 6, 5
    assert [a.name for a in plan.arms] == [
        "base", "ppo", "grpo", "dapo", "grpo_clip_higher", "placebo",
    ]  # fmt: skip
    assert plan.cells == 4 * (trials + seeds) + 2 * seeds
    by_name = {arm.name: arm for arm in plan.arms}
    steps = {n: a.cell("seed").steps for n, a in by_name.items()}  # type: ignore[union-attr]
    assert steps["base"] == 0
    assert 10 < steps["ppo"] < steps["grpo"] < steps["dapo"]
    assert steps["grpo"] == steps["grpo_clip_higher"] == steps["placebo"]
    limit = plan.budget["limit"]
    for arm in plan.arms[1:]:
        cell = arm.cell("seed")
        assert cell is not None
        assert arm.step is not None
        assert limit <= cell.training.total_flops < limit + arm.step.total_flops
    assert by_name["ppo"].critic
    assert not by_name["grpo"].critic
    assert len(by_name["ppo"].space) == 5
    assert by_name["ppo"].knobs == 4
    assert by_name["placebo"].cell("trial") is None
    assert plan.biggest is not None
    assert plan.biggest.name == "ppo"
    assert plan.smallest_p == 2 / 2**5
    assert any("5 seeds" in w and "0.0625" in w for w in plan.warnings)


def test_the_json_is_plain_and_the_same_again():
    first, second = planned().to_json(), planned().to_json()
    for plan in (first, second):
        del plan["memory_available"]
    assert json.dumps(first, allow_nan=False) == json.dumps(second, allow_nan=False)
    arms = first["arms"]
    for part in ("training", "evaluation"):
        total = sum(arm[f"total_{part}"]["flops"] for arm in arms)
        assert first["totals"][part]["flops"] == pytest.approx(total, rel=1e-9)
    evaluations = {arm["name"]: arm["cells"][-1]["evaluation"]["completions"] for arm in arms}
    tests, final, curve = 200, 32 + 1, 8 + 1  # problems; samples and the greedy answer
    assert evaluations["base"] == tests * final
    along_the_way = len(opened().spec.budget.evaluate_at) - 1
    assert evaluations["grpo"] == tests * (final + along_the_way * curve)


def test_the_description_names_every_arm_and_warning(capsys: pytest.CaptureFixture[str]):
    plan = planned()
    describe(plan, Console(width=300))
    text = capsys.readouterr().out
    for word in [*(a.name for a in plan.arms), *plan.warnings, *plan.assumptions]:
        assert word in text


def test_the_gpu_sized_experiment_plans_here(real_data: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HARNESS_DATA", str(real_data))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    plan = planned(spec="matched_math_1.5b")
    assert plan.model["parameters"] == PUBLISHED["Qwen/Qwen2.5-Math-1.5B"]
    assert plan.model["known_from"] == "the built-in card"
    sizes = {s.name.removeprefix("test."): s.problems for s in plan.data}
    assert sizes == {
        "train": 6998, "validation": 200, "math500": 500, "gsm8k": 1319,
        "aime24": 30, "aime25": 30, "aime26": 30, "amc23": 40,
    }  # fmt: skip
    assert all(s.file_sha256 for s in plan.data)
    assert plan.time.unit == "GPU-hours"
    assert not plan.time.measured
    assert 24 < plan.time.wall_hours[8] < 96  # "about two days", a factor of two either way
    for arm in plan.arms:
        assert arm.memory is None or 20e9 < arm.memory["peak"] < 80e9
        for cell in arm.cells:
            assert arm.name == "base" or cell.steps >= 50
    ranges = next(a.space for a in plan.arms if a.name == "ppo")
    assert ranges["advantage.critic.learning_rate"]["high"] < 1e-3
    assert any("aime24 30" in w for w in plan.warnings)


# -- refusals and warnings -----------------------------------------------------------------------

ODD = """
from harness.arms.grpo import GRPO
from harness.parts.sampling import FixedGroups

ODD = GRPO.but("odd", sampling=FixedGroups(group_size=3))
"""

REFUSED = {
    "budget": (["budget.limit=1e9"], r"budget.limit.* arm 'ppo'.*flops.*raise the limit"),
    "trial": (["budget.limit=2e10", "tuning.budget_fraction=0.1"], "tuning.budget_fraction"),
    "updates": (["budget={unit: updates, limit: 1}"], "one step of arm 'ppo', 12 updates"),
    "tuning path": (
        ["tuning.shared={optimizer.learning_rat: {low: 1, high: 2}}"],
        "Did you mean 'optimizer.learning_rate'",
    ),
    "tuning knob": (
        ["tuning.arms={ppo: {advantage.gae_lamda: {low: 0, high: 1}}}"],
        "tuning.arms.ppo.*Did you mean 'advantage.gae_lambda'",
    ),
    "tuning arm": (
        ["tuning.arms={pppo: {kl.kl_coef: {low: 0, high: 1}}}"],
        "tuning.arms: 'pppo' is no arm.*'ppo'",
    ),
    "context": (["sampling.max_new_tokens=60"], r"max_new_tokens 60 .*context of 64"),
    "prompt": (["data.max_prompt_tokens=3"], r"data.train: the prompt of problem .*tokens"),
    "hash": ([f"data.train.sha256={'f' * 64}"], "data.train: .*sha256"),
    "file": (
        ["data.test.arithmetic={task: gsm8k, split: test, source: local}"],
        "data.test.arithmetic: .*test.jsonl is missing",
    ),
    "model": (["model.name=embedded/arithmetik"], "Did you mean 'arithmetic'"),
    "revision": (["model.name=Qwen/Qwen2.5-1.5B"], "pin it with model.revision"),
    "hub": (["model={name: acme/x, revision: main}"], "no built-in card"),
    "folder": (["model.name=./nowhere"], r"folder ./nowhere does not exist"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_run_is_refused_in_one_line(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HARNESS_DATA", str(tmp_path))
    overrides, message = REFUSED[what]
    with pytest.raises(InputError, match=message) as caught:
        planned(*overrides)
    assert "\n" not in str(caught.value)


def test_a_group_that_does_not_divide_the_batch_is_refused(tmp_path: Path):
    (tmp_path / "odd.py").write_text(ODD)
    with pytest.raises(InputError, match=r"arm 'odd': its group of 3 .* batch of 256"):
        planned(f"plugins=[{tmp_path / 'odd.py'}]", "arms=[grpo, odd]")
    with pytest.raises(InputError, match="at least 2 completions per prompt"):
        planned("sampling.completions_per_prompt=1", "arms=[grpo]")


WARNED = {
    "few steps": (["budget.limit=8e10"], r"seed's budget pays for \d steps only"),
    "warm-up": (["budget.limit=8e10"], r"arm ppo: critic warm-up takes 2 of a trial's"),
    "samples": (["evaluation.samples=16"], r"samples 16 is below 2 x k = 32"),
    "small": (["data.test.arithmetic.limit=25"], r"arithmetic 25\).*4.0 points.*10.0 points"),
    "passes": (["data.train.limit=64"], r"passes over 64"),
    "no tuning": (["tuning=null"], "no tuning"),
    "seconds": (["budget={unit: seconds, limit: 100}"], "not reproducible"),
    "vllm": (["sampling.engine=vllm"], "weights of its own"),
}


@cache
def shipped_warnings() -> tuple[str, ...]:
    return planned().warnings


@pytest.mark.parametrize("what", WARNED)
def test_what_weakens_a_result_is_said(what: str):
    overrides, message = WARNED[what]
    said = planned(*overrides).warnings
    assert any(re.search(message, line) for line in said), said
    assert not any(re.search(message, line) for line in shipped_warnings())


def test_equal_problems_in_training_and_test_are_said(
    real_data: Path, monkeypatch: pytest.MonkeyPatch
):
    """MATH's whole training file holds one problem of the full test set."""
    monkeypatch.setenv("HARNESS_DATA", str(real_data))
    plan = planned(
        "data.train={task: math, split: train_full}",
        "data.test={math: {task: math, split: test}}",
        spec="matched_math_1.5b",
    )
    assert any("1 of 5000 problems stand in the training data" in w for w in plan.warnings)
    assert load_split("x", opened().spec.data.train).sha256  # generated splits are hashed too
