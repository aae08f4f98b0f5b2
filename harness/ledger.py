"""What a run has spent, in every unit, and the budget that stops it.

Whatever is sampled is charged, dropped or used; evaluation is not charged.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from harness.cost.flops import (
    MODEL,
    Convention,
    Generation,
    Lengths,
    forward,
    generate,
    train,
)
from harness.cost.shape import Matmul, ModelShape
from harness.spec.schema import ModelSpec

COUNTS = (
    "prompts",
    "completions",
    "prompt_tokens",
    "completion_tokens",
    "updates",
    "reward_calls",
    "steps_graded",
)


@dataclass
class Ledger:
    """Counts since the start of a run, and of the current step.

    ``prompt_tokens`` counts each drawn prompt once: the engine reads it once for its whole group.
    What an environment shows between turns counts as prompt, in each completion.
    ``tokens`` is prompt plus completion tokens. ``reward_calls`` counts verdicts on completions,
    ``steps_graded`` those on their worked steps, which few arms ask for. FLOPs follow from
    ``lengths`` and the shapes alone, so that an auditor can compute them again.
    """

    shapes: Mapping[str, ModelShape]
    convention: Convention = MODEL
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    flops: dict[str, int] = field(default_factory=dict)
    lengths: dict[str, Any] = field(default_factory=dict)  # of the current step
    seconds: dict[str, float] = field(default_factory=dict)

    def start_step(self) -> None:
        self.lengths = {}

    def charge(self, **counts: int) -> None:
        for name, count in counts.items():
            self.counts[name] += count

    def charge_generation(self, role: str, generation: Generation) -> None:
        key = f"{role}/generate"
        before = self.lengths.get(key)
        total = generation if before is None else generation_from(before) + generation
        self.lengths[key] = asdict(total)
        self._spend(key, generate(self.shapes[role], generation, self.convention))

    def charge_score(self, role: str, lengths: Lengths, head_tokens: int) -> None:
        key = f"{role}/score"
        before = self.lengths.get(key)
        if before is not None:  # a reward model scores every sampling round of a step
            scored = Lengths(**before["lengths"]) + lengths
            head = before["head_tokens"] + head_tokens
            self.lengths[key] = {"lengths": asdict(scored), "head_tokens": head}
            self._spend(key, forward(self.shapes[role], lengths, head_tokens, self.convention))
            return
        self.lengths[key] = {"lengths": asdict(lengths), "head_tokens": head_tokens}
        self._spend(key, forward(self.shapes[role], lengths, head_tokens, self.convention))

    def charge_train(self, role: str, lengths: Lengths, head_tokens: int, epochs: int) -> None:
        key = f"{role}/train"
        self.lengths[key] = {
            "lengths": asdict(lengths),
            "head_tokens": head_tokens,
            "epochs": epochs,
        }
        self._spend(
            key,
            train(
                self.shapes[role], lengths, head_tokens, epochs=epochs, convention=self.convention
            ),
        )

    def _spend(self, key: str, flops: int) -> None:
        self.flops[key] = self.flops.get(key, 0) + flops

    @contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    def spent(self) -> dict[str, int]:
        """Totals in every deterministic unit."""
        tokens = self.counts["prompt_tokens"] + self.counts["completion_tokens"]
        return self.counts | {"tokens": tokens, "flops": sum(self.flops.values())}

    def spent_in(self, unit: str) -> float:
        return self.total_seconds if unit == "seconds" else self.spent()[unit]

    def state(self) -> dict[str, Any]:
        return {"counts": self.counts, "flops": self.flops, "seconds": self.seconds}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.counts = dict(state["counts"])
        self.flops = dict(state["flops"])
        self.seconds = dict(state["seconds"])


def generation_from(record: Mapping[str, Any]) -> Generation:
    """A ``Generation`` from its record in ``steps.jsonl``."""
    counts = (record[name] for name in ("sampled", "decoded", "contexts"))
    later = {name: record.get(name, 0) for name in ("searched", "given")}
    return Generation(Lengths(**record["prefill"]), *counts, **later)


def shape_from(record: Mapping[str, Any]) -> ModelShape:
    """A ``ModelShape`` from its record in ``run.json``."""
    values = dict(record)
    values["lora_targets"] = tuple(values["lora_targets"])
    values["loose"] = tuple(Matmul(**m) for m in values["loose"])
    return ModelShape(**values)


def step_flops(
    lengths: Mapping[str, Any], shapes: Mapping[str, ModelShape], convention: Convention
) -> dict[str, int]:
    """What a step costs by ``role/phase``, from its recorded lengths alone."""
    found: dict[str, int] = {}
    for key, record in lengths.items():
        role, _, phase = key.partition("/")
        shape = shapes[role]
        if phase == "generate":
            found[key] = generate(shape, generation_from(record), convention)
            continue
        sums, head = Lengths(**record["lengths"]), record["head_tokens"]
        if phase == "score":
            found[key] = forward(shape, sums, head, convention)
        else:
            found[key] = train(shape, sums, head, epochs=record["epochs"], convention=convention)
    return found


def convention(model: ModelSpec) -> Convention:
    """How FLOPs are counted for an experiment's models."""
    return Convention(
        recompute=model.gradient_checkpointing,
        fused=model.attention == "flash_attention_2",
        input_gradients=model.lora is not None and model.gradient_checkpointing,
    )
