"""Random models of a few thousand weights, and the harness's own objects built around them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from harness.arm import Arm
from harness.cell import critic_shape
from harness.cost.shape import ModelShape
from harness.data import PromptSet, PromptStream, StreamHash
from harness.identity import digest
from harness.learner import Learner
from harness.ledger import Ledger
from harness.loop import Controls, Judge, Loop, Progress
from harness.models import (
    Base,
    Critic,
    Policy,
    Reference,
    ValueHead,
    build_critic,
    scored,
    trainable,
)
from harness.reference import build_reference, reference_shape
from harness.rewards.judge import MathsJudge
from harness.rewards.maths import MathGrader, Outcome, Verdict
from harness.samplers.hf import HFSampler
from harness.samplers.sampler import Drawn
from harness.spec.schema import BudgetSpec, LoraSpec, OptimizerSpec, RewardSpec, SamplingSpec
from harness.tasks.arithmetic import CHARACTERS
from harness.tasks.task import Problem
from harness.tokenizer import build_tokenizer
from harness.types import Batch, Experience, Rollout

PAD, EOS = 0, 2


def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(CHARACTERS, max_length=64)


def double_model(seed: int = 0, *, spread: float = 0.4) -> PreTrainedModel:
    """A random GPT-2 in float64. Llama's norms and angles are float32 whatever its weights are."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=3 + len(CHARACTERS),
                n_embd=16,
                n_layer=2,
                n_head=4,
                n_positions=64,
                initializer_range=spread,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                pad_token_id=PAD,
                bos_token_id=1,
                eos_token_id=EOS,
                attn_implementation="sdpa",
            )
        )
    return model.eval().double()


def tiny_model(
    seed: int = 0, *, spread: float = 0.3, layers: int = 2, hidden: int = 16
) -> PreTrainedModel:
    """A random Llama; ``spread`` is the scale of its weights, and so of its opinions."""
    vocabulary = 3 + len(CHARACTERS)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocabulary,
                hidden_size=hidden,
                intermediate_size=2 * hidden,
                num_hidden_layers=layers,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=64,
                initializer_range=spread,
                pad_token_id=PAD,
                bos_token_id=1,
                eos_token_id=EOS,
                attn_implementation="eager",  # the one whose attention torch counts on a CPU
            )
        )
    return model.eval()


def tiny_base(model: PreTrainedModel | None = None) -> Base:
    return Base(
        model=model or tiny_model(),
        tokenizer=tokenizer(),
        eos_token_ids=(EOS,),
        context=64,
        model_sha256="m",
        tokenizer_sha256="t",
    )


def save_base(folder: Path) -> Path:
    """The tiny model and tokenizer as a folder that a spec can name."""
    tiny_model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def sampler(model: torch.nn.Module, engine_batch: int = 1024) -> HFSampler:
    return HFSampler(model, tokenizer(), [EOS], engine_batch)


def as_rollout(drawn: Drawn, group_size: int = 1, score: Tensor | None = None) -> Rollout:
    B = len(drawn.mask)
    score = torch.zeros(B) if score is None else score
    return Rollout(
        prompt_ids=drawn.prompt_ids,
        prompt_mask=drawn.prompt_mask,
        completion_ids=drawn.completion_ids,
        mask=drawn.mask,
        group=torch.arange(B) // group_size,
        score=score,
        bonus=torch.zeros_like(score),
        correct=score > 0,
        finished=drawn.finished,
        behaviour_logprobs=drawn.logprobs,
    )


def ragged(
    prompts: Sequence[int] = (3, 5, 1, 4, 2, 6, 3, 2),
    completions: Sequence[int] = (4, 1, 7, 2, 5, 3, 6, 7),
    *,
    group_size: int = 4,
    seed: int = 0,
    left: int = 0,
    right: int = 0,
    garbage: int = PAD,
) -> Rollout:
    """A batch of given lengths, with extra padding columns and anything at all under the mask."""
    generator = torch.Generator().manual_seed(seed)
    B, S, T = len(prompts), max(prompts) + left, max(completions) + right
    ids = torch.full((B, S), garbage)
    prompt_mask = torch.zeros((B, S), dtype=torch.bool)
    out = torch.full((B, T), garbage)
    mask = torch.zeros((B, T), dtype=torch.bool)
    for row, (p, c) in enumerate(zip(prompts, completions, strict=True)):
        drawn = torch.randint(3, 18, (p + c,), generator=generator)
        ids[row, S - p :], prompt_mask[row, S - p :] = drawn[:p], True
        out[row, :c], mask[row, :c] = drawn[p:], True
        if row % 3 != 1:
            out[row, c - 1] = EOS
    score = torch.tensor([1.0, 0.0, 0.0, 1.0] * B)[:B]
    return Rollout(
        prompt_ids=ids,
        prompt_mask=prompt_mask,
        completion_ids=out,
        mask=mask,
        group=torch.arange(B) // group_size,
        score=score,
        bonus=torch.zeros(B),
        correct=score > 0,
        finished=torch.arange(B) % 3 != 1,
        behaviour_logprobs=torch.zeros(B, T),
    )


