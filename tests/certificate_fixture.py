"""A results folder in which nothing is wrong, made of the real arms, knobs, ledger and sampler.

No model is run: completions are drawn from a random number generator. But every record follows from
the others as it does in a run, so the audit must certify it, and must name whatever is changed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from harness.arm import Arm, parts
from harness.arms import find_arms
from harness.cost.flops import Generation, Lengths
from harness.cost.shape import ModelShape
from harness.data import StreamHash
from harness.identity import digest, tree
from harness.knobs import turn
from harness.ledger import Ledger
from harness.spec.load import check_spec
from harness.spec.schema import ExperimentSpec
from harness.store import CellFolder, chained
from harness.train import rate_factor
from harness.tune import choose, propose

CONFIG = {
    "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 32, "vocab_size": 24,
}  # fmt: skip
SPLITS = ("train", "validation", "test.sums")
PACKAGES = {"torch": "2.13.0", "transformers": "5.17.0"}

SPEC: dict[str, Any] = {
    "name": "fixture",
    "question": "Does the audit certify what is right?",
    "arms": ["ppo", "grpo", "dapo"],
    "baseline": "grpo",
    "controls": {"base": True, "placebo": "grpo"},
    "seeds": [0, 1],
    "model": {"name": "some/model", "revision": "abc"},
    "data": {
        "train": {"task": "arithmetic", "split": "train"},
        "validation": {"task": "arithmetic", "split": "validation"},
        "test": {"sums": {"task": "arithmetic", "split": "test"}},
    },
    "sampling": {
        "prompts_per_step": 4, "completions_per_prompt": 4, "max_new_tokens": 8,
    },
    "optimizer": {"learning_rate": 1e-3, "minibatches": 2, "warmup_steps": 3, "schedule": "linear"},
    "budget": {"unit": "flops", "limit": 6e7, "evaluate_at": [0.5, 1.0]},
    "tuning": {
        "trials": 3, "budget_fraction": 0.5, "seeds": [1000], "samples": 4,
        "shared": {"optimizer.learning_rate": {"low": 1e-4, "high": 1e-2, "log": True}},
    },
    "evaluation": {"samples": 4, "curve_samples": 2, "k": [1, 2]},
}  # fmt: skip


@dataclass
class Builder:
    """Writes the cells of one experiment, one after the other."""

    results: Path
    spec: ExperimentSpec
    arms: dict[str, Arm] = field(default_factory=dict)

    def build(self) -> None:
        self.arms = {name: found.arm for name, found in find_arms(self.spec.arms).items()}
        self.lock()
        chosen: dict[str, dict[str, Any]] = {}
        for name, arm in self.arms.items():
            chosen[name] = self.tune(name, arm)
            for seed in self.spec.seeds:
                self.train(name, name, seed, chosen[name])
        for seed in self.spec.seeds:
            if self.spec.controls.base:
                self.base(seed)
            if like := self.spec.controls.placebo:
                self.train("placebo", like, seed, chosen[like])

    def hashes(self) -> dict[str, str]:
        spec = self.spec.model_dump(mode="json", exclude={"runtime"})
        names = ("model", "tokenizer", "code", "reward", *(f"data.{s}" for s in SPLITS))
        return {"spec": digest(spec)} | {name: digest(name) for name in names}

    def lock(self) -> None:
        tuning = self.spec.tuning
        lock = {
            "format": 1,
            "spec": self.spec.model_dump(mode="json"),
            "arms": {
                name: {"origin": "built-in", "source": arm.source, "parts": parts(arm)}
                for name, arm in self.arms.items()
            },
            "hashes": self.hashes(),
            "streams": {
                str(seed): StreamHash(self.spec.sampling.prompts_per_step).add(
                    [prompt(seed, position) for position in range(400)]
                )
                for seed in (*self.spec.seeds, *(tuning.seeds if tuning else ()))
            },
            "evaluation_problems": {split: digest(f"data.{split}") for split in SPLITS},
        }
        self.results.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(lock, sort_keys=True, width=120, allow_unicode=True)
        (self.results / "spec.lock.yaml").write_text(text)

    def tune(self, name: str, arm: Arm) -> dict[str, Any]:
        tuning = self.spec.tuning
        if tuning is None:
            return {}
        scores: list[float | None] = []
        for number in range(tuning.trials):
            settings = propose(self.spec, arm, scores)[number]
            values = [self.train(name, name, seed, settings, number) for seed in tuning.seeds]
            scores.append(sum(values) / len(values))
        return propose(self.spec, arm, scores)[choose(scores)]

    def identity(
        self, cell: str, arm: Arm | None, declared: Arm | None, spec: ExperimentSpec, **more: Any
    ) -> dict[str, Any]:
        sections = ("model", "data", "reward", "sampling", "optimizer", "evaluation")
        controls = {name: getattr(spec, name).model_dump(mode="json") for name in sections}
        return {
            "format": 1, "arm": cell, "origin": "built-in" if arm else "control",
            "parts": parts(arm) if arm else None,
            "declared_parts": parts(declared) if declared else None,
            "controls": controls | {"entropy_coef": 0.0},
            "hashes": self.hashes(),
        } | more  # fmt: skip

    def open(self, cell: str, name: str, record: dict[str, Any]) -> CellFolder:
        folder = CellFolder(self.results / "runs" / cell / name)
        folder.write("run.json", record)
        folder.write("environment.json", {"packages": PACKAGES, "threads": 1})
        return folder

    def base(self, seed: int) -> None:
        record = self.identity(
            "base", None, None, self.spec, kind="seed", trial=None, seed=seed, settings={},
            budget=None, shapes={"policy": shape()}, placebo_of=None,
        )  # fmt: skip
        folder = self.open("base", f"seed-{seed}", record)
        ledger, rng = Ledger({}), random.Random(seed)
        line = chained(self.evaluation(rng, seed, 0.0, 0, ledger, "final", "test.sums"), "")
        folder.append("evals.jsonl", line)
        folder.append("timing.jsonl", {"evaluation": 0.0, "seconds": 1.0})
        folder.write("done.json", {
            "status": "done", "steps": 0, "spent": ledger.spent(), "flops": {},
            "last_chain": "", "evals_chain": line["chain"],
        })  # fmt: skip

    def train(
        self, cell: str, like: str, seed: int, settings: Mapping[str, Any], trial: int | None = None
    ) -> float:
        """One cell from its first step to its last; the trial's score."""
        spec, arm = self.spec, self.arms[like]
        for path, value in settings.items():
            if path in (spec.tuning.shared if spec.tuning else ()):
                name = path.partition(".")[2]
                optimizer = spec.optimizer.model_copy(update={name: value})
                spec = spec.model_copy(update={"optimizer": optimizer})
            else:
                arm = turn(arm, path, value)
        limit = spec.budget.limit
        if trial is not None and spec.tuning is not None:
            limit *= spec.tuning.budget_fraction
        shapes = {"policy": shape()} | ({"reference": shape()} if arm.kl.needs_reference else {})
        shapes |= {"critic": shape(scalar_head=True)} if arm.critic else {}
        kind = "seed" if trial is None else "trial"
        name = f"seed-{seed}" if trial is None else f"trial-{trial:03d}-seed-{seed}"
        record = self.identity(
            cell, arm, self.arms[like], spec, kind=kind, trial=trial, seed=seed,
            settings=dict(settings), shapes=shapes, placebo_of=like if cell == "placebo" else None,
            budget=spec.budget.model_dump(mode="json") | {"limit": limit},
        )  # fmt: skip
        folder = self.open(cell, name, record)
        folder.write("memory.json", {"predicted": [], "measured": [], "peak": {"bytes": 1}})
        run = Run(self, spec, arm, seed, limit, trial, folder, random.Random(f"{cell}{name}"))
        return run.to_its_end()

    def evaluation(
        self, rng: random.Random, seed: int, at: float, step: int, ledger: Ledger, purpose: str,
        split: str,
    ) -> dict[str, Any]:  # fmt: skip
        e, tuning = self.spec.evaluation, self.spec.tuning
        samples = {"curve": e.curve_samples, "final": e.samples}.get(purpose, 0)
        samples = samples or (tuning.samples if tuning else 0)
        return {
            "at": at, "step": step, "spent": ledger.spent(), "split": split, "purpose": purpose,
            "protocol": {
                "samples": samples, "temperature": e.temperature, "top_p": e.top_p,
                "max_new_tokens": self.spec.sampling.max_new_tokens, "stop": [], "seed": seed,
                "greedy": e.greedy,
            },
            "problems_sha256": digest(f"data.{split}"),
            "problems": [judged(rng, f"{split}-{i}", samples) for i in range(3)],
            "entropy": rng.random(), "kl_to_base": {"mean": 0.1, "se": 0.01, "n": 6},
        }  # fmt: skip


