"""The gold scorers: by their formula, from VADER's published rules and the lexicon's ratings."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import InputError
from harness.rewards.gold import ClassifierGold, ReviewSentiment, gold_identity, make_gold
from harness.spec.reward import LearnedSpec
from harness.tasks import reviews

GOOD, GREAT, BAD = 1.9, 3.1, -2.5  # the lexicon's mean human ratings, from -4 to 4
NEGATED, MORE = -0.74, 0.293  # VADER's constants (Hutto and Gilbert 2014)
REPEAT, UNFINISHED = 0.2, 0.5


def compound(total: float) -> float:
    return total / math.sqrt(total**2 + 15)


def score(completion: str, prompt: str = "the film was") -> float:
    return ReviewSentiment()([prompt], [completion])[0]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("long .", 0.0),
        ("good .", compound(GOOD)),
        ("bad .", compound(BAD)),
        ("not good .", compound(GOOD * NEGATED)),
        ("very good .", compound(GOOD + MORE)),
        ("barely good .", compound(GOOD - MORE)),
        ("very bad .", compound(BAD - MORE)),
        ("good and great .", compound(GOOD + GREAT)),
        ("good but the plot was bad .", compound(0.5 * GOOD + 1.5 * BAD)),
        ("good", compound(GOOD) - UNFINISHED),
        ("good and good .", compound(GOOD) - REPEAT),
        ("good and good and good .", compound(GOOD) - 2 * REPEAT),
        ("good and great and good .", compound(GOOD + GREAT) - REPEAT),
        ("long long .", -REPEAT),  # stammering, whatever the word
        ("", -UNFINISHED),
    ],
)
def test_the_formula(completion: str, expected: float):
    assert score(completion) == pytest.approx(expected, abs=6e-5)  # VADER rounds to four places


def test_the_opening_counts_too():
    found = score("good .", prompt="the good film was")
    assert found == pytest.approx(compound(GOOD) - REPEAT, abs=6e-5)


def test_the_lexicon_rates_the_vocabulary_as_the_generator_uses_it():
    def alone(word: str) -> float:
        return score(f"{word} .", prompt="")

    assert all(alone(word) > 0 for word in (*reviews.GOOD, *reviews.LIKED))
    assert all(alone(word) < 0 for word in (*reviews.BAD, *reviews.LOATHED))
    rated = {*reviews.GOOD, *reviews.LIKED, *reviews.BAD, *reviews.LOATHED}
    assert all(alone(word) == 0 for word in set(reviews.WORDS) - rated - {"."})


def test_praise_said_again_is_worth_less_each_time():
    scores = [score(" and ".join(["superb"] * n) + " .") for n in range(1, 8)]
    assert all(later < earlier or later == -1 for earlier, later in pairwise(scores))
    assert scores[-1] < 0 < scores[0]


@given(st.lists(st.sampled_from(reviews.WORDS), max_size=24))
@settings(max_examples=60, deadline=None)
def test_any_text_has_one_bounded_score(words: list[str]):
    text = " ".join(words)
    first, second = ReviewSentiment()(["the film was"] * 2, [text, text])
    assert first == second == ReviewSentiment()(["the film was"], [text])[0]
    assert -1 <= first <= 1
    finished = ReviewSentiment()(["the film was"], [f"{text} ."])[0]
    assert words[-1:] == ["."] or finished >= first


def test_prompts_and_completions_come_in_pairs():
    with pytest.raises(ValueError, match="argument"):
        ReviewSentiment()(["a", "b"], ["c"])


# -- a classifier as gold --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random RoBERTa with siebert's labels."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        RobertaConfig,
        RobertaForSequenceClassification,
    )

    folder = tmp_path_factory.mktemp("classifier")
    vocabulary = {w: i for i, w in enumerate(["[UNK]", "[PAD]", *reviews.WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        RobertaForSequenceClassification(
            RobertaConfig(
                vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=1,
                num_attention_heads=2, intermediate_size=32, max_position_embeddings=40,
                pad_token_id=1, initializer_range=0.5,
                id2label={0: "NEGATIVE", 1: "POSITIVE"}, label2id={"NEGATIVE": 0, "POSITIVE": 1},
            )
        ).save_pretrained(folder)  # fmt: skip
    return folder


TEXTS = ["good .", "not very good , and the plot was dull .", "bad ."]


def test_a_classifiers_gold_is_its_log_odds_whatever_it_is_read_with(classifier: Path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(classifier)
    model = AutoModelForSequenceClassification.from_pretrained(classifier).eval()
    expected = []
    for text in TEXTS:
        with torch.no_grad():
            logits = model(**tokenizer(f"the film was {text}", return_tensors="pt")).logits[0]
        p = logits.double().softmax(0)[1]
        expected.append(float(torch.log(p / (1 - p))))
    for batch in (1, 2, 64):
        found = ClassifierGold(str(classifier), batch=batch)(["the film was "] * 3, TEXTS)
        assert found == pytest.approx(expected, abs=1e-4)
    assert len({round(x, 3) for x in expected}) == 3


def learned(**gold: Any) -> LearnedSpec:
    model = {"preferences": {"pairs": 1, "heldout": 1}, "learning_rate": 1e-3}
    return LearnedSpec.model_validate({"success": 0.0, "model": model} | gold)


def test_gold_scorers_are_found_by_name(classifier: Path, tmp_path: Path):
    assert make_gold(learned(gold="review_sentiment")) == ReviewSentiment()
    spec = learned(gold="classifier", gold_model=str(classifier))
    assert len(make_gold(spec)(["the film was "], ["good ."])) == 1
    for wanted, said in (
        (learned(gold="review_sentimnt"), "Did you mean 'review_sentiment'"),
        (learned(gold="classifier"), "needs a gold_model"),
        (learned(gold="review_sentiment", gold_model="x"), "takes no gold_model"),
        (learned(gold="classifier", gold_model="a/b"), "pin it with reward.learned.gold_revision"),
        (learned(gold="classifier", gold_model=str(tmp_path)), "cannot be loaded"),
    ):
        with pytest.raises(InputError, match=said):
            make_gold(wanted)


def test_a_gold_scorers_identity_is_its_numbers_or_its_weights(classifier: Path, tmp_path: Path):
    import shutil

    assert gold_identity(learned(gold="review_sentiment")) == {
        "gold": "review_sentiment", "version": 1, "repetition": REPEAT, "unfinished": UNFINISHED,
    }  # fmt: skip
    copy = tmp_path / "copy"
    shutil.copytree(classifier, copy)
    spec = learned(gold="classifier", gold_model=str(copy))
    before = gold_identity(spec)
    assert "model.safetensors" in before["files"]
    weights = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    assert gold_identity(spec) != before
