"""Prompt templates: the question stands in them once and untouched."""

from __future__ import annotations

import pytest

from harness.errors import InputError
from harness.tasks.prompts import PROMPTS, prompt_from_spec


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_hold_the_question_once_and_keep_its_braces(name):
    question = r"What is $\frac{1}{2}$ of {question}?"
    text = PROMPTS[name].render(question)
    assert text.count(question) == 1
    assert PROMPTS[name].name == name


def test_prompt_from_spec():
    assert prompt_from_spec("equation").render("1+2=") == "1+2="
    assert prompt_from_spec("qa").render("1+2?") == "Question: 1+2?\nAnswer:"
    custom = prompt_from_spec("Q: {question} {}", chat=True)
    assert custom.messages("x") == [{"role": "user", "content": "Q: x {}"}]
    assert prompt_from_spec("chat_boxed").messages("1+1?")[0]["content"].endswith("\\boxed{}.")
    with pytest.raises(InputError, match="Did you mean 'boxed'"):
        prompt_from_spec("boxd")
    with pytest.raises(InputError, match="2 times"):
        prompt_from_spec("{question}{question}")
