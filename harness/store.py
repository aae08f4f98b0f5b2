"""Results on disk: appended to while running, replaced atomically when whole, never edited."""

from __future__ import annotations

import errno
import fcntl
import gzip
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from harness.errors import CellError, InputError
from harness.identity import canonical, digest

TEXT_FILES = ("steps.jsonl", "evals.jsonl", "timing.jsonl", "samples.jsonl")
TEMPORARY = ".tmp"
SWEEP_FILE = "sweep.json"  # in the folder of a sweep, beside those of its cases
PATIENCE_SECONDS = 30.0  # for the orphan of a killed run, which dies within moments


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
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO):
            raise CellError(
                f"{path}: cannot be written ({error.strerror}); mend and run again"
            ) from error
        raise


def write_text(path: Path, text: str) -> None:
    """Write a file as UTF-8, whole or not at all."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    with disk_errors(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise


def sweep(folder: Path) -> None:
    """Remove what a killed process was about to rename; only where no other process writes."""
    for left in folder.glob(f".*{TEMPORARY}"):
        left.unlink(missing_ok=True)


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


def stored_bytes(path: Path) -> bytes:
    """A stored file's bytes; a published folder may hold it compressed, as ``NAME.gz``.

    Raises:
        OSError: neither is there, or it is damaged.
    """
    packed = path.with_name(f"{path.name}.gz")
    if not path.exists() and packed.exists():
        return gzip.decompress(packed.read_bytes())
    return path.read_bytes()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; a last line cut short by a kill is left out.

    Raises:
        InputError: a line before the last is not JSON.
    """
    try:
        content = stored_bytes(path)
    except FileNotFoundError:
        return []
    found = []
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
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
        dump = partial(json.dumps, sort_keys=True, ensure_ascii=False, allow_nan=False)
        data = memoryview("".join(dump(record) + "\n" for record in records).encode())
        # Unbuffered: a buffer would write what is left of it on closing, after the cut.
        with disk_errors(self.path / name), (self.path / name).open("ab", buffering=0) as file:
            start = file.tell()
            try:
                while data:
                    data = data[file.write(data) :]
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
        """Cut the appended files back to a checkpoint's sizes; what came after is run again.

        Raises:
            CellError: a file is shorter than the checkpoint remembers: lines were lost.
        """
        for name in TEXT_FILES:
            path, size = self.path / name, sizes.get(name, 0)
            found = path.stat().st_size if path.exists() else 0
            if found < size:
                raise CellError(
                    f"{path}: has {found} bytes, its checkpoint knows of {size}: lines were lost; "
                    f"restore it, or delete {self.path} to run this cell anew"
                )
            if found > size:
                os.truncate(path, size)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the folder against a second process, such as the orphan of a killed run.

        Raises:
            CellError: another process holds it and does not let go.
        """
        held = os.open(self.path, os.O_RDONLY)
        try:
            if not _locked(held, PATIENCE_SECONDS):
                raise CellError(
                    f"{self.path}: another process is writing here; stop it and run again"
                )
            for folder in (self.path, self.path / "checkpoint"):
                sweep(folder)
            yield
        finally:
            os.close(held)

    def clear_error(self) -> None:
        (self.path / "error.json").unlink(missing_ok=True)


@dataclass(frozen=True)
class ResultStore:
    """``results/<experiment>/``."""

    path: Path

    @property
    def lock_file(self) -> Path:
        return self.path / "spec.lock.yaml"

    @property
    def plugins(self) -> Path:
        """Copies of the files that define arms."""
        return self.path / "plugins"

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
            InputError: another process holds it, or it cannot be written to.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / ".lock").open("a+")
        except OSError as error:
            raise InputError(
                f"results folder {self.path}: cannot be written ({error.strerror}); "
                "mend it, or name another with --results"
            ) from error
        with file:
            if not _locked(file.fileno(), 1.0):  # `harness status` looks at the lock for a moment
                file.seek(0)
                owner = file.read().strip() or "unknown"
                raise InputError(
                    f"results folder {self.path}: another process (pid {owner}) is writing here; "
                    "wait for it or stop it, or name another folder with --results"
                )
            with disk_errors(self.path / ".lock"):
                file.truncate(0)
                file.write(str(os.getpid()))
                file.flush()
            for folder in (self.path, self.path / "tuning", self.plugins):
                sweep(folder)
            yield


def _locked(descriptor: int, patience: float) -> bool:
    """Lock an open file or folder against other processes; False if it stays held for so long."""
    end = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.05)


def chained(record: dict[str, Any], previous: str) -> dict[str, Any]:
    """The record with a hash that depends on every line before it."""
    return record | {"chain": digest([previous, record])}


def chain_breaks(records: list[dict[str, Any]], previous: str = "") -> list[int]:
    """Indices of the records whose hash does not follow from their content and predecessor."""
    breaks = []
    for index, record in enumerate(records):
        content = {k: v for k, v in record.items() if k != "chain"}
        if record.get("chain") != digest([previous, content]):
            breaks.append(index)
        previous = record.get("chain", "")
    return breaks


def same(a: Any, b: Any) -> bool:
    """Equal as JSON."""
    return canonical(a) == canonical(b)
