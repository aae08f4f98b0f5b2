"""Speed and memory of a training step, by arm and phase. Timings, so not part of the tests.

make bench                                  # the arms of matched_math
make bench ARGS="--experiment smoke --steps 20 --json"
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from harness.cell import CellRun
from harness.cost.memory import PeakMeter
from harness.experiment import open_context
from harness.job import Cell
from harness.rewards.judge import make_grader
from harness.spec.load import find_spec
from harness.store import CellFolder
from harness.train import step

PHASES = ("sample", "grade", "score", "update")


def measure(experiment: str, arm: str, steps: int, warm: int) -> dict[str, Any]:
    """Median seconds of a step by phase, after ``warm`` steps that are not counted."""
    with tempfile.TemporaryDirectory() as folder:
        context = open_context(find_spec(experiment), [], [], Path(folder))
        cell = Cell(arm, "seed", 0, limit=float("inf"))
        run = CellRun(context, cell, CellFolder(Path(folder) / "cell"))
        assert run.arm is not None
        with make_grader(run.spec.reward) as grader:
            loop = run.build(run.arm, grader)
            skip = warm + run.arm.critic_warmup_steps
            seconds: list[dict[str, float]] = []
            tokens = 0
            with PeakMeter(str(run.device)) as meter:
                for number in range(skip + steps):
                    before = dict(loop.ledger.seconds)
                    spent = loop.ledger.spent()["completion_tokens"]
                    step(loop)
                    if number >= skip:
                        seconds.append(
                            {p: loop.ledger.seconds[p] - before.get(p, 0.0) for p in PHASES}
                        )
                        tokens += loop.ledger.spent()["completion_tokens"] - spent
    total = sum(sum(s.values()) for s in seconds)
    return {
        "arm": arm,
        "steps": steps,
        "seconds": {p: statistics.median(s[p] for s in seconds) for p in PHASES},
        "step_seconds": statistics.median(sum(s.values()) for s in seconds),
        "completion_tokens_per_second": tokens / total,
        "peak_bytes": meter.above_entry,
        "peak_by": meter.source,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experiment", default="matched_math")
    parser.add_argument("--arms", nargs="*", help="default: those of the experiment")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm", type=int, default=2, help="steps that are not counted")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    context = open_context(find_spec(options.experiment), [], [], Path("unused"))
    found = []
    for arm in options.arms or context.spec.arms:
        print(f"measuring {arm} ...", file=sys.stderr)
        found.append(measure(options.experiment, arm, options.steps, options.warm))
    if options.json:
        print(json.dumps(found, indent=1))
        return
    heads = [*(f"{p:>9}" for p in PHASES), f"{'step':>9}", f"{'tokens/s':>10}", f"{'peak MB':>9}"]
    print(f"{'arm':20}" + "".join(heads))
    for row in found:
        parts = "".join(f"{row['seconds'][p]:9.3f}" for p in PHASES)
        rate, peak = row["completion_tokens_per_second"], row["peak_bytes"] / 1e6
        print(f"{row['arm']:20}{parts}{row['step_seconds']:9.3f}{rate:10.0f}{peak:9.0f}")


if __name__ == "__main__":
    main()
