"""Every bad input ends in one line that names file and key and says how to mend it; exit code 2.

Nothing is written: a run that is refused leaves no results folder behind.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none
from experiment_fixture import save_model, write_spec

from harness.cli import main
from harness.errors import BAD_INPUT
from harness.store import ResultStore

Refusal = Callable[..., str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture
def refused(tmp_path: Path, model: Path, capfd: pytest.CaptureFixture[str]) -> Refusal:
    """Run the tiny experiment with some keys changed; the one line that it is refused with."""

    def run(*options: str, command: str = "run", **changes: Any) -> str:
        spec = write_spec(tmp_path / "tiny.yaml", model, **changes)
        capfd.readouterr()  # what preparing the case printed, such as the bars of saving a model
        with pytest.raises(SystemExit) as ended:
            main([command, str(spec), *options])
        error = capfd.readouterr().err
        assert ended.value.code == BAD_INPUT, error
        assert "Traceback" not in error
        (line,) = error.splitlines()
        assert line.startswith("error: ")
        assert not (tmp_path / "results").exists()
        return line

    return run


def split(**changes: Any) -> dict[str, Any]:
    return {"task": "arithmetic", "split": "train", "limit": 32} | changes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"budgett": {}}, r"tiny.yaml: unknown key 'budgett'\. Did you mean 'budget'\?"),
        ({"seeds": "many"}, r"tiny.yaml: seeds: .*found 'many'"),
        ({"extends": "none.yaml"}, r"tiny.yaml: extends 'none.yaml', but .* does not exist"),
        ({"extends": "tiny.yaml"}, r"tiny.yaml: extends goes round in a circle"),
        ({"arms": ["grpo", "pppo"]}, r"unknown arm 'pppo'\. Did you mean 'ppo'\?"),
        ({"evaluation": {"k": [1, 16]}}, r"evaluation: k 16 is above samples 4.* raise evaluat"),
        ({"optimizer": {"minibatches": 3}}, r"optimizer.minibatches 3 does not divide the batch"),
        ({"sampling": {"completions_per_prompt": 1}}, r"arm 'grpo': .* raise sampling.completions"),
        ({"data": {"train": split(offset=3, limit=None)}}, r"data.train: .*give it a limit"),
        ({"data": {"train": split(task="arithmetics")}}, r"data.train: .*mean 'arithmetic'"),
        ({"data": {"train": split(split="training")}}, r"data.train: .*Did you mean 'train'"),
        ({"data": {"train": split(options={"lvels": 1})}}, r"data.train: .*unknown option 'lvels'"),
        ({"data": {"train": split(sha256="0" * 64)}}, r"data.train: .*sha256 .*, expected 0{64}"),
        ({"data": {"validation": split(sha256="ab")}}, r"data.validation: .*expected ab; restore"),
        ({"data": {"prompt": "equasion"}}, r"data.prompt.*Did you mean 'equation'"),
        ({"data": {"prompt": "plain"}}, r"data.train: .*tokenizer cannot encode the prompt of"),
        ({"data": {"chat_template": True}}, r"data.chat_template"),
        ({"data": {"max_prompt_tokens": 4}}, r"data.*prompt.* tokens, data.max_prompt_tokens is 4"),
        ({"data": {"max_prompt_tokens": 60}}, r"max_prompt_tokens 60 \+ .* model's context"),
        ({"model": {"name": "./nowhere"}}, r"model.name.*\./nowhere does not exist; check"),
        ({"model": {"name": "nowhere"}}, r"model.name 'nowhere' is no folder here.*revision"),
        ({"model": {"name": "."}}, r"model.name: . holds no config.json"),
        ({"model": {"pad_token": "<x>"}}, r"model.pad_token '<x>' is not in the tokenizer of"),
        ({"budget": {"limit": 1}, "tuning": None}, r"budget.limit: 1 updates does not pay for one"),
        ({"budget": {"unit": "tokens", "limit": 9}}, r"budget.limit.* 4.5 tokens does not pay for"),
        ({"budget": {"unit": "flops", "limit": 1e3}}, r"budget.limit.* flops does not pay"),
        ({"tuning": {"budget_fraction": 0.01}}, r"budget.limit x tuning.budget_fraction"),
        ({"tuning": {"shared": {"optimizer.lr": {"low": 1, "high": 2}}}}, r"'optimizer.lr' is"),
        ({"tuning": {"arms": {"ppo": {"kl.coef": {"low": 1, "high": 2}}}}}, r"'kl.coef' is no"),
        ({"tuning": {"arms": {"pop": {}}}}, r"tuning.arms: 'pop' is no arm .*Did you mean 'ppo'"),
        ({"tuning": {"seeds": [0]}}, r"tuning.seeds \[0\] are also in seeds: tune on others"),
        ({"reward": {"correct": float("nan")}}, r"reward.correct: .*finite number"),
        ({"reward": {"correct": 1e39}}, r"reward.correct: .*less than or equal to 1000000"),
        ({"runtime": {"device": "cuda"}}, r"runtime.device: cuda, but torch sees no GPU; use auto"),
        ({"plugins": ["none.py"]}, r"plugin file .*none.py does not exist; check the path"),
    ],
)  # fmt: skip
def test_a_bad_spec(refused: Refusal, changes: dict[str, Any], expected: str):
    line = refused(**changes)
    assert re.search(expected, line), line


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--set", "budget.limit"], r"--set 'budget.limit': give KEY.KEY=VALUE"),
        (["--set", "budget.limt=3"], r"unknown key 'budget.limt'\. Did you mean 'limit'\?"),
        (["--set", "seeds=[1"], r"--set 'seeds=\[1': the value is not YAML"),
        (["--plugin", "none.py"], r"plugin file .*none.py does not exist; check the path"),
        (["--jobs", "-1"], r"--jobs.*greater than or equal to 0"),
        (["--job", "1"], r"(?i)no such option.*--job"),
        (["--results"], r"(?i)--results.*requires an argument"),
    ],
)
def test_bad_options(refused: Refusal, options: list[str], expected: str):
    line = refused(*options)
    assert re.search(expected, line), line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\na: 2\n", r"bad.yaml line 2: not YAML: key 'a' stands twice"),
        ("a: !!python/object/apply:os.system ['touch owned']\n", r"bad.yaml line 1: not YAML"),
        ("a: [\n", r"bad.yaml line 2: not YAML"),
        ("", r"bad.yaml: a spec is a mapping of keys"),
    ],
)
@pytest.mark.parametrize("command", ["run", "validate", "plan", "status"])
def test_a_file_that_is_no_spec(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], command: str, text: str, expected: str
):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main([command, "bad.yaml"])
    (line,) = capfd.readouterr().err.splitlines()
    assert ended.value.code == BAD_INPUT
    assert re.search(expected, line), line
    assert {p.name for p in tmp_path.iterdir()} == {"bad.yaml"}


@pytest.mark.parametrize("command", ["run", "validate", "plan", "status", "audit", "report"])
def test_an_experiment_that_is_not_there(capfd: pytest.CaptureFixture[str], command: str):
    for name in ("nothing", "nothing.yaml"):
        with pytest.raises(SystemExit) as ended:
            main([command, name])
        (line,) = capfd.readouterr().err.splitlines()
        assert ended.value.code == BAD_INPUT
        assert re.search(r"nothing", line)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import nowhere_at_all\n", r"plugin.py failed to import: line 1: ModuleNotFoundError: No"),
        ("x = 1\nx = y\n", r"plugin.py failed to import: line 2: NameError: name 'y' is not def"),
        ("x = 1\n\ndef f(:\n", r"plugin.py failed to import: line 3: SyntaxError: "),
        ("x = 1\n", r"plugin .*plugin.py defines no Arm; see docs/arms.md"),
        ("raise SystemExit(0)\n", r"plugin.py failed to import: line 1: SystemExit: 0"),
        (
            "from harness.arms.grpo import GRPO\nA = GRPO.but('ppo')\n",
            r"plugin .*: an arm named 'ppo' exists already \(built-in\); choose another name",
        ),
    ],
)
def test_a_plugin_that_will_not_do(tmp_path: Path, refused: Refusal, text: str, expected: str):
    (tmp_path / "plugin.py").write_text(text)
    line = refused("--plugin", "plugin.py")
    assert re.search(expected, line), line


@pytest.mark.parametrize("name", ["base", "placebo", "../up", "a b", ""])
def test_an_arm_whose_name_will_not_do(tmp_path: Path, refused: Refusal, name: str):
    plugin = f"from harness.arms.grpo import GRPO\nA = GRPO.but({name!r})\n"
    (tmp_path / "plugin.py").write_text(plugin)
    line = refused("--plugin", "plugin.py", arms=["grpo", name])
    assert re.search(rf"arm {name!r} .*plugin.py\) calls itself .*choose another name", line), line


GROUP_OF_FIVE = """
from harness.arms.grpo import GRPO
from harness.parts.sampling import FixedGroups

