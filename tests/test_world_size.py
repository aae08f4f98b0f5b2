"""Two real processes take one step together: the weights are those of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none
from world_rank import step

ROOT = Path(__file__).parent.parent
WORLD = 2
# A critic, a shared head, sequence weights, a denominator of kept rows, a ratio of whole
# completions, a likelihood term, a constant.
NAMES = ["ppo", "ppo_shared_head", "grpo", "dapo_overlong_filter", "gspo", "vapo", "rloo"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, torch.Tensor]]]:
    """What each rank of a gloo group holds after two steps of each arm."""
    folder = tmp_path_factory.mktemp("world")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "tests/world_rank.py"), str(rank), str(WORLD),
             str(folder / "rendezvous"), str(folder / f"{rank}.pt"), *NAMES],
            env=environment, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(WORLD)
    ]  # fmt: skip
    for process in running:
        _, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_make_the_step_of_one(
    ranks: list[dict[str, dict[str, torch.Tensor]]], name: str
):
    alone = step(name, 0, 1)
    a, b = (rank[name] for rank in ranks)
    assert torch.equal(a["weights"], b["weights"])
    assert float((a["weights"] - alone["weights"]).abs().max()) < 1e-9
    torch.testing.assert_close(a["losses"] + b["losses"], alone["losses"], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(a["norms"], alone["norms"], rtol=1e-9, atol=0.0)
    assert sorted(a["rows"].tolist() + b["rows"].tolist()) == alone["rows"].tolist()
    assert len(a["rows"]) == len(b["rows"]) == 4
