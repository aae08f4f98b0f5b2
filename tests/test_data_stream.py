"""The stream of prompts: shuffled epochs, a function of the seed alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none

from tiny import prompt_set, tokenizer

from harness.data import PromptStream, StreamHash
from harness.data import prompt_set as encode
from harness.errors import InputError
from harness.spec.schema import DataSpec, ExperimentSpec, SamplingSpec


@pytest.mark.parametrize("count", [1, 2, 7, 30])
def test_an_epoch_is_a_permutation(count):
    stream = PromptStream(prompt_set(count), seed=4)
    epochs = [stream.take(e * count, count) for e in range(5)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    if count == 30:
        assert len({tuple(e) for e in epochs}) == 5


def test_the_stream_is_one_whatever_the_steps():
    """Small steps, large steps, a restart in the middle and a look back read the same stream."""
    problems = prompt_set(7)
    whole = PromptStream(problems, 3).take(0, 40)
    stream, cursor, pieces = PromptStream(problems, 3), 0, []
    for size in (1, 5, 13, 2, 19):
        pieces += stream.take(cursor, size)
        cursor += size
    assert pieces == whole
    resumed = PromptStream(problems, 3)
    assert resumed.take(17, 9) == whole[17:26]
    assert resumed.take(8, 20) == whole[8:28]  # back over an epoch's start
    assert PromptStream(problems, 4).take(0, 40) != whole


def test_the_hash_of_a_stream_is_noted_at_multiples():
    ids = [f"p{i}" for i in range(10)]
    at_once, in_steps = StreamHash(4), StreamHash(4)
    noted = at_once.add(ids)
    assert list(noted) == ["4", "8"]
    found = in_steps.add(ids[:3]) | in_steps.add(ids[3:9]) | in_steps.add(ids[9:])
    assert found == noted
    resumed = StreamHash(4)
    resumed.add(ids[:5])
    again = StreamHash(4)
    again.restore(resumed.state())
    assert again.add(ids[5:]) == {"8": noted["8"]}
    assert StreamHash(4).add(list(reversed(ids)))["4"] != noted["4"]


def spec(**data):
    """A spec whose data and sampling alone are read."""
    fields = {"task": "arithmetic", "split": "train"}
    return ExperimentSpec.model_construct(
        data=DataSpec(
            **(
                {"train": fields, "validation": fields, "test": {"t": fields}, "prompt": "equation"}
                | data
            )
        ),
        sampling=SamplingSpec(prompts_per_step=1, completions_per_prompt=1, max_new_tokens=20),
    )


def test_a_prompt_is_the_templates_tokens():
    problems = prompt_set(3).problems
    found = encode("train", problems, spec(max_prompt_tokens=16), tokenizer(), 64)
    assert [tokenizer().decode(list(p)) for p in found.prompts] == ["1+1=", "2+1=", "3+1="]
    same = encode("validation", problems, spec(max_prompt_tokens=16), tokenizer(), 64)
    other = encode(
        "train", problems, spec(prompt="{question}=", max_prompt_tokens=16), tokenizer(), 64
    )
    assert found.sha256 == same.sha256 != other.sha256


@pytest.mark.parametrize(
    ("data", "context", "message"),
    [
        ({"max_prompt_tokens": 3}, 64, "max_prompt_tokens"),
        ({"max_prompt_tokens": 60}, 64, "context of 64"),
        ({"chat_template": True, "max_prompt_tokens": 9, "prompt": "{question}"}, 64, "template"),
    ],
)
def test_prompts_that_cannot_be_asked(data, context, message):
    with pytest.raises(InputError, match=message):
        encode("train", prompt_set(2).problems, spec(**data), tokenizer(), context)
