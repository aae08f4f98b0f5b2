"""Certificates of runs that other libraries logged: what their files refute, show, and leave open.

TRL's logs are made here by training for two steps. Those of verl, OpenRLHF and TRL's PPO are
written by hand after their formats (tests/imported_logs/README.md).
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.certificate import RULES
from harness.certificate.finding import MISSING
from harness.certificate.imported import ImportedCertificate, audit_imported, read_runs
from harness.certificate.imported.files import at, read_rows, read_tree
from harness.cli import main
from harness.errors import BAD_INPUT, NOT_CERTIFIED, InputError
from tests.parity.trl_setup import GROUP, make_trainer
from tests.tiny import tiny_model

LOGS = Path(__file__).parent / "imported_logs"
STEPS = 2


def odd_length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(completion) % 2) for completion in completions]


def train(folder: Path, **changes: Any) -> Path:
    """What a user of TRL has after training: the state, and the arguments as JSON."""
    trainer = make_trainer(
        "grpo", tiny_model(), folder, ["1+1=", "2+7="], odd_length,
        logging_strategy="steps", logging_steps=1, max_steps=STEPS, **changes,
    )  # fmt: skip
    trainer.train()
    trainer.save_state()
    out = folder / "out"
    (out / "training_args.json").write_text(json.dumps(trainer.args.to_dict()))
    return out


@pytest.fixture(scope="module")
def trl(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three runs: two that differ in the seed alone, and one with other controls."""
    top = tmp_path_factory.mktemp("trl")
    return {
        "first": train(top / "first"),
        "second": train(top / "second", seed=1),
        "other": train(
            top / "other", beta=0.04, loss_type="grpo", num_iterations=2, lr_scheduler_type="linear"
        ),
    }


def copied(source: Path, place: Path) -> Path:
    shutil.copytree(source, place)
    return place


def edit(path: Path, **changes: Any) -> None:
    tree = json.loads(path.read_text())
    path.write_text(json.dumps(tree | changes))


def set_at(path: Path, key: str, value: Any) -> None:
    """Change one key of a YAML file."""
    tree = yaml.safe_load(path.read_text())
    node = tree
    *above, last = key.split(".")
    for part in above:
        node = node[part]
    node[last] = value
    path.write_text(yaml.safe_dump(tree))


def status(found: ImportedCertificate) -> dict[str, str]:
    return {check.name: check.status for check in found.checks}


def reasons(found: ImportedCertificate, name: str) -> str:
    return "\n".join(next(check.why for check in found.checks if check.name == name))


def broken(found: ImportedCertificate, name: str) -> dict[str, tuple[Any, Any]]:
    return {v.key: (v.expected, v.found) for v in found.violations if v.check == name}


def test_a_real_run_of_trl_is_read(trl: dict[str, Path]):
    (run,) = read_runs("trl", [str(trl["first"])])
    assert (run.algorithm, run.finished) == ("grpo", True)
    have = run.settings
    assert (have["learning_rate"], have["temperature"], have["seed"]) == (1e-3, 1.0, 0)
    assert (have["loss_normaliser"], have["kl_place"], have["kl_coef"]) == ("token_mean", "none", 0)
    assert (have["group_size"], have["optimizer_batch"]) == (GROUP, 2 * GROUP)
    assert have["reward"] == ["odd_length"]
    assert run.totals["completions"] == STEPS * 2 * GROUP
    prompts = STEPS * 2 * GROUP * 4  # characters are tokens, and a prompt has four
    lengths = sum(row["completions/mean_length"] * 2 * GROUP for row in run.training_rows)
    assert run.totals["tokens"] == pytest.approx(prompts + lengths)


def test_completions_used_twice_are_drawn_once(trl: dict[str, Path]):
    (run,) = read_runs("trl", [str(trl["other"])])
    assert (run.settings["epochs"], run.totals["optimizer_steps"]) == (2, STEPS)
    assert run.totals["completions"] == 2 * GROUP
    assert run.totals["tokens"] == run.training_rows[0]["num_tokens"]
    assert "num_tokens" not in run.training_rows[1]
    assert run.settings["kl_estimator"] == "k3 times the ratio"
    assert run.settings["loss_normaliser"] == "sequence_mean"


