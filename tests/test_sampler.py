"""The engine draws from softmax(logits / temperature), and batching is not part of its luck."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers import TopPLogitsWarper

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none

from tiny import EOS, PAD, as_rollout, sampler, tiny_model, tokenizer

from harness.models import Policy, scored, trainable
from harness.samplers.hf import HFSampler, nucleus
from harness.samplers.sampler import Decoding, left_pad, uniforms
from harness.spec.schema import LoraSpec

PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10], [11], [12, 13]]
PLAIN = Decoding(temperature=1.0, top_p=1.0, max_new_tokens=8)


def rows_of(drawn):
    """Each row's tokens, without padding."""
    return [ids[m].tolist() for ids, m in zip(drawn.completion_ids, drawn.mask, strict=True)]


def without_end(seed=0, eos_bias=-30.0, **options):
    """A model that all but never ends a completion, or ends it at once."""
    model = tiny_model(seed, **options)
    head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size)
    with torch.no_grad():
        head.weight.copy_(model.lm_head.weight)
        head.bias.zero_()
        head.bias[EOS] = eos_bias
    model.lm_head = head
    return model


def next_token(model, prompt, temperature):
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt])).logits[0, -1].double()
    return (logits / temperature).softmax(0)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_draws_follow_the_scored_distribution(temperature):
    """Chi-square of 4000 first tokens, and of the second tokens after each common first one."""
    model, count = tiny_model(3, spread=0.15), 4000
    decoding = Decoding(temperature, 1.0, 2)
    drawn = sampler(model).draw([[3, 9, 4]], count, decoding, seed=11)
    firsts = Counter(row[0] for row in rows_of(drawn))
    checked = 0
    for prefix in [[]] + [[token] for token, n in firsts.most_common(3) if token != EOS]:
        p = next_token(model, [3, 9, 4, *prefix], temperature)
        rows = [r for r in rows_of(drawn) if len(r) > len(prefix) and r[: len(prefix)] == prefix]
        seen = torch.bincount(torch.tensor([r[len(prefix)] for r in rows]), minlength=len(p))
        expected = p * len(rows)
        large = expected >= 5
        observed, hoped = seen[large].tolist(), expected[large].tolist()
        if not large.all():
            observed.append(int(seen[~large].sum()))
            hoped.append(float(expected[~large].sum()))
        assert chisquare(observed, hoped).pvalue > 1e-3
        checked += 1
    assert checked >= 3


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_engine_and_the_trainer_report_the_same_log_probs(temperature):
    model = tiny_model()
    drawn = sampler(model).draw(PROMPTS, 3, Decoding(temperature, 1.0, 8), seed=1)
    again = scored(Policy(model, temperature).logprobs, as_rollout(drawn), 64)
    assert float((again - drawn.logprobs).abs().max()) < 2e-5
    other = scored(Policy(model, 2 * temperature).logprobs, as_rollout(drawn), 64)
    assert float((other - drawn.logprobs).abs().max()) > 0.1


def test_gradient_checkpointing_does_not_blind_the_engine():
    """In training mode a checkpointed model drops its cache; drawing must not."""
    model = tiny_model()
    expected = sampler(model).draw(PROMPTS, 2, PLAIN, seed=1)
    model.gradient_checkpointing_enable()
    model.train()
    found = sampler(model).draw(PROMPTS, 2, PLAIN, seed=1)
    assert rows_of(found) == rows_of(expected)
    assert model.training