@dataclass
class Trained:
    """A learner and a batch it can learn from, in float64."""

    learner: Learner
    batch: Batch


def trained(
    arm: Arm,
    rollout: Rollout,
    *,
    micro_batch: int = 1000,
    warmup: bool = False,
    temperature: float = 0.8,
    **optimizer: Any,
) -> Trained:
    """Experience of a tiny float64 policy, its reference and critic, with the arm's credit."""
    model = double_model(1)
    policy = Policy(copy.deepcopy(model), temperature)
    base = tiny_base(double_model(2))
    critic: Critic | None = None
    if arm.separate_critic is not None:
        critic = build_critic(base, "fresh_head", None, 0).double()
    hidden = int(model.config.hidden_size)
    head = ValueHead(policy, hidden, "fresh_head", 0).double() if arm.shared_head else None
    reference = Reference(base.model, temperature)
    options = {"learning_rate": 1e-2, "max_grad_norm": 0.1} | optimizer
    values = critic.values if critic is not None else None
    if head is not None:
        values = lambda x: head.with_logprobs(x)[2]  # noqa: E731
    learner = Learner(arm, policy, critic, OptimizerSpec(micro_batch=micro_batch, **options), head)
    experience = rollout.extend(
        Experience,
        old_logprobs=scored(policy.logprobs, rollout, 1000),
        ref_logprobs=scored(reference.logprobs, rollout, 1000) if arm.kl.needs_reference else None,
        values=scored(values, rollout, 1000) if values is not None else None,
    )
    batch = arm.credit(experience, kl_coef=arm.kl.initial_coef, max_new_tokens=12, warmup=warmup)
    return Trained(learner, batch)


def weights(learner: Learner) -> Tensor:
    """All trained weights in one vector."""
    return torch.cat([t.flatten() for name, t in learner.tensors() if ".adam/" not in name])


class Rule:
    """A grader by a fixed rule: the completion starts with the gold answer."""

    def grade(
        self, golds: Sequence[str], texts: Sequence[str], finished: Sequence[bool]
    ) -> list[Verdict]:
        return [
            Verdict(Outcome.CORRECT if text.startswith(gold) else Outcome.WRONG, text[:1] or None)
            for gold, text in zip(golds, texts, strict=True)
        ]


def prompt_set(count: int = 12, answer: str | None = None) -> PromptSet:
    """Small sums; ``answer`` makes every problem's gold answer the same text."""
    problems = tuple(
        Problem(f"p{i}", f"{i % 9 + 1}+{i // 9 + 1}=", answer or str(i % 10)) for i in range(count)
    )
    encoded = tuple(tuple(tokenizer()(p.question)["input_ids"]) for p in problems)
    return PromptSet("train", problems, encoded, digest([p.id for p in problems]))


def make_loop(
    arm: Arm,
    *,
    seed: int = 0,
    model: PreTrainedModel | None = None,
    problems: PromptSet | None = None,
    placebo: bool = False,
    unit: str = "completions",
    limit: float = 64,
    lora: LoraSpec | None = None,
    sampling: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    judge: Judge | None = None,
) -> Loop:
    """A loop as a cell builds it, around a tiny model and a rule that grades."""
    base = tiny_base(model or tiny_model())
    problems = problems or prompt_set()
    options = {"prompts_per_step": 4, "completions_per_prompt": 4, "max_new_tokens": 5}
    drawing = SamplingSpec(**(options | (sampling or {})))
    learning = OptimizerSpec(**({"learning_rate": 1e-3, "minibatches": 2} | (optimizer or {})))
    controls = Controls(seed, drawing, learning, BudgetSpec(unit=unit, limit=limit))  # type: ignore[arg-type]
    policy = Policy(trainable(base.model, lora, seed), drawing.temperature)
    reference = critic = None
    shapes = {"policy": ModelShape.from_model(policy.model)}  # type: ignore[arg-type]
    if arm.kl.needs_reference:
        moves = arm.kl.refresh is not None
        reference = build_reference(base, policy, lora=lora is not None, moves=moves)
        shapes["reference"] = reference_shape(reference, base, shapes["policy"])
    separate, shared = arm.separate_critic, arm.shared_head
    hidden = int(base.model.config.hidden_size)
    head = ValueHead(policy, hidden, shared.init, seed) if shared else None
    if separate is not None:
        critic = build_critic(base, separate.init, lora, seed)
        shapes["critic"] = critic_shape(critic, base, shapes["policy"])
    grader: MathGrader = Rule()  # type: ignore[assignment]
    return Loop(
        arm=arm,
        controls=controls,
        learner=Learner(arm, policy, critic, learning, head),
        reference=reference,
        sampler=sampler(policy.model),
        prompts=PromptStream(problems, seed),
        judge=judge or MathsJudge(grader, problems.problems, RewardSpec(), placebo=placebo),
        ledger=Ledger(shapes),
        progress=Progress(kl_coef=arm.kl.initial_coef, stream=StreamHash(drawing.prompts_per_step)),
    )
