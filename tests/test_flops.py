"""The charged operations are those that torch counts on the real models."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
)

from harness.cost.flops import (
    Convention,
    Generation,
    Lengths,
    attention,
    backward,
    forward,
    generate,
    generation_charges,
    scoring_charges,
    train,
    training_charges,
)
from harness.cost.shape import ModelShape
from harness.errors import InputError

CONFIGS = {
    "llama": LlamaConfig(
        vocab_size=67, hidden_size=48, intermediate_size=112, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True,
    ),
    "qwen2": Qwen2Config(
        vocab_size=131, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=False,
    ),
    "qwen3": Qwen3Config(
        vocab_size=59, hidden_size=32, intermediate_size=80, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
    ),
    "gpt2": GPT2Config(
        vocab_size=97, n_embd=48, n_layer=2, n_head=3, n_positions=128,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    ),
    "gpt_neox": GPTNeoXConfig(
        vocab_size=83, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4,
    ),
}  # fmt: skip
LENGTHS = (5, 24, 61)
LORA_TARGETS = ("q_proj", "v_proj", "down_proj")


def build(name: str, attention: str = "eager"):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation=attention)
    model.config.pad_token_id = None
    return model


def tokens(name: str, length: int) -> torch.Tensor:
    return torch.randint(2, CONFIGS[name].vocab_size, (1, length))


def counted(action) -> int:
    # On a CPU the fused kernel has a name of its own, which torch's counter does not know.
    ahead, back = partial(sdpa_flop), partial(sdpa_backward_flop)
    ahead._get_raw = back._get_raw = True  # both turn tensors into shapes themselves
    kernels = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: ahead,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: back,
    }
    with FlopCounterMode(display=False, custom_mapping=kernels) as counter:
        action()
    return counter.get_total_flops()


def passes(model, ids: torch.Tensor, keep: int):
    def step() -> None:
        model(input_ids=ids, logits_to_keep=keep, use_cache=False).logits.sum().backward()

    return step


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", CONFIGS)
def test_forward_and_training_are_what_torch_counts(name, length):
    model, ids, keep = build(name), tokens(name, length), (length + 1) // 2
    shape, lengths = ModelShape.from_config(CONFIGS[name]), Lengths.of([length])
    with torch.no_grad():
        seen = counted(lambda: model(input_ids=ids, logits_to_keep=keep, use_cache=False))
    assert forward(shape, lengths, keep) == seen
    assert train(shape, lengths, keep) == counted(passes(model, ids, keep))


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_of_different_length_cost_the_sum_of_their_own(name):
    model, shape = build(name), ModelShape.from_config(CONFIGS[name])
    with torch.no_grad():
        seen = sum(counted(lambda n=n: model(input_ids=tokens(name, n))) for n in LENGTHS)
    assert forward(shape, Lengths.of(LENGTHS)) == seen
    assert sum((Lengths.of([n]) for n in LENGTHS), Lengths()) == Lengths.of(LENGTHS)


@pytest.mark.parametrize("prompt", LENGTHS)
@pytest.mark.parametrize("name", CONFIGS)
def test_generation_is_what_torch_counts(name, prompt):
    model, new = build(name).eval(), 17
    seen = counted(
        lambda: model.generate(
            tokens(name, prompt), max_new_tokens=new, min_new_tokens=new, do_sample=True,
            pad_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip
    charged = generate(ModelShape.from_config(CONFIGS[name]), Generation.of([prompt], [new]))
    assert charged == seen


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("llama", LORA_TARGETS),
        ("qwen2", ("gate_proj",)),
        ("qwen2", ("k_proj", "o_proj")),
        ("qwen3", "all-linear"),
        ("gpt2", ("c_attn", "c_proj")),
    ],
)
def test_lora_is_what_torch_counts(name, targets, length):
    named = targets if targets == "all-linear" else list(targets)
    peft = LoraConfig(r=4, target_modules=named, fan_in_fan_out=name == "gpt2")
    model, ids = get_peft_model(build(name), peft), tokens(name, length)
    shape = ModelShape.from_config(CONFIGS[name], lora_rank=4, lora_targets=targets)
    lengths = Lengths.of([length])
    assert train(shape, lengths, 3) == counted(passes(model, ids, 3))
    assert shape.parameters == model.num_parameters()
    assert shape.trainable == model.num_parameters(only_trainable=True)
    read = ModelShape.from_model(model)
    assert train(read, lengths, 3) == train(shape, lengths, 3)
    assert (read.parameters, read.trainable) == (shape.parameters, shape.trainable)
    assert read.trainable_tensors == shape.trainable_tensors
    model.enable_input_require_grads()
    whole = Convention(input_gradients=True)
    assert train(shape, lengths, 3, convention=whole) == counted(passes(model, ids, 3))


@pytest.mark.parametrize("rank", [0, 4])
def test_a_critic_with_a_scalar_head_is_what_torch_counts(rank):
    config = LlamaConfig(**{**CONFIGS["llama"].to_dict(), "num_labels": 1, "pad_token_id": 0})
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    if rank:
        model = get_peft_model(
            model, LoraConfig(r=rank, target_modules=["q_proj"], task_type="SEQ_CLS")
        )
    shape = ModelShape.from_config(
        config, scalar_head=True, lora_rank=rank, lora_targets=("q_proj",)
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    assert shape.trainable == sum(p.numel() for p in trained)
    assert shape.trainable_tensors == len(trained)
    seen = counted(lambda: model(input_ids=tokens("llama", 24)).logits.sum().backward())
    assert train(shape, Lengths.of([24])) == seen


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_a_fused_kernel_adds_the_scores_it_recomputes(name):
    model, ids = build(name, "sdpa"), tokens(name, 61)
    shape, lengths = ModelShape.from_config(CONFIGS[name]), Lengths.of([61])
    fused = Convention(fused=True)
    assert train(shape, lengths, convention=fused) == counted(passes(model, ids, 0))
    square = 2 * shape.layers * shape.heads * shape.head_dim * 61 * 61
    assert backward(shape, lengths, convention=fused) - backward(shape, lengths) == square


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_checkpointing_runs_the_layers_forward_again(name):
    model, ids = build(name).train(), tokens(name, 61)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    shape, lengths = ModelShape.from_config(CONFIGS[name]), Lengths.of([61])
    charged = train(shape, lengths, 8, convention=Convention(recompute=True))
    with set_checkpoint_early_stop(False):
        assert charged == counted(passes(model, ids, 8))
    # By default torch leaves out what follows a layer's last saved tensor: its down projection.
    saved = shape.layers * 2 * shape.intermediate * shape.hidden * 61
    assert charged - saved == counted(passes(model, ids, 8))


@pytest.mark.parametrize("name", CONFIGS)
def test_shapes_hold_the_real_parameters(name):
    model = build(name)
    shape = ModelShape.from_config(CONFIGS[name])
    assert shape.parameters == shape.trainable == sum(p.numel() for p in model.parameters())
    assert shape.trainable_tensors == len(list(model.parameters()))
    assert ModelShape.from_config(CONFIGS[name].to_dict()) == shape
    assert ModelShape.from_model(model) == shape
    frozen = ModelShape.from_config(CONFIGS[name], trained=False)
    assert (frozen.trainable, frozen.trainable_tensors) == (0, 0)
    with pytest.raises(ValueError, match="frozen"):
        backward(frozen, Lengths.of([3]))


def test_generation_reads_a_shared_prompt_once():
    alone = Generation.of([7] * 4, [3, 1, 5, 2])
    shared = Generation.of([7] * 4, [3, 1, 5, 2], shared_by=4)
    assert alone.prefill == Lengths(4, 28, 196)
    assert replace(alone, prefill=Lengths(1, 7, 49)) == shared
    assert (alone.sampled, alone.decoded) == (11, 7)
    assert alone.contexts == (8 + 9) + 0 + (8 + 9 + 10 + 11) + 8
    assert Generation.of([7, 7], [3, 1]) + Generation.of([7, 7], [5, 2]) == alone
    with pytest.raises(ValueError, match="shared by 3"):
        Generation.of([7] * 4, [1] * 4, shared_by=3)


def test_what_cannot_be_charged_is_refused():
    some = LoraConfig(r=2, target_modules=["q_proj"], layers_to_transform=[0])
    with pytest.raises(InputError, match="adapt all layers alike"):
        ModelShape.from_model(get_peft_model(build("llama"), some))
    moe = MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    with pytest.raises(InputError, match=r"mixtral.*dense decoder"):
        ModelShape.from_config(moe)
    with pytest.raises(InputError, match="Did you mean 'q_proj'"):
        ModelShape.from_config(CONFIGS["llama"], lora_rank=2, lora_targets=("q_prj",))
    with pytest.raises(InputError, match="hidden_size is None"):
        ModelShape.from_config({"model_type": "llama"})
    with pytest.raises(InputError, match="'no_such_model'"):
        ModelShape.from_config({"model_type": "no_such_model"})


def test_accounting_needs_no_torch():
    code = (
        "import sys, harness.cost.memory as memory, harness.cost.flops as flops\n"
        "config = {'model_type': 'gpt2', 'n_embd': 8, 'n_layer': 1, 'n_head': 2, 'n_positions': 9,"
        " 'vocab_size': 5}\n"
        "shape = memory.ModelShape.from_config(config)\n"
        "assert flops.train(shape, flops.Lengths.of([3])) > 0\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    root = str(Path(__file__).parent.parent)
    run = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": root}, check=False
    )
    assert run.returncode == 0


def dense_step(case: str, critic: bool, n: int) -> int:
    """FLOPs of one completion token, all models of n parameters, attention left out."""
    epochs = int(case[1])
    trained, frozen = ModelShape.dense(n), ModelShape.dense(n, trained=False)
    learners = {"policy": trained} | ({"critic": trained} if critic else {})
    judges = {} if case.endswith("noref") else {"reference": frozen}
    judges |= {"reward_model": frozen} if "_rm_" in case else {}
    one = Lengths(1, 1, 1)
    charges = (
        *generation_charges(trained, Generation(sampled=1, decoded=1)),
        *scoring_charges(learners | judges, one, 1),
        *training_charges(learners, one, 1, epochs=epochs),
    )
    return sum(charge.flops for charge in charges)


def test_cost_per_token_matches_the_golden_vector(golden):
    vector = golden("flops_per_response_token_in_units_of_N")
    n, expected = 1000, vector["expected"]
    for i, case in enumerate(vector["inputs"]["cases"]):
        ppo, grpo = dense_step(case, True, n), dense_step(case, False, n)
        assert (ppo, grpo) == (expected["ppo"][i] * n, expected["grpo"][i] * n)
        ratio = expected["equal_flops_token_ratio_grpo_over_ppo"][i]
        assert ppo / grpo == pytest.approx(ratio, abs=vector["tolerance"])


def test_attention_term_matches_the_golden_vector(golden):
    vector = golden("flops_attention_term")
    given, expected = vector["inputs"], vector["expected"]
    length, heads = given["T"], given["d_model"] // 128
    shape = replace(
        ModelShape.dense(int(given["n_params"])),
        layers=given["n_layers"], hidden=given["d_model"], heads=heads, head_dim=128,
    )  # fmt: skip
    lengths = Lengths.of([length])
    half = attention(shape, lengths, Convention(causal=True)) / length
    dense = 2 * shape.trunk_matmul_parameters
    assert dense == expected["dense_fwd_per_token"]
    assert half == expected["attn_fwd_per_token_causal_avg"]
    assert attention(shape, lengths) / length == expected["attn_fwd_per_token_uncausal"]
    assert half / dense == pytest.approx(expected["fraction_of_dense"], abs=vector["tolerance"])
