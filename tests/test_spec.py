"""Specs: what is read, what is merged, and what is refused in one line that says where."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none
from experiment_fixture import write_spec

from harness.errors import InputError
from harness.spec.load import find_spec, load_spec, merge, read_yaml
from harness.spec.sweep import load_sweep

ROOT = Path(__file__).parent.parent


def spec_file(tmp_path: Path, **changes: Any) -> Path:
    return write_spec(tmp_path / "tiny.yaml", tmp_path / "model", **changes)


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        load_spec(path, overrides)
    line = str(caught.value)
    assert "\n" not in line
    assert str(path) in line or "--set" in line
    return line


@pytest.mark.parametrize(
    "path", sorted((ROOT / "experiments").glob("*.yaml")), ids=lambda p: p.stem
)
def test_every_shipped_spec_is_valid_and_named_after_its_file(path: Path):
    sweep = load_sweep(path)
    if sweep is None:
        assert load_spec(path).name == path.stem
    else:
        assert sweep.name == path.stem
        assert [case.spec.name for case in sweep.cases] == [
            f"{path.stem}.{case.name}" for case in sweep.cases
        ]


def test_what_is_read_is_what_was_written(tmp_path: Path):
    spec = load_spec(spec_file(tmp_path))
    assert spec.budget.limit == 12
    assert spec.budget.evaluate_at == (0.5, 1.0)
    assert spec.tuning is not None
    assert spec.tuning.shared["optimizer.learning_rate"].log is True
    assert spec.baseline_arm == "grpo"


def test_numbers_without_a_point_are_numbers(tmp_path: Path):
    path = tmp_path / "n.yaml"
    path.write_text("a: 1e-4\nb: 2E5\nc: -1e+2\nd: 1.5e3\ne: 1e\nf: e5\n")
    assert read_yaml(path) == {"a": 1e-4, "b": 2e5, "c": -100.0, "d": 1500.0, "e": "1e", "f": "e5"}


def test_extends_is_relative_to_the_file_and_the_nearer_file_wins(tmp_path: Path):
    spec_file(tmp_path)
    (tmp_path / "below").mkdir()
    (tmp_path / "middle.yaml").write_text(
        "extends: tiny.yaml\nseeds: [3]\nsampling: {max_new_tokens: 5}\n"
    )
    top = tmp_path / "below" / "top.yaml"
    top.write_text("extends: ../middle.yaml\nseeds: [4, 5]\n")
    spec = load_spec(top)
    assert spec.seeds == (4, 5)
    assert spec.sampling.max_new_tokens == 5
    assert spec.sampling.prompts_per_step == 2


def test_merging_replaces_lists_and_joins_mappings():
    below = {"a": {"x": 1, "y": [1, 2]}, "b": 2}
    assert merge(below, {"a": {"y": [3]}, "c": {}}) == {"a": {"x": 1, "y": [3]}, "b": 2, "c": {}}
    assert below == {"a": {"x": 1, "y": [1, 2]}, "b": 2}


def test_overrides_come_last_and_hold_yaml(tmp_path: Path):
    path = spec_file(tmp_path)
    spec = load_spec(
        path, ["budget.limit=3e2", "seeds=[7, 8]", "model.lora={rank: 2}", "tuning=null"]
    )
    assert spec.budget.limit == 300
    assert spec.seeds == (7, 8)
    assert spec.model.lora is not None
    assert spec.model.lora.rank == 2
    assert spec.tuning is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"bugdet": {"limit": 1}}, r"unknown key 'bugdet'\. Did you mean 'budget'\?"),
        (
            {"sampling": {"temprature": 1}},
            r"unknown key 'sampling.temprature'\. Did you mean 'temperature'\?",
        ),
        (
            {"data": {"test": {"arithmetic": {"offzet": 1}}}},
            r"unknown key 'data.test.arithmetic.offzet'\. Did you mean 'offset'\?",
        ),
        (
            {"tuning": {"shared": {"optimizer.learning_rate": {"lwo": 1}}}},
            r"unknown key 'tuning.shared.optimizer.learning_rate.lwo'\. Did you mean 'low'\?",
        ),
        ({"seeds": "three"}, r": seeds: should be a list, found 'three'"),
        ({"optimizer": {"betas": [0.9]}}, r"betas: should have more items, found \[0.9\]"),
        ({"optimizer": {"betas": [1, 1, 1]}}, r"betas: should have at most 2 items, found \[1, 1,"),
        ({"arms": [None]}, r"arms.0: should be a valid string, found null"),
        ({"controls": {"base": [True]}}, r"base: should be a valid boolean.*found \[true\]"),
        ({"model": {"lora": {"target_modules": 3}}}, r"lora.target_modules: should be a list, fou"),
        (
            {"tuning": {"shared": {"optimizer.learning_rate": {"choices": [1, 2]}}}},
            r"search range \{low: 0.001, high: 0.01, choices: \[1, 2\]\}: give either low and high",
        ),
        (
            {"tuning": {"arms": {"ppo": {"kl.kl_coef": {"choices": []}}}}},
            r"tuning.arms.ppo.kl.kl_coef: search range: choices is empty; give the values to try",
        ),
        ({"seeds": [0.5]}, r"seeds.0: .*integer.*found 0.5"),
        ({"budget": {"limit": "much"}}, r"budget.limit: .*valid number.*found 'much'"),
        ({"budget": {"unit": "flop"}}, r"budget.unit: .*'flops'.*found 'flop'"),
        ({"budget": {"limit": 0}}, r"budget.limit: .*greater than 0, found 0"),
        ({"model": {"dtype": "float16"}}, r"model.dtype: .*float32.*found 'float16'"),
        ({"model": "gpt"}, r"model: should be a mapping of keys, found 'gpt'"),
        ({"sampling": None}, r"key 'sampling' is missing; add it"),
        ({"question": ""}, r"question: .*at least 1 character"),
        ({"name": "../up"}, r"name: .*found '../up'"),
        ({"reward": {"correct": float("nan")}}, r"reward.correct: .*finite number"),
        ({"reward": {"correct": float("inf")}}, r"reward.correct: .*finite number"),
        ({"reward": {"correct": 0, "wrong": 1}}, r"reward: correct \(0.0\) must be above wrong"),
        ({"evaluation": {"k": [1, 8]}}, r"k 8 is above samples 4.*raise evaluation.samples to 16"),
        ({"evaluation": {"k": []}}, r"evaluation: k \[\]: give rising whole numbers"),
        ({"evaluation": {"k": [0, 1]}}, r"evaluation: k \[0, 1\]: give rising whole numbers"),
        ({"evaluation": {"k": [2, 1]}}, r"evaluation: k \[2, 1\]: give rising whole numbers"),
        ({"budget": {"evaluate_at": [0.5]}}, r"budget: evaluate_at \[0.5\]: .*ending in 1.0"),
        ({"budget": {"evaluate_at": [0.5, 0.5, 1.0]}}, r"budget: evaluate_at .* rising shares"),
        ({"optimizer": {"minibatches": 3}}, r"optimizer.minibatches 3 does not divide the batch"),
        ({"tuning": {"seeds": [0]}}, r"tuning.seeds \[0\] are also in seeds"),
        ({"tuning": {"seeds": [9, 9]}}, r"tiny.yaml: tuning.seeds \[9, 9\]: one is named twice"),
        ({"seeds": [1, 1]}, r"seeds \[1, 1\]: one is named twice"),
        ({"seeds": []}, r"seeds: should have at least 1 item, found \[\]"),
        ({"arms": ["ppo", "ppo"]}, r"arms \['ppo', 'ppo'\]: one is named twice"),
        ({"baseline": "dapo"}, r"baseline 'dapo' is not among arms \['grpo', 'ppo'\]"),
        ({"controls": {"placebo": "dapo"}}, r"controls.placebo 'dapo' is not among arms"),
        ({"sampling": {"top_p": 0.9}}, r"sampling: top_p 0.9: training samples from the whole"),
        (
            {"tuning": {"shared": {"optimizer.learning_rate": {"low": 1, "high": 0.1}}}},
            r"learning_rate: .*low 1.0 must be below high 0.1",
        ),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_in_one_line_with_its_key(
    tmp_path: Path, changes: dict[str, Any], expected: str
):
    assert re.search(expected, refusal(spec_file(tmp_path, **changes)))


def test_more_than_one_mistake_is_counted(tmp_path: Path):
    line = refusal(spec_file(tmp_path, seeds="x", budget={"limit": -1}))
    assert line.endswith("(and 1 more)")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seeds: [0]\nname: a\nseeds: [1]\n", r"line 3: not YAML: key 'seeds' stands twice"),
        ("model: {name: a, name: b}\n", r"line 1: not YAML: key 'name' stands twice"),
        ("name: !!python/object:os.system x\n", r"line 1: not YAML: could not determine a constr"),
        ("name: !!python/object/apply:os.system ['true']\n", r"line 1: not YAML: could not deter"),
        ("name: [1\n", r"line 2: not YAML: expected ',' or '\]'"),
        ("name: a\n\tb: c\n", r"line 2: not YAML: .*cannot start any token"),
        ("? [a]\n: b\n", r"line 1: not YAML: key \['a'\] is not a word"),
        ("a: &a {b: *a}\n", r"key 'name' is missing"),
        ("", r"a spec is a mapping of keys, found NoneType"),
        ("- a\n- b\n", r"a spec is a mapping of keys, found list"),
        ("1: 2\n", r"key 'name' is missing"),
        ("extends: 3\n", r"extends must name one file, found 3"),
        ("extends: nowhere.yaml\n", r"extends 'nowhere.yaml', but .*nowhere.yaml does not exist"),
        ("extends: .\n", r"extends '.', but .* does not exist"),
    ],
)
def test_a_file_that_is_no_spec_is_refused_with_its_line(tmp_path: Path, text: str, expected: str):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert re.search(expected, refusal(path))


def test_text_that_is_not_utf8_is_refused(tmp_path: Path):
    path = tmp_path / "bad.yaml"
    path.write_bytes(b"name: caf\xe9\n")
    assert "is not UTF-8 text" in refusal(path)


def test_a_circle_of_extends_is_refused(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    assert "a.yaml: extends goes round in a circle" in refusal(tmp_path / "a.yaml")
    (tmp_path / "c.yaml").write_text("extends: c.yaml\n")
    assert "extends goes round in a circle" in refusal(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("budget.limit", r"--set 'budget.limit': give KEY.KEY=VALUE"),
        ("=3", r"--set '=3': give KEY.KEY=VALUE"),
        ("seeds=[1", r"--set 'seeds=\[1': the value is not YAML"),
        ("budget.limt=3", r"\(with --set\): unknown key 'budget.limt'\. Did you mean 'limit'\?"),
        ("budget..limit=3", r"\(with --set\): unknown key 'budget.'"),
        ("seeds=!!python/name:os.system", r"the value is not YAML"),
        ("model=other", r"\(with --set\): model: .*found 'other'"),
    ],
)
def test_a_bad_override_is_refused(tmp_path: Path, override: str, expected: str):
    assert re.search(expected, refusal(spec_file(tmp_path), override))


def test_an_experiment_is_found_by_name_or_path(tmp_path: Path):
    (tmp_path / "experiments").mkdir()
    path = write_spec(tmp_path / "experiments" / "mine.yaml", tmp_path / "model")
    assert find_spec("mine").resolve() == path
    assert find_spec(str(path)) == path
    with pytest.raises(InputError, match=r"no experiment 'mien' in .*Did you mean 'mine'\?"):
        find_spec("mien")
    with pytest.raises(InputError, match=r"spec other.yaml does not exist; check the path"):
        find_spec("other.yaml")
