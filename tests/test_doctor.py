"""Each thing the doctor looks at, well and ill; nothing it meets may end in an exception."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import harness.doctor
from harness.doctor import Check, diagnose
from harness.recipes import RECIPES, WARMSTART_VERSION
from harness.tasks import TASKS


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def looked(name: str) -> dict[str, Check]:
    return by_name(harness.doctor._guarded(getattr(harness.doctor, name)))


def test_everything_is_looked_at_and_what_fails_has_a_mend():
    found = by_name(diagnose())
    for name in ("python", "packages", "torch", "results folder", "cache folder", "grader",
                 "fork server"):  # fmt: skip
        assert found[name].ok, found[name]
    for name in ("memory", "disk, results", "data", "embedded/arithmetic", "vllm (optional)"):
        assert name in found
    assert all(check.mend for check in found.values() if not check.ok)
    assert all("\n" not in check.found + check.mend for check in found.values())


def test_packages_that_do_not_fit_are_named(monkeypatch: pytest.MonkeyPatch):
    wanted = ["torch<1", "numpy>=1", "no-such-package-here>=2", "tomli>1; python_version < '3'"]
    monkeypatch.setattr(harness.doctor, "_requirements", lambda: wanted)
    found = looked("_packages")
    assert not found["package torch"].ok
    assert "wanted <1" in found["package torch"].found
    assert found["package no-such-package-here"].found == "not installed"
    assert found["package no-such-package-here"].mend == "pip install 'no-such-package-here>=2'"
    assert not found["packages"].ok
    assert found["packages"].found.startswith("1 fit")
    assert len(found) == 3


def test_data_is_compared_with_the_hashes_it_was_checked_with(
    real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HARNESS_DATA", str(real_data))
    files = {i.path for task in TASKS.values() for i in task.splits.values() if i.path}
    assert looked("_data")["data"].found.startswith(f"{real_data}: {len(files)} files as checked")
    shutil.copytree(real_data / "amc23", tmp_path / "amc23")
    monkeypatch.setenv("HARNESS_DATA", str(tmp_path))
    fewer = looked("_data")["data"]
    assert fewer.ok
    assert "1 files as checked" in fewer.found
    assert "gsm8k/train.jsonl" in fewer.found
    with (tmp_path / "amc23/amc23.jsonl").open("a") as file:
        file.write("\n")
    altered = looked("_data")
    assert not altered["data"].ok
    assert not altered["data amc23/amc23.jsonl"].ok
    assert "restore" in altered["data amc23/amc23.jsonl"].mend


def test_a_data_folder_that_is_none_is_a_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HARNESS_DATA", "/nowhere/at/all")
    found = by_name(diagnose())
    assert not found["data"].ok
    assert "HARNESS_DATA: '/nowhere/at/all' is not a folder" in found["data"].found


def test_folders_that_cannot_be_written_are_lines(monkeypatch: pytest.MonkeyPatch):
    if not Path("/proc/self").exists():
        pytest.skip("needs a folder that not even root can write to")
    monkeypatch.chdir("/proc")
    monkeypatch.setenv("HARNESS_CACHE", "/proc/cache")
    results, cache = looked("_results")["results folder"], looked("_cache")["cache folder"]
    assert not results.ok
    assert "--results" in results.mend
    assert not cache.ok
    assert "HARNESS_CACHE" in cache.mend


def test_looking_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    for name in ("_results", "_cache", "_embedded", "_disk"):
        looked(name)
    assert list(tmp_path.iterdir()) == []


def test_an_embedded_base_counts_when_its_recipe_is_todays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path))
    assert "not built" in looked("_embedded")["embedded/arithmetic"].found
    folder = tmp_path / "embedded/arithmetic-0123"
    folder.mkdir(parents=True)
    recipe = dataclasses.asdict(RECIPES["arithmetic"])
    manifest = {"name": "arithmetic", "seed": 3, "recipe": recipe}
    manifest["warmstart_version"] = WARMSTART_VERSION
    (folder / "recipe.json").write_text(json.dumps(manifest))
    assert looked("_embedded")["embedded/arithmetic"].found == "built: seed 3"
    assert "not built" in looked("_embedded")["embedded/arithmetic-tiny"].found
    manifest["recipe"] = recipe | {"steps": 1}
    (folder / "recipe.json").write_text(json.dumps(manifest))
    assert "not built" in looked("_embedded")["embedded/arithmetic"].found


def test_too_little_memory_or_disk_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(harness.doctor, "LEAST_MEMORY", 1e18)
    monkeypatch.setattr(harness.doctor, "LEAST_DISK", 1e18)
    for check in [*looked("_memory").values(), *looked("_disk").values()]:
        assert not check.ok
        assert "free" in check.mend


def test_a_check_that_breaks_is_a_line_and_keeps_what_it_had_found():
    def broken() -> Iterator[Check]:
        yield Check("first", True, "well")
        raise RuntimeError("two\nlines")

    first, second = harness.doctor._guarded(broken)
    assert first.ok
    assert (second.name, second.ok, second.found) == ("broken", False, "RuntimeError: two lines")
    assert second.mend
