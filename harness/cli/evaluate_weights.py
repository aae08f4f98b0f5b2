"""Evaluate the stored weights of a finished run by the spec's protocol, or with more samples."""

from __future__ import annotations

from typing import Any

from harness.cell import CellRun
from harness.checkpoint import load_weights
from harness.errors import InputError, suggest
from harness.evaluate import evaluate
from harness.grading import open_grader
from harness.job import BASE, PLACEBO, Cell, Context
from harness.metrics import maj_at_k, pass_at_k
from harness.models import Policy, trainable
from harness.samplers import make_sampler
from harness.store import CellFolder


def evaluate_weights(
    context: Context, arm: str, seed: int, split: str, samples: int
) -> dict[str, Any]:
    """Metrics of one run on one split.

    Raises:
        InputError: no such arm, run, weights or split.
    """
    known = [*context.arms(), BASE, *([PLACEBO] if context.spec.controls.placebo else [])]
    if arm not in known:
        raise InputError(f"--arm {arm!r} is not in the experiment.{suggest(arm, known)}")
    cell = Cell(arm, "seed", seed, context.spec.budget.limit)
    folder = CellFolder(context.results / "runs" / arm / cell.name)
    run = CellRun(context, cell, folder)
    names = [name for name in run.sets if name != "train"]
    split = split or next(name for name in names if name.startswith("test."))
    if split not in names:
        raise InputError(f"--split {split!r} is not in the experiment.{suggest(split, names)}")
    model = trainable(run.base.model, run.spec.model.lora, seed)
    if arm != BASE:
        weights = folder.path / "checkpoint" / "policy.safetensors"
        if not weights.is_file():
            raise InputError(f"{weights} does not exist; weights stay with the machine that ran")
        load_weights(weights, model)
    protocol = run.protocol(samples or context.spec.evaluation.samples)
    with open_grader(run.spec, run.base, run.sets) as grader:
        found = evaluate(
            split, run.sets[split], protocol, make_sampler(run.spec, model, run.base),
            grader, run.divergence(Policy(model, run.spec.sampling.temperature)),
        )  # fmt: skip
    return {
        "arm": arm, "seed": seed, "split": split, "samples": protocol.samples,
        "metrics": _metrics(found.record, context.spec.evaluation.k),
        "kl_to_base": found.record["kl_to_base"],
    }  # fmt: skip


def _metrics(record: dict[str, Any], ks: tuple[int, ...]) -> dict[str, float]:
    """Avg@n, greedy, Pass@K and Maj@K: means over problems."""
    problems = record["problems"]
    count = len(problems)
    n = problems[0]["n"]
    found = {f"avg@{n}": sum(p["correct"] / p["n"] for p in problems) / count}
    if problems[0]["greedy"] is not None:
        found["greedy"] = sum(p["greedy"] for p in problems) / count
    usable = [k for k in ks if k <= n]
    for k in usable:
        found[f"pass@{k}"] = sum(pass_at_k(p["n"], p["correct"], k) for p in problems) / count
    for k in usable:
        found[f"maj@{k}"] = sum(_maj(p, k) for p in problems) / count
    return found


def _maj(problem: dict[str, Any], k: int) -> float:
    counts = [n for _, n, _ in problem["answers"]]
    flags = [right for *_, right in problem["answers"]]
    return maj_at_k(counts, flags, problem["unparsed"], k)
