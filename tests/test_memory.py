"""Predicted bytes against real tensors, and the savings that papers quote."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

from harness.cost.memory import (
    BF16_ADAM,
    BF16_LORA_ADAM,
    FP32_ADAM,
    FP32_SGD,
    MIXED_ADAM,
    MIXED_ADAM_BOTH_GRADIENTS,
    MIXED_ADAM_FP32_GRADIENTS,
    OFFLOADED_ADAM,
    Load,
    MemoryItem,
    PeakMeter,
    Resident,
    activation_bytes,
    by_role,
    kv_cache_bytes,
    measured_activations,
    measured_kv_cache,
    measured_static,
    model_state_bytes,
    peak_bytes,
    predict,
)
from harness.cost.shape import ModelShape

LLAMA = LlamaConfig(
    vocab_size=67, hidden_size=48, intermediate_size=112, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, pad_token_id=0,
    num_labels=1,
)  # fmt: skip
CONFIGS = {
    "llama": LLAMA,
    "qwen2": Qwen2Config(
        vocab_size=131, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=False,
    ),
    "qwen3": Qwen3Config(
        vocab_size=59, hidden_size=32, intermediate_size=80, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    ),
    "gpt2": GPT2Config(
        vocab_size=97, n_embd=48, n_layer=2, n_head=3, n_positions=128,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    ),
}  # fmt: skip
LOAD = Load(train_rows=4, score_rows=8, generate_rows=16, length=40, completion=24)


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.nn.Module:
    """The model after one update, its gradients still held."""
    model(input_ids=torch.randint(2, 60, (2, 9))).logits.float().sum().backward()
    optimizer.step()
    return model


def static(shape: ModelShape, storage) -> dict[str, int]:
    items = predict([Resident("policy", shape, storage)], LOAD)
    held = {item.kind: item.bytes for item in items if item.phase is None}
    return {kind: held.get(kind, 0) for kind in ("parameters", "gradients", "optimizer")}


@pytest.mark.parametrize(
    ("storage", "dtype", "lora", "optimizer"),
    [
        (FP32_ADAM, torch.float32, 0, torch.optim.AdamW),
        (FP32_ADAM, torch.float32, 4, torch.optim.AdamW),
        (BF16_ADAM, torch.bfloat16, 0, torch.optim.AdamW),
        (BF16_LORA_ADAM, torch.bfloat16, 4, torch.optim.AdamW),
        (FP32_SGD, torch.float32, 0, torch.optim.SGD),
    ],
)
def test_static_bytes_are_exact(storage, dtype, lora, optimizer):
    model = AutoModelForCausalLM.from_config(LLAMA).to(dtype)
    targets = ("q_proj", "down_proj")
    if lora:
        model = get_peft_model(model, LoraConfig(r=lora, target_modules=list(targets)))
    shape = ModelShape.from_config(LLAMA, lora_rank=lora, lora_targets=targets)
    steps = optimizer([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    assert static(shape, storage) == measured_static(trained(model, steps), steps)


def test_a_critic_and_a_shared_optimizer_are_measured_apart():
    policy = AutoModelForCausalLM.from_config(LLAMA)
    critic = AutoModelForSequenceClassification.from_config(LLAMA)
    both = torch.optim.AdamW([*policy.parameters(), *critic.parameters()], lr=1e-3)
    trained(critic, both)
    trained(policy, both)
    shape = ModelShape.from_config(LLAMA, scalar_head=True)
    assert measured_static(critic, both) == static(shape, FP32_ADAM)
    assert measured_static(policy, both) == static(ModelShape.from_config(LLAMA), FP32_ADAM)
    frozen = ModelShape.from_config(LLAMA, trained=False)
    parameters = {"parameters": 4 * shape.parameters - 4 * 48, "gradients": 0, "optimizer": 0}
    assert static(frozen, FP32_ADAM) == parameters
    assert measured_static(AutoModelForCausalLM.from_config(LLAMA)) == parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_cache_bytes_are_exact(name, dtype):
    model = AutoModel.from_config(CONFIGS[name]).to(dtype).eval()
    with torch.no_grad():
        cache = model(input_ids=torch.randint(2, 50, (3, 14)), use_cache=True).past_key_values
    shape = ModelShape.from_config(CONFIGS[name])
    assert kv_cache_bytes(shape, 3 * 14, dtype.itemsize) == measured_kv_cache(cache)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_saved_activations_are_predicted_within_2_percent(name, dtype, fused, padded):
    kernel = "sdpa" if fused else "eager"
    model = (
        AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation=kernel)
        .to(dtype)
        .train()
    )
    shape = ModelShape.from_config(CONFIGS[name])
    for rows, length in ((1, 24), (4, 61), (3, 120)):
        ids = torch.randint(2, 50, (rows, length))
        mask = torch.ones_like(ids)
        mask[0, :3] = 0  # left padding on one row is enough for attention to need a mask
        arguments = {"input_ids": ids, "attention_mask": mask if padded else None}
        seen, _ = measured_activations(
            lambda arguments=arguments: model(**arguments, use_cache=False).logits,
            [*model.parameters(), ids, mask],
        )
        size = activation_bytes(
            shape, rows, length, dtype.itemsize, fused=fused, recompute=False, padded=padded
        )
        assert size == pytest.approx(seen, rel=0.02)


def test_activations_of_an_unlisted_architecture_are_over_rather_than_underestimated():
    config = GPTNeoXConfig(
        vocab_size=83, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    ids = torch.randint(2, 50, (4, 61))
    seen, _ = measured_activations(
        lambda: model(input_ids=ids, use_cache=False).logits, model.parameters()
    )
    shape = ModelShape.from_config(config)
    assert 1 <= activation_bytes(shape, 4, 61, 4, fused=False, recompute=False) / seen < 1.5


def test_checkpointing_keeps_layer_inputs():
    model = AutoModelForCausalLM.from_config(LLAMA, attn_implementation="eager").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(2, 50, (4, 61))
    seen, _ = measured_activations(
        lambda: model(input_ids=ids, use_cache=False).logits,
        [*model.parameters(), ids],
    )
    shape, one = ModelShape.from_config(LLAMA), {"rows": 4, "length": 61, "weight_bytes": 4}
    whole = activation_bytes(shape, fused=False, recompute=True, **one)
    layer = activation_bytes(replace(shape, layers=1), fused=False, recompute=False, **one)
    norm = activation_bytes(replace(shape, layers=0), fused=False, recompute=False, **one)
    assert whole - (layer - norm) == pytest.approx(seen, rel=0.02)


def test_a_peak_is_what_stays_plus_the_largest_turn():
    items = [
        MemoryItem("policy", "parameters", None, 100),
        MemoryItem("critic", "optimizer", None, 50),
        MemoryItem("policy", "kv_cache", "generate", 30),
        MemoryItem("policy", "logits", "generate", 8),
        MemoryItem("policy", "activations", "train", 20),
        MemoryItem("policy", "logits", "train", 15),
        MemoryItem("critic", "activations", "train", 34),
    ]
    assert peak_bytes(items) == 150 + 38
    assert peak_bytes(items[:2]) == 150
    assert by_role(items)["policy"] == {
        "parameters": 100, "kv_cache": 30, "logits": 15, "activations": 20,
    }  # fmt: skip


def test_prediction_covers_each_role():
    learner = ModelShape.from_config(LLAMA)
    critic = ModelShape.from_config(LLAMA, scalar_head=True)
    frozen = ModelShape.from_config(LLAMA, trained=False)
    grpo = [Resident("policy", learner, FP32_ADAM), Resident("reference", frozen, FP32_ADAM)]
    ppo = [*grpo, Resident("critic", critic, FP32_ADAM)]
    more, less = predict(ppo, LOAD), predict(grpo, LOAD)
    assert set(less) < set(more)
    assert {item.role for item in set(more) - set(less)} == {"critic"}
    state = critic.parameters * 16 + critic.trainable_tensors * 4
    assert peak_bytes(more) - peak_bytes(less) == state  # the critic trains in a turn of its own
    table = by_role(more)
    assert set(table["reference"]) == {"parameters", "activations", "logits"}
    assert table["policy"]["kv_cache"] == kv_cache_bytes(learner, 16 * 40, 4)
    assert table["policy"]["logits"] == 8 * 24 * 67 * 4 * 2


def test_measured_training_adds_up_to_the_loss_tables():
    model = AutoModelForCausalLM.from_config(LLAMA, attn_implementation="eager").train()
    ids, keep = torch.randint(2, 60, (4, 40)), 24

    def logprobs() -> torch.Tensor:
        logits = model(input_ids=ids, logits_to_keep=keep, use_cache=False).logits
        return logits.log_softmax(-1).gather(2, ids[:, -keep:, None])

    seen, _ = measured_activations(logprobs, [*model.parameters(), ids])
    load = replace(LOAD, logits_copies=1)  # log-softmax saves its output and not its input
    items = predict([Resident("policy", ModelShape.from_config(LLAMA), FP32_ADAM)], load)
    assert sum(i.bytes for i in items if i.phase == "train") == pytest.approx(seen, rel=0.04)


def test_peak_meter_sees_a_block_of_known_size():
    size = 200 * 2**20
    with PeakMeter("cpu") as meter:
        block = torch.ones(size // 4)
        time.sleep(0.02)
        del block
    assert meter.source == "process_rss_sampled"
    assert 0.9 * size < meter.above_entry < 2 * size


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_peak_meter_is_exact_on_cuda():
    torch.zeros(1, device="cuda")
    with PeakMeter("cuda") as meter:
        torch.ones(2**20, device="cuda")
    assert (meter.source, meter.above_entry) == ("cuda_allocated", 4 * 2**20)


def test_cache_matches_the_golden_vector(golden):
    vector = golden("kv_cache_bytes")
    given, expected = vector["inputs"], vector["expected"]
    shape = replace(
        ModelShape.dense(1),
        layers=given["n_layers"], kv_heads=given["n_kv_heads"], head_dim=given["head_dim"],
    )  # fmt: skip
    assert kv_cache_bytes(shape, 1, given["bytes"]) == expected["bytes_per_token"]
    total = kv_cache_bytes(shape, given["tokens"] * given["concurrent"], given["bytes"])
    assert total / 1e9 == pytest.approx(expected["total_GB"], abs=vector["tolerance"])


# arm of the golden table -> models trained, models frozen
LAYOUTS = {
    "ppo_4_models": (2, 2),
    "grpo_rm_ref": (1, 2),
    "grpo_rule_ref": (1, 1),
    "grpo_rule_noref": (1, 0),
    "ppo_rule_ref": (2, 1),
    "ppo_rule_noref": (2, 0),
}


def test_model_state_matches_the_golden_vector(golden):
    vector = golden("memory_bytes_and_savings")
    given, expected = vector["inputs"], vector["expected"]
    assert MIXED_ADAM.trained == given["trainable_bytes"]
    assert MIXED_ADAM.frozen == given["frozen_bytes"]
    for size, row in expected["decimal_GB"].items():
        assert set(row) == set(LAYOUTS)
        for arm, gigabytes in row.items():
            state = model_state_bytes(given["params"][size], *LAYOUTS[arm], MIXED_ADAM)
            assert state / 1e9 == pytest.approx(gigabytes, abs=vector["tolerance"])


def test_each_quoted_saving_follows_from_its_own_accounting(golden):
    vector = golden("memory_bytes_and_savings")

    def saved(ppo: tuple[int, int], grpo: tuple[int, int], storage=MIXED_ADAM, shared=0.0):
        more, less = (model_state_bytes(1, *arm, storage, shared) for arm in (ppo, grpo))
        return 1 - less / more

    weights = replace(MIXED_ADAM, gradient=0, master=0, moments=0)
    found = {
        "bytes16_four_to_three": saved((2, 2), (1, 2)),
        "bytes16_rule_ref": saved((2, 1), (1, 1)),
        "bytes16_trainable_only": saved((2, 0), (1, 0)),
        "bytes18_four_to_three": saved((2, 2), (1, 2), MIXED_ADAM_FP32_GRADIENTS),
        "optimizer_offloaded_to_cpu": saved((2, 2), (1, 2), OFFLOADED_ADAM),
        "weights_only_count": saved((2, 2), (1, 2), weights),
        "with_12_bytes_per_param_shared": saved((2, 2), (1, 2), shared=12),
    }
    assert found == pytest.approx(vector["expected"]["saved_fraction"], abs=vector["tolerance"])
    assert MIXED_ADAM_BOTH_GRADIENTS.trained == 20