def shape(**options: Any) -> dict[str, Any]:
    return tree(asdict(ModelShape.from_config(CONFIG, **options)))


def prompt(seed: int, position: int) -> str:
    return f"sum-{(7 * position + 13 * seed) % 97}"


def judged(rng: random.Random, name: str, n: int) -> dict[str, Any]:
    """One problem's record: samples right, wrong, or without an answer."""
    right = rng.randint(0, n)
    wrong = rng.randint(0, n - right)
    answers: list[Any] = [["13", right, True]] if right else []
    answers += [["14", wrong, False]] if wrong else []
    outcomes = {"correct": right, "wrong": wrong, "no_answer": n - right - wrong}
    return {
        "id": name, "level": "1", "subject": None, "n": n, "correct": right, "answers": answers,
        "unparsed": n - right - wrong, "outcomes": {k: v for k, v in outcomes.items() if v},
        "greedy": rng.random() < 0.5, "length_mean": 4.5, "truncated": 0,
    }  # fmt: skip


@dataclass
class Run:
    """The steps of one cell."""

    builder: Builder
    spec: ExperimentSpec
    arm: Arm
    seed: int
    limit: float
    trial: int | None
    folder: CellFolder
    rng: random.Random
    cursor: int = 0
    kl_coef: float = 0.0
    optimizer_steps: int = 0
    policy_steps: int = 0  # those outside the critic's warm-up

    def to_its_end(self) -> float:
        run = self.folder.json("run.json")
        shapes = {
            role: ModelShape.from_config(CONFIG, scalar_head=role == "critic")
            for role in run["shapes"]
        }
        self.ledger, self.kl_coef = Ledger(shapes), self.arm.kl.initial_coef
        self.stream = StreamHash(self.spec.sampling.prompts_per_step)
        chain = evals_chain = ""
        step, score = 0, 0.0
        moments = list(self.spec.budget.evaluate_at) if self.trial is None else [1.0]
        unit = self.spec.budget.unit
        while self.ledger.spent_in(unit) < self.limit:
            step += 1
            line = chained(self.step(step), chain)
            chain = line["chain"]
            self.folder.append("steps.jsonl", line)
            self.folder.append(
                "timing.jsonl", {"step": step, "seconds": dict(self.ledger.seconds),
                                 "total_seconds": self.ledger.total_seconds}
            )  # fmt: skip
            share = self.ledger.spent_in(unit) / self.limit
            due, moments = [m for m in moments if m <= share], [m for m in moments if m > share]
            for at in due:
                purpose = "final" if due[-1] == 1.0 else "curve"
                split = "test.sums" if self.trial is None else "validation"
                purpose = purpose if self.trial is None else "tuning"
                record = self.builder.evaluation(
                    self.rng, self.seed, at, step, self.ledger, purpose, split
                )
                score = sum(p["correct"] / p["n"] for p in record["problems"]) / 3
                record = chained(record, evals_chain)
                evals_chain = record["chain"]
                self.folder.append("evals.jsonl", record)
                self.folder.append("timing.jsonl", {"evaluation": at, "seconds": 0.5})
        done = {
            "status": "done", "steps": step, "spent": self.ledger.spent(),
            "flops": self.ledger.flops, "last_chain": chain, "evals_chain": evals_chain,
        }  # fmt: skip
        if self.trial is not None:
            done["selected_metric"] = {"name": "avg", "value": score}
        self.folder.write("done.json", done)
        return score

    def step(self, number: int) -> dict[str, Any]:
        self.ledger.start_step()
        self.ledger.seconds["sample"] = number / 10
        record, rows = self.sample()
        warmup = number <= self.arm.critic_warmup_steps
        record |= {"step": number, "phase": "critic_warmup" if warmup else "train"}
        record["kl_coef"] = self.kl_coef
        if rows:
            record |= self.learn(rows, warmup)
        return record | {
            "spent": self.ledger.spent(), "flops": dict(self.ledger.flops),
            "lengths": self.ledger.lengths,
        }  # fmt: skip

    def sample(self) -> tuple[dict[str, Any], list[tuple[int, int, bool]]]:
        """Groups until the batch is full; (prompt length, completion length, right) of the used."""
        s, rng = self.spec.sampling, self.rng
        size = self.arm.group_size(s.completions_per_prompt)
        wanted = s.prompts_per_step * s.completions_per_prompt // size
        kept: list[tuple[int, int, bool]] = []
        everything: list[tuple[int, int, bool]] = []
        before, stream, flat = self.cursor, {}, 0
        for _ in range(10 if self.arm.sampling.resamples else 1):
            rows = []
            for _ in range(wanted - len(kept) // size):
                length, rate = rng.randint(2, 6), rng.choice((0.0, 0.5, 0.9))
                group = [
                    (length, rng.randint(1, s.max_new_tokens), rng.random() < rate)
                    for _ in range(size)
                ]
                rows += group
                right = sum(r for *_, r in group)
                flat += right in (0, size)
                if 0 < right < size or not self.arm.sampling.resamples:
                    kept += group
            ids = [prompt(self.seed, self.cursor + i) for i in range(len(rows) // size)]
            stream |= self.stream.add(ids)
            self.cursor += len(ids)
            self.charge(rows, size)
            everything += rows
            if len(kept) == wanted * size:
                break
        right = sum(r for *_, r in everything)
        dropped = len(everything) - len(kept)
        return {
            "prompts": {"drawn": self.cursor - before, "cursor": self.cursor, "stream": stream},
            "outcomes": {"correct": right, "wrong": len(everything) - right},
            "dropped": {"groups": dropped // size, "completions": dropped},
            "used": len(kept), "completions_per_prompt": size,
            "length_mean": sum(c for _, c, _ in everything) / len(everything),
            "truncated_share": 0.0, "entropy": rng.random(),
            "zero_variance_share": flat * size / len(everything),
        }, kept  # fmt: skip

    def charge(self, rows: list[tuple[int, int, bool]], size: int) -> None:
        prompts, lengths = [p for p, *_ in rows], [c for _, c, _ in rows]
        self.ledger.charge_generation("policy", Generation.of(prompts, lengths, shared_by=size))
        self.ledger.charge(
            prompts=len(rows) // size, completions=len(rows), reward_calls=len(rows),
            prompt_tokens=sum(prompts) // size, completion_tokens=sum(lengths),
        )  # fmt: skip

    def learn(self, rows: list[tuple[int, int, bool]], warmup: bool) -> dict[str, Any]:
        optimizer, rng, critic = self.spec.optimizer, self.rng, self.arm.critic
        lengths, head = Lengths.of(p + c for p, c, _ in rows), sum(c for _, c, _ in rows)
        for role in self.ledger.shapes:
            self.ledger.charge_score(role, lengths, head)
        share = min(self.ledger.spent_in(self.spec.budget.unit) / self.limit, 1.0)
        rate = rate_factor(optimizer, self.policy_steps, share)
        critic_rate = rate_factor(optimizer, self.optimizer_steps, share)
        taken = optimizer.epochs * min(optimizer.minibatches, len(rows))
        self.optimizer_steps += taken
        self.policy_steps += 0 if warmup else taken
        self.ledger.charge(updates=taken)
        for role in ([] if warmup else ["policy"]) + (["critic"] if critic else []):
            self.ledger.charge_train(role, lengths, head, optimizer.epochs)
        kl = 0.01 + rng.random() / 10 if self.arm.kl.needs_reference else None
        accuracy = sum(r for *_, r in rows) / len(rows)
        record: dict[str, Any] = {
            "accuracy": accuracy, "score_mean": accuracy, "reward_mean": rng.random(),
            "engine_gap": 1e-7, "kl_to_reference": kl, "explained_variance": None,
            "effective": {
                "learning_rate": optimizer.learning_rate * rate,
                "critic_learning_rate": critic.learning_rate * critic_rate if critic else None,
                "temperature": 1.0, "top_p": 1.0, "max_new_tokens": 8, "epochs": optimizer.epochs,
                "minibatches": taken // optimizer.epochs, "gradient_steps": taken,
                "completions_per_prompt": self.arm.group_size(4), "weight_sum": [1.0] * taken,
            },
        }  # fmt: skip
        if critic:
            record |= {"loss/value": rng.random(), "critic_grad_norm": rng.random()}
        if not warmup:
            surrogate, penalty = rng.random() - 0.5, rng.random() / 100
            in_loss = type(self.arm.kl).__name__ == "KLInLoss"
            record |= {"loss/kl": penalty} if in_loss else {}
            record |= {
                "loss/surrogate": surrogate,
                "loss/policy": surrogate + (penalty if in_loss else 0.0),
                "clip_fraction_high": 0.01, "clip_fraction_low": 0.02, "approx_kl": 1e-4,
                "grad_norm": rng.random(), "first_ratio_error": 1e-6,
            }  # fmt: skip
        return record


def build(results: Path, **changes: Any) -> Path:
    """A conforming folder; ``changes`` replace keys of the spec."""
    Builder(results, check_spec(SPEC | changes, "fixture")).build()
    return results
