"""TRL's own trainers as arms: what they are told, and that they then do what our loop does.

Where the experiment's engine draws for both (``sampler="harness"``), their trainer and our loop
must end at the same weights; where TRL draws, prompts, budget and records must still be the
experiment's.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none
from certificate_plants import forge, read
from experiment_fixture import SPEC, contents, save_model, write_spec
from tiny import double_model, tiny_base

from harness.arm import PARTS, parts
from harness.arms import ARMS, EXTERNAL
from harness.arms.grpo import GRPO
from harness.cell import CellRun, run_cell
from harness.certificate import audit
from harness.errors import CellError, DivergedError, InputError
from harness.experiment import ensure_lock, open_context
from harness.external import run as external_run
from harness.external import settings as external_settings
from harness.external import trainer as external_trainer
from harness.external.arm import ExternalArm, TRLLoop
from harness.external.objective import CAN_BE, RULES, objective
from harness.external.settings import arguments, batches, check_external
from harness.job import Cell, Context
from harness.lock import make_lock
from harness.parts.advantage import LeaveOneOut
from harness.parts.aggregate import TokenMean
from harness.parts.clip import CISPOClip, PPOClip
from harness.parts.exclude import Unfinished
from harness.parts.kl import KLInLoss, KLInReward, NoKL, Refresh
from harness.parts.ratio import ProductRatio, SequenceRatio
from harness.parts.scale import BatchStd, GroupStd
from harness.parts.shaping import SignedScore
from harness.spec.load import check_spec, merge
from harness.spec.schema import ExperimentSpec
from harness.store import CellFolder

ROOT = Path(__file__).parent.parent
STD = GroupStd(eps=1e-4, ddof=1)
ON_GRPO, ON_RLOO = TRLLoop("GRPOTrainer"), TRLLoop("RLOOTrainer")


def by(loop: TRLLoop, arm: Any = GRPO, **changes: Any) -> ExternalArm:
    scale = {"scale": STD} if arm is GRPO and loop.trainer == "GRPOTrainer" else {}
    return ExternalArm.of(arm, "by_trl", source="a test", loop=loop, **(scale | changes))


def spec_of(**changes: Any) -> ExperimentSpec:
    return check_spec(merge(SPEC, changes), "here")


# -- what a trainer is told -----------------------------------------------------------------------

TOLD: dict[str, tuple[ExternalArm, dict[str, Any]]] = {
    "grpo": (
        EXTERNAL["trl_grpo_trainer"],  # type: ignore[dict-item]
        {
            "beta": 0.04, "scale_rewards": "group", "importance_sampling_level": "token",
            "epsilon": 0.2, "epsilon_high": 0.2, "delta": None, "loss_type": "grpo",
        },
    ),
    "rloo": (
        EXTERNAL["trl_rloo_trainer"],  # type: ignore[dict-item]
        {"beta": 0.03, "epsilon": 0.2, "epsilon_high": 0.2},
    ),
    "dr_grpo": (
        by(ON_GRPO, ARMS["dr_grpo"]),
        {
            "beta": 0.0, "scale_rewards": "none", "importance_sampling_level": "token",
            "epsilon": 0.2, "epsilon_high": 0.2, "delta": None, "loss_type": "dr_grpo",
        },
    ),
    "gspo": (
        by(ON_GRPO, ARMS["gspo"], scale=STD),
        {
            "beta": 0.0, "scale_rewards": "group", "importance_sampling_level": "sequence",
            "epsilon": 3e-4, "epsilon_high": 4e-4, "delta": None, "loss_type": "grpo",
        },
    ),
    "cispo": (
        by(ON_GRPO, kl=NoKL(), clip=CISPOClip(None, 4.0), aggregate=TokenMean(),
           scale=BatchStd(eps=1e-4, ddof=1)),
        {
            "beta": 0.0, "scale_rewards": "batch", "importance_sampling_level": "token",
            "epsilon": 0.0, "epsilon_high": 5.0, "delta": None, "loss_type": "cispo",
        },
    ),
    "dual clip": (
        by(ON_GRPO, kl=NoKL(), scale=None, clip=PPOClip(0.1, 0.3, dual_clip=3.0)),
        {
            "beta": 0.0, "scale_rewards": "none", "importance_sampling_level": "token",
            "epsilon": 0.1, "epsilon_high": 0.3, "delta": 3.0, "loss_type": "grpo",
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TOLD)
def test_parts_are_told_by_trls_names(name: str):
    arm, told = TOLD[name]
    assert objective(arm, arm.loop.trainer) == told


def test_every_part_has_a_rule():
    for trainer, rules in RULES.items():
        assert set(rules) == set(PARTS), trainer
        assert set(CAN_BE[trainer]) == set(PARTS) - {"reward"}, trainer  # nothing of it is refused


REFUSED: dict[str, tuple[TRLLoop, dict[str, Any], str]] = {
    "another std": (ON_GRPO, {"scale": GroupStd()}, "scale"),
    "a KL in the reward": (ON_GRPO, {"kl": KLInReward()}, "kl"),
    "k2": (ON_GRPO, {"kl": KLInLoss(estimator="k2")}, "kl"),
    "a reference that moves": (ON_GRPO, {"kl": KLInLoss(refresh=Refresh(5))}, "kl"),
    "other means": (ON_GRPO, {"advantage": LeaveOneOut()}, "advantage"),
    "a product of ratios": (ON_GRPO, {"ratio": ProductRatio()}, "ratio"),
    "the engine's ratio": (ON_GRPO, {"ratio": SequenceRatio(anchor="behaviour")}, "ratio"),
    "an open clip": (ON_GRPO, {"clip": PPOClip(None, 0.2)}, "clip"),
    "a dual clip inside the clip": (ON_GRPO, {"clip": PPOClip(dual_clip=1.1)}, "clip"),
    "a floor of weights": (
        ON_GRPO, {"clip": CISPOClip(0.5, 4.0), "aggregate": TokenMean()}, "clip"),
    "weights in completions' means": (ON_GRPO, {"clip": CISPOClip(None, 4.0)}, "mean over tokens"),
    "shaped scores": (ON_GRPO, {"shaping": (SignedScore(),)}, "shaping"),
    "completions left out": (ON_GRPO, {"exclude": Unfinished()}, "exclude"),
    "resampling": (ON_GRPO, {"sampling": ARMS["dapo"].sampling}, "sampling"),
    "mixed inputs": (ON_GRPO, {"sampling": ARMS["n_grpo"].sampling}, "sampling"),
    "a KL in RLOO's loss": (ON_RLOO, {"advantage": LeaveOneOut(), "scale": None,
                                      "ratio": ProductRatio()}, "kl"),
    "a std in RLOO": (ON_RLOO, {"advantage": LeaveOneOut(), "kl": NoKL(),
                                "ratio": ProductRatio()}, "scale"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_told_is_refused(name: str):
    loop, changes, word = REFUSED[name]
    with pytest.raises(InputError, match=f"by_trl.*TRL.*{word}"):
        by(loop, **changes)


def test_a_loop_is_trls():
    with pytest.raises(InputError, match="PPOTrainer"):
        TRLLoop("PPOTrainer")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="vllm"):
        TRLLoop("GRPOTrainer", sampler="vllm")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="give a TRLLoop"):
        ExternalArm.of(GRPO, "x", source="", loop="GRPOTrainer")  # type: ignore[arg-type]


def test_the_library_and_its_version_are_a_part():
    declared = parts(EXTERNAL["trl_grpo_trainer"])["loop"]
    assert declared["trainer"] == "GRPOTrainer"
    assert declared["library"].startswith("trl 1.")


# Settings of TRL and transformers that move no number here: the machine, logs, files, evaluation
# by the trainer, several devices, and numbers of losses that are switched off.
SILENT = """
accelerator_config average_tokens_across_devices batch_eval_metrics dataloader_ ddp_ debug
deepspeed do_ ds3_ enable_jit_checkpoint eval_ fsdp greater_is_better hub_ ignore_data_skip
include_ label_names length_column_name liger_kernel_config load_best_model local_rank log_
metric_for_best_model parallelism_config per_device_eval prediction_loss_only project
restore_callback resume_from run_name save_ skip_memory_metrics torch_compile_
torch_empty_cache_steps trackio_ vllm_ num_completions_to_print num_generations_eval
bf16_full_eval fp16_full_eval tf32 trust_remote_code use_cache use_transformers_paged
transformers_continuous_batching_config max_tool_calling_iterations num_train_epochs
model_init_kwargs gradient_checkpointing_kwargs train_sampling_strategy optim_args
optim_target_modules ref_model_ entropy_coef_ entropy_target sapo_ vespo_
"""


@pytest.mark.parametrize("name", EXTERNAL)
def test_no_default_of_the_installed_trl_is_used_unsaid(name: str, tmp_path: Path):
    arm: ExternalArm = EXTERNAL[name]  # type: ignore[assignment]
    _, config = external_trainer.CLASSES[arm.loop.trainer]
    said = arguments(arm, spec_of(), folder=tmp_path, seed=0, cpu=True)
    fields = {f.name for f in dataclasses.fields(config) if f.init}
    assert set(said) <= fields
    unsaid = {f for f in fields - set(said) if not f.startswith(tuple(SILENT.split()))}
    assert unsaid == set()


def test_batches_are_cut_equally():
    spec = spec_of(optimizer={"micro_batch": 3, "minibatches": 2, "epochs": 3},
                   sampling={"prompts_per_step": 3, "completions_per_prompt": 4})  # fmt: skip
    cut = batches(EXTERNAL["trl_grpo_trainer"], spec)  # type: ignore[arg-type]
    assert (cut.per_device, cut.accumulation, cut.minibatches, cut.epochs) == (3, 2, 2, 3)
    assert (cut.completions, cut.prompts, cut.updates) == (12, 3, 6)


@pytest.mark.parametrize(
    ("arm", "changes", "words"),
    [
        (by(ON_GRPO), {"sampling": {"engine": "vllm"}}, "sampling.engine is vllm"),
        (by(ON_GRPO), {"sampling": {"stop": ["\n"]}}, "no stop strings"),
        (by(ON_GRPO), {"sampling": {"completions_per_prompt": 1}}, "at least 2 completions"),
        (by(ON_GRPO, aggregate=TokenMean()), {"optimizer": {"micro_batch": 2}}, "micro_batch of 4"),
        (by(ON_GRPO, kl=NoKL(), aggregate=TokenMean(), clip=CISPOClip(None, 4.0)), {},
         "take optimizer.minibatches 1$"),
    ],
)  # fmt: skip
def test_experiments_that_trl_cannot_run_are_refused(arm, changes, words):
    with pytest.raises(InputError, match=words):
        check_external(arm, spec_of(**changes))


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        ({"minibatches": 2, "micro_batch": 8}, "bnpo"),  # one pass is the minibatch
        ({"minibatches": 1, "micro_batch": 2}, "dapo"),
    ],
)
def test_a_mean_over_tokens_has_the_name_that_is_exact(optimizer, name, tmp_path):
    arm = by(ON_GRPO, aggregate=TokenMean())
    spec = spec_of(optimizer=optimizer)
    assert arguments(arm, spec, folder=tmp_path, seed=0, cpu=True)["loss_type"] == name


def test_absolute_positions_are_refused():
    arm = EXTERNAL["trl_grpo_trainer"]
    external_trainer.check_positions(tiny_base(), arm)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="rotary"):
        external_trainer.check_positions(tiny_base(double_model()), arm)  # type: ignore[arg-type]


# -- cells ----------------------------------------------------------------------------------------

PLUGIN = """
from harness.arms.grpo import GRPO
from harness.external.arm import ExternalArm, TRLLoop
from harness.parts.advantage import LeaveOneOut
from harness.parts.aggregate import TokenMean
from harness.parts.clip import PPOClip
from harness.parts.kl import KLInReward, NoKL
from harness.parts.ratio import ProductRatio
from harness.parts.scale import GroupStd

