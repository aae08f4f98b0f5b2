"""Shared by all tests: one thread, the golden vectors, the real data where it exists."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

torch.set_num_threads(1)

ROOT = Path(__file__).parent.parent
VECTORS = {
    v["name"]: v for v in json.loads((ROOT / "tests/golden/vectors.json").read_text())["vectors"]
}


@pytest.fixture(scope="session")
def golden() -> Callable[[str], dict[str, Any]]:
    """A golden vector by name: ``{inputs, expected, tolerance, formula_ref}``."""
    return VECTORS.__getitem__


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real GSM8K, MATH and contest files; the test skips where there is none."""
    path = Path(os.environ.get("HARNESS_DATA", ROOT / "../shared/data")).resolve()
    if not (path / "gsm8k").is_dir():
        pytest.skip(f"real data files are not at {path}; set HARNESS_DATA")
    return path


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test leaves files in the checkout."""
    monkeypatch.chdir(tmp_path)
