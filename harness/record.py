"""What a cell writes down about itself before it starts: docs/results.md describes it."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from harness.arm import Arm, parts
from harness.arms import FoundArm
from harness.code import code_sha256, git_commit
from harness.cost.shape import ModelShape
from harness.data import PromptSet
from harness.grading import reward_hashes
from harness.identity import digest, tree
from harness.job import PLACEBO, Cell, Context
from harness.models import Base
from harness.plugins import file_hashes, recorded_origin
from harness.spec.schema import ExperimentSpec

ENTROPY_COEF = 0.0  # no arm has an entropy bonus; recorded so that one could not hide


def identity(
    cell: Cell,
    spec: ExperimentSpec,
    found: FoundArm | None,
    arm: Arm | None,
    shapes: Mapping[str, ModelShape],
    hashes: Mapping[str, str],
) -> dict[str, Any]:
    """``run.json``: what a cell is.

    Args:
        cell: what is run.
        spec: the experiment with the cell's settings put in.
        found: the arm as declared; None for ``base``.
        arm: the arm with the cell's settings put in; None for ``base``.
        shapes: the models that are held, by role.
        hashes: of the inputs, before any setting.
    """
    controls = {
        name: getattr(spec, name).model_dump(mode="json")
        for name in ("model", "data", "reward", "sampling", "optimizer", "evaluation")
    } | {"entropy_coef": ENTROPY_COEF}
    budget = spec.budget.model_dump(mode="json") | {"limit": cell.limit}
    return {
        "format": 1,
        "arm": cell.arm, "kind": cell.kind, "trial": cell.trial, "seed": cell.seed,
        "origin": recorded_origin(found.origin) if found else "control",
        "parts": parts(arm) if arm else None,
        "declared_parts": parts(found.arm) if found else None,
        "settings": dict(cell.settings),
        "controls": controls,
        "budget": budget if arm else None,
        "hashes": dict(hashes),
        "shapes": {role: tree(asdict(shape)) for role, shape in sorted(shapes.items())},
        "placebo_of": spec.controls.placebo if cell.arm == PLACEBO else None,
    }  # fmt: skip


def input_hashes(context: Context, base: Base, sets: Mapping[str, PromptSet]) -> dict[str, str]:
    """The hash of everything that goes into a run."""
    spec = context.spec
    dump = spec.model_dump(mode="json", exclude={"runtime"})
    return {
        "spec": context.spec_sha256 or digest(dump),
        "model": base.model_sha256,
        "tokenizer": base.tokenizer_sha256,
        "code": code_sha256(),
        **reward_hashes(spec, base, sets),
        **{f"data.{name}": problems.sha256 for name, problems in sets.items()},
        **file_hashes(context.plugin_files),
    }


PACKAGES = ("torch", "transformers", "numpy", "peft", "math-verify", "optuna", "datasets", "vllm")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def environment(spec: ExperimentSpec) -> dict[str, Any]:
    """Where a cell ran."""
    cuda = torch.cuda.is_available()
    return {
        "commit": git_commit(),
        "python": sys.version.split()[0],
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "threads": spec.runtime.threads,
    }
