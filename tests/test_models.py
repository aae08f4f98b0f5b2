"""What a policy, a reference and a critic say about a batch, whatever surrounds its tokens."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none

from tiny import EOS, double_model, ragged, save_base, tiny_base, tiny_model, tokenizer

from harness.errors import InputError
from harness.models import (
    Policy,
    Reference,
    build_critic,
    load_base,
    scored,
    trainable,
    trim,
    weights_sha256,
)
from harness.spec.schema import LoraSpec, ModelSpec

PADDINGS = [
    {"left": 5},
    {"right": 3},
    {"left": 2, "right": 9, "garbage": 7},
    {"left": 1, "right": 1, "garbage": EOS},
]


def one_by_one(model, x, temperature):
    """Each row alone, without padding, through the model's whole forward pass."""
    rows = []
    for i in range(len(x)):
        prompt, completion = x.prompt_ids[i][x.prompt_mask[i]], x.completion_ids[i][x.mask[i]]
        ids = torch.cat([prompt, completion])[None]
        with torch.no_grad():
            full = (model(input_ids=ids).logits[0] / temperature).log_softmax(-1)
        rows.append([float(full[len(prompt) + t - 1, token]) for t, token in enumerate(completion)])
    return rows


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_logprobs_are_those_of_each_row_alone(temperature):
    model, x = double_model(), ragged(left=3, right=2, garbage=9)
    found = Policy(model, temperature).logprobs(x)
    for row, expected, real in zip(
        found.tolist(), one_by_one(model, x, temperature), x.mask, strict=True
    ):
        assert row[: len(expected)] == pytest.approx(expected, abs=1e-9)
        assert not any(row[int(real.sum()) :])  # 0 on padding


@pytest.mark.parametrize("padding", PADDINGS, ids=str)
def test_padding_changes_nothing(padding):
    model, plain, wide = double_model(), ragged(), ragged(**padding)
    T = plain.mask.shape[1]
    policy = Policy(model, 0.7)
    critic = build_critic(tiny_base(model), "fresh_head", None, 0).double()
    for score in (policy.logprobs, critic.values):
        found, expected = score(wide), score(plain)
        assert float((found[:, :T] - expected).detach().abs().max()) < 1e-9
        assert not found[:, T:].any()
        assert torch.equal(score(trim(wide)).detach(), expected.detach())


@pytest.mark.parametrize("padding", PADDINGS, ids=str)
def test_padding_changes_no_gradient(padding):
    gradients = []
    for x in (ragged(), ragged(**padding)):
        model = double_model()
        critic = build_critic(tiny_base(model), "fresh_head", None, 0).double()
        Policy(model, 0.7).logprobs(x).sum().backward()
        critic.values(x).square().sum().backward()
        parameters = [*model.parameters(), *critic.parameters()]
        gradients.append(torch.cat([p.grad.flatten() for p in parameters]))  # type: ignore[union-attr]
    assert float((gradients[0] - gradients[1]).abs().max()) < 1e-9
    assert gradients[0].isfinite().all()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_llama_in_float32_forgets_its_padding_too(attention):
    model, plain, wide = tiny_model(), ragged(), ragged(left=4, right=3, garbage=11)
    model.set_attn_implementation(attention)
    policy, T = Policy(model, 0.7), plain.mask.shape[1]
    expected = one_by_one(model, plain, 0.7)
    for score, real, alone in zip(policy.logprobs(wide), wide.mask, expected, strict=True):
        assert score[: len(alone)].tolist() == pytest.approx(alone, abs=2e-5)
        assert not score[int(real.sum()) :].any()
    assert (
        float((policy.logprobs(wide)[:, :T] - policy.logprobs(plain)).detach().abs().max()) < 2e-5
    )


@pytest.mark.parametrize("micro_batch", [1, 3, 100])
def test_scoring_in_micro_batches_changes_nothing(micro_batch):
    model, x = double_model(), ragged(right=4)
    policy = Policy(model, 0.9)
    found = scored(policy.logprobs, x, micro_batch)
    assert not found.requires_grad
    assert float((found - policy.logprobs(x).detach()).abs().max()) < 1e-9


