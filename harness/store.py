"""Results on disk: appended to while running, replaced atomically when whole, never edited."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import CellError, InputError
from harness.identity import canonical, digest

TEXT_FILES = ("steps.jsonl", "evals.jsonl", "timing.jsonl", "samples.jsonl")


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """A full or failing disk as one clear line.

    Raises:
        CellError: the disk is full, over quota, or cannot be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CellError(
                f"{path}: the disk is full; free space and run again (it resumes)"
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EIO):
            raise CellError(
                f"{path}: cannot be written ({error.strerror}); mend and run again"
            ) from error
        raise


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with disk_errors(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise


def write_json(path: Path, value: Any) -> None:
    """Write JSON, sorted and indented, whole or not at all."""
    write_text(
        path,
        json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n",
    )


def read_json(path: Path) -> Any:
    """Plain data of a JSON file.

    Raises:
        InputError: missing or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; a last line cut short by a kill is left out.

    Raises:
        InputError: a line before the last is not JSON.
    """
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")
    found = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise InputError(f"{path} line {number}: not JSON: {error}") from error
    return found


@dataclass(frozen=True)
class CellFolder:
    """The files of one cell. Only the process that runs the cell writes."""

    path: Path

    @property
    def done(self) -> bool:
        return (self.path / "done.json").exists()

    @property
    def failed(self) -> bool:
        return not self.done and (self.path / "error.json").exists()

    @property
    def started(self) -> bool:
        return (self.path / "run.json").exists()

    def json(self, name: str) -> Any:
        return read_json(self.path / name)

    def write(self, name: str, value: Any) -> None:
        write_json(self.path / name, value)

    def append(self, name: str, *records: dict[str, Any]) -> None:
        """Add lines to a JSON-lines file: all of them, on disk when this returns, or none."""
        with disk_errors(self.path / name), (self.path / name).open("ab") as file:
            start = file.tell()
            try:
                for record in records:
                    line = json.dumps(record, sort_keys=True, ensure_ascii=False, allow_nan=False)
                    file.write(line.encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                with suppress(OSError):
                    os.truncate(self.path / name, start)
                raise

    def lines(self, name: str) -> list[dict[str, Any]]:
        return read_lines(self.path / name)

    def sizes(self) -> dict[str, int]:
        """Byte sizes of the appended files: a checkpoint remembers them."""
        return {
            name: (self.path / name).stat().st_size
            for name in TEXT_FILES
            if (self.path / name).exists()
        }

    def rewind(self, sizes: dict[str, int]) -> None:
        """Cut the appended files back to a checkpoint's sizes; what came after is run again."""
        for name in TEXT_FILES:
            path = self.path / name
            if path.exists() and path.stat().st_size > sizes.get(name, 0):
                os.truncate(path, sizes.get(name, 0))

    def clear_error(self) -> None:
        (self.path / "error.json").unlink(missing_ok=True)

    def drop_checkpoint(self) -> None:
        shutil.rmtree(self.path / "checkpoint", ignore_errors=True)


@dataclass(frozen=True)
class ResultStore:
    """``results/<experiment>/``."""

    path: Path

    @property
    def lock_file(self) -> Path:
        return self.path / "spec.lock.yaml"

    def cell(self, arm: str, name: str) -> CellFolder:
        return CellFolder(self.path / "runs" / arm / name)

    def cells(self) -> dict[tuple[str, str], CellFolder]:
        """Every cell on disk, by arm and cell name."""
        return {
            (folder.parent.name, folder.name): CellFolder(folder)
            for folder in sorted((self.path / "runs").glob("*/*"))
            if (folder / "run.json").exists() or (folder / "error.json").exists()
        }

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the folder against a second process.

        Raises:
            InputError: another process holds it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                file.seek(0)
                owner = file.read().strip() or "unknown"
                raise InputError(
                    f"{self.path}: another process (pid {owner}) is writing here; "
                    "wait for it, or stop it"
                ) from error
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield


def chained(record: dict[str, Any], previous: str) -> dict[str, Any]:
    """The record with a hash that depends on every line before it."""
    return record | {"chain": digest([previous, record])}


def chain_breaks(records: list[dict[str, Any]]) -> list[int]:
    """Indices of the records whose hash does not follow from their content and predecessor."""
    previous, breaks = "", []
    for index, record in enumerate(records):
        content = {k: v for k, v in record.items() if k != "chain"}
        if record.get("chain") != digest([previous, content]):
            breaks.append(index)
        previous = record.get("chain", "")
    return breaks


def same(a: Any, b: Any) -> bool:
    """Equal as JSON."""
    return canonical(a) == canonical(b)