def test_runs_that_differ_in_the_seed_break_nothing_and_prove_little(trl: dict[str, Path]):
    found = audit_imported("trl", [str(trl["first"]), str(trl["second"])])
    assert found.violations == ()
    assert not found.certified
    assert status(found).pop("budget") == "holds"
    assert status(found) | {"budget": "unknown"} == dict.fromkeys(status(found), "unknown")
    assert "model is not recorded" in reasons(found, "pinned")
    assert set(found.differences) <= {"seed", "tokens"}
    assert found.differences["seed"]["values"] == {"first/out": 0, "second/out": 1}


def test_the_checks_are_those_of_any_certificate(trl: dict[str, Path]):
    made = audit_imported("trl", [str(trl["first"])]).to_json()
    assert [check["name"] for check in made["checks"]] == [MISSING, *(rule.name for rule in RULES)]
    assert {"certified", "cells", "violations", "settings", "declared_differences"} <= made.keys()
    for check in made["checks"]:
        assert check["passed"] is (check["status"] == "holds")
        assert bool(check["why"]) is (check["status"] == "unknown")
    json.dumps(made, allow_nan=False)


def test_controls_that_differ_are_told(trl: dict[str, Path]):
    found = audit_imported("trl", [str(trl["first"]), str(trl["other"])])
    told = broken(found, "pinned")
    assert told["kl_coef"] == (0.0, 0.04)
    assert told["loss_normaliser"] == ("token_mean", "sequence_mean")
    assert told["epochs"] == (1, 2)
    assert told["lr_scheduler"] == ("constant", "linear")
    assert "learning_rate" not in told
    assert broken(found, "budget") == {"completions": (STEPS * 2 * GROUP, 2 * GROUP)}
    assert set(told) <= set(found.differences)
    assert broken(found, "matrix")["seed"] == ("each seed once", [0])


def test_a_log_that_contradicts_its_configuration(trl: dict[str, Path], tmp_path: Path):
    lied = copied(trl["first"], tmp_path / "lied")
    edit(lied / "training_args.json", learning_rate=5e-4)
    measured = copied(trl["other"], tmp_path / "measured")
    edit(measured / "training_args.json", beta=0.0)
    found = audit_imported("trl", [str(lied), str(measured)])
    told = broken(found, "effective")
    assert told["step 1: learning_rate"] == (5e-4, 1e-3)
    assert "kl" in told


def test_a_run_that_stopped_early_or_diverged(trl: dict[str, Path], tmp_path: Path):
    place = copied(trl["first"], tmp_path / "run")
    state = json.loads((place / "trainer_state.json").read_text())
    state["log_history"][0]["loss"] = math.nan
    edit(place / "trainer_state.json", max_steps=10, log_history=state["log_history"])
    found = audit_imported("trl", [str(place)])
    assert broken(found, "matrix") == {"step_limit": (10, STEPS)}
    assert status(found)["budget"] == "VIOLATED"
    assert broken(found, MISSING) == {"step 1: loss": ("a number", "nan")}
    assert found.to_json()["diverged"] == ["run"]


def test_steps_that_are_logged_twice(trl: dict[str, Path], tmp_path: Path):
    place = copied(trl["first"], tmp_path / "run")
    rows = json.loads((place / "trainer_state.json").read_text())["log_history"]
    edit(place / "trainer_state.json", log_history=[*rows[:2], rows[0]])
    assert broken(audit_imported("trl", [str(place)]), "records") == {"step": ("above 2", 1)}


def test_without_a_configuration_nothing_is_assumed(trl: dict[str, Path], tmp_path: Path):
    place = copied(trl["first"], tmp_path / "run")
    (place / "training_args.json").unlink()
    (place / "training_args.bin").write_bytes(b"a pickle")
    found = audit_imported("trl", [str(place), str(trl["second"])])
    assert found.runs["run"]["algorithm"] is None
    assert "temperature is not recorded of run" in reasons(found, "pinned")
    assert "training_args.bin is a pickle" in reasons(found, MISSING)
    assert found.differences["temperature"]["values"]["run"] == "unknown"
    assert not broken(found, "pinned")