def test_adapters_are_sampled_from():
    model = trainable(tiny_model(), LoraSpec(rank=2), 0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(generator=torch.Generator().manual_seed(0))
    drawn = sampler(model).draw(PROMPTS, 2, PLAIN, seed=1)
    again = scored(Policy(model, 1.0).logprobs, as_rollout(drawn), 64)
    assert float((again - drawn.logprobs).abs().max()) < 2e-5
    assert rows_of(drawn) != rows_of(sampler(tiny_model()).draw(PROMPTS, 2, PLAIN, seed=1))


@pytest.mark.parametrize("engine_batch", [1, 3, 8, 11, 1024])
def test_the_size_of_a_batch_is_no_part_of_a_draw(engine_batch):
    model, group_size = tiny_model(), 4
    whole = sampler(model).draw(PROMPTS, group_size, PLAIN, seed=5)
    found = sampler(model, engine_batch).draw(PROMPTS, group_size, PLAIN, seed=5)
    assert rows_of(found) == rows_of(whole)
    assert torch.equal(found.finished, whole.finished)
    assert found.texts == whole.texts
    assert float((found.logprobs - whole.logprobs).abs().max()) < 2e-5


def test_rows_that_end_early_leave_without_a_trace():
    """Half the rows end at once, so the batch is compacted; each row alone gives the same."""
    model = without_end(eos_bias=1.0, spread=0.3)
    decoding = Decoding(1.0, 1.0, 16)
    prompts = [PROMPTS[i % 4] for i in range(16)]
    together = sampler(model).draw(prompts, 2, decoding, seed=7)
    alone = sampler(model, 1).draw(prompts, 2, decoding, seed=7)
    lengths = together.mask.sum(1)
    assert lengths.min() <= 2
    assert lengths.max() >= 8
    assert rows_of(together) == rows_of(alone)


def test_a_seed_is_a_sample():
    model = tiny_model()
    a, b, c = (sampler(model).draw(PROMPTS, 4, PLAIN, seed=s) for s in (1, 1, 2))
    assert rows_of(a) == rows_of(b)
    assert rows_of(a) != rows_of(c)


def test_luck_belongs_to_a_row_and_a_position():
    """Fewer prompts, or a smaller limit on rows, give the first rows of the same numbers."""
    assert torch.equal(uniforms(40, 7, 3)[:9], uniforms(9, 7, 3))
    assert float(uniforms(50, 50, 1).max()) < 1
    model = tiny_model()
    whole = rows_of(sampler(model).draw(PROMPTS, 2, PLAIN, seed=9))
    assert rows_of(sampler(model).draw(PROMPTS[:2], 2, PLAIN, seed=9)) == whole[:4]


def test_the_rows_of_a_group_are_adjacent():
    drawn = sampler(tiny_model()).draw(PROMPTS, 3, PLAIN, seed=0)
    for row in range(12):
        assert drawn.prompt_ids[row][drawn.prompt_mask[row]].tolist() == PROMPTS[row // 3]
    assert len({tuple(r) for r in rows_of(drawn)}) > 4  # a group's rows are drawn apart


def test_prompts_are_padded_on_the_left():
    ids, mask = left_pad([[5], [6, 7, 8]], PAD)
    assert ids.tolist() == [[PAD, PAD, 5], [6, 7, 8]]
    assert mask.tolist() == [[False, False, True], [True, True, True]]


def test_an_end_is_sampled_counted_and_not_text():
    model = without_end(eos_bias=2.0)
    drawn = sampler(model).draw(PROMPTS, 8, PLAIN, seed=2)
    some = 0
    for row, text, finished in zip(rows_of(drawn), drawn.texts, drawn.finished, strict=True):
        assert (row[-1] == EOS) == bool(finished)
        assert EOS not in row[:-1]
        assert len(text) == len([t for t in row if t >= 3])
        some += finished
    assert some > 0
    lost = drawn.completion_ids[~drawn.mask]
    assert (lost == PAD).all()
    assert not drawn.logprobs[~drawn.mask].any()


def test_cut_at_the_limit_is_not_an_end():
    model = without_end()
    drawn = sampler(model).draw(PROMPTS, 2, PLAIN, seed=2)
    assert not drawn.finished.any()
    assert (drawn.mask.sum(1) == PLAIN.max_new_tokens).all()


def test_an_end_at_the_very_limit_is_an_end():
    model = without_end(eos_bias=1.0)
    for limit in (1, 2, 3):
        drawn = sampler(model).draw([[3, 4]], 64, Decoding(1.0, 1.0, limit), seed=3)
        for row, finished in zip(rows_of(drawn), drawn.finished.tolist(), strict=True):
            assert finished == (row[-1] == EOS)
        whole = [len(r) == limit and r[-1] == EOS for r in rows_of(drawn)]
        assert 0 < sum(whole) < 64


def test_stop_strings_end_a_row_and_stay_in_it():
    model = without_end()
    text = sampler(model).draw([[3, 4]], 200, Decoding(1.0, 1.0, 6, stop=()), seed=4)
    stopped = sampler(model).draw([[3, 4]], 200, Decoding(1.0, 1.0, 6, stop=("1", "+2")), seed=4)
    ended = 0
    for before, after, finished in zip(text.texts, stopped.texts, stopped.finished, strict=True):
        found = [at + len(s) for s in ("1", "+2") if (at := before.find(s)) >= 0]
        assert after == (before[: min(found)] if found else before)
        assert bool(finished) == bool(found)
        ended += bool(found)
    assert 20 < ended < 200


def test_greedy_takes_the_likeliest_token():
    model = tiny_model()
    decoding = Decoding(0.3, 0.1, 6, greedy=True)
    drawn = sampler(model).draw(PROMPTS, 2, decoding, seed=1)
    assert rows_of(drawn) == rows_of(sampler(model).draw(PROMPTS, 2, decoding, seed=2))
    for index, row in enumerate(rows_of(drawn)[::2]):
        so_far = list(PROMPTS[index])
        for token in row:
            assert token == int(next_token(model, so_far, 1.0).argmax())
            so_far.append(token)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-40, 40).map(lambda n: n / 10), min_size=2, max_size=12, unique=True),
    st.floats(0.05, 0.999),
)
def test_the_nucleus_is_the_smallest_likeliest_set(logits, top_p):
    """By its definition, and against transformers' own warper where rounding cannot decide."""
    p = torch.tensor([logits], dtype=torch.float64).softmax(1)
    kept = (nucleus(p, top_p) > 0)[0].tolist()
    order = sorted(range(len(logits)), key=lambda i: -p[0, i])
    sums = [float(sum(p[0, i] for i in order[: n + 1])) for n in range(len(order))]
    if min(abs(s - top_p) for s in sums) < 1e-9:
        return
    size = next((n + 1 for n, s in enumerate(sums) if s >= top_p), len(order))
    assert {i for i, k in enumerate(kept) if k} == set(order[:size])
    assert torch.equal(nucleus(p, top_p)[0][kept], p[0][kept])
    warped = TopPLogitsWarper(top_p)(None, p.log())[0].isfinite().tolist()  # type: ignore[arg-type]
    assert warped == kept


