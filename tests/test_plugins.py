"""Arms from elsewhere: found by file, by module or by entry point, or refused in one line."""

from __future__ import annotations

import importlib.metadata
import itertools
from pathlib import Path

import pytest

from harness.arms import ARMS, find_arms, list_arms
from harness.arms.grpo import GRPO
from harness.errors import InputError

_count = itertools.count()

ARM = 'from harness.arms.grpo import GRPO\nMINE = GRPO.but("mine")\n'


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write a module of a fresh name into the current folder, where ``module:NAME`` looks."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str) -> str:
        name = f"plugin_under_test_{next(_count)}"
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


def test_built_in_arms_say_so():
    found = find_arms(list(ARMS))
    assert {name: f.arm for name, f in found.items()} == ARMS
    assert {f.origin for f in found.values()} == {"built-in"}


def test_an_unknown_arm_gets_a_suggestion():
    with pytest.raises(InputError, match=r"^unknown arm 'grop'\. Did you mean 'grpo'\?$"):
        find_arms(["grop"])
    with pytest.raises(InputError, match=r"unknown arm 'zzzzzz'\. Known: .*grpo"):
        find_arms(["zzzzzz"])


def test_an_arm_named_twice_is_refused():
    with pytest.raises(InputError, match="'grpo' is named twice"):
        find_arms(["grpo", "ppo", "grpo"])


def test_an_arm_by_module_and_name(module):
    name = module(ARM)
    found = find_arms(["grpo", f"{name}:MINE"])
    assert list(found) == ["grpo", "mine"]
    assert found["mine"].arm == GRPO.but("mine")
    assert found["mine"].origin == f"module {name}"


def test_what_a_module_lacks_is_named(module):
    name = module(ARM)
    with pytest.raises(InputError, match=r"has no 'MIEN'. Did you mean 'MINE'"):
        find_arms([f"{name}:MIEN"])
    with pytest.raises(InputError, match=r"is a type, not a harness.arm.Arm"):
        find_arms(["pathlib:Path"])
    with pytest.raises(InputError, match="'no_such_module_here' failed to import: ModuleNotFound"):
        find_arms(["no_such_module_here:ARM"])


def test_an_arm_from_a_file_is_loaded_once(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text(ARM + 'with open("loads", "a") as f:\n    f.write("x")\n')
    found = find_arms(["grpo", "mine"], [path])
    assert found["mine"].origin == f"plugin {path}"
    assert "mine" in list_arms([path])
    assert Path("loads").read_text() == "x"


def test_a_plugin_that_fails_to_import_names_its_file_and_line(tmp_path: Path):
    path = tmp_path / "broken.py"
    path.write_text("import os\n\nos.no_such_thing()\n")
    with pytest.raises(InputError, match=rf"{path} .*line 3: AttributeError: .*no_such_thing"):
        find_arms(["grpo"], [path])
    path.write_text("x = (\n\ndef f(:\n")
    with pytest.raises(InputError, match=rf"{path} failed to import: line \d: SyntaxError"):
        find_arms(["grpo"], [path])


def test_the_line_is_the_plugins_own_even_where_the_harness_refuses(tmp_path: Path):
    path = tmp_path / "mistaken.py"
    path.write_text("from harness.knobs import knob\n\nx = knob(0.5, low=2, high=1)\n")
    with pytest.raises(InputError, match=r"line 3: InputError: search range: low 2 must be below"):
        find_arms(["grpo"], [path])


def test_a_plugin_without_an_arm_or_a_file_is_refused(tmp_path: Path):
    empty = tmp_path / "empty.py"
    empty.write_text("from harness.arms.grpo import GRPO\n")
    with pytest.raises(InputError, match="defines no Arm"):
        find_arms(["grpo"], [empty])
    with pytest.raises(InputError, match="does not exist"):
        find_arms(["grpo"], [tmp_path / "absent.py"])


def test_a_plugin_may_not_take_a_name_that_exists(tmp_path: Path):
    fake, first, second = (tmp_path / f"{name}.py" for name in ("fake", "first", "second"))
    fake.write_text('from harness.arms.ppo import PPO\nFAKE = PPO.but("grpo")\n')
    with pytest.raises(InputError, match=r"named 'grpo' exists already \(built-in\)"):
        find_arms(["grpo"], [fake])
    first.write_text(ARM)
    second.write_text(ARM)
    with pytest.raises(InputError, match="named 'mine' exists already"):
        find_arms(["mine"], [first, second])


def test_an_arm_by_entry_point(module, monkeypatch: pytest.MonkeyPatch):
    name = module(ARM)
    point = importlib.metadata.EntryPoint("theirs", f"{name}:MINE", "harness.arms")
    broken = importlib.metadata.EntryPoint("broken", "no_such_module_here:ARM", "harness.arms")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point, broken])
    found = find_arms(["theirs"])
    assert found["mine"].origin == f"entry point {name}:MINE"
    with pytest.raises(InputError, match=r"'broken' \(no_such_module_here:ARM\) failed to import"):
        find_arms(["broken"])
    with pytest.raises(InputError, match=r"unknown arm 'their'. Did you mean 'theirs'"):
        find_arms(["their"])
