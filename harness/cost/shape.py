"""The dimensions of a causal language model that decide what it costs.

No torch is imported here: the planner and the report read costs without it. Only an architecture
that is not known by name is built (on torch's meta device, so without memory) to list its layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from harness.errors import InputError, suggest

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Matmul:
    """``count`` linear layers of ``inputs x outputs`` weights that every token passes through."""

    name: str
    inputs: int
    outputs: int
    count: int = 1

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs * self.count


@dataclass(frozen=True)
class ModelShape:
    """A decoder as the accounting sees it.

    Attributes:
        layers, hidden, heads, kv_heads, head_dim, intermediate, vocab: the config's dimensions.
        tied: the output matrix is the embedding table.
        parameters: all parameters held, LoRA adapters and the scalar head included.
        trainable: those of them that receive gradients.
        trainable_tensors: how many tensors these are (torch's Adam keeps a step count for each).
        gated_mlp: gate, up and down matrices rather than up and down.
        fused_qkv: one matrix for query, key and value (GPT-2).
        rotary_dim: rotated dimensions per head; 0 where positions are not rotary.
        head_norms: queries and keys are normalised head by head (Qwen3).
        lora_rank, lora_targets: adapters, by the names of the linear layers; rank 0 means none.
        scalar_head: a value or reward head in place of the vocabulary head.
        loose: linear layers of the whole trunk, where the architecture is not known by name.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    parameters: int
    trainable: int
    trainable_tensors: int
    gated_mlp: bool
    fused_qkv: bool = False
    rotary_dim: int = 0
    head_norms: bool = False
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    scalar_head: bool = False
    loose: tuple[Matmul, ...] = ()

    @classmethod
    def from_config(
        cls,
        config: PretrainedConfig | Mapping[str, Any],
        *,
        trained: bool = True,
        lora_rank: int = 0,
        lora_targets: Sequence[str] | str = ALL_LINEAR,
        scalar_head: bool = False,
        head_bias: bool = False,
    ) -> ModelShape:
        """The shape of a model with this config.

        Args:
            config: a transformers config, or the content of a ``config.json``.
            trained: False for a frozen model (reference, reward model).
            lora_rank: 0 trains every parameter; otherwise only adapters (and a scalar head).
            lora_targets: names of the adapted linear layers, or ``all-linear``.
            scalar_head: one output per token instead of one per vocabulary entry.
            head_bias: the scalar head has a bias.

        Raises:
            InputError: the architecture cannot be charged, or a LoRA target does not exist.
        """
        values = dict(config) if isinstance(config, Mapping) else config.to_dict()
        kind = str(values.get("model_type", ""))
        if kind in _ROTARY:
            shape, sizes = _rotary_decoder(cls, kind, values)
        elif kind == "gpt2":
            shape, sizes = _gpt2(cls, values)
        else:
            shape, sizes = _from_meta_model(cls, kind, values)
        if scalar_head:
            sizes = (sizes if shape.tied else sizes[:-1]) + [shape.hidden] + [1] * head_bias
        shape = replace(shape, scalar_head=scalar_head, parameters=sum(sizes))
        if lora_rank:
            return _with_adapters(shape, lora_rank, lora_targets, 1 + head_bias, trained)
        if not trained:
            return shape
        return replace(shape, trainable=sum(sizes), trainable_tensors=len(sizes))

    @classmethod
    def from_model(cls, model: PreTrainedModel | Any, *, scalar_head: bool = False) -> ModelShape:
        """The shape of a loaded model: parameters and adapters are read off its tensors.

        Args:
            model: a transformers model, bare or wrapped by peft's LoRA.
            scalar_head: the model is a critic or a reward model.

        Raises:
            InputError: adapters sit on some layers only, which the shape cannot say.
        """
        shape = cls.from_config(model.config, scalar_head=scalar_head)
        adapters = getattr(model, "peft_config", None)
        if adapters:
            lora = next(iter(adapters.values()))
            wanted = lora.target_modules
            wanted = [wanted] if isinstance(wanted, str) else list(wanted)
            names = [
                m.name
                for m in shape.block or shape.loose
                # peft stores paths, or the last parts of paths
                if any(f".{m.name}".endswith(f".{t}") or t.endswith(f".{m.name}") for t in wanted)
            ]
            shape = _with_adapters(shape, int(lora.r), names, 1, True)
            held = sum(p.numel() for n, p in model.named_parameters() if ".lora_" in n)
            if held != shape.adapter_parameters:
                raise InputError(
                    f"lora targets: the adapters hold {held} weights where {sorted(wanted)} "
                    f"in every layer would be {shape.adapter_parameters}; adapt all layers alike."
                )
        trained = [p.numel() for p in model.parameters() if p.requires_grad]
        return replace(
            shape,
            parameters=sum(p.numel() for p in model.parameters()),
            trainable=sum(trained),
            trainable_tensors=len(trained),
        )

    @classmethod
    def dense(cls, parameters: int, *, trained: bool = True) -> ModelShape:
        """The textbook model: each parameter multiplies each token once; no attention, no head."""
        return cls(
            layers=0, hidden=0, heads=0, kv_heads=0, head_dim=0, intermediate=0, vocab=0,
            tied=True, parameters=parameters, trainable=parameters if trained else 0,
            trainable_tensors=1 if trained else 0, gated_mlp=False,
            loose=(Matmul("dense", parameters, 1),),
        )  # fmt: skip

    @property
    def block(self) -> tuple[Matmul, ...]:
        """The linear layers of one decoder layer; empty where ``loose`` lists them all."""
        if self.loose:
            return ()
        h, i, q = self.hidden, self.intermediate, self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        if self.fused_qkv:
            attention = (Matmul("c_attn", h, q + 2 * kv), Matmul("attn.c_proj", q, h))
            return (*attention, Matmul("c_fc", h, i), Matmul("mlp.c_proj", i, h))
        attention = (
            Matmul("q_proj", h, q),
            Matmul("k_proj", h, kv),
            Matmul("v_proj", h, kv),
            Matmul("o_proj", q, h),
        )
        gate = (Matmul("gate_proj", h, i),) if self.gated_mlp else ()
        return (*attention, *gate, Matmul("up_proj", h, i), Matmul("down_proj", i, h))

    @property
    def head_parameters(self) -> int:
        """Weights that turn a hidden state into logits, or into a value."""
        return self.hidden if self.scalar_head else self.hidden * self.vocab

    @property
    def adapter_parameters(self) -> int:
        """LoRA weights over the whole model."""
        return _adapter_parameters(self)

    @property
    def trunk_matmul_parameters(self) -> int:
        """Weights that multiply each token before the head, adapters included."""
        base = self.layers * sum(m.parameters for m in self.block)
        return base + sum(m.parameters for m in self.loose) + self.adapter_parameters

    @property
    def matmul_parameters(self) -> int:
        """Weights that multiply a token whose logits are computed; embedding look-ups are none."""
        return self.trunk_matmul_parameters + self.head_parameters

    def adapted(self, matmul: Matmul) -> bool:
        """Whether this linear layer carries a LoRA adapter (peft's rule: the name's last parts)."""
        if not self.lora_rank:
            return False
        return any(matmul.name == t or matmul.name.endswith("." + t) for t in self.lora_targets)


def _adapter_parameters(shape: ModelShape) -> int:
    per_layer = sum(m.inputs + m.outputs for m in shape.block if shape.adapted(m))
    loose = sum((m.inputs + m.outputs) * m.count for m in shape.loose if shape.adapted(m))
    return shape.lora_rank * (shape.layers * per_layer + loose)


def _with_adapters(
    shape: ModelShape, rank: int, targets: Sequence[str] | str, head_tensors: int, trained: bool
) -> ModelShape:
    layers = shape.block or shape.loose
    if isinstance(targets, str):
        targets = [m.name for m in layers] if targets == ALL_LINEAR else [targets]
    adapted = replace(shape, lora_rank=rank, lora_targets=tuple(targets))
    for target in targets:
        if not any(replace(adapted, lora_targets=(target,)).adapted(m) for m in layers):
            raise InputError(
                f"lora targets: no linear layer is called {target!r}."
                f"{suggest(target, [m.name for m in layers])}"
            )
    count = sum(m.count for m in layers if adapted.adapted(m)) * (
        shape.layers if shape.block else 1
    )
    added = _adapter_parameters(adapted)
    head = shape.hidden + head_tensors - 1 if shape.scalar_head else 0
    return replace(
        adapted,
        parameters=shape.parameters + added,
        trainable=(added + head) if trained else 0,
        trainable_tensors=(2 * count + (head_tensors if head else 0)) if trained else 0,
    )


# model type -> (biases on q, k, v; on o; norms on the heads' queries and keys); None: by the config
_ROTARY: dict[str, tuple[bool | None, bool | None, bool]] = {
    "llama": (None, None, False),
    "mistral": (False, False, False),
    "qwen2": (True, False, False),
    "qwen3": (None, None, True),
}


def _need(values: Mapping[str, Any], key: str) -> int:
    value = values.get(key)
    if not isinstance(value, int) or value < 1:
        raise InputError(
            f"model config: {key} is {value!r}; cost accounting needs a positive integer there."
        )
    return value


def _rotary_decoder(
    cls: type[ModelShape], kind: str, values: Mapping[str, Any]
) -> tuple[ModelShape, list[int]]:
    """Llama and its relatives: shape, and the sizes of all parameter tensors (head last)."""
    qkv_bias, o_bias, head_norms = _ROTARY[kind]
    by_config = bool(values.get("attention_bias", False))
    qkv_bias = by_config if qkv_bias is None else qkv_bias
    o_bias = by_config if o_bias is None else o_bias
    h, heads = _need(values, "hidden_size"), _need(values, "num_attention_heads")
    head_dim = values.get("head_dim") or (128 if kind == "qwen3" else h // heads)
    shape = cls(
        layers=_need(values, "num_hidden_layers"),
        hidden=h,
        heads=heads,
        kv_heads=values.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        intermediate=_need(values, "intermediate_size"),
        vocab=_need(values, "vocab_size"),
        tied=bool(values.get("tie_word_embeddings", False)),
        parameters=0,
        trainable=0,
        trainable_tensors=0,
        gated_mlp=True,
        rotary_dim=head_dim,
        head_norms=head_norms,
    )
    layer = [m.parameters for m in shape.block] + [h, h]
    q, k, v, o, gate, up, down = (m.outputs for m in shape.block)
    layer += [q, k, v] * qkv_bias + [o] * o_bias + [head_dim, head_dim] * head_norms
    layer += [gate, up, down] * bool(values.get("mlp_bias", False))
    table = shape.vocab * h
    return shape, [table, *layer * shape.layers, h] + ([] if shape.tied else [table])


def _gpt2(cls: type[ModelShape], values: Mapping[str, Any]) -> tuple[ModelShape, list[int]]:
    """GPT-2: learned positions, fused attention input, biases everywhere but in the head."""
    h, heads = _need(values, "n_embd"), _need(values, "n_head")
    shape = cls(
        layers=_need(values, "n_layer"),
        hidden=h,
        heads=heads,
        kv_heads=heads,
        head_dim=h // heads,
        intermediate=values.get("n_inner") or 4 * h,
        vocab=_need(values, "vocab_size"),
        tied=bool(values.get("tie_word_embeddings", True)),
        parameters=0,
        trainable=0,
        trainable_tensors=0,
        gated_mlp=False,
        fused_qkv=True,
    )
    layer = [size for m in shape.block for size in (m.parameters, m.outputs)] + [h] * 4
    table = shape.vocab * h
    sizes = [table, _need(values, "n_positions") * h, *layer * shape.layers, h, h]
    return shape, sizes + ([] if shape.tied else [table])


def _from_meta_model(
    cls: type[ModelShape], kind: str, values: Mapping[str, Any]
) -> tuple[ModelShape, list[int]]:
    """Any other causal LM: its linear layers, listed from a model without memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    try:
        config = AutoConfig.for_model(
            kind, **{k: v for k, v in values.items() if k != "model_type"}
        )
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"model config: model_type {kind!r} is not a causal language model that transformers "
            f"builds ({reason})."
        ) from None
    head = model.get_output_embeddings()
    counts: dict[tuple[str, int, int], int] = {}
    known = {
        id(p) for m in model.modules() if isinstance(m, torch.nn.Embedding) for p in [m.weight]
    }
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear | Conv1D):
            continue
        known.add(id(module.weight))
        if module is not head:
            rows, columns = module.weight.shape
            sides = (rows, columns) if isinstance(module, Conv1D) else (columns, rows)
            key = (name.rsplit(".", 1)[-1], *sides)
            counts[key] = counts.get(key, 0) + 1
    strange = [n for n, p in model.named_parameters() if p.dim() > 1 and id(p) not in known]
    if strange or head is None:
        raise InputError(
            f"model config: model_type {kind!r} holds {strange[0] if strange else 'no output head'}"
            ", which dense accounting cannot charge; use a dense decoder."
        )
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    hidden = config.hidden_size
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    rope = getattr(config, "rope_parameters", None)
    partial = rope.get("partial_rotary_factor", 1.0) if isinstance(rope, dict) else 0
    tied = any(head.weight is p for p in [model.get_input_embeddings().weight])
    sizes = [p.numel() for n, p in model.named_parameters() if p is not head.weight or tied]
    shape = cls(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        intermediate=getattr(config, "intermediate_size", None) or 4 * hidden,
        vocab=head.weight.shape[0],
        tied=tied,
        parameters=0,
        trainable=0,
        trainable_tensors=0,
        gated_mlp=any(name.startswith("gate") for name, _, _ in counts),
        rotary_dim=2 * math.ceil(int(head_dim * partial) / 2),
        loose=tuple(Matmul(*key, count=count) for key, count in counts.items()),
    )
    return shape, sizes + ([] if tied else [head.weight.numel()])