def test_the_end_of_sequence_is_an_action():
    """Its log-prob is scored, and pushes on the weights."""
    model, x = double_model(), ragged()
    last = x.mask.sum(1) - 1
    ends = x.completion_ids[torch.arange(len(x)), last] == EOS
    assert ends.any()
    row = int(ends.nonzero()[0])
    logprobs = Policy(model, 1.0).logprobs(x)
    logprobs[row, last[row]].backward()
    table = model.get_output_embeddings().weight.grad
    assert table is not None
    assert table[EOS].abs().max() > 1e-6


def test_values_are_read_before_each_token():
    """Changing token t moves the value of t+1, not of t: the state comes before the action."""
    model, x = double_model(), ragged((3,), (5,))
    critic = build_critic(tiny_base(model), "fresh_head", None, 0).double()
    before = critic.values(x)[0]
    x.completion_ids[0, 2] = (x.completion_ids[0, 2] + 1) % 15 + 3
    moved = (critic.values(x)[0] - before).abs() > 1e-12
    assert moved.tolist() == [False, False, False, True, True]


@pytest.mark.parametrize("init", ["policy", "fresh_head"])
def test_what_a_critic_starts_from(init):
    model = tiny_model(hidden=32)
    critic = build_critic(tiny_base(model), init, None, 3)
    same = build_critic(tiny_base(model), init, None, 3)
    assert torch.equal(critic.head.weight, same.head.weight)
    assert torch.equal(critic.trunk.embed_tokens.weight, model.model.embed_tokens.weight)
    values = critic.values(ragged())
    assert (init == "policy") == (not values.any())
    if init == "fresh_head":
        assert float(critic.head.weight.detach().std()) == pytest.approx(33**-0.5, rel=0.4)


def test_no_reward_model_to_start_from():
    with pytest.raises(InputError, match="reward_model"):
        build_critic(tiny_base(), "reward_model", None, 0)


def test_training_a_copy_leaves_the_base_alone():
    base = tiny_base()
    before = weights_sha256(base.model)
    copied = trainable(base.model, None, 0)
    critic = build_critic(base, "policy", None, 0)
    with torch.no_grad():
        for p in [*copied.parameters(), *critic.parameters()]:
            p.add_(1.0)
    assert weights_sha256(base.model) == before


def test_the_reference_with_adapters_off_is_the_base():
    model, x = double_model(), ragged()
    adapted = trainable(model, LoraSpec(rank=2), 5)
    again = trainable(model, LoraSpec(rank=2), 5)
    assert weights_sha256(adapted) == weights_sha256(again)
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            assert p.requires_grad == ("lora_" in name)
            if "lora_B" in name:
                p.normal_(generator=torch.Generator().manual_seed(0))
    expected = Policy(model, 0.9).logprobs(x).detach()
    policy = Policy(adapted, 0.9)
    reference = Reference(adapted, 0.9, adapters_off=True)
    assert float((reference.logprobs(x) - expected).abs().max()) < 1e-12
    assert float((policy.logprobs(x).detach() - expected).abs().max()) > 1e-2
    assert not reference.logprobs(x).requires_grad
    assert policy.logprobs(x).requires_grad


def test_a_base_is_loaded_by_content(tmp_path):
    folder = save_base(tmp_path / "base")
    base = load_base(ModelSpec(name=str(folder)), torch.device("cpu"))
    again = load_base(ModelSpec(name=str(folder)), torch.device("cpu"))
    assert base.model_sha256 == again.model_sha256 == weights_sha256(tiny_model())
    assert base.eos_token_ids == (EOS,)
    assert base.context == 64
    assert base.tokenizer.decode([3, 4, 2], skip_special_tokens=True) == "01"


@pytest.mark.parametrize(
    ("name", "found"),
    [("./nowhere", "does not exist"), ("someone/model", "model.revision")],
)
def test_a_base_that_cannot_be_pinned(name, found):
    with pytest.raises(InputError, match=found):
        load_base(ModelSpec(name=name), torch.device("cpu"))


def test_a_pad_token_must_exist(tmp_path):
    folder = save_base(tmp_path / "base")
    with pytest.raises(InputError, match="pad_token"):
        load_base(ModelSpec(name=str(folder), pad_token="<nothing>"), torch.device("cpu"))
    assert tokenizer().pad_token_id == 0