def twin(arm, trainer):
    loop = TRLLoop(trainer, sampler="harness")
    return ExternalArm.of(arm, f"trl_{arm.name}", source="a twin", loop=loop)

GROUPED = GRPO.but("grouped", scale=GroupStd(eps=1e-4, ddof=1))
TOKENS = GROUPED.but("tokens", aggregate=TokenMean(), kl=NoKL(), clip=PPOClip(0.1, 0.3))
OTHERS = GRPO.but("others", kl=KLInReward(kl_coef=0.03), advantage=LeaveOneOut(), scale=None,
                  ratio=ProductRatio())
TRL_GROUPED = twin(GROUPED, "GRPOTrainer")
TRL_TOKENS = twin(TOKENS, "GRPOTrainer")
TRL_OTHERS = twin(OTHERS, "RLOOTrainer")
"""
TWINS = ("grouped", "tokens", "others")
ALL = ["grpo", *EXTERNAL, *TWINS, *(f"trl_{name}" for name in TWINS)]
LIMIT = 8.0  # updates: four steps of two epochs


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    save_model(root / "model")
    (root / "twins.py").write_text(PLUGIN)
    return root


def opened(root: Path, results: Path, arms: list[str] = ALL, **changes: Any) -> Context:
    """An experiment in which order within a batch is no matter, so that twins can agree."""
    settings = merge(
        {
            "arms": arms, "controls": {"base": False, "placebo": None}, "tuning": None,
            "optimizer": {"minibatches": 1, "epochs": 2, "micro_batch": 4, "learning_rate": 3e-3,
                          "warmup_steps": 2, "schedule": "cosine"},
            "budget": {"limit": LIMIT},
            "runtime": {"checkpoint_every": 2},
        },
        changes,
    )  # fmt: skip
    spec = write_spec(results.with_suffix(".yaml"), root / "model", **settings)
    context = open_context(spec, [], [root / "twins.py"], results)
    ensure_lock(context, make_lock(context))
    return context


def trained(context: Context, *arms: str) -> Path:
    for arm in arms:
        run_cell(context, Cell(arm, "seed", 0, LIMIT))
    return context.results


@pytest.fixture(scope="module")
def sound(root: Path) -> Path:
    return trained(opened(root, root / "sound"), *ALL)


@pytest.fixture
def copy(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "copy"))


def steps(results: Path, arm: str) -> list[dict[str, Any]]:
    return read(results / f"runs/{arm}/seed-0/steps.jsonl")


def weights(results: Path, arm: str) -> torch.Tensor:
    found = load_file(results / f"runs/{arm}/seed-0/checkpoint/policy.safetensors")
    return torch.cat([found[name].flatten() for name in sorted(found)])


def test_the_records_are_certified_and_what_they_cannot_show_is_said(sound: Path):
    certificate = audit(sound)
    assert certificate.violations == ()
    assert certificate.certified
    external = certificate.external
    assert set(external) == set(EXTERNAL) | {f"trl_{name}" for name in TWINS}
    assert len(external["trl_grpo_trainer"]["not_proven"]) == 5
    assert len(external["trl_grouped"]["not_proven"]) == 3  # our engine drew, and told log-probs
    (effective,) = (c for c in certificate.checks if c.name == "effective")
    assert "trl_rloo_trainer" in effective.proves


@pytest.mark.parametrize("arm", EXTERNAL)
def test_prompts_and_budget_are_those_of_a_loop_of_ours(sound: Path, arm: str):
    mine, its = steps(sound, "grpo"), steps(sound, arm)
    assert [s["prompts"] for s in its] == [s["prompts"] for s in mine]
    assert [s["spent"]["updates"] for s in its] == [2, 4, 6, 8]
    rates = [s["effective"]["learning_rate"] for s in its]
    assert rates == [s["effective"]["learning_rate"] for s in mine]
    assert 0 < rates[0] < rates[1]
    assert rates[3] < rates[2]  # warmed up, then along the cosine
    assert {len(s["lengths"]["policy/generate"]) for s in its} == {6}
    assert its[0]["kl_to_reference"] == pytest.approx(0, abs=1e-5)
    assert its[3]["kl_to_reference"] > 1e-4
    moved = weights(sound, arm) - start(sound)
    assert float(moved.abs().max()) > 3e-3


def start(sound: Path) -> torch.Tensor:
    found = load_file(sound.parent / "model" / "model.safetensors")
    return torch.cat([found[name].flatten() for name in sorted(found)])


@pytest.mark.parametrize("name", TWINS)
def test_trls_trainer_ends_at_the_weights_of_our_loop(sound: Path, name: str):
    mine, its = steps(sound, name), steps(sound, f"trl_{name}")
    shared = ("prompts", "spent", "outcomes", "kept_in_loss", "lengths", "flops", "used", "kl_coef")
    for ours, theirs in zip(mine, its, strict=True):
        assert [theirs[key] for key in shared] == [ours[key] for key in shared]
        assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-3)
        assert theirs["advantage_gap"] < 1e-5
        assert theirs["engine_gap"] < 1e-4
    moved = float((weights(sound, name) - start(sound)).abs().max())
    apart = float((weights(sound, name) - weights(sound, f"trl_{name}")).abs().max())
    assert moved > 3e-3
    assert apart < 1e-5, f"weights differ by {apart:.2g} after moving by {moved:.2g}"


def test_noise_on_the_reward_reaches_a_trainer_as_it_does_our_loop(root: Path, tmp_path: Path):
    """The same rows are told otherwise, to the same weights; and the records say so."""
    arms = ["grouped", "trl_grouped"]
    noise = {"noise": {"flip": 0.3, "sigma": 0.5}}
    results = trained(opened(root, tmp_path / "noisy", arms, reward=noise), *arms)
    mine, its = (steps(results, arm) for arm in arms)
    assert [s["noise"] for s in mine] == [s["noise"] for s in its]
    assert sum(s["noise"]["wrong_turned"] for s in mine) > 0
    assert all(s["noise"]["added_rms"] > 0 for s in mine)
    assert float((weights(results, arms[0]) - weights(results, arms[1])).abs().max()) < 1e-5
    assert audit(results).violations == ()


# -- what must not pass ---------------------------------------------------------------------------


def test_another_advantage_in_the_records_is_a_violation(copy: Path):
    def plant(lines: list[dict[str, Any]]) -> None:
        lines[2]["advantage_gap"] = 0.01

    forge(copy, "trl_grpo_trainer/seed-0", "steps.jsonl", plant)
    violation, *rest = audit(copy).violations
    assert (violation.check, rest) == ("effective", [])
    assert violation.cells == ("runs/trl_grpo_trainer/seed-0",)
    assert violation.key == "steps.jsonl line 3: advantage_gap"


def test_a_gap_left_out_is_a_violation(copy: Path):
    forge(copy, "trl_grouped/seed-0", "steps.jsonl", lambda lines: lines[1].pop("advantage_gap"))
    assert any("advantage_gap" in v.key for v in audit(copy).violations)


def test_a_trainer_that_is_told_something_else_is_found_out(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def wrong(arm: ExternalArm, trainer: str) -> dict[str, Any]:
        return objective(arm, trainer) | {"scale_rewards": "none"}

    monkeypatch.setattr(external_settings, "objective", wrong)
    results = trained(opened(root, tmp_path / "wrong", ["trl_grouped"]), "trl_grouped")
    found = [v for v in audit(results).violations if "advantage_gap" in v.key]
    assert [v.check for v in found] == ["effective"]


def test_other_prompts_than_the_streams_end_the_cell(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stream = external_trainer._stream

    def later(loop: Any, spec: Any) -> Any:
        loop.progress.cursor += 1
        try:
            return stream(loop, spec)
        finally:
            loop.progress.cursor -= 1

    monkeypatch.setattr(external_trainer, "_stream", later)
    with pytest.raises(CellError, match="other prompts than the 2 from position 0"):
        trained(opened(root, tmp_path / "later", ["trl_grpo_trainer"]), "trl_grpo_trainer")


def test_numbers_that_are_not_finite_end_the_cell():
    followed = object.__new__(external_run.Steps)
    followed.now = external_run.Ongoing({}, 0.0, 0)
    nothing: Any = None
    with pytest.raises(DivergedError, match="grad_norm is nan"):
        followed.on_log(nothing, nothing, nothing, {"loss": 0.1, "grad_norm": float("nan")})


def test_what_trl_reads_otherwise_is_refused():
    prompts: Any = SimpleNamespace(
        problems=[SimpleNamespace(id="p0", question="1+1=")], prompts=[(4, 13, 4, 14)]
    )
    reads: Any = SimpleNamespace(_tokenize_prompts=lambda texts: ([[1, 4, 13, 4, 14]], None))
    with pytest.raises(InputError, match=r"'p0' as 5 tokens, .* experiment's 4"):
        external_trainer._check_prompts(reads, prompts, spec_of())
    fp16: Any = SimpleNamespace(
        accelerator=SimpleNamespace(mixed_precision="fp16", num_processes=1)
    )
    with pytest.raises(InputError, match="unset ACCELERATE_MIXED_PRECISION"):
        external_trainer.check_environment(fp16)


# -- stopping and going on ------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from harness.cell import run_cell
from harness.experiment import open_context
from harness.job import Cell
from harness.store import CellFolder
append = CellFolder.append
def dying(self, name, *lines):
    append(self, name, *lines)
    if name == "steps.jsonl" and lines[0]["step"] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
CellFolder.append = dying
spec, plugin, results, arm, limit = sys.argv[1:]
run_cell(open_context(Path(spec), [], [Path(plugin)], Path(results)),
         Cell(arm, "seed", 0, float(limit)))
"""
RECORDS = ("steps.jsonl", "evals.jsonl", "samples.jsonl", "done.json", "run.json")


