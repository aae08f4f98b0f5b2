"""Weights that are built once, in a child process, and cached by what they depend on.

The child has one thread and none of the caller's state (thread count, random state, accelerate's
environment), so that weights are a function of their manifest and the kind of processor alone. A
folder is published whole or not at all.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness.errors import CellError, InputError

CACHE_VARIABLE, DEFAULT_CACHE = "HARNESS_CACHE", "~/.cache/harness"

_WEIGHTS = "model.safetensors"
_LIBRARIES = ("torch", "transformers", "trl", "accelerate", "tokenizers")
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Artefact:
    """What is to be built.

    Attributes:
        kind: the folder below the cache that artefacts of this kind stand in.
        name: the start of the folder's name.
        title: what messages call it.
        manifest: all that the weights depend on, with the key that it hashes to.
        record: the file that the manifest is written to, beside the weights.
        module: run as the child; it reads the manifest from standard input, and writes ``model``
            in its working folder.
        threads: of the child.
        gpu: the child sees the caller's GPUs; without, it sees none.
        prepare: writes into the child's working folder what it needs beside the manifest.
    """

    kind: str
    name: str
    title: str
    manifest: Mapping[str, Any]
    record: str
    module: str
    threads: int = 1
    gpu: bool = False
    prepare: Callable[[Path], None] = lambda work: None


def keyed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Content with the versions of the libraries that weights depend on, and its key."""
    libraries = {library: version(library) for library in _LIBRARIES}
    text = json.dumps({**content, "libraries": libraries}, sort_keys=True)
    return {"key": hashlib.sha256(text.encode()).hexdigest()[:16], **json.loads(text)}


def ensure(
    wanted: Artefact, *, cache_dir: Path | None = None, progress: Progress | None = None
) -> Path:
    """The artefact's folder, built first where the cache lacks it.

    Processes that ask at the same time wait for one build. A build that dies leaves nothing that
    a later call could take for a model.

    Raises:
        InputError: a cache folder that cannot be written.
        CellError: the build failed (diverged, disk full, killed).
    """
    root = cache_root(cache_dir) / wanted.kind
    folder = root / f"{wanted.name}-{wanted.manifest['key']}"
    if _is_complete(folder, wanted.record):
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{folder.name}.lock"):
            if not _is_complete(folder, wanted.record):
                _publish(wanted, folder, progress or (lambda line: None))
    except OSError as error:
        raise InputError(
            f"{CACHE_VARIABLE}: cannot write {root} ({error.strerror}); name a writable folder "
            "with free space"
        ) from error
    return folder


def cache_root(cache_dir: Path | None = None) -> Path:
    """``$HARNESS_CACHE``, else ``~/.cache/harness``, unless a folder is given."""
    if cache_dir is None:
        cache_dir = Path(os.environ.get(CACHE_VARIABLE) or DEFAULT_CACHE)
    return Path(cache_dir).expanduser().absolute()


def _is_complete(folder: Path, record: str) -> bool:
    """Whether a folder holds a model whose weights are those that were published."""
    try:
        manifest = json.loads((folder / record).read_text())
        return manifest["weights_sha256"] == _file_sha256(folder / _WEIGHTS)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _file_sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; the system frees it when its holder dies, however it dies."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _publish(wanted: Artefact, folder: Path, progress: Progress) -> None:
    """Build in a folder beside the final one and rename it there whole. Needs the lock."""
    prefix = f".{folder.name}."
    for stale in folder.parent.glob(f"{prefix}*"):  # left by a build that was killed
        shutil.rmtree(stale, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        wanted.prepare(work)
        _run_build(wanted, work, progress)
        built = work / "model"
        found = built / wanted.record  # what the child adds to the manifest
        more = json.loads(found.read_text()) if found.exists() else {}
        record = {**wanted.manifest, **more, "weights_sha256": _file_sha256(built / _WEIGHTS)}
        found.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
        if folder.exists():  # incomplete or damaged, else it would have been returned
            shutil.rmtree(folder)
        built.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run_build(wanted: Artefact, work: Path, progress: Progress) -> None:
    """Run the module as a child process; its lines go to ``progress``."""
    progress(f"building {wanted.title} (seed {wanted.manifest['seed']}), once")
    errors = work / "stderr.txt"
    with errors.open("w") as stderr:
        child = subprocess.Popen(
            [sys.executable, "-m", wanted.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            cwd=work,
            env=_child_environment(wanted, work),
        )
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(json.dumps(wanted.manifest))
            child.stdin.close()
            for line in child.stdout:
                progress(f"{wanted.title}: {line.rstrip()}")
            code = child.wait()
        finally:
            child.kill()
            child.wait()
    if code != 0:
        lines = [line for line in errors.read_text().splitlines() if line.strip()]
        reason = lines[-1] if lines else f"its process ended with {code}"
        raise CellError(f"building {wanted.title} failed: {reason}")


def _child_environment(wanted: Artefact, work: Path) -> dict[str, str]:
    """The caller's environment without what would reach the trainer or the arithmetic."""
    prefixes = ("ACCELERATE_", "CUDA_", "HF_", "MKL_", "OMP_", "TORCH", "TRANSFORMERS_", "WANDB_")
    distributed = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(prefixes) and key not in distributed
    }
    source = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") if wanted.gpu else ""
    return {
        **kept,
        **({"CUDA_VISIBLE_DEVICES": seen} if seen is not None else {}),
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": str(wanted.threads),
        "HF_HOME": str(work / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
