"""A name to a value: a built-in, an entry point, or ``module:NAME``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.errors import InputError, suggest

FILE = "plugin "  # how the origin of what a file defines begins
HASH_KEY = "plugin."  # before a file's name, among the hashes of a run's inputs


def find(name: str, built_in: Mapping[str, Any], group: str) -> tuple[Any, str]:
    """The value of a name and where it comes from.

    Raises:
        InputError: unknown name, a module that fails to import, or a name it does not hold.
    """
    if name in built_in:
        return built_in[name], "built-in"
    if ":" in name:
        module_name, _, attribute = name.partition(":")
        module = _import(module_name)
        if not hasattr(module, attribute):
            known = [n for n in vars(module) if n.isupper()]
            raise InputError(
                f"plugin {name!r}: {module_name} has no {attribute!r}.{suggest(attribute, known)}"
            )
        return getattr(module, attribute), f"module {module_name}"
    points = {p.name: p for p in importlib.metadata.entry_points(group=group)}
    if name in points:
        try:
            return points[name].load(), f"entry point {points[name].value}"
        except Exception as error:
            raise InputError(
                f"plugin {name!r} ({points[name].value}) failed to import: "
                f"{type(error).__name__}: {error}"
            ) from error
    raise InputError(
        f"unknown {group.rpartition('.')[2].rstrip('s')} {name!r}."
        f"{suggest(name, [*built_in, *points])}"
    )


def load_file(path: Path) -> ModuleType:
    """Import a plugin file by its path, once.

    Raises:
        InputError: missing, or failing to import; the message names the file and the line.
    """
    path = path.resolve()
    if not path.is_file():
        raise InputError(f"plugin file {path} does not exist; check the path")
    # Named after its content, so that a run's identity does not depend on where the file lies.
    name = f"plugin_{path.stem}_{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"plugin file {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise InputError(f"plugin file {path} failed to import: {_where(error, path)}") from error
    return module


def recorded_origin(origin: str) -> str:
    """An origin as results record it: of a plugin file its name, not where it lies."""
    return FILE + Path(origin.removeprefix(FILE)).name if origin.startswith(FILE) else origin


def file_hashes(files: Sequence[Path]) -> dict[str, str]:
    """The SHA-256 of each plugin file, as ``plugin.NAME``.

    Raises:
        InputError: a file is missing, or two of one name could not be told apart in the results.
    """
    found: dict[str, str] = {}
    for path in files:
        if not path.is_file():
            raise InputError(f"plugin file {path} does not exist; check the path")
        key = HASH_KEY + path.name
        if key in found:
            raise InputError(f"plugin file {path}: another one is called so too; rename one")
        found[key] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def copy_name(name: str, sha256: str) -> str:
    """What a results folder calls its copy of a plugin file."""
    return f"{Path(name).stem}-{sha256[:12]}.py"


def _import(module_name: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise InputError(
            f"plugin module {module_name!r} failed to import: {type(error).__name__}: {error}"
        ) from error


def _where(error: BaseException, path: Path) -> str:
    trace = error.__traceback__
    line = None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and error.lineno:
        line = error.lineno
    at = f"line {line}: " if line else ""
    return f"{at}{type(error).__name__}: {error}"