FIVE = GRPO.but("five", sampling=FixedGroups(group_size=5))
"""


def test_an_arms_own_group_that_does_not_divide_the_batch(tmp_path: Path, refused: Refusal):
    (tmp_path / "five.py").write_text(GROUP_OF_FIVE)
    line = refused(arms=["grpo", "five"], plugins=["five.py"])
    assert "arm 'five': its group of 5 does not divide the batch of 8" in line
    assert "change one of them" in line


def test_a_model_without_pad_token(tmp_path: Path, refused: Refusal):
    save_model(tmp_path / "padless", pad=False)
    line = refused(model={"name": str(tmp_path / "padless")})
    assert "its tokenizer has no pad token; set model.pad_token, for example to '<eos>'" in line


def test_a_model_whose_context_is_too_short(tmp_path: Path, refused: Refusal):
    save_model(tmp_path / "short", context=20)
    line = refused(model={"name": str(tmp_path / "short")})
    assert re.search(r"max_prompt_tokens 16 \+ sampling.max_new_tokens 6 .*context of 20", line)


@pytest.mark.parametrize("damage", ["weights cut", "config cut", "no tokenizer", "empty folder"])
def test_a_damaged_model(tmp_path: Path, refused: Refusal, damage: str):
    folder = tmp_path / "damaged"
    if damage == "empty folder":
        folder.mkdir()
    elif damage == "no tokenizer":
        LlamaForCausalLM(
            LlamaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
        ).save_pretrained(folder)
    else:
        save_model(folder)
        name = "model.safetensors" if damage == "weights cut" else "config.json"
        (folder / name).write_bytes((folder / name).read_bytes()[:50])
    line = refused(model={"name": str(folder)})
    assert str(folder) in line
    assert "model.name" in line


def test_a_data_file_that_is_missing(
    tmp_path: Path, refused: Refusal, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("HARNESS_DATA", str(tmp_path / "data"))
    train = {"task": "gsm8k", "split": "train", "source": "local", "limit": 3}
    line = refused(data={"train": train})
    assert re.search(r"data.train: .*gsm8k.* is missing; set HARNESS_DATA", line), line
    monkeypatch.setenv("HARNESS_DATA", str(tmp_path / "none"))
    assert "is not a folder; mend or unset it" in refused(data={"train": train})


def test_an_empty_split(real_data: Path, refused: Refusal, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HARNESS_DATA", str(real_data))
    test = {"task": "aime24", "split": "test", "source": "local", "offset": 30}
    line = refused(data={"test": {"arithmetic": test | {"limit": None}}})
    assert re.search(r"data.test.arithmetic: .*offset 30, but it has 30 problems; lower", line), (
        line
    )


def test_results_that_another_process_writes(
    tmp_path: Path, model: Path, capfd: pytest.CaptureFixture[str]
):
    """flock tells descriptors apart, so this process can stand for the other."""
    spec = write_spec(tmp_path / "tiny.yaml", model)
    with ResultStore(tmp_path / "held").exclusive():
        with pytest.raises(SystemExit) as ended:
            main(["run", str(spec), "--results", "held"])
        (line,) = capfd.readouterr().err.splitlines()
    assert ended.value.code == BAD_INPUT
    assert re.search(r"results folder .*held: another process \(pid \d+\) is writing here", line)
    assert {p.name for p in (tmp_path / "held").iterdir()} == {".lock"}


def test_results_where_nothing_can_be_written(
    tmp_path: Path, model: Path, capfd: pytest.CaptureFixture[str]
):
    spec = write_spec(tmp_path / "tiny.yaml", model)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SystemExit) as ended:
        main(["run", str(spec), "--results", "file/below"])
    (line,) = capfd.readouterr().err.splitlines()
    assert ended.value.code == BAD_INPUT
    assert re.search(r"results folder .*file/below: cannot be written \(Not a directory\)", line)
    assert (tmp_path / "file").read_text() == "mine"
