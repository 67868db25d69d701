"""Which setting counts, and what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from helpers_langchain import (
    EchoModel,
    joined,
    make_llm,
    num_finished,
)
from langchain_paged import ChatPaged
from paged_backend import LLM

# Which setting counts.


def test_a_calls_setting_wins_over_a_bound_one_and_that_over_the_field(llm: LLM) -> None:
    model = ChatPaged(llm=llm, stop=["Hello"], max_tokens=40)
    bound = model.bind(stop=["said"], max_tokens=8)
    assert model.invoke("Hello.").content == "You said: "
    assert bound.invoke("Hello.").content == "You "
    assert bound.invoke("Hello.", stop=["id"]).content == "You sa"
    assert bound.invoke("Hello.", stop=["u"], max_tokens=2).content == "Yo"
    assert bound.invoke("Hello.", stop=[]).content == "You said"
    assert bound.invoke("Hello.", stop=[], max_tokens=None).content == "You said: Hello."


def test_what_nobody_gave_comes_from_the_models_authors_and_falsy_values_count_as_given() -> None:
    recommended = {"temperature": 0.2, "top_p": 0.9, "top_k": 5, "repetition_penalty": 1.1, "max_tokens": 7}
    echo = EchoModel(0.0)
    with make_llm(model=echo, default_sampling=recommended) as llm:
        ChatPaged(llm=llm).invoke("Hello.")
        ChatPaged(llm=llm, temperature=0, top_p=1.0, repetition_penalty=1.0, max_tokens=9).invoke("Hello.")
        ChatPaged(llm=llm, temperature=0.7).invoke("Hello.", temperature=0.0, seed=0)
    first, second, third = echo.seen
    assert {name: getattr(first, name) for name in recommended} == recommended
    assert (second.temperature, second.repetition_penalty, second.max_tokens) == (0.0, 1.0, 9)
    assert (third.temperature, third.seed, third.max_tokens) == (0.0, 0, 7)


def test_an_answer_has_no_limit_unless_somebody_set_one(llm: LLM) -> None:
    question = "A question longer than the sixteen tokens that completions get."
    assert ChatPaged(llm=llm).invoke(question).content == f"You said: {question}"
    assert ChatPaged(llm=llm, temperature=0.5).invoke(question).content == f"You said: {question}"


def test_generation_config_of_a_checkpoint_counts(folder: str) -> None:
    model = ChatPaged(model=folder, engine_kwargs={"num_gpu_blocks_override": 64})
    recommended = model.invoke("Hello.", ignore_eos=True)
    assert recommended.usage_metadata is not None
    assert recommended.usage_metadata["output_tokens"] == 7
    shorter = model.invoke("Hello.", ignore_eos=True, max_tokens=3)
    assert shorter.usage_metadata is not None
    assert shorter.usage_metadata["output_tokens"] == 3
    assert recommended.response_metadata["model_name"] == folder


def test_a_call_may_name_another_model(llm: LLM, folder: str) -> None:
    model = ChatPaged(llm=llm, engine_kwargs={"num_gpu_blocks_override": 64})
    assert model.invoke("Hello.", model=folder).response_metadata["model_name"] == folder
    assert joined(model.stream("Hello.", model=folder)).response_metadata["model_name"] == folder
    assert asyncio.run(model.ainvoke("Hello.", model=folder)).response_metadata["model_name"] == folder
    assert model.invoke("Hello.").response_metadata["model_name"] == "echo"


def test_unknown_arguments_of_a_call_are_errors_that_name_the_nearest(llm: LLM) -> None:
    model = ChatPaged(llm=llm)
    with pytest.raises(ValueError, match="'temprature'; did you mean 'temperature'"):
        model.invoke("Hello.", temprature=0)
    with pytest.raises(ValueError, match="'max_token'; did you mean 'max_tokens'"):
        model.bind(max_token=5).invoke("Hello.")
    assert num_finished(llm) == 0


def test_unknown_arguments_of_the_constructor_are_warnings_that_name_the_nearest() -> None:
    with pytest.warns(UserWarning, match="'max_token'; did you mean 'max_tokens'") as warnings:
        ChatPaged(model="demo", max_token=5)
    assert warnings[0].filename == __file__


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1), ("top_p", 0), ("max_tokens", -1), ("n", 0), ("seed", 2**64), ("logit_bias", {5: 1000})],
)
def test_an_impossible_setting_is_refused_by_name_wherever_it_is_given(llm: LLM, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        ChatPaged(llm=llm, **{name: value})
    with pytest.raises(ValueError, match=name):
        ChatPaged(llm=llm).invoke("Hello.", **{name: value})


def test_an_impossible_engine_setting_is_refused_when_the_model_is_made() -> None:
    with pytest.raises(ValueError, match="did you mean 'block_size'"):
        ChatPaged(model="demo", engine_kwargs={"blocksize": 16})


def test_both_spellings_of_model_and_stop_are_understood() -> None:
    model = ChatPaged(model_name="demo", stop_sequences=["x"])
    assert (model.model, model.stop) == ("demo", ["x"])


@pytest.mark.parametrize("arguments", [{"model": object()}, {"model": None}, {"model": ""}, {}])
def test_without_a_model_the_error_says_what_to_give(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"for a loaded model give llm=LLM\(model, tokenizer\)"):
        ChatPaged(**arguments)


def test_a_path_can_be_given_as_model(tmp_path: Path) -> None:
    assert ChatPaged(model=tmp_path).model == str(tmp_path)


def test_an_engine_can_be_given_as_model(llm: LLM) -> None:
    assert ChatPaged(model=llm).invoke("Hello.").content == "You said: Hello."
