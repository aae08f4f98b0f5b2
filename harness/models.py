"""Policy, reference and critic on transformers; how a base model is found and pinned."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from harness.cost.memory import measured_static
from harness.errors import InputError
from harness.identity import stream_seed
from harness.parts.mixing import mixed_embeddings
from harness.spec.schema import LoraSpec, ModelSpec
from harness.types import Rollout

EMBEDDED = "embedded/"
R = TypeVar("R", bound=Rollout)


@dataclass(frozen=True)
class Base:
    """The base model's weights and tokenizer, and what they are pinned by."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: tuple[int, ...]
    context: int
    model_sha256: str
    tokenizer_sha256: str


def resolve_device(device: str) -> torch.device:
    """``auto`` takes a GPU where there is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("runtime.device: cuda, but torch sees no GPU; use auto or cpu")
    return torch.device(device)


def load_base(
    spec: ModelSpec, device: torch.device, *, progress: Callable[[str], None] | None = None
) -> Base:
    """Load the base model that a spec names.

    Raises:
        InputError: not found, no pad or end token, or a hub model without a pinned revision.
    """
    transformers_logging.disable_progress_bar()
    source, revision = _locate(spec, progress)
    options: dict[str, Any] = {"revision": revision} if revision else {}
    if spec.gguf_file:
        options["gguf_file"] = spec.gguf_file
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        config = AutoConfig.from_pretrained(source, **options)
        _silence_dropout(config)
        model = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=getattr(torch, spec.dtype),
            attn_implementation=spec.attention,
            **options,
        )
    except (OSError, ValueError, ImportError, LookupError, RuntimeError, SafetensorError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"model.name {spec.name!r}: cannot be loaded: {first}") from error
    _set_pad_token(tokenizer, spec)
    model.to(device)  # type: ignore[arg-type]
    model.eval()
    model.requires_grad_(False)  # the base never trains; ``trainable`` copies it
    return Base(
        model=model,
        tokenizer=tokenizer,
        eos_token_ids=_end_tokens(model, tokenizer, spec),
        context=int(getattr(config, "max_position_embeddings", 0) or 1 << 30),
        model_sha256=weights_sha256(model),
        tokenizer_sha256=_tokenizer_sha256(tokenizer),
    )


def _locate(spec: ModelSpec, progress: Callable[[str], None] | None) -> tuple[str, str | None]:
    if spec.name.startswith(EMBEDDED):
        from harness.warmstart import ensure_embedded_base  # trl takes seconds to import

        name = spec.name.removeprefix(EMBEDDED)
        return str(ensure_embedded_base(name, seed=spec.seed, progress=progress)), None
    path = Path(spec.name).expanduser()
    if path.is_dir():
        return str(path), None
    if spec.name.startswith((".", "/", "~")):
        raise InputError(
            f"model.name: folder {spec.name} does not exist; check the path "
            "(`make smollm2` makes that of SmolLM2)"
        )
    if spec.revision is None:
        raise InputError(
            f"model.name {spec.name!r} is no folder here; if it is a hub id, pin it with "
            "model.revision (a commit hash)"
        )
    return spec.name, spec.revision


def _silence_dropout(config: Any) -> None:
    """No dropout anywhere: with it, the ratio of an unchanged policy would not be 1."""
    for name in vars(config):
        if name.endswith(("dropout", "pdrop", "dropout_prob")) and getattr(config, name):
            setattr(config, name, 0.0)


def _set_pad_token(tokenizer: PreTrainedTokenizerBase, spec: ModelSpec) -> None:
    if spec.pad_token is not None:
        if tokenizer.convert_tokens_to_ids(spec.pad_token) in (None, tokenizer.unk_token_id):
            raise InputError(
                f"model.pad_token {spec.pad_token!r} is not in the tokenizer of {spec.name}"
            )
        tokenizer.pad_token = spec.pad_token
    if tokenizer.pad_token_id is None:
        raise InputError(
            f"model.name {spec.name!r}: its tokenizer has no pad token; set model.pad_token, "
            f"for example to {tokenizer.eos_token!r} (padding is masked and never read)"
        )


def _end_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, spec: ModelSpec
) -> tuple[int, ...]:
    """Every token that ends a completion. Other generation defaults of the model are not used."""
    generation: GenerationConfig | None = model.generation_config  # type: ignore[assignment]
    declared = generation.eos_token_id if generation is not None else None
    ids = [declared] if isinstance(declared, int) else list(declared or [])
    if isinstance(tokenizer.eos_token_id, int):
        ids.append(tokenizer.eos_token_id)
    if not ids:
        raise InputError(f"model.name {spec.name!r}: its tokenizer has no end-of-sequence token")
    return tuple(sorted(set(ids)))


def weights_sha256(model: nn.Module) -> str:
    """Content hash of all parameters, by name."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name}:{parameter.dtype}:{tuple(parameter.shape)}".encode())
        data = parameter.detach().cpu().contiguous()
        digest.update(data.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    digest = hashlib.sha256()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    digest.update(backend.to_str().encode() if backend else repr(tokenizer.get_vocab()).encode())
    digest.update(repr(tokenizer.chat_template).encode())
    digest.update(repr(tokenizer.special_tokens_map).encode())
    return digest.hexdigest()


def trainable(model: PreTrainedModel, lora: LoraSpec | None, seed: int) -> nn.Module:
    """A copy of the base to be trained: whole, or frozen with fresh adapters."""
    model = copy.deepcopy(model)
    if lora is None:
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        return model
    from peft import LoraConfig, get_peft_model

    targets = lora.target_modules
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=targets if isinstance(targets, str) else list(targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    with seeded(stream_seed(seed, "lora")):
        adapted: nn.Module = get_peft_model(model, config)  # type: ignore[assignment]
    return adapted


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's global generator at a seed, and back to where it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def positions(mask: Tensor) -> Tensor:
    """Position ids that start at 0 on the first real token of left-padded rows."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)


def trim(x: R) -> R:
    """The rows without columns that are padding in all of them."""
    first = int(x.prompt_mask.any(0).long().argmax())
    length = max(int(x.present.sum(1).max()), 1)
    fields = {
        name: value[:, :length]
        for name, value in vars(x).items()
        if isinstance(value, Tensor) and value.shape[:2] == x.mask.shape
    }
    fields |= {
        "prompt_ids": x.prompt_ids[:, first:],
        "prompt_mask": x.prompt_mask[:, first:],
        "completion_ids": x.completion_ids[:, :length],
    }
    return dataclasses.replace(x, **fields)


class Policy:
    """A causal language model that is sampled from and scored at one temperature."""

    def __init__(self, model: nn.Module, temperature: float) -> None:
        self.model = model
        self.temperature = temperature

    def parameters(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def logprobs(self, x: Rollout) -> Float[Tensor, "B T"]:
        """Log-probs of the sampled tokens at the sampling temperature; 0 on padding."""
        return token_logprobs(
            self._forward(x).logits[:, :-1], x.completion_ids, x.mask, self.temperature
        )

    def logprobs_and_top(
        self, x: Rollout
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T K"] | None]:
        """Those, and of the recorded top tokens, from one forward pass; None without any."""
        return self._chosen_and_top(self._forward(x).logits[:, :-1], x)

    def logprobs_top_and_hidden(
        self, x: Rollout
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T K"] | None, Float[Tensor, "B T H"]]:
        """Those, and the trunk's output before each completion token, from one forward pass."""
        T = x.completion_ids.shape[1]
        out = self._forward(x, hidden=True)
        chosen, top = self._chosen_and_top(out.logits[:, :-1], x)
        return chosen, top, out.hidden_states[-1][:, -T - 1 : -1]

    def _chosen_and_top(
        self, logits: Float[Tensor, "B T V"], x: Rollout
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T K"] | None]:
        chosen = token_logprobs(logits, x.completion_ids, x.mask, self.temperature)
        if x.top_ids is None:
            return chosen, None
        with torch.no_grad():  # a divergence decides what is masked, and has no gradient
            return chosen, top_logprobs(logits, x.top_ids, x.mask, self.temperature)

    def _forward(self, x: Rollout, *, hidden: bool = False) -> Any:
        """The model's output, logits from the last prompt token on."""
        ids = torch.cat([x.prompt_ids, x.completion_ids], 1)
        mask = torch.cat([x.prompt_mask, x.present], 1)
        T = x.completion_ids.shape[1]
        return self.model(
            **(self._mixed(x) or {"input_ids": ids}),
            attention_mask=mask.long(),
            position_ids=positions(mask),
            logits_to_keep=T + 1,
            use_cache=False,
            **({"output_hidden_states": True} if hidden else {}),
        )

    def _mixed(self, x: Rollout) -> dict[str, Tensor]:
        """The embeddings that were fed while sampling, from this model's present table.

        Empty where no completion was mixed: the model then looks up the tokens itself.
        """
        if x.mixed_ids is None or x.mixed_weights is None:
            return {}
        weights = x.mixed_weights.masked_fill(~x.mask[:, :, None], 0.0)
        if not weights.any():
            return {}
        model: Any = self.model
        table = model.get_input_embeddings()
        completion = mixed_embeddings(table, x.completion_ids, x.mixed_ids, weights)
        return {"inputs_embeds": torch.cat([table(x.prompt_ids), completion], 1)}


def token_logprobs(
    logits: Float[Tensor, "B T V"], ids: Tensor, mask: Tensor, temperature: float
) -> Float[Tensor, "B T"]:
    """log softmax(logits / temperature) of each token; at least float32; 0 on padding."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.to(dtype) / temperature
    chosen = logits.gather(2, ids[:, :, None]).squeeze(2)
    logprobs = chosen - logits.logsumexp(2)
    return torch.where(mask, logprobs, torch.zeros_like(logprobs))


def top_logprobs(
    logits: Float[Tensor, "B T V"], ids: Int[Tensor, "B T K"], mask: Tensor, temperature: float
) -> Float[Tensor, "B T K"]:
    """As :func:`token_logprobs`, of K tokens at each place."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.to(dtype) / temperature
    return (logits.gather(2, ids) - logits.logsumexp(2, keepdim=True)).masked_fill(
        ~mask[:, :, None], 0.0
    )


class Reference(Policy):
    """The frozen base; with adapters, the trained model with its adapters switched off."""

    def __init__(self, model: nn.Module, temperature: float, *, adapters_off: bool = False) -> None:
        super().__init__(model, temperature)
        self.adapters_off = adapters_off

    @torch.no_grad()
    def logprobs(self, x: Rollout) -> Float[Tensor, "B T"]:
        off: Any = self.model.disable_adapter() if self.adapters_off else nullcontext()  # type: ignore[operator]
        with off:
            return super().logprobs(x)

    def bytes_held(self) -> int:
        """Of weights of its own: none where it is the policy without its adapters."""
        return 0 if self.adapters_off else measured_static(self.model)["parameters"]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What resuming a run needs of it, by name: nothing, as the base never changes."""
        return iter(())

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what ``tensors`` gave."""


class Critic(nn.Module):
    """A value model of the policy's size: its own trunk and a scalar head.

    ``init``: ``policy`` starts from V = 0, ``fresh_head`` from a random linear read-out.
    """

    def __init__(self, trunk: nn.Module, hidden: int, init: str, seed: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = _scalar_head(hidden, init, seed, next(trunk.parameters()).device)

    def values(self, x: Rollout) -> Float[Tensor, "B T"]:
        """V of the state before each sampled token; 0 on padding."""
        ids = torch.cat([x.prompt_ids, x.completion_ids], 1)
        mask = torch.cat([x.prompt_mask, x.present], 1)
        T = x.completion_ids.shape[1]
        hidden = self.trunk(
            input_ids=ids,
            attention_mask=mask.long(),
            position_ids=positions(mask),
            use_cache=False,
        ).last_hidden_state[:, -T - 1 : -1]
        values = self.head(hidden.to(self.head.weight.dtype)).squeeze(2)
        return torch.where(x.mask, values, torch.zeros_like(values))


class ValueHead(nn.Module):
    """A scalar head on the policy's trunk: values come with the policy's own forward pass."""

    def __init__(self, policy: Policy, hidden: int, init: str, seed: int) -> None:
        super().__init__()
        self.policy = policy  # no module, so its weights are not this head's
        self.head = _scalar_head(hidden, init, seed, next(policy.model.parameters()).device)

    def with_logprobs(
        self, x: Rollout
    ) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T K"] | None, Float[Tensor, "B T"]]:
        """Log-probs, those of recorded top tokens, and V before each token; 0 on padding."""
        logprobs, top, hidden = self.policy.logprobs_top_and_hidden(x)
        values = self.head(hidden.to(self.head.weight.dtype)).squeeze(2)
        return logprobs, top, torch.where(x.mask, values, torch.zeros_like(values))


def _scalar_head(hidden: int, init: str, seed: int, device: torch.device) -> nn.Linear:
    """V = 0, or for ``fresh_head`` a linear read-out from N(0, 1/(hidden+1))."""
    head = nn.Linear(hidden, 1, bias=True, dtype=torch.float32, device=device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    if init == "fresh_head":
        generator = torch.Generator().manual_seed(stream_seed(seed, "critic"))
        drawn = torch.randn(head.weight.shape, generator=generator)
        with torch.no_grad():
            head.weight.copy_(drawn / (hidden + 1) ** 0.5)
    return head


def build_critic(base: Base, init: str, lora: LoraSpec | None, seed: int) -> Critic:
    """A critic on a copy of the base's trunk.

    Raises:
        InputError: ``reward_model`` where the experiment has no reward model.
    """
    if init == "reward_model":
        raise InputError(
            "critic init 'reward_model': this experiment's reward is a rule, there is no reward "
            "model to start from; use 'policy' or 'fresh_head'"
        )
    model = trainable(base.model, lora, seed)
    inner: Any = model.get_base_model() if lora is not None else model  # type: ignore[operator]
    trunk = inner.base_model
    return Critic(trunk, int(base.model.config.hidden_size), init, seed)


def scored(
    score: Callable[[Rollout], Tensor], x: Rollout, micro_batch: int
) -> Float[Tensor, "B T"]:
    """A scoring function over micro-batches, each trimmed to its own lengths, without gradient."""
    T = x.mask.shape[1]
    found = []
    with torch.no_grad():
        for rows in torch.arange(len(x), device=x.mask.device).split(micro_batch):
            part = score(trim(x.select(rows)))
            found.append(nn.functional.pad(part, (0, T - part.shape[-1])))
    return torch.cat(found)
