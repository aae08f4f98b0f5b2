"""The embedded base: the same bits every time, built once, never half, and worth training."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import warmstart
from harness.errors import CellError, InputError
from harness.recipes import EmbeddedRecipe, StrategyMix, demonstrate, recipe_from_json
from harness.tasks import arithmetic
from harness.warmstart import RECIPES, ensure_embedded_base

TINY = "arithmetic-tiny"
SHORT = dataclasses.replace(RECIPES[TINY], steps=20)  # for what holds however long one trains

CHILD = f"""
import dataclasses, sys
from pathlib import Path
from harness import warmstart
short = dataclasses.replace(warmstart.RECIPES["{TINY}"], steps=20)
warmstart.RECIPES["{TINY}"] = short
say = lambda line: print(line, flush=True)
say(warmstart.ensure_embedded_base("{TINY}", cache_dir=Path(sys.argv[1]), progress=say))
"""


def ask(cache: Path) -> subprocess.Popen[str]:
    """A process that wants the short tiny base from a cache."""
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(cache)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(warmstart.__file__).parent.parent,
    )


def weights_sha256(folder: Path) -> str:
    return json.loads((folder / "recipe.json").read_text())["weights_sha256"]


def test_demonstrations_hold_the_shares_that_the_recipe_names() -> None:
    rng = random.Random(0)
    problem = arithmetic.load("train", limit=4)[3]
    mix = StrategyMix(worked=0.2, left_to_right=0.3, direct_right=0.6)
    drawn = [demonstrate(problem, mix, 5, rng) for _ in range(4000)]
    kinds = [arithmetic.strategy(problem.question, completion) for completion in drawn]
    direct = [int(c[1:]) for c, kind in zip(drawn, kinds, strict=True) if kind == "direct"]
    right = sum(guess == int(problem.answer) for guess in direct)
    # 4 standard errors of a share from 4000 draws are below 0.032
    assert kinds.count("worked") / 4000 == pytest.approx(0.2, abs=0.032)
    assert kinds.count("left_to_right") / 4000 == pytest.approx(0.3, abs=0.032)
    assert right / len(direct) == pytest.approx(0.6, abs=0.045)
    assert all(guess >= 0 and abs(guess - int(problem.answer)) <= 5 for guess in direct)


def test_demonstrations_come_from_the_train_split_alone() -> None:
    source = RECIPES["arithmetic"].demonstrations(0)
    for problem, completion in (next(source) for _ in range(2000)):
        assert arithmetic.split_of(problem.question) == "train"
        assert len(completion) + 1 <= 32  # with EOS


def test_the_key_holds_everything_that_moves_a_weight() -> None:
    def key(recipe: EmbeddedRecipe, seed: int = 0) -> str:
        return warmstart._manifest(TINY, recipe, seed)["key"]

    recipe = RECIPES[TINY]
    mix = dataclasses.replace(recipe.chain, worked=0.41)
    others = [
        key(dataclasses.replace(recipe, chain=mix)),
        key(dataclasses.replace(recipe, learning_rate=2e-2)),
        key(dataclasses.replace(recipe, hidden_size=64)),
        key(recipe, seed=1),
        key(recipe),
    ]
    assert len(set(others)) == 5
    assert key(recipe) == others[-1]
    restored = recipe_from_json(json.loads(json.dumps(dataclasses.asdict(recipe))))
    assert restored == recipe


def test_one_build_for_many_none_half_written_and_always_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECIPES, TINY, SHORT)
    cache, other = tmp_path / "one", tmp_path / "two"

    killed = ask(cache)
    while not list((cache / "embedded").glob(".*.*/stderr.txt")):
        assert killed.poll() is None
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not list((cache / "embedded").glob(f"{TINY}-*/recipe.json"))

    both = [ask(cache), ask(cache)]
    said = [process.communicate(timeout=300)[0].splitlines() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("building" in line for lines in said for line in lines) == 1
    folder = Path(said[0][-1])
    assert said[1][-1] == str(folder)
    assert not list(folder.parent.glob(".*"))  # the killed build's folder went too

    # A damaged copy is built again, under other threads and another random state: the same bits.
    damaged = other / "embedded" / folder.name
    shutil.copytree(folder, damaged)
    (damaged / "model.safetensors").write_bytes(b"short")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    torch.manual_seed(7)
    rebuilt = ensure_embedded_base(TINY, cache_dir=other)
    assert rebuilt == damaged
    assert weights_sha256(rebuilt) == weights_sha256(folder)
    first, second = ((f / "model.safetensors").read_bytes() for f in (folder, rebuilt))
    assert first == second
    assert torch.initial_seed() == 7
    assert not list(Path.cwd().glob("trainer*"))

    started, lines = time.perf_counter(), []
    assert ensure_embedded_base(TINY, cache_dir=other, progress=lines.append) == rebuilt
    assert lines == []
    assert time.perf_counter() - started < 1.0


@pytest.fixture(scope="module")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_embedded_base(TINY, cache_dir=tmp_path_factory.mktemp("cache"))


def test_the_tiny_base_loads_and_is_neither_hopeless_nor_done(tiny_base: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_base)
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    problems = arithmetic.load("test", limit=100, levels=["Level 1"])
    batch = tokenizer([p.question for p in problems], padding=True, return_tensors="pt")
    torch.manual_seed(0)
    drawn = model.generate(
        **batch, do_sample=True, top_k=0, max_new_tokens=32, num_return_sequences=8
    )[:, batch["input_ids"].shape[1] :]
    completions = tokenizer.batch_decode(drawn, skip_special_tokens=True)
    asked = [p for p in problems for _ in range(8)]
    pairs = list(zip(asked, completions, strict=True))
    right = [c.rsplit("A", 1)[-1] == p.answer for p, c in pairs]
    kinds = [arithmetic.strategy(p.question, c) for p, c in pairs]
    assert 0.10 <= sum(right) / len(right) <= 0.60
    assert (drawn == tokenizer.eos_token_id).any(1).float().mean() > 0.95
    # the demonstrations' shares are 0.4 and 0.6
    assert 0.25 <= kinds.count("worked") / len(kinds) <= 0.55
    assert 0.40 <= kinds.count("direct") / len(kinds) <= 0.75


def test_the_folder_says_what_it_is(tiny_base: Path) -> None:
    manifest = json.loads((tiny_base / "recipe.json").read_text())
    assert manifest["recipe"] == json.loads(json.dumps(dataclasses.asdict(RECIPES[TINY])))
    assert manifest["libraries"]["torch"] == torch.__version__
    assert tiny_base.name == f"{TINY}-{manifest['key']}"
    assert (tiny_base / "model.safetensors").stat().st_size < 1 << 20


def test_a_failed_build_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECIPES, TINY, dataclasses.replace(SHORT, heads=5))
    with pytest.raises(CellError, match="building embedded/arithmetic-tiny failed: ") as caught:
        ensure_embedded_base(TINY, cache_dir=tmp_path)
    assert "\n" not in str(caught.value)
    assert {p.suffix for p in (tmp_path / "embedded").iterdir()} == {".lock"}


def test_bad_names_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Did you mean 'arithmetic'"):
        ensure_embedded_base("arithmetics")
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(InputError, match="HARNESS_CACHE: cannot write"):
        ensure_embedded_base(TINY, cache_dir=blocked)