def test_top_p_is_sampled_from_and_scored_before():
    model, top_p = tiny_model(3, spread=0.15), 0.5
    drawn = sampler(model).draw([[3, 9, 4]], 3000, Decoding(0.9, top_p, 1), seed=1)
    p = next_token(model, [3, 9, 4], 0.9)
    allowed = nucleus(p[None], top_p)[0]
    seen = torch.bincount(drawn.completion_ids[:, 0], minlength=len(p)).double()
    assert not seen[allowed == 0].any()
    inside = allowed > 0
    expected = allowed[inside] / allowed.sum() * 3000
    assert chisquare(seen[inside].tolist(), expected.tolist()).pvalue > 1e-3
    full = p[drawn.completion_ids[:, 0]].log()
    assert float((drawn.logprobs[:, 0].double() - full).abs().max()) < 1e-5


def test_a_certain_token_is_always_drawn():
    """Rounding of the ladder of probabilities never reaches a token of probability 0."""
    model = tiny_model()
    head = torch.nn.Linear(16, model.config.vocab_size)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.fill_(-1e4)
        head.bias[5] = head.bias[7] = 0.0
    model.lm_head = head
    drawn = sampler(model).draw([[3]], 500, Decoding(1.0, 1.0, 4), seed=0)
    assert set(drawn.completion_ids.flatten().tolist()) == {5, 7}
    assert drawn.logprobs.flatten().tolist() == pytest.approx([-0.6931472] * 2000, abs=1e-6)


def test_every_end_token_ends():
    model = without_end()
    engine = HFSampler(model, tokenizer(), [EOS, 8, 9], 1024)
    drawn = engine.draw([[3]], 100, PLAIN, seed=0)
    for row, finished in zip(rows_of(drawn), drawn.finished, strict=True):
        assert bool(finished) == (row[-1] in (EOS, 8, 9))
        assert not {8, 9} & set(row[:-1])
    assert int(drawn.finished.sum()) > 0
