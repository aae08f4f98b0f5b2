"""A plugin file is kept beside the results, hashed in every cell, and asked for by the audit."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none
from experiment_fixture import save_model, write_spec

from harness.certificate import audit
from harness.certificate.finding import MISSING
from harness.errors import InputError
from harness.experiment import ensure_lock, open_context, run_experiment
from harness.job import Context
from harness.lock import make_lock, read_lock
from harness.plan import make_plan
from harness.plugins import copy_name, file_hashes, recorded_origin
from harness.report import write_report

ROOT = Path(__file__).parent.parent
PLUGIN = 'from harness.arms.grpo import GRPO\r\n\r\nMINE = GRPO.but("mine")  # \u00e9\r\n'
SHA = hashlib.sha256(PLUGIN.encode()).hexdigest()
COPY = f"mine-{SHA[:12]}.py"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and, somewhere else, a plugin."""
    root = tmp_path_factory.mktemp("root")
    save_model(root / "model")
    (root / "private").mkdir()
    (root / "private" / "mine.py").write_bytes(PLUGIN.encode())
    return root


def opened(root: Path, results: Path, plugin: Path | None = None) -> Context:
    spec = write_spec(
        results.with_suffix(".yaml"), root / "model", arms=["grpo", "mine"], tuning=None,
        controls={"base": False, "placebo": "mine"}, budget={"limit": 2, "evaluate_at": [1.0]},
    )  # fmt: skip
    return open_context(spec, [], [plugin or root / "private" / "mine.py"], results)


@pytest.fixture(scope="module")
def sound(root: Path) -> Path:
    results = root / "sound"
    end = run_experiment(opened(root, results), 2)
    assert (end.done, end.failed, end.missing) == (3, [], 0)
    return results


@pytest.fixture
def results(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "results"))


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    tree = yaml.safe_load(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))


def test_the_file_is_kept_byte_for_byte_and_its_place_is_not_recorded(root: Path, sound: Path):
    assert [p.name for p in (sound / "plugins").iterdir()] == [COPY]
    assert (sound / "plugins" / COPY).read_bytes() == PLUGIN.encode()
    lock = read_lock(sound / "spec.lock.yaml")
    assert lock["arms"]["mine"]["origin"] == "plugin mine.py"
    assert lock["arms"]["grpo"]["origin"] == "built-in"
    assert lock["hashes"]["plugin.mine.py"] == SHA
    for arm in ("mine", "placebo"):
        run = json.loads((sound / "runs" / arm / "seed-0" / "run.json").read_text())
        assert run["origin"] == "plugin mine.py"
        assert run["hashes"]["plugin.mine.py"] == SHA
    for file in (*sound.rglob("run.json"), sound / "spec.lock.yaml"):
        assert str(root / "private") not in file.read_text()
    planned = json.dumps(make_plan(opened(root, root / "planned")).to_json())
    assert '"plugin mine.py"' in planned
    assert str(root / "private") not in planned


def test_such_results_are_certified_and_reported(results: Path):
    certificate = audit(results)
    assert [v.message for v in certificate.violations] == []
    assert certificate.certified
    assert SHA in write_report(results).html.read_text()


def test_a_published_folder_has_the_copy_and_is_certified(results: Path, tmp_path: Path):
    (tmp_path / "site" / "results").mkdir(parents=True)
    shutil.copytree(results, tmp_path / "site" / "results" / "tiny")
    command = ["make", "-f", str(ROOT / "Makefile"), "publish", "EXP=tiny"]
    subprocess.run(command, cwd=tmp_path / "site", check=True, capture_output=True)
    published = tmp_path / "site" / "published" / "tiny"
    assert (published / "plugins" / COPY).read_bytes() == PLUGIN.encode()
    assert not (published / "runs/mine/seed-0/log.txt").exists()
    assert audit(published).certified


def _unpin(results: Path) -> None:
    edit(results / "spec.lock.yaml", lambda lock: lock["hashes"].pop("plugin.mine.py"))


PLANTS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "the copy is deleted": (
        lambda r: (r / "plugins" / COPY).unlink(), MISSING, f"plugins/{COPY}",
    ),
    "all copies are": (lambda r: shutil.rmtree(r / "plugins"), MISSING, f"plugins/{COPY}"),
    "the copy is edited": (
        lambda r: (r / "plugins" / COPY).write_text(PLUGIN + "\n"), "hashes", f"plugins/{COPY}",
    ),
    "the copy has another name": (
        lambda r: (r / "plugins" / COPY).rename(r / "plugins" / "mine.py"),
        MISSING, f"plugins/{COPY}",
    ),
    "the lock pins another file": (
        lambda r: edit(
            r / "spec.lock.yaml", lambda lock: lock["hashes"].update({"plugin.mine.py": "0" * 64})
        ),
        MISSING, f"plugins/mine-{'0' * 12}.py",
    ),
    "the lock pins none": (_unpin, MISSING, "spec.lock.yaml: hashes.plugin.mine.py"),
    "a cell ran another file": (
        lambda r: edit(
            r / "runs/placebo/seed-0/run.json",
            lambda run: run["hashes"].update({"plugin.mine.py": "1" * 64}),
        ),
        "hashes", "run.json: hashes.plugin.mine.py",
    ),
    "a cell recorded none": (
        lambda r: edit(
            r / "runs/mine/seed-0/run.json", lambda run: run["hashes"].pop("plugin.mine.py")
        ),
        "hashes", "run.json: hashes.plugin.mine.py",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTS)
def test_whatever_does_not_fit_is_a_violation(results: Path, name: str):
    plant, check, key = PLANTS[name]
    plant(results)
    certificate = audit(results)
    assert not certificate.certified
    assert (check, key) in {(v.check, v.key) for v in certificate.violations}


def test_a_changed_plugin_does_not_go_on_in_the_old_folder(root: Path, tmp_path: Path):
    plugin = tmp_path / "mine.py"
    plugin.write_bytes(PLUGIN.encode())
    context = opened(root, tmp_path / "results", plugin)
    ensure_lock(context, make_lock(context))
    copy = context.results / "plugins" / COPY
    copy.unlink()
    ensure_lock(context, make_lock(context))  # as a run that goes on does
    assert copy.read_bytes() == PLUGIN.encode()
    plugin.write_text(PLUGIN + "# one word more\n")
    with pytest.raises(InputError, match=rf"hashes.plugin.mine.py is '[0-9a-f]*', there '{SHA}'"):
        ensure_lock(context, make_lock(context))
    assert [p.name for p in copy.parent.iterdir()] == [COPY]


def test_plugins_of_one_name_or_none_are_refused(root: Path, tmp_path: Path):
    plugin = root / "private" / "mine.py"
    other = Path(shutil.copy(plugin, tmp_path / "mine.py"))
    assert file_hashes([plugin]) == {"plugin.mine.py": SHA}
    with pytest.raises(InputError, match=rf"{other}: another one is called so too; rename one"):
        file_hashes([plugin, other])
    with pytest.raises(InputError, match=r"absent.py does not exist; check the path"):
        file_hashes([tmp_path / "absent.py"])


def test_only_a_files_place_is_left_out_of_an_origin():
    assert recorded_origin("plugin /home/somebody/arms/opo.py") == "plugin opo.py"
    for origin in ("built-in", "control", "module a.b", "entry point a.b:C"):
        assert recorded_origin(origin) == origin
    assert copy_name("opo.py", "0123456789abcdef") == "opo-0123456789ab.py"
