"""Bytes by model role and kind: predicted from shapes, and measured on real tensors.

Predictions need no torch. Three kinds stay for the whole run (parameters, gradients, optimizer);
three come and go with a phase (activations, logits, KV cache). Phases and models take turns, so a
peak is what stays plus the largest turn, never the sum of turns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from harness.cost.flops import Phase, Role
from harness.cost.shape import ModelShape

if TYPE_CHECKING:
    import torch

Kind = Literal["parameters", "gradients", "optimizer", "activations", "logits", "kv_cache"]
KINDS: tuple[Kind, ...] = (
    "parameters", "gradients", "optimizer", "activations", "logits", "kv_cache",
)  # fmt: skip


@dataclass(frozen=True)
class Storage:
    """Bytes per parameter of what training keeps.

    Attributes:
        weight: the weights a pass reads.
        gradient: gradients of trainable parameters.
        master: a second, wider copy of trainable weights; 0 where there is none.
        moments: optimizer moments.
        step: optimizer bytes per parameter *tensor* (torch's Adam keeps a step count for each).
        base: frozen weights, where they are stored more narrowly than trained ones (peft keeps
            adapters in float32 over a bfloat16 model); None where there is one width.
    """

    weight: float
    gradient: float
    master: float
    moments: float
    step: int = 0
    base: float | None = None

    @property
    def frozen(self) -> float:
        """Bytes of a weight that does not train; also the width of activations."""
        return self.weight if self.base is None else self.base

    @property
    def trained(self) -> float:
        """Bytes per trainable parameter, weight included."""
        return self.weight + self.gradient + self.master + self.moments


MIXED_ADAM = Storage(weight=2, gradient=2, master=4, moments=8)
MIXED_ADAM_FP32_GRADIENTS = Storage(weight=2, gradient=4, master=4, moments=8)
MIXED_ADAM_BOTH_GRADIENTS = Storage(weight=2, gradient=6, master=4, moments=8)
BF16_ADAM = Storage(weight=2, gradient=2, master=0, moments=4, step=4)
EIGHT_BIT_ADAM = Storage(weight=2, gradient=2, master=4, moments=2)
FP32_ADAM = Storage(weight=4, gradient=4, master=0, moments=8, step=4)
FP32_SGD = Storage(weight=4, gradient=4, master=0, moments=0)
BF16_LORA_ADAM = Storage(weight=4, gradient=4, master=0, moments=8, step=4, base=2)
OFFLOADED_ADAM = Storage(weight=2, gradient=2, master=0, moments=0)  # the rest is on the host


@dataclass(frozen=True)
class Resident:
    """A model that is held for the whole run."""

    role: Role
    shape: ModelShape
    storage: Storage


@dataclass(frozen=True)
class Load:
    """The largest tensors of a step.

    Attributes:
        train_rows: sequences in a training micro-batch; 0 where nothing trains.
        score_rows: sequences in a scoring micro-batch.
        generate_rows: completions decoded at once.
        length: longest prompt + completion, tokens.
        completion: longest completion, tokens; logits exist for these positions only.
        fused: the attention kernel never writes its length x length scores.
        padded: sequences differ in length, so that attention is given a mask.
        recompute: activations are recomputed layer by layer going backward.
        logits_bytes: bytes of a logit where the loss reads it; usually float32.
        logits_copies: how many such tables live at once (logits and their log-softmax).
    """

    train_rows: int
    score_rows: int
    generate_rows: int
    length: int
    completion: int
    fused: bool = False
    padded: bool = True
    recompute: bool = False
    logits_bytes: int = 4
    logits_copies: int = 2


@dataclass(frozen=True)
class MemoryItem:
    """Bytes of one kind, held by one role; ``phase`` None means for the whole run."""

    role: Role
    kind: Kind
    phase: Phase | None
    bytes: int


def model_state_bytes(
    parameters: float, trained: int, frozen: int, storage: Storage, shared: float = 0
) -> float:
    """Bytes of ``trained`` + ``frozen`` models of equal size; ``shared`` more per parameter."""
    per_parameter = trained * storage.trained + frozen * storage.frozen + shared
    return parameters * per_parameter


def kv_cache_bytes(shape: ModelShape, tokens: int, bytes_per_value: float) -> int:
    """Keys and values of ``tokens`` cached positions (summed over sequences)."""
    values = 2 * shape.layers * shape.kv_heads * shape.head_dim * tokens
    return int(values * bytes_per_value)


def activation_bytes(
    shape: ModelShape,
    rows: int,
    length: int,
    weight_bytes: float,
    *,
    fused: bool,
    recompute: bool,
    padded: bool = True,
) -> int:
    """Bytes that a forward pass of the trunk saves for its backward pass (no logits).

    Counts what each operation of a decoder layer saves: norms (in float32), the inputs of linear
    layers, queries, keys and values after the heads are repeated, attention weights unless the
    kernel is fused, and the products of the MLP. Dropout is taken to be off. A fused kernel given
    a padding mask saves that mask and repeated keys and values; ``padded`` says that there is one.
    """
    layer = _layer_bytes(shape, length, weight_bytes, fused, padded)
    kept = shape.layers * layer
    if recompute:  # each layer's input, and one layer at a time in full
        kept = shape.layers * shape.hidden * weight_bytes + (layer if shape.layers else 0)
    return int(rows * length * (kept + _norm_bytes(shape, weight_bytes)))


def _norm_bytes(shape: ModelShape, weight_bytes: float) -> float:
    """Saved by one norm per token: RMS norms keep input (float32), its scaling and the output."""
    if shape.gated_mlp:
        return shape.hidden * (4 + 2 * weight_bytes) + 4
    return shape.hidden * 2 * weight_bytes + 8


def _layer_bytes(
    shape: ModelShape, length: int, weight_bytes: float, fused: bool, padded: bool
) -> float:
    """Saved by one decoder layer per token, in a sequence of ``length`` tokens."""
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if fused:  # one log-sum-exp per head and query; heads are repeated only beside a mask
        repeated, mask = (width, length) if padded else (kv_width, 0)
        attention = (2 * (width + repeated) + mask) * weight_bytes + shape.heads * 4
    else:  # attention weights: the float32 softmax, and a narrower copy where weights are narrow
        copy = 0 if weight_bytes >= 4 else weight_bytes
        scores = weight_bytes if shape.fused_qkv else 4 + copy
        attention = 4 * width * weight_bytes + shape.heads * length * scores
    if shape.head_norms:
        attention += (width + kv_width) * (4 + weight_bytes) + 4 * (shape.heads + shape.kv_heads)
    # gated: gate, its activation, up, product; otherwise: input and the steps of a tanh GELU
    mlp = (4 if shape.gated_mlp else 5) * shape.intermediate * weight_bytes
    return 2 * _norm_bytes(shape, weight_bytes) + attention + mlp


def predict(residents: Sequence[Resident], load: Load) -> list[MemoryItem]:
    """Bytes by role and kind for models held through the largest step."""
    items: list[MemoryItem] = []
    for model in residents:
        items += _static(model)
        items += _transient(model, load)
    return [item for item in items if item.bytes]


def adapter_copy(role: Role, shape: ModelShape, storage: Storage) -> MemoryItem:
    """A second set of adapters, which take turns with the first in one model."""
    size = int(shape.adapter_parameters * storage.weight)
    return MemoryItem(role, "parameters", None, size)


def _static(model: Resident) -> list[MemoryItem]:
    shape, storage = model.shape, model.storage
    optimizer = shape.trainable * (storage.master + storage.moments)
    optimizer += shape.trainable_tensors * storage.step
    amounts: dict[Kind, float] = {
        "parameters": (shape.parameters - shape.trainable) * storage.frozen
        + shape.trainable * storage.weight,
        "gradients": shape.trainable * storage.gradient,
        "optimizer": optimizer,
    }
    return [MemoryItem(model.role, kind, None, int(n)) for kind, n in amounts.items()]


def _transient(model: Resident, load: Load) -> list[MemoryItem]:
    shape, width = model.shape, model.storage.frozen
    outputs = 1 if shape.scalar_head else shape.vocab
    table = load.completion * outputs * load.logits_bytes * load.logits_copies
    items = []
    if model.role == "policy":
        cache = kv_cache_bytes(shape, load.generate_rows * load.length, width)
        logits = load.generate_rows * outputs * load.logits_bytes * load.logits_copies
        items.append(MemoryItem(model.role, "kv_cache", "generate", cache))
        items.append(MemoryItem(model.role, "logits", "generate", logits))
    # Without gradients one layer's tensors live at a time.
    layer = _layer_bytes(shape, load.length, width, load.fused, load.padded)
    scoring = int(load.score_rows * load.length * layer)
    items.append(MemoryItem(model.role, "activations", "score", scoring))
    items.append(MemoryItem(model.role, "logits", "score", load.score_rows * table))
    if shape.trainable:
        saved = activation_bytes(
            shape,
            load.train_rows,
            load.length,
            width,
            fused=load.fused,
            recompute=load.recompute,
            padded=load.padded,
        )
        items.append(MemoryItem(model.role, "activations", "train", saved))
        items.append(MemoryItem(model.role, "logits", "train", load.train_rows * table))
    return items


def peak_bytes(items: Iterable[MemoryItem]) -> int:
    """What stays, plus the largest turn: one model in one phase."""
    stays, turns = 0, {}
    for item in items:
        if item.phase is None:
            stays += item.bytes
        else:
            turn = (item.role, item.phase)
            turns[turn] = turns.get(turn, 0) + item.bytes
    return stays + max(turns.values(), default=0)


def _unique_bytes(tensors: Iterable[torch.Tensor], skip: frozenset[int] = frozenset()) -> int:
    """Bytes of distinct storages, so that views and tied weights count once."""
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(size for key, size in sizes.items() if key not in skip)


def measured_static(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[Kind, int]:
    """Exact bytes of a model's parameters, of the gradients it holds now, and of its optimizer.

    Optimizer state counts for this model's parameters only, so an optimizer that two roles share
    is split between them.
    """
    import torch

    parameters = list(model.parameters())
    state = [] if optimizer is None else [optimizer.state.get(p, {}) for p in parameters]
    held = [v for values in state for v in values.values() if isinstance(v, torch.Tensor)]
    return {
        "parameters": _unique_bytes(parameters),
        "gradients": _unique_bytes(p.grad for p in parameters if p.grad is not None),
        "optimizer": _unique_bytes(held),
    }


def measured_activations(
    action: Callable[[], Any], exclude: Iterable[torch.Tensor] = ()
) -> tuple[int, Any]:
    """Bytes that ``action`` (a forward pass) saves for its backward pass, and its result.

    Args:
        action: returns a tensor, or anything that keeps the graph alive.
        exclude: tensors that are held anyway: the model's parameters and the inputs.
    """
    import torch

    saved: list[torch.Tensor] = []  # kept alive, so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = action()
    skip = frozenset(t.untyped_storage()._cdata for t in exclude)
    return _unique_bytes(saved, skip), result


def measured_kv_cache(past_key_values: Any) -> int:
    """Bytes of keys and values that a transformers cache holds."""
    layers = getattr(past_key_values, "layers", past_key_values)
    held = [(layer.keys, layer.values) for layer in layers]
    return sum(t.numel() * t.element_size() for pair in held for t in pair if t is not None)


class PeakMeter:
    """Peak memory of a ``with`` block, in bytes above what was held on entry.

    On CUDA this is the allocator's peak and exact. On a CPU it is the process's resident set,
    sampled every few milliseconds: memory that the allocator kept from earlier work is not seen
    again, so small blocks read low, even 0. ``source`` says which of the two it was.
    """

    def __init__(self, device: str = "cpu", interval: float = 0.002) -> None:
        self.device, self.interval = device, interval
        self.source = "cuda_allocated" if device.startswith("cuda") else "process_rss_sampled"
        self.before = self.peak = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def above_entry(self) -> int:
        """Peak bytes over the level on entry."""
        return max(self.peak - self.before, 0)

    def __enter__(self) -> PeakMeter:
        if self.source == "cuda_allocated":
            import torch

            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = self.peak = torch.cuda.memory_allocated(self.device)
            return self
        import psutil

        process = psutil.Process()
        self.before = self.peak = process.memory_info().rss
        self._stop.clear()

        def watch() -> None:
            while not self._stop.wait(self.interval):
                self.peak = max(self.peak, process.memory_info().rss)

        self._thread = threading.Thread(target=watch, name="peak-memory", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.source == "cuda_allocated":
            import torch

            self.peak = torch.cuda.max_memory_allocated(self.device)
            return
        import psutil

        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.peak = max(self.peak, psutil.Process().memory_info().rss)


def by_role(items: Iterable[MemoryItem]) -> dict[Role, dict[Kind, int]]:
    """Largest bytes of each kind each role ever holds: the rows and columns of a memory table."""
    table: dict[Role, dict[Kind, int]] = {}
    for item in items:
        row = table.setdefault(item.role, {})
        largest = row.get(item.kind, 0)
        row[item.kind] = max(largest, item.bytes)
    return table