def test_the_last_checkpoint_is_read(trl: dict[str, Path], tmp_path: Path):
    for step in (9, 10):  # by number, not by name
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        shutil.copy(trl["first"] / "trainer_state.json", folder)
        edit(folder / "trainer_state.json", global_step=step, max_steps=10)
    shutil.copy(trl["first"] / "training_args.json", tmp_path)
    (run,) = read_runs("trl", [str(tmp_path)])
    assert (run.finished, run.algorithm) == (True, "grpo")
    assert run.totals["optimizer_steps"] == 10


def test_defaults_of_trl_are_no_controlled_pair(trl: dict[str, Path], tmp_path: Path):
    from trl import GRPOConfig

    config = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[])
    stock = tmp_path / "stock.json"
    stock.write_text(json.dumps(config.to_dict()))
    found = audit_imported("trl", [str(LOGS / "handwritten_trl_ppo"), str(stock)])
    texts = [note.text for note in found.notes]
    assert sum("runs trl's defaults" in text for text in texts) == 2
    (pair,) = [text for text in texts if "not a controlled pair" in text]
    assert "trl ppo and trl grpo at their defaults" in pair
    for name in ("temperature", "learning_rate", "epochs", "kl_place", "group_size"):
        assert name in pair
    assert any("weighs 0.0059 100 tokens before" in text for text in texts)  # 0.95 ** 100
    assert found.differences["loss_normaliser"]["values"]["handwritten_trl_ppo"] == (
        "'token_mean_micro' (not recorded: its code)"
    )
    assert "loss_normaliser" not in broken(found, "pinned")  # what is not recorded proves nothing
    own = audit_imported("trl", [str(LOGS / "handwritten_trl_ppo"), str(trl["first"])])
    assert sum("runs trl's defaults" in note.text for note in own.notes) == 1


def test_ppo_of_trl_is_counted_by_episodes(tmp_path: Path):
    folder = copied(LOGS / "handwritten_trl_ppo", tmp_path / "run")
    edit(folder / "trainer_state.json", max_steps=8)  # minibatches counted, as in some versions
    (run,) = read_runs("trl", [str(folder)])
    assert (run.finished, run.totals["completions"]) == (True, 128)
    assert run.totals["optimizer_steps"] == 2 * 4  # two batches, four passes
    edit(folder / "ppo_config.json", total_episodes=256)
    assert status(audit_imported("trl", [str(folder)]))["matrix"] == "VIOLATED"


def test_verl_settings_budget_and_notes():
    paths = [str(LOGS / f"handwritten_verl_{name}") for name in ("ppo", "grpo")]
    found = audit_imported("verl", paths)
    ppo, grpo = (found.settings[f"handwritten_verl_{name}"] for name in ("ppo", "grpo"))
    assert (ppo["advantage"], ppo["gae_lambda"], ppo["critic_learning_rate"]) == ("GAE", 1, 1e-5)
    assert (grpo["advantage"], grpo["scale"], grpo["gae_lambda"]) == ("group mean", "group", None)
    assert (grpo["minibatches"], grpo["optimizer_batch"]) == (4, 256 * 8)
    assert found.runs["handwritten_verl_ppo"]["completions"] == 3 * 1024
    assert found.runs["handwritten_verl_grpo"]["completions"] == 3 * 1024 * 8
    assert found.runs["handwritten_verl_ppo"]["tokens"] == 308224 + 309248 + 310272
    assert broken(found, "pinned")["group_size"] == (1, 8)
    assert broken(found, "budget")["completions"] == (3 * 1024, 3 * 1024 * 8)
    assert sum(note.about == "defaults" for note in found.notes) == 2


