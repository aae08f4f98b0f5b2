"""Floating-point operations of sampling, scoring and training, from token counts alone.

The convention is that of torch's ``FlopCounterMode`` on an unpadded transformers model: two
operations per multiply-add of every matrix product, attention over the full length x length
square, nothing for norms, activations, softmax or look-ups (those of the K likeliest tokens that a
clip may ask for among them: they gather from logits that exist). Padding is never charged, so a
cost does not depend on how rows were batched. The ``causal`` switch halves the square, as the usual
paper formula does (2N + 2 layers d T per forward token).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from harness.cost.shape import Matmul, ModelShape

Role = Literal["policy", "critic", "reference", "reward_model"]
Phase = Literal["generate", "score", "train"]
ROLES: tuple[Role, ...] = ("policy", "critic", "reference", "reward_model")
PHASES: tuple[Phase, ...] = ("generate", "score", "train")


@dataclass(frozen=True)
class Lengths:
    """Sequence lengths as the three sums a cost depends on.

    Attributes:
        sequences: how many.
        tokens: sum of lengths.
        squared: sum of squared lengths.
    """

    sequences: int = 0
    tokens: int = 0
    squared: int = 0

    @classmethod
    def of(cls, lengths: Iterable[int]) -> Lengths:
        """The sums over these lengths (in tokens, without padding)."""
        values = [int(n) for n in lengths]
        return cls(len(values), sum(values), sum(n * n for n in values))

    def __add__(self, other: Lengths) -> Lengths:
        return Lengths(
            self.sequences + other.sequences,
            self.tokens + other.tokens,
            self.squared + other.squared,
        )


@dataclass(frozen=True)
class Generation:
    """Sampling with a KV cache: prompts are read once, then one token at a time.

    Attributes:
        prefill: the prompts read.
        sampled: completion tokens drawn, ends of sequence included; each needs logits.
        decoded: those fed back; the last token of a completion is not.
        contexts: sum, over decoded tokens, of the positions each attends to (itself included).
        searched: tokens whose neighbours were looked for among all input embeddings.
        given: tokens of completions that an environment wrote; fed and attended to like those that
            were sampled, and none of them needs logits.
    """

    prefill: Lengths = Lengths()
    sampled: int = 0
    decoded: int = 0
    contexts: int = 0
    searched: int = 0
    given: int = 0

    @classmethod
    def of(
        cls,
        prompts: Iterable[int],
        completions: Iterable[int],
        *,
        shared_by: int = 1,
        searched: int = 0,
        given: int = 0,
    ) -> Generation:
        """The sums over rows of one sampling call.

        Args:
            prompts: prompt length of each row.
            completions: completion length of each row, end of sequence included, and what an
                environment wrote between its turns.
            shared_by: rows that share one read of their (equal, adjacent) prompt; 1 where the
                sampler reads the prompt again for each completion, as transformers does.
            searched: tokens whose neighbours the call looked for.
            given: of the completions' tokens, those that an environment wrote.

        Raises:
            ValueError: the two differ in number, or ``shared_by`` does not divide it.
        """
        starts, drawn = [int(n) for n in prompts], [int(n) for n in completions]
        if len(starts) != len(drawn) or len(starts) % shared_by:
            raise ValueError(
                f"{len(starts)} prompts, {len(drawn)} completions, shared by {shared_by}"
            )
        decoded = [max(c - 1, 0) for c in drawn]
        contexts = sum(p * d + d * (d + 1) // 2 for p, d in zip(starts, decoded, strict=True))
        prefill = Lengths.of(starts[::shared_by])
        return cls(prefill, sum(drawn) - given, sum(decoded), contexts, searched, given)

    def __add__(self, other: Generation) -> Generation:
        return Generation(
            self.prefill + other.prefill,
            self.sampled + other.sampled,
            self.decoded + other.decoded,
            self.contexts + other.contexts,
            self.searched + other.searched,
            self.given + other.given,
        )


@dataclass(frozen=True)
class Convention:
    """What counts as an operation. The default is the model's own arithmetic.

    Attributes:
        causal: charge half of each attention square, the masked half being free.
        recompute: the decoder layers run forward again in the backward pass (checkpointing).
        fused: the attention kernel recomputes its scores going backward (flash attention).
        input_gradients: LoRA only: gradients also reach the embeddings' output, as
            ``enable_input_require_grads`` has it.
    """

    causal: bool = False
    recompute: bool = False
    fused: bool = False
    input_gradients: bool = False


MODEL = Convention()


@dataclass(frozen=True)
class Charge:
    """Operations spent by one role in one phase."""

    role: Role
    phase: Phase
    flops: int


def attention(shape: ModelShape, lengths: Lengths, convention: Convention = MODEL) -> int:
    """Forward operations of scores and weighted values; all query heads, also under GQA."""
    square = 4 * shape.layers * shape.heads * shape.head_dim * lengths.squared
    return square // 2 if convention.causal else square


def forward(
    shape: ModelShape,
    lengths: Lengths,
    head_tokens: int | None = None,
    convention: Convention = MODEL,
) -> int:
    """One forward pass over whole sequences.

    Args:
        shape: the model.
        lengths: prompt + completion of each sequence.
        head_tokens: positions whose logits (or values) are computed; None means all.
        convention: what counts.
    """
    at_head = lengths.tokens if head_tokens is None else head_tokens
    return (
        2 * shape.trunk_matmul_parameters * lengths.tokens
        + attention(shape, lengths, convention)
        + shape.rotary_dim * lengths.tokens  # angles = frequencies x positions, a product of rank 1
        + 2 * shape.head_parameters * at_head
    )


def backward(
    shape: ModelShape,
    lengths: Lengths,
    head_tokens: int | None = None,
    convention: Convention = MODEL,
) -> int:
    """One backward pass over whole sequences; arguments as for :func:`forward`.

    Full fine-tuning: twice the products of the forward pass. LoRA: gradients of inputs and of
    adapters only, and none below the first adapter of the first layer, since nothing there learns.

    Raises:
        ValueError: the model is frozen.
    """
    if not shape.trainable:
        raise ValueError("backward of a frozen model")
    at_head = lengths.tokens if head_tokens is None else head_tokens
    linear, products = _trunk_backward(shape, convention)
    unit = 2 * shape.heads * shape.head_dim * lengths.squared
    weights_learn = not shape.lora_rank or shape.scalar_head
    total = linear * lengths.tokens + products * unit // (2 if convention.causal else 1)
    total += (4 if weights_learn else 2) * shape.head_parameters * at_head
    if convention.recompute:
        total += 2 * shape.trunk_matmul_parameters * lengths.tokens
        total += attention(shape, lengths, convention)
    return total


def train(
    shape: ModelShape,
    lengths: Lengths,
    head_tokens: int | None = None,
    *,
    epochs: int = 1,
    convention: Convention = MODEL,
) -> int:
    """``epochs`` forward and backward passes over the same sequences."""
    once = forward(shape, lengths, head_tokens, convention)
    return epochs * (once + backward(shape, lengths, head_tokens, convention))


def generate(shape: ModelShape, generation: Generation, convention: Convention = MODEL) -> int:
    """Sampling with a KV cache: prefill, then decoding; logits only where a token is drawn.

    A search for neighbours is one product of a token's embedding with all of them.
    """
    return (
        forward(shape, generation.prefill, 0, convention)
        + (2 * shape.trunk_matmul_parameters + shape.rotary_dim) * generation.decoded
        + 4 * shape.layers * shape.heads * shape.head_dim * generation.contexts
        + 2 * shape.head_parameters * generation.sampled
        + 2 * shape.vocab * shape.hidden * generation.searched
    )


def generation_charges(
    policy: ModelShape, generation: Generation, convention: Convention = MODEL
) -> tuple[Charge, ...]:
    """What sampling costs, discarded completions included."""
    return (Charge("policy", "generate", generate(policy, generation, convention)),)


def scoring_charges(
    shapes: Mapping[Role, ModelShape],
    lengths: Lengths,
    completion_tokens: int,
    convention: Convention = MODEL,
) -> tuple[Charge, ...]:
    """One forward pass of each model given, over the sampled sequences.

    Args:
        shapes: the models that score: the policy where old log-probs are computed anew, the
            reference, the critic, the reward model. Leave out those that do not run.
        lengths: prompt + completion of each sequence scored.
        completion_tokens: positions that need logits or values; a reward model reads its one
            output per sequence from a head that runs over all positions.
        convention: what counts.
    """
    charges = []
    for role, shape in shapes.items():
        at_head = None if role == "reward_model" else completion_tokens
        charges.append(Charge(role, "score", forward(shape, lengths, at_head, convention)))
    return tuple(charges)


def training_charges(
    shapes: Mapping[Role, ModelShape],
    lengths: Lengths,
    completion_tokens: int,
    *,
    epochs: int = 1,
    convention: Convention = MODEL,
) -> tuple[Charge, ...]:
    """``epochs`` training passes of each model given (policy, critic) over the kept sequences."""
    return tuple(
        Charge(
            role,
            "train",
            train(shape, lengths, completion_tokens, epochs=epochs, convention=convention),
        )
        for role, shape in shapes.items()
    )


def _linear_backward(shape: ModelShape, m: Matmul, input_learns: bool) -> tuple[int, bool]:
    """Operations per token of one linear layer, and whether its output carries a gradient."""
    full, adapted = not shape.lora_rank, shape.adapted(m)
    flops = 2 * m.parameters * (int(full) + int(input_learns))
    if adapted:
        down, up = shape.lora_rank * m.inputs * m.count, shape.lora_rank * m.outputs * m.count
        flops += 4 * up + 2 * down * (1 + int(input_learns))
    return flops, full or adapted or input_learns


def _block_backward(
    shape: ModelShape, input_learns: bool, convention: Convention
) -> tuple[int, int, bool]:
    """One decoder layer going backward.

    Returns operations per token of its linear layers, its attention products (each one of
    2 heads head_dim T^2), and whether its output carries a gradient.
    """
    n = 1 if shape.fused_qkv else 3
    attention_inputs, output = shape.block[:n], shape.block[n]
    gates, down = shape.block[n + 1 : -1], shape.block[-1]
    total, learns = 0, []
    for m in attention_inputs:
        flops, carries = _linear_backward(shape, m, input_learns)
        total, learns = total + flops, [*learns, carries]
    query, key, value = learns * 3 if shape.fused_qkv else learns
    scores = query or key
    products = int(query) + int(key) + int(scores) + int(value)
    if convention.fused and products:
        products = 5
    flops, carries = _linear_backward(shape, output, scores or value)
    total, middle_learns = total + flops, input_learns or carries
    mlp_learns = False
    for m in gates:
        flops, carries = _linear_backward(shape, m, middle_learns)
        total, mlp_learns = total + flops, mlp_learns or carries
    flops, carries = _linear_backward(shape, down, mlp_learns)
    return total + flops, products, middle_learns or carries


def _trunk_backward(shape: ModelShape, convention: Convention) -> tuple[int, int]:
    """Operations per token of all linear layers before the head, and attention products."""
    if shape.loose:
        # Where adapters sit is not known: every input is taken to carry a gradient.
        total = sum(_linear_backward(shape, m, True)[0] for m in shape.loose)
        return total, shape.layers * (5 if convention.fused else 4)
    total, products = 0, 0
    learns = not shape.lora_rank or convention.input_gradients
    for _ in range(shape.layers):
        flops, squares, learns = _block_backward(shape, learns, convention)
        total, products = total + flops, products + squares
    return total, products
