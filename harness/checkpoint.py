"""A run's latest state on disk, from which it goes on as if it had never stopped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from harness.errors import CellError, InputError
from harness.learner import Learner
from harness.models import Reference
from harness.store import TEMPORARY, disk_errors, read_json, write_json


def save_checkpoint(
    folder: Path,
    learner: Learner,
    state: Mapping[str, Any],
    reference: Reference | None = None,
) -> None:
    """Write weights, optimizer moments and state; the old checkpoint stands until the new is whole.

    A reference that is no longer the base is written too.
    No random state is held: every stream is a function of seed and step.
    """
    name = f"step-{state['step']:07d}.safetensors"
    with disk_errors(folder / name):
        folder.mkdir(parents=True, exist_ok=True)
        held = reference.tensors() if reference is not None else ()
        _save(folder / name, dict(learner.tensors()) | dict(held))
    write_json(folder / "state.json", {**state, "tensors": name})
    for old in folder.glob("step-*.safetensors"):
        if old.name != name:
            old.unlink()


def load_checkpoint(
    folder: Path, learner: Learner, reference: Reference | None = None
) -> dict[str, Any] | None:
    """Put the saved state back; None where there is none.

    Raises:
        CellError: the checkpoint is damaged, or does not fit the run.
    """
    path = folder / "state.json"
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = read_json(path)
        path = folder / state["tensors"]
        tensors = load_file(path)
        learner.restore(tensors)
        if reference is not None:
            reference.restore(tensors)
    except (OSError, InputError, LookupError, TypeError, RuntimeError, SafetensorError) as error:
        raise CellError(
            f"{path}: cannot be resumed from ({type(error).__name__}: {error}); delete {folder} "
            "to run this cell anew, which gives the same numbers"
        ) from error
    return state


def save_weights(folder: Path, learner: Learner) -> None:
    """The trained policy alone, for evaluation after the run."""
    weights = {
        name.removeprefix("policy/"): tensor
        for name, tensor in learner.tensors()
        if name.startswith("policy/")
    }
    with disk_errors(folder / "policy.safetensors"):
        folder.mkdir(parents=True, exist_ok=True)
        _save(folder / "policy.safetensors", weights)


def drop_checkpoint(folder: Path) -> None:
    """Remove what only resuming needs; for a run that is recorded as done."""
    for old in (folder / "state.json", *folder.glob("step-*.safetensors")):
        old.unlink(missing_ok=True)


def load_weights(path: Path, model: torch.nn.Module) -> None:
    """Put saved policy weights into a model of the same shape.

    Raises:
        CellError: they are damaged, or do not fit.
    """
    parameters = dict(model.named_parameters())
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CellError(f"{path}: cannot be read ({error}); run its cell anew") from error
    for name, tensor in weights.items():
        if name not in parameters or parameters[name].shape != tensor.shape:
            raise CellError(f"{path}: {name} does not fit the model")
        parameters[name].data.copy_(tensor)


def _save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    temporary = path.with_name(f".{path.name}{TEMPORARY}")
    try:
        save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, temporary)
        temporary.replace(path)
    except Exception as error:
        temporary.unlink(missing_ok=True)
        if "No space left" in str(error):  # safetensors raises an error of its own
            raise OSError(28, "No space left on device", str(path)) from error
        raise