def of_cell(results: Path, arm: str) -> dict[str, bytes]:
    return contents(results / f"runs/{arm}/seed-0", *RECORDS, "policy.safetensors")


def test_a_killed_cell_goes_on_to_the_same_bytes(sound: Path, root: Path):
    """SIGKILL after the third step, which no checkpoint holds."""
    arm, results = "trl_grpo_trainer", root / "killed"
    context = opened(root, results)
    end = subprocess.run(
        [sys.executable, "-c", KILLED, results.with_suffix(".yaml"), root / "twins.py", results,
         arm, str(LIMIT)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert end.returncode == -signal.SIGKILL, end.stderr
    assert len(steps(results, arm)) == 3
    trained(context, arm)
    assert of_cell(results, arm) == of_cell(sound, arm)


class Stop(BaseException):
    """An end that no handler sees."""


def stopped(context: Context, arm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a cell until its third step has been written."""
    append = CellFolder.append

    def stopping(self: CellFolder, name: str, *lines: Any) -> None:
        append(self, name, *lines)
        if name == "steps.jsonl" and lines[0]["step"] == 3:
            raise Stop

    with monkeypatch.context() as patched:
        patched.setattr(CellFolder, "append", stopping)
        with pytest.raises(Stop):
            trained(context, arm)


def test_rloo_goes_on_too(sound: Path, root: Path, monkeypatch: pytest.MonkeyPatch):
    results = root / "stopped"
    context = opened(root, results)
    stopped(context, "trl_rloo_trainer", monkeypatch)
    trained(context, "trl_rloo_trainer")
    assert of_cell(results, "trl_rloo_trainer") == of_cell(sound, "trl_rloo_trainer")
    assert not (results / "runs/trl_rloo_trainer/seed-0/trainer").exists()


def test_with_adapters_the_reference_stays_the_base(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """TRL would copy the adapters as they are at its start: in a resumed run, trained ones."""
    arms, lora = ["grouped", "trl_grouped"], {"model": {"lora": {"rank": 2}}}
    whole = trained(opened(root, tmp_path / "whole", arms, **lora), *arms)
    mine, its = weights(whole, "grouped"), weights(whole, "trl_grouped")
    assert float(mine.abs().max()) > 0
    assert float((mine - its).abs().max()) < 1e-4
    context = opened(root, tmp_path / "stopped", arms, **lora)
    stopped(context, "trl_grouped", monkeypatch)
    trained(context, "trl_grouped")
    assert of_cell(tmp_path / "stopped", "trl_grouped") == of_cell(whole, "trl_grouped")


def test_a_finished_loop_is_not_trained_again(root: Path, sound: Path):
    done = json.loads((sound / "runs/trl_grpo_trainer/seed-0/done.json").read_text())
    before = of_cell(sound, "trl_grpo_trainer")
    trained(opened(root, sound), "trl_grpo_trainer")
    assert (done["steps"], of_cell(sound, "trl_grpo_trainer")) == (4, before)


def test_the_placebo_of_an_external_arm_is_trained_by_it(root: Path, tmp_path: Path):
    context = opened(root, tmp_path / "placebo", ["trl_rloo_trainer"],
                     controls={"base": False, "placebo": "trl_rloo_trainer"})  # fmt: skip
    assert isinstance(CellRun(context, Cell("placebo", "seed", 0, LIMIT),
                              CellFolder(tmp_path / "cell")).arm, ExternalArm)  # fmt: skip
    results = trained(context, "trl_rloo_trainer", "placebo")
    certificate = audit(results)
    assert certificate.certified, certificate.violations
    assert (
        steps(results, "placebo")[0]["accuracy"]
        == steps(results, "trl_rloo_trainer")[0]["accuracy"]
    )
