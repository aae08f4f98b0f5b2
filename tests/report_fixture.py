"""A small results folder of invented numbers that keeps the contract; for tests only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ARMS = ("ppo", "grpo", "dapo")
SEEDS = (0, 1, 2)
STEPS, PROBLEMS, SAMPLES, CURVE = 12, 30, 16, 4
LIMIT = 1.0e12
SKILL = {"base": 0.27, "placebo": 0.27, "ppo": 0.44, "grpo": 0.47, "dapo": 0.52}

PARTS: dict[str, dict[str, Any]] = {
    "ppo": {
        "sampling": {"part": "FixedGroups", "version": 1, "group_size": None},
        "shaping": [],
        "exclude": None,
        "kl": {"part": "KLInReward", "version": 1, "kl_coef": 0.05, "estimator": "k1"},
        "advantage": {
            "part": "GAE",
            "version": 1,
            "gamma": 1.0,
            "gae_lambda": 1.0,
            "critic": {"part": "Critic", "version": 1, "learning_rate": 1e-3, "value_clip": 0.2},
        },
        "scale": {"part": "Whiten", "version": 1, "eps": 1e-8},
        "clip": {"part": "PPOClip", "version": 1, "clip_low": 0.2, "clip_high": 0.2},
        "aggregate": {"part": "TokenMean", "version": 1},
    },
    "grpo": {
        "sampling": {"part": "FixedGroups", "version": 1, "group_size": None},
        "shaping": [],
        "exclude": None,
        "kl": {"part": "KLInLoss", "version": 1, "kl_coef": 0.04, "estimator": "k3"},
        "advantage": {"part": "GroupBaseline", "version": 1},
        "scale": {"part": "GroupStd", "version": 1, "eps": 1e-6, "ddof": 0},
        "clip": {"part": "PPOClip", "version": 1, "clip_low": 0.2, "clip_high": 0.2},
        "aggregate": {"part": "SequenceMean", "version": 1},
    },
    "dapo": {
        "sampling": {"part": "DynamicSampling", "version": 1, "group_size": None, "max_rounds": 4},
        "shaping": [
            {"part": "SignedScore", "version": 1},
            {"part": "OverlongPenalty", "version": 1, "cache_share": 0.2},
        ],
        "exclude": None,
        "kl": {"part": "NoKL", "version": 1},
        "advantage": {"part": "GroupBaseline", "version": 1},
        "scale": {"part": "GroupStd", "version": 1, "eps": 1e-6, "ddof": 0},
        "clip": {"part": "PPOClip", "version": 1, "clip_low": 0.2, "clip_high": 0.28},
        "aggregate": {"part": "TokenMean", "version": 1},
    },
}

SPEC: dict[str, Any] = {
    "name": "invented",
    "question": "Invented numbers: does the report say what it should?",
    "arms": list(ARMS),
    "baseline": "grpo",
    "controls": {"base": True, "placebo": "grpo"},
    "seeds": list(SEEDS),
    "model": {"name": "embedded/arithmetic", "dtype": "float32", "lora": None},
    "data": {
        "train": {"task": "arithmetic", "split": "train"},
        "validation": {"task": "arithmetic", "split": "validation"},
        "test": {"arithmetic": {"task": "arithmetic", "split": "test"}},
    },
    "reward": {"kind": "maths", "correct": 1.0, "wrong": 0.0},
    "sampling": {
        "prompts_per_step": 8,
        "completions_per_prompt": 4,
        "temperature": 1.0,
        "max_new_tokens": 32,
    },
    "optimizer": {"name": "adamw", "learning_rate": 1e-4, "betas": [0.9, 0.999]},
    "budget": {"unit": "flops", "limit": LIMIT, "evaluate_at": [0.25, 0.5, 0.75, 1.0]},
    "tuning": {
        "trials": 2,
        "budget_fraction": 0.5,
        "seeds": [1000],
        "samples": 4,
        "select": "avg",
        "shared": {"optimizer.learning_rate": {"low": 5e-5, "high": 5e-4, "log": True}},
    },
    "evaluation": {"samples": SAMPLES, "curve_samples": CURVE, "k": [1, 2, 4, 8], "greedy": True},
}

UNITS = ("prompts", "completions", "prompt_tokens", "completion_tokens", "updates", "reward_calls")


def write_fixture(path: Path, seed: int = 0) -> Path:
    """Three arms, base and placebo, three seeds, two trials an arm. Returns ``path``."""
    path.mkdir(parents=True, exist_ok=True)
    lock = {
        "spec": SPEC,
        "hashes": {"model": "0" * 64, "code": "1" * 64},
        "arms": {a: {"origin": "built-in", "source": "invented", "parts": PARTS[a]} for a in ARMS},
    }
    (path / "spec.lock.yaml").write_text(yaml.safe_dump(lock))
    for arm in ("base", "placebo", *ARMS):
        for cell_seed in SEEDS:
            rng = np.random.default_rng((seed, list(SKILL).index(arm), cell_seed))
            _write_seed(path / "runs" / arm / f"seed-{cell_seed}", arm, cell_seed, rng)
    for arm in ARMS:
        for trial in range(2):
            rng = np.random.default_rng((seed, 9, list(SKILL).index(arm), trial))
            _write_trial(path / "runs" / arm / f"trial-{trial:03d}-seed-1000", arm, trial, rng)
    return path


def _write_seed(folder: Path, arm: str, seed: int, rng: np.random.Generator) -> None:
    trained = arm != "base"
    _json(folder / "run.json", _run(arm, "seed", seed, None, _settings(arm, 1) if trained else {}))
    _json(folder / "environment.json", {"commit": "c0ffee", "python": "3.11", "threads": 1})
    steps = _steps(arm, rng, STEPS) if trained else []
    shares = SPEC["budget"]["evaluate_at"] if trained else [0.0]
    evals = []
    for at in shares:
        step = steps[round(at * STEPS) - 1] if trained else None
        spent = step["spent"] if step else dict.fromkeys((*UNITS, "tokens", "flops"), 0)
        skill = SKILL["base"] + (SKILL[arm] - SKILL["base"]) * at**0.5
        final = at in (0.0, 1.0)
        evals.append(
            {
                "at": at,
                "step": step["step"] if step else 0,
                "spent": spent,
                "split": "test.arithmetic",
                "purpose": "final" if final else "curve",
                "protocol": {"samples": SAMPLES if final else CURVE, "temperature": 1.0},
                "problems_sha256": "2" * 64,
                "problems": _problems(skill, SAMPLES if final else CURVE, rng),
                "entropy": 1.1 - 0.5 * at,
                "kl_to_base": {"mean": 2.0 * at, "se": 0.1, "n": 60},
                "chain": "",
            }
        )
    _lines(folder / "evals.jsonl", evals)
    if trained:
        _lines(folder / "steps.jsonl", steps)
    _lines(folder / "timing.jsonl", _timing(steps, rng))
    _json(folder / "memory.json", _memory(arm))
    _lines(folder / "samples.jsonl", _samples(arm, evals[-1]["problems"]))
    _json(folder / "done.json", _done(steps))


def _write_trial(folder: Path, arm: str, trial: int, rng: np.random.Generator) -> None:
    _json(folder / "run.json", _run(arm, "trial", 1000, trial, _settings(arm, trial)))
    steps = _steps(arm, rng, STEPS // 2)
    _lines(folder / "steps.jsonl", steps)
    value = float(SKILL[arm] + 0.02 * trial + rng.normal(0, 0.01))
    _json(folder / "done.json", _done(steps) | {"selected_metric": {"name": "avg", "value": value}})


def _settings(arm: str, trial: int) -> dict[str, Any]:
    settings: dict[str, Any] = {"optimizer.learning_rate": (1e-4, 2.3e-4)[trial]}
    if arm == "ppo":
        settings["advantage.gae_lambda"] = (1.0, 0.95)[trial]
    return settings


def _run(
    arm: str, kind: str, seed: int, trial: int | None, settings: dict[str, Any]
) -> dict[str, Any]:
    like = "grpo" if arm == "placebo" else arm
    parts = json.loads(json.dumps(PARTS.get(like)))
    if "advantage.gae_lambda" in settings:
        parts["advantage"]["gae_lambda"] = settings["advantage.gae_lambda"]
    controls = {k: SPEC[k] for k in ("model", "data", "reward", "sampling", "evaluation")}
    rate = settings.get("optimizer.learning_rate", 1e-4)
    controls["optimizer"] = SPEC["optimizer"] | {"learning_rate": rate}
    share = SPEC["tuning"]["budget_fraction"] if kind == "trial" else 1.0
    return {
        "format": 1,
        "arm": arm,
        "origin": "control" if arm in ("base", "placebo") else "built-in",
        "kind": kind,
        "trial": trial,
        "seed": seed,
        "parts": parts,
        "declared_parts": PARTS.get(like),
        "settings": settings,
        "controls": controls | {"entropy_coef": 0.0},
        "budget": SPEC["budget"] | {"limit": LIMIT * share},
        "hashes": {"model": "0" * 64},
        "shapes": {},
        "placebo_of": "grpo" if arm == "placebo" else None,
    }


def _steps(arm: str, rng: np.random.Generator, count: int) -> list[dict[str, Any]]:
    per_step = {"policy/generate": 0.3, "policy/train": 0.5}
    if arm == "ppo":
        per_step |= {"critic/score": 0.05, "critic/train": 0.25}
    if arm != "dapo":
        per_step |= {"reference/score": 0.1}
    total = sum(per_step.values())
    found = []
    for step in range(1, count + 1):
        progress = step / STEPS
        right = round(32 * (SKILL["base"] + (SKILL[arm] - SKILL["base"]) * progress))
        dropped = 2 if arm == "dapo" else 0
        warm = arm == "ppo" and step == 1
        flops = {k: step / STEPS * LIMIT * v / total for k, v in per_step.items()}
        spent = {"prompts": 8, "completions": 32, "prompt_tokens": 96, "completion_tokens": 600}
        spent |= {"updates": 2, "reward_calls": 32, "tokens": 696}
        found.append(
            {
                "step": step,
                "phase": "critic_warmup" if warm else "train",
                "prompts": {"drawn": 8, "cursor": 8 * step, "stream": {}},
                "spent": {k: v * step for k, v in spent.items()} | {"flops": sum(flops.values())},
                "flops": flops,
                "outcomes": {"correct": right, "wrong": 30 - right, "truncated": 2},
                "dropped": {"groups": dropped, "completions": 4 * dropped},
                "used": 32 - 4 * dropped,
                "accuracy": right / 32,
                "score_mean": right / 32,
                "reward_mean": right / 32 + float(rng.normal(0, 0.01)),
                "length_mean": 19.0 + 3 * progress + float(rng.normal(0, 0.4)),
                "truncated_share": 2 / 32,
                "entropy": 1.1 - 0.5 * progress + float(rng.normal(0, 0.02)),
                "zero_variance_share": 0.2 + 0.3 * progress,
                "kl_to_reference": None if arm == "dapo" else 2 * progress,
                "kl_coef": 0.0,
                "engine_gap": 1e-7,
                "clip_fraction_high": None if warm else 0.01 * progress,
                "clip_fraction_low": None if warm else 0.02 * progress,
                "approx_kl": None if warm else 1e-3,
                "grad_norm": None if warm else 0.8,
                "explained_variance": 0.5 * progress if arm == "ppo" else None,
                "chain": "",
            }
        )
    return found


def _problems(skill: float, samples: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    rows = []
    for i in range(PROBLEMS):
        chance = float(np.clip(skill + 0.35 * np.cos(i), 0.02, 0.98))
        right = int(rng.binomial(samples, chance))
        near = int(rng.binomial(samples - right, 0.6))
        other = int(rng.binomial(samples - right - near, 0.7))
        unparsed = samples - right - near - other
        answers = [[str(i), right, True], [str(i + 1), near, False], [str(i + 2), other, False]]
        outcomes = {"correct": right, "wrong": near + other, "truncated": unparsed}
        rows.append(
            {
                "id": f"p{i:02d}",
                "level": 1 + i % 3,
                "subject": ("addition", "products")[i % 2],
                "n": samples,
                "correct": right,
                "answers": [a for a in answers if a[1]],
                "unparsed": unparsed,
                "outcomes": {k: v for k, v in outcomes.items() if v},
                "greedy": bool(chance > 0.5),
                "length_mean": 20.0,
                "truncated": unparsed,
            }
        )
    return rows


def _samples(arm: str, problems: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "problem": p["id"],
            "question": f"What is {i} + 0? <b>&",
            "gold": str(i),
            "completion": f"{i}+0={i}; answer {i} ({arm}, {place})",
            "outcome": "correct",
            "extracted": str(i),
            "split": "test.arithmetic",
        }
        for i, p in enumerate(problems)
        for place in range(2)
    ]


def _timing(steps: list[dict[str, Any]], rng: np.random.Generator) -> list[dict[str, Any]]:
    phases = {"sample": 0.5, "grade": 0.02, "score": 0.1, "update": 0.4}
    lines, total = [], dict.fromkeys(phases, 0.0)
    for step in steps:
        for phase, mean in phases.items():
            total[phase] += mean * float(rng.uniform(0.9, 1.2))
        lines.append(
            {"step": step["step"], "seconds": dict(total), "total_seconds": sum(total.values())}
        )
    return [*lines, {"evaluation": 1.0, "seconds": 0.8}]


def _memory(arm: str) -> dict[str, Any]:
    kinds = {"parameters": 2.0e6, "gradients": 2.0e6, "optimizer": 4.0e6, "activations": 9.0e6}
    items = [{"role": "policy", "kind": k, "bytes": int(v)} for k, v in kinds.items()]
    items.append({"role": "policy", "kind": "kv_cache", "bytes": 1_500_000})
    if arm == "ppo":
        items += [{"role": "critic", "kind": k, "bytes": int(v)} for k, v in kinds.items()]
    if arm != "dapo":
        items.append({"role": "reference", "kind": "parameters", "bytes": 2_000_000})
    measured = [i | {"bytes": int(i["bytes"] * 1.07)} for i in items]
    peak = {"bytes": sum(i["bytes"] for i in measured), "method": "process_rss_sampled"}
    return {"predicted": items, "measured": measured, "peak": peak}


def _done(steps: list[dict[str, Any]]) -> dict[str, Any]:
    last: Mapping[str, Any] = steps[-1] if steps else {"spent": {"flops": 0}, "flops": {}}
    return {
        "status": "done",
        "steps": len(steps),
        "spent": last["spent"],
        "flops": last["flops"],
        "last_chain": "",
        "evals_chain": "",
    }


def _json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, sort_keys=True))


def _lines(path: Path, values: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(v, sort_keys=True) + "\n" for v in values))
