"""How fast it will go: measured on earlier runs of the experiment, or assumed and said so."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.errors import counted
from harness.plan.cost import Amount
from harness.spec.schema import ExperimentSpec
from harness.store import CellFolder, ResultStore, same

# Dense bfloat16 (or float32) tensor-core peaks, FLOP/s, from NVIDIA's data sheets. Torch does not
# use TF32 for float32 matrix products unless told to.
GPU_PEAKS: dict[str, tuple[float, float]] = {
    "H200": (989e12, 67e12),
    "H100": (989e12, 67e12),
    "A100": (312e12, 19.5e12),
}
DEFAULT_GPU, DEFAULT_GPU_BYTES = "H100", 80 * 10**9
NODE_GPUS = 8
# Shares of the peak, by phase. GPU: a 1-7 B model, padded micro-batches, gradient checkpointing,
# decoding bound by memory bandwidth. CPU: measured on models of 0.1-0.5 M parameters, one thread,
# where Python and small tensors cost more than arithmetic; larger models reach twice as much.
GPU_SHARES = {"generate": 0.05, "score": 0.25, "train": 0.25}
CPU_SHARES = {"generate": 0.05, "score": 0.15, "train": 0.25}
PHASES = ("generate", "score", "train")
SECONDS_OF = {"generate": ("sample", "grade"), "score": ("score",), "train": ("update",)}
BENCHMARK_SIZE, BENCHMARK_SECONDS = 512, 0.5


@dataclass(frozen=True)
class Speed:
    """FLOP/s of each phase on one core or one GPU, and what that rests on."""

    rates: Mapping[str, float]
    measured: bool
    device: str  # "cpu" or "gpu"
    basis: str

    def seconds(self, amount: Amount) -> float:
        return sum(amount.phase_flops(phase) / self.rates[phase] for phase in PHASES)


@dataclass(frozen=True)
class Measured:
    """What finished and started cells of this experiment tell.

    Attributes:
        cells: how many were read.
        rates: FLOP/s by phase.
        completion: mean completion length of each arm, tokens.
        resampling: completions drawn for each one used, by arm.
    """

    cells: int
    rates: Mapping[str, float]
    completion: Mapping[str, float]
    resampling: Mapping[str, float]


def wants_gpu(spec: ExperimentSpec) -> bool:
    """Whether the experiment is for GPUs, wherever it is planned."""
    if spec.runtime.device != "auto":
        return spec.runtime.device == "cuda"
    sized = (
        spec.sampling.engine == "vllm"
        or spec.model.attention == "flash_attention_2"
        or spec.model.dtype == "bfloat16"
    )
    return sized or torch.cuda.is_available()


def assumed_speed(spec: ExperimentSpec) -> Speed:
    """Peak of the device x a stated share of it, by phase."""
    if not wants_gpu(spec):
        peak = matmul_peak(spec.runtime.threads)
        return Speed(
            {phase: peak * share for phase, share in CPU_SHARES.items()},
            False,
            "cpu",
            f"assumed: {_shares(CPU_SHARES)} of this machine's {peak / 1e9:.0f} GFLOP/s in "
            f"{BENCHMARK_SIZE} x {BENCHMARK_SIZE} float32 products on "
            f"{counted(spec.runtime.threads, 'thread')}; expect a factor of two either way",
        )
    name, here = gpu_name()
    peak = GPU_PEAKS[name][spec.model.dtype == "float32"]
    where = "" if here else f"; this machine has no GPU, so a {name} is assumed"
    return Speed(
        {phase: peak * share for phase, share in GPU_SHARES.items()},
        False,
        "gpu",
        f"assumed: {_shares(GPU_SHARES)} of the {peak / 1e12:.0f} TFLOP/s of one {name} in "
        f"{spec.model.dtype}{where}; expect a factor of two either way",
    )


def _shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{phase} at {share:.0%}" for phase, share in shares.items())


def gpu_name() -> tuple[str, bool]:
    """A key of GPU_PEAKS, and whether that is the GPU in this machine."""
    if torch.cuda.is_available():
        found = torch.cuda.get_device_name()
        for name in GPU_PEAKS:
            if name in found:
                return name, True
    return DEFAULT_GPU, False


def memory_available(spec: ExperimentSpec) -> tuple[int, str]:
    """Bytes that one cell may use, and of what: all of a GPU, or what is free here."""
    if wants_gpu(spec):
        if torch.cuda.is_available():
            return int(torch.cuda.get_device_properties(0).total_memory), "GPU"
        return DEFAULT_GPU_BYTES, f"{DEFAULT_GPU} GPU"
    import psutil

    return int(psutil.virtual_memory().available), "free memory"


def matmul_peak(threads: int) -> float:
    """FLOP/s of a square float32 product, the best of half a second's worth."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        n = BENCHMARK_SIZE
        a, b = torch.ones(n, n), torch.ones(n, n)
        best, end = 0.0, time.perf_counter() + BENCHMARK_SECONDS
        while time.perf_counter() < end:
            start = time.perf_counter()
            torch.mm(a, b)
            best = max(best, 2 * n**3 / (time.perf_counter() - start))
        return best
    finally:
        torch.set_num_threads(before)


def measure(results: Path, spec: ExperimentSpec) -> Measured | None:
    """What the results folder tells of speed and lengths; None where nothing there compares.

    Only cells of this very model and these sampling settings count.
    """
    flops, seconds = dict.fromkeys(PHASES, 0.0), dict.fromkeys(PHASES, 0.0)
    tokens: dict[str, list[float]] = {}
    batch = spec.sampling.prompts_per_step * spec.sampling.completions_per_prompt
    cells = 0
    for (arm, _), folder in ResultStore(results).cells().items():
        if not folder.started or not _comparable(folder.json("run.json"), spec):
            continue
        steps, timing = folder.lines("steps.jsonl"), _timed(folder)
        last = next((s for s in reversed(steps) if s["step"] in timing), None)
        if last is None or not last["spent"]["completions"]:  # an arm that samples nothing
            continue
        cells += 1
        for phase in PHASES:
            flops[phase] += sum(n for k, n in last["flops"].items() if k.endswith(f"/{phase}"))
            seconds[phase] += sum(timing[last["step"]].get(n, 0.0) for n in SECONDS_OF[phase])
        sums = tokens.setdefault(arm, [0.0, 0.0, 0.0])
        drawn = (last["spent"]["completions"], last["spent"]["completion_tokens"])
        for i, value in enumerate((*drawn, last["step"] * batch)):
            sums[i] += value
    if not cells or not all(seconds.values()):
        return None
    return Measured(
        cells,
        {phase: flops[phase] / seconds[phase] for phase in PHASES},
        {arm: length / drawn for arm, (drawn, length, _) in tokens.items()},
        {arm: drawn / used for arm, (drawn, _, used) in tokens.items()},
    )


def _timed(folder: CellFolder) -> dict[int, dict[str, float]]:
    return {t["step"]: t["seconds"] for t in folder.lines("timing.jsonl") if "step" in t}


def _comparable(run: Mapping[str, Any], spec: ExperimentSpec) -> bool:
    controls = run["controls"]
    return same(controls["model"], spec.model.model_dump(mode="json")) and same(
        controls["sampling"], spec.sampling.model_dump(mode="json")
    )
