"""A YAML file, what it extends, and overrides, to one checked ``ExperimentSpec``."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from harness.errors import InputError, counted, shown, suggest
from harness.spec.schema import ExperimentSpec

EXPERIMENTS = Path("experiments")
SWEEP = "sweep"


def find_spec(name: str) -> Path:
    """The file of an experiment: a path, or a name in ``experiments/``.

    Raises:
        InputError: there is no such file.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if path.is_file():
            return path
        raise InputError(f"spec {path} does not exist; check the path")
    for candidate in (EXPERIMENTS / f"{name}.yaml", EXPERIMENTS / f"{name}.yml"):
        if candidate.is_file():
            return candidate
    known = [p.stem for p in EXPERIMENTS.glob("*.y*ml")]
    raise InputError(f"no experiment {name!r} in {EXPERIMENTS}/.{suggest(name, known)}")


def load_spec(path: Path, overrides: Sequence[str] = ()) -> ExperimentSpec:
    """Read, merge and check a spec.

    Args:
        path: the YAML file; its ``extends:`` names another, relative to it, that it overrides.
        overrides: ``a.b=value`` settings, the value in YAML, applied last.

    Raises:
        InputError: unknown key, wrong type, inconsistent values; the line names file and key.
    """
    tree = read_tree(path, overrides)
    if SWEEP in tree:
        raise InputError(f"{path} is a sweep of several experiments; name one with --case")
    return check_spec(tree, f"{path} (with --set)" if overrides else str(path))


def read_tree(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """A spec file with what it extends and the overrides, unchecked.

    A file that extends a sweep has it too, unless it says ``sweep: null``.

    Raises:
        InputError: a file that cannot be read, or an override that is none.
    """
    tree = _read(path, ())
    for override in overrides:
        tree = _set(tree, override)
    if tree.get(SWEEP, 0) is None:
        del tree[SWEEP]
    return tree


def check_spec(tree: Mapping[str, Any], where: str) -> ExperimentSpec:
    """A plain tree to a checked spec."""
    try:
        return ExperimentSpec.model_validate(tree)
    except ValidationError as error:
        raise InputError(_one_line(error, where)) from error


def read_yaml(path: Path) -> Any:
    """Plain data of a YAML file; duplicate keys are refused.

    Raises:
        InputError: not there, not UTF-8, or not YAML.
    """
    try:
        return _parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; check the path") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); give a YAML file") from error
    except RecursionError:
        raise InputError(f"{path}: nested without end; write it without such aliases") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise InputError(f"{path}{line}: not YAML: {problem}") from error


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that stands twice (YAML would keep the last); reads 1e-4 as a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is not a word", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _parse(text: str) -> Any:
    """One YAML document as plain data; tags that would build objects are errors."""
    loader = _UniqueKeys(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


_FLOAT = r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"
_UniqueKeys.add_implicit_resolver(  # YAML 1.1 takes 1e-4 for text
    "tag:yaml.org,2002:float", re.compile(_FLOAT), list("-+0123456789")
)


def _read(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    resolved = path.resolve()
    if resolved in above:
        raise InputError(f"{path}: extends goes round in a circle; break it")
    tree = read_yaml(path)
    if not isinstance(tree, dict):
        raise InputError(f"{path}: a spec is a mapping of keys, found {type(tree).__name__}")
    extends = tree.pop("extends", None)
    if extends is None:
        return tree
    if not isinstance(extends, str):
        raise InputError(f"{path}: extends must name one file, found {extends!r}")
    below = path.parent / extends
    if not below.is_file():
        raise InputError(
            f"{path}: extends {extends!r}, but {below} does not exist; the path is relative to "
            "the spec"
        )
    return merge(_read(below, (*above, resolved)), tree)


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """``above`` laid over ``below``: mappings merge, anything else is replaced."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(old, Mapping)
        merged[key] = merge(old, value) if both else value  # type: ignore[arg-type]
    return merged


def _set(tree: dict[str, Any], override: str) -> dict[str, Any]:
    path, equals, text = override.partition("=")
    if not equals or not path.strip():
        raise InputError(f"--set {override!r}: give KEY.KEY=VALUE")
    try:
        value = _parse(text)
    except yaml.YAMLError as error:
        raise InputError(f"--set {override!r}: the value is not YAML") from error
    for key in reversed(path.strip().split(".")):
        value = {key: value}
    return merge(tree, value)


def _one_line(error: ValidationError, where: str) -> str:
    first = error.errors()[0]
    location, kind = first["loc"], first["type"]
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if kind == "extra_forbidden":
        known = _fields_at(ExperimentSpec, location[:-1])
        return (
            f"{where}: unknown key {_dotted(location)!r}.{suggest(str(location[-1]), known)}{more}"
        )
    if kind == "missing" and not isinstance(location[-1], int):
        return f"{where}: key {_dotted(location)!r} is missing; add it{more}"
    if kind == "missing":  # an item of a list of fixed length
        location = location[:-1]
    place = f"{where}: {_dotted(location)}: " if location else f"{where}: "
    found = first.get("input")
    plain = isinstance(found, (str, int, float, bool, list, tuple, NoneType))
    return f"{place}{_message(first)}{f', found {shown(found)}' * plain}{more}"


def _dotted(location: Sequence[str | int]) -> str:
    """Keys joined by points, without the names of types by which a choice of types is told."""
    types_ = ("int", "float", "str")
    return ".".join(str(p) for p in location if p not in types_ and "[" not in str(p))


def _message(problem: Any) -> str:
    """What is wrong, in the words of YAML where the checker has those of Python."""
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "tuple_type":
        return "should be a list"
    if kind in ("dict_type", "model_type", "model_attributes_type"):
        return "should be a mapping of keys"
    if kind in ("too_short", "too_long", "missing"):
        few = f"at least {counted(context['min_length'], 'item')}" if kind == "too_short" else None
        many = f"at most {counted(context['max_length'], 'item')}" if kind == "too_long" else None
        return f"should have {few or many or 'more items'}"
    message = problem["msg"].removeprefix("Value error, ")
    return re.sub(r"^(Input|String) should", "should", message)


def _fields_at(model: type[BaseModel], location: Sequence[Any]) -> list[str]:
    """The known keys of the model that a location leads to."""
    for part in location:
        field = model.model_fields.get(str(part))
        if field is None:
            continue  # a key of a mapping, such as a test set's name
        nested = _model_in(field.annotation)
        if nested is None:
            return []
        model = nested
    return list(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, dict, tuple):
        for argument in typing.get_args(annotation):
            if found := _model_in(argument):
                return found
    return None