@pytest.mark.parametrize(
    ("changes", "place", "estimator", "coef"),
    [
        ({"actor_rollout_ref.actor.use_kl_loss": True}, "loss", "k3", 0.001),
        ({"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.02},
         "reward", "k1", 0.02),
        ({"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive"},
         "reward", "k1", "adaptive, from 0.001"),
        ({"algorithm.use_kl_in_reward": True, "actor_rollout_ref.actor.use_kl_loss": True},
         "loss+reward", ["k3", "k1"], [0.001, 0.001]),
    ],
)  # fmt: skip
def test_the_kl_of_verl(
    tmp_path: Path, changes: dict[str, Any], place: str, estimator: Any, coef: Any
):
    folder = copied(LOGS / "handwritten_verl_grpo", tmp_path / "run")
    for key, value in changes.items():
        set_at(folder / "config.yaml", key, value)
    (run,) = read_runs("verl", [str(folder)])
    told = [run.settings[name] for name in ("kl_place", "kl_estimator", "kl_coef")]
    assert told == [place, estimator, coef]


def test_what_verl_draws_again_is_not_counted(tmp_path: Path):
    folder = copied(LOGS / "handwritten_verl_grpo", tmp_path / "run")
    set_at(folder / "config.yaml", "algorithm.filter_groups", {"enable": True})
    found = audit_imported("verl", [str(folder)])
    assert not {"completions", "tokens"} & found.runs["run"].keys()
    assert "drawn again" in reasons(found, "budget")


def test_a_step_missing_from_a_log_leaves_its_sums_unknown(tmp_path: Path):
    folder = copied(LOGS / "handwritten_verl_grpo", tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([lines[0], lines[1], lines[3], '{"step": 4']))
    found = audit_imported("verl", [str(folder)])
    assert not {"completions", "tokens"} & found.runs["run"].keys()
    assert "some steps are not in the log" in reasons(found, "budget")
    assert broken(found, MISSING) == {"metrics.jsonl line 4": ("JSON", "damage")}


def test_a_console_rounds_what_it_prints():
    path = LOGS / "handwritten_verl_console"
    rows, damaged, rounded = read_rows(path / "train.log")
    assert ([int(row["step"]) for row in rows], damaged, rounded) == ([0, 1, 2], [], True)
    assert rows[0]["val-core/openai/gsm8k/acc/mean@1"] == 0.31
    found = audit_imported("verl", [str(path)])
    assert "rounds the learning rate away" in reasons(found, "effective")
    assert not broken(found, "effective")  # 0.000 is 1e-6, as printed
    assert "tokens" not in found.runs["handwritten_verl_console"]
    assert broken(found, "matrix") == {"step_limit": (3, 2)}


def test_a_console_that_does_not_round_is_held_to_its_numbers(tmp_path: Path):
    folder = copied(LOGS / "handwritten_verl_console", tmp_path / "run")
    text = (folder / "train.log").read_text()
    exact = text.replace("lr:0.000", "lr:2e-06").replace(":0.554", ":0.5541278")
    (folder / "train.log").write_text(exact)
    found = audit_imported("verl", [str(folder)])
    assert broken(found, "effective") == {"step 1: actor/lr": (1e-6, 2e-6)}
    assert found.runs["run"]["tokens"] == 2465792 + 2473984


def test_one_run_alone_is_compared_with_nothing(trl: dict[str, Path]):
    found = audit_imported("trl", [str(trl["first"])])
    assert "holds" not in status(found).values()
    assert "one run" in reasons(found, "budget")


@pytest.mark.parametrize(
    "changes",
    [
        {"n_samples_per_prompt": "eight"},
        {"eps_clip_low_high": "x"},
        {"actor_learning_rate": None},
        {"max_epochs": math.inf},
        {"rollout_batch_size": {"a": 1}},
        {"use_kl_loss": None},
    ],
)
def test_a_setting_that_holds_something_else_proves_nothing(
    tmp_path: Path, changes: dict[str, Any]
):
    folder = copied(LOGS / "handwritten_openrlhf_ppo", tmp_path / "run")
    edit(folder / "args.json", **changes)
    found = audit_imported("openrlhf", [str(folder), str(LOGS / "handwritten_openrlhf_ppo")])
    assert status(found)["pinned"] != "holds"
    assert not found.certified
    json.dumps(found.to_json(), allow_nan=False)


def test_both_spellings_of_openrlhf():
    paths = [str(LOGS / f"handwritten_openrlhf_{name}") for name in ("ppo", "grpo")]
    found = audit_imported("openrlhf", paths)
    assert broken(found, "pinned") == {"group_size": (1, 8)}
    assert not broken(found, "budget")
    totals = {name: run["tokens"] for name, run in found.runs.items()}
    assert totals["handwritten_openrlhf_ppo"] == (410.5 + 405.25 + 401.0) * 1024
    assert totals["handwritten_openrlhf_grpo"] == (400 + 399 + 398) * 128 * 8
    assert found.settings["handwritten_openrlhf_grpo"]["learning_rate"] == 1e-6  # text in YAML
    assert "its code sets 'token_mean'" in reasons(found, "pinned")
    assert sum(note.about == "defaults" for note in found.notes) == 2


def test_libraries_side_by_side(trl: dict[str, Path]):
    found = audit_imported("trl", [str(trl["first"]), f"verl:{LOGS / 'handwritten_verl_grpo'}"])
    assert {run["library"] for run in found.runs.values()} == {"trl", "verl"}
    told = broken(found, "pinned")
    assert told["group_size"] == (GROUP, 8)
    assert "dual_clip" not in told  # TRL has none, but no file of the run says so
    clips = found.differences["dual_clip"]["values"]
    assert clips == {"out": "null (not recorded: its code)", "handwritten_verl_grpo": 3.0}
    assert not {"reward", "step_limit", "warmup"} & told.keys()
    assert "reward of trl and verl cannot be held together" in reasons(found, "pinned")
    assert any("ddof" in note.text for note in found.notes)


def test_references_of_hydra_are_followed(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "a: {b: 1e-6, c: '${a.b}', d: '${.b}', e: '${oc.select:x.y,512}', f: '${g}'}\n"
        "g: ${a.f}\nh: x${a.b}\n"
    )
    tree = read_tree(path)
    assert [at(tree, f"a.{key}") for key in "bcde"] == [
        (True, 1e-6), (True, 1e-6), (True, 1e-6), (True, 512),
    ]  # fmt: skip
    assert at(tree, "a.f") == (False, None)  # a circle
    assert at(tree, "h") == (False, None)  # text around it
    assert at(tree, "a.i") == (False, None)


@pytest.mark.parametrize(
    ("library", "log", "says"),
    [
        ("trx", ".", "Did you mean 'trl'?"),
        ("trl", "nowhere", "does not exist"),
        ("trl", "none", "give the output_dir"),
        ("verl", "none", "give the run's folder"),
        ("openrlhf", "empty.csv", "no step found"),
        ("verl", "two", "several logs (a.jsonl, b.jsonl)"),
        ("trl", "bad.json", "is not JSON"),
        ("openrlhf", "odd", "is not as openrlhf writes it"),
    ],
)
def test_what_cannot_be_read_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, log: str, says: str
):
    monkeypatch.chdir(tmp_path)
    Path("empty.csv").write_text("step,loss\n")
    Path("bad.json").write_text("{")
    for folder in ("none", "odd"):
        Path(folder).mkdir()
    Path("odd", "args.json").write_text('{"advantage_estimator": ["gae"]}')
    Path("two").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        Path("two", name).write_text('{"step": 1}\n')
    with pytest.raises(InputError) as told:
        audit_imported(library, [log])
    assert says in str(told.value)


def test_the_command(
    trl: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = [str(trl["first"]), str(trl["other"])]

    def run(*arguments: str) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["audit", *arguments])
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    code, out, _ = run("--import", "trl", *logs)
    assert code == NOT_CERTIFIED
    assert "VIOLATED" in out
    assert "unknown" in out
    assert "loss_normaliser" in out
    code, out, _ = run("--import", "trl", *logs, "--json", "--results", str(tmp_path / "made"))
    assert code == NOT_CERTIFIED
    assert json.loads(out) == json.loads((tmp_path / "made" / "certificate.json").read_text())
    code, _, err = run(*logs)
    assert (code, "need --import" in err) == (BAD_INPUT, True)
    code, _, err = run("--import", "trl", logs[0], logs[0])
    assert (code, "given twice" in err) == (BAD_INPUT, True)
