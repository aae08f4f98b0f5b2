"""Results on disk: whole or not at all, whatever fails and whoever else writes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from harness import store
from harness.errors import CellError, InputError
from harness.store import (
    CellFolder,
    ResultStore,
    chain_breaks,
    chained,
    read_json,
    read_lines,
    write_json,
    write_text,
)


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 256 KiB; the test skips where this user may not mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("this user cannot mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def test_a_file_is_replaced_whole(tmp_path: Path):
    write_json(tmp_path / "deep" / "a.json", {"b": 1, "a": "é"})
    write_json(tmp_path / "deep" / "a.json", {"b": 2, "a": "é"})
    assert (tmp_path / "deep" / "a.json").read_text() == '{\n "a": "é",\n "b": 2\n}\n'
    assert names(tmp_path / "deep") == {"a.json"}


def test_a_number_that_json_does_not_know_is_never_written(tmp_path: Path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "a.json", {"loss": float("nan")})
    with pytest.raises(ValueError, match="not JSON compliant"):
        CellFolder(tmp_path).append("steps.jsonl", {"a": 1}, {"loss": float("inf")})
    assert not (tmp_path / "steps.jsonl").exists()


def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_text(tmp_path / "a.txt", "old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CellError, match=r"a.txt: the disk is full; free space and run again"):
        write_text(tmp_path / "a.txt", "new")
    assert (tmp_path / "a.txt").read_text() == "old"
    assert names(tmp_path) == {"a.txt"}


def test_lines_are_appended_in_order(tmp_path: Path):
    folder = CellFolder(tmp_path)
    folder.append("steps.jsonl", {"b": 1, "a": 2})
    folder.append("steps.jsonl", {"step": 2}, {"text": "é\u2028\n"})
    assert folder.lines("steps.jsonl") == [{"a": 2, "b": 1}, {"step": 2}, {"text": "é\u2028\n"}]
    assert folder.lines("none.jsonl") == []


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_last_line_cut_by_a_kill_is_left_out(tmp_path: Path, cut: int):
    folder = CellFolder(tmp_path)
    folder.append("steps.jsonl", {"a": 1}, {"b": "éé"})
    whole = (tmp_path / "steps.jsonl").read_bytes()
    (tmp_path / "steps.jsonl").write_bytes(whole[:-cut])
    assert folder.lines("steps.jsonl") == [{"a": 1}]


def test_damage_before_the_last_line_is_an_error(tmp_path: Path):
    path = tmp_path / "steps.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b"\n{"c": 3}\n')
    with pytest.raises(InputError, match=r"steps.jsonl line 2: not JSON"):
        read_lines(path)
    path.write_bytes(b'{"a": "\xff"}\n')
    with pytest.raises(InputError, match=r"steps.jsonl line 1: not JSON"):
        read_lines(path)
    with pytest.raises(InputError, match=r"none.json does not exist"):
        read_json(tmp_path / "none.json")


def test_a_full_disk_takes_a_whole_append_or_none(small_disk: Path):
    folder = CellFolder(small_disk)
    record = {"text": "x" * 3000}

    def fill() -> None:
        for _ in range(1000):
            folder.append("steps.jsonl", record, record)

    with pytest.raises(CellError, match=r"steps.jsonl: the disk is full"):
        fill()
    lines = (small_disk / "steps.jsonl").read_bytes().split(b"\n")
    assert lines[-1] == b""
    assert len(lines) % 2 == 1  # pairs of lines: no half of a pair
    assert all(len(line) == len(lines[0]) for line in lines[:-1])
    assert len(lines) > 10
    with pytest.raises(CellError, match="the disk is full"):
        folder.write("done.json", {"text": "x" * 9000})
    assert names(small_disk) == {"steps.jsonl"}


def test_rewinding_cuts_to_the_checkpoint_and_refuses_lost_lines(tmp_path: Path):
    folder = CellFolder(tmp_path)
    folder.append("steps.jsonl", {"step": 1})
    sizes = folder.sizes()
    folder.append("steps.jsonl", {"step": 2})
    folder.append("evals.jsonl", {"at": 0.5})
    folder.rewind(sizes)
    assert folder.lines("steps.jsonl") == [{"step": 1}]
    assert folder.lines("evals.jsonl") == []
    (tmp_path / "steps.jsonl").write_bytes(b"")
    with pytest.raises(CellError, match=r"steps.jsonl: has 0 bytes, its checkpoint knows of 12"):
        folder.rewind(sizes)


def test_a_change_anywhere_breaks_the_chain_there():
    records: list[dict[str, Any]] = []
    for step in range(5):
        records.append(chained({"step": step}, records[-1]["chain"] if records else ""))
    assert chain_breaks(records) == []
    changed = [dict(r) for r in records]
    changed[2]["step"] = 7
    assert chain_breaks(changed) == [2]
    assert chain_breaks([*records[:2], *records[3:]]) == [2]
    assert chain_breaks([records[1], records[0], *records[2:]]) == [0, 1, 2]


HOLD = """
import sys, time
from pathlib import Path
from harness.store import CellFolder, ResultStore
kind, path = sys.argv[1:]
folder = ResultStore(Path(path)) if kind == "results" else CellFolder(Path(path))
with folder.exclusive():
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder():
    """Start another process that holds a folder."""
    started = []

    def hold(kind: str, path: Path) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, kind, str(path)], stdout=subprocess.PIPE
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        return process

    yield hold
    for process in started:
        process.kill()
        process.wait()


def test_a_second_process_on_the_results_is_refused_by_name(tmp_path: Path, holder: Any):
    other = holder("results", tmp_path)
    with (
        pytest.raises(InputError, match=rf"another process \(pid {other.pid}\) is writing here"),
        ResultStore(tmp_path).exclusive(),
    ):
        pass
    other.kill()
    other.wait()
    with ResultStore(tmp_path).exclusive():  # the kernel let go with the process
        assert (tmp_path / ".lock").read_text() == str(os.getpid())


def test_a_cell_waits_for_the_orphan_of_a_killed_run(
    tmp_path: Path, holder: Any, monkeypatch: pytest.MonkeyPatch
):
    other = holder("cell", tmp_path)
    monkeypatch.setattr(store, "PATIENCE_SECONDS", 0.2)
    start = time.monotonic()
    with (
        pytest.raises(CellError, match=r"another process is writing here; stop it"),
        CellFolder(tmp_path).exclusive(),
    ):
        pass
    assert 0.2 <= time.monotonic() - start < 5
    other.kill()
    monkeypatch.setattr(store, "PATIENCE_SECONDS", 30.0)
    with CellFolder(tmp_path).exclusive():
        pass
    assert names(tmp_path) == set()  # a lock that leaves no file behind


def test_what_a_killed_process_was_writing_is_swept(tmp_path: Path):
    (tmp_path / "checkpoint").mkdir()
    for left in (".done.json.123.tmp", "checkpoint/.state.json.123.tmp"):
        (tmp_path / left).write_text("half")
    write_json(tmp_path / "run.json", {})
    with CellFolder(tmp_path).exclusive():
        assert names(tmp_path) == {"run.json", "checkpoint"}
        assert names(tmp_path / "checkpoint") == set()


def test_a_results_folder_that_cannot_be_made_is_bad_input(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with (
            pytest.raises(InputError, match=r"results folder .*file.*cannot be written"),
            ResultStore(path).exclusive(),
        ):
            pass
