"""Callbacks, LLM caches, copies and pickles of a `ChatPaged`."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler, UsageMetadataCallbackHandler
from langchain_core.load import dumps
from langchain_core.runnables import ConfigurableField

from helpers_langchain import (
    OTHER_SETTINGS,
    joined,
    num_finished,
)
from helpers_models import CHAT_TEMPLATE
from langchain_paged import ChatPaged
from langchain_paged.settings import ChatSettings
from paged_backend import LLM

# Callbacks.


class TokenCounter(BaseCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.num_ends = 0

    def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        self.tokens.append(token)

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.num_ends += 1


def test_callbacks_hear_of_each_chunk_once(llm: LLM) -> None:
    counter = TokenCounter()
    chunks = list(ChatPaged(llm=llm, callbacks=[counter]).stream("Hello."))
    assert counter.tokens == [chunk.content for chunk in chunks]
    assert "".join(counter.tokens) == "You said: Hello."
    assert counter.num_ends == 1


def test_usage_callback_adds_up_by_model(llm: LLM) -> None:
    usage = UsageMetadataCallbackHandler()
    messages = ChatPaged(llm=llm).batch(["one", "two"], {"callbacks": [usage]})
    total = sum(message.usage_metadata["total_tokens"] for message in messages)
    assert usage.usage_metadata["echo"]["total_tokens"] == total


# LLM caches.


class RecordingCache(InMemoryCache):
    def __init__(self) -> None:
        super().__init__()
        self.keys: list[str] = []

    def update(self, prompt: str, llm_string: str, return_val: Any) -> None:
        self.keys.append(llm_string)
        super().update(prompt, llm_string, return_val)


OTHER_VALUES: dict[str, Any] = OTHER_SETTINGS | {
    "chat_template": CHAT_TEMPLATE + " ",
    "chat_template_kwargs": {"enable_thinking": False},
    "parallel_tool_calls": False,
    "continue_final_message": False,
    "stream_usage": False,
}


def test_every_setting_is_tried_below() -> None:
    # Adapters need a model: tests/test_lora_in_frameworks.py.
    assert set(OTHER_VALUES) | {"lora_request"} == set(ChatSettings.model_fields)


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_an_llm_cache_answers_only_for_the_same_settings(reasoning_llm: LLM, name: str) -> None:
    llm, cache, setting = reasoning_llm, RecordingCache(), {name: OTHER_VALUES[name]}
    plain, other = ChatPaged(llm=llm, cache=cache), ChatPaged(llm=llm, cache=cache, **setting)
    plain.invoke("Hello.")
    answer = other.invoke("Hello.")
    assert num_finished(llm) == 2
    assert ChatPaged(llm=llm, cache=cache, **setting).invoke("Hello.").content == answer.content
    assert num_finished(llm) == 2
    assert plain.invoke("Hello.", **setting).content == answer.content
    assert not any(" at 0x" in key or str(id(llm)) in key for key in cache.keys)


def test_an_llm_cache_tells_models_and_engines_apart() -> None:
    models = [
        ChatPaged(model="demo"),
        ChatPaged(model="other"),
        ChatPaged(model="demo", engine_kwargs={"dtype": "float32"}),
        ChatPaged(model="demo", engine_kwargs={"max_model_len": 64}),
    ]
    keys = [str(sorted(model.asdict().items())) for model in models]
    assert len(set(keys)) == len(models)


def test_the_order_of_engine_kwargs_does_not_matter_to_an_llm_cache() -> None:
    one = ChatPaged(model="demo", engine_kwargs={"dtype": "float32", "kv_cache_memory": "1KiB"})
    two = ChatPaged(model="demo", engine_kwargs={"kv_cache_memory": 1024, "dtype": "float32"})
    assert str(one.asdict()) == str(two.asdict())


# Copies, pickles, and what is shared.


@pytest.mark.parametrize(
    "make_copy",
    [copy.copy, copy.deepcopy, lambda model: model.model_copy(), lambda model: model.model_copy(deep=True)],
)
def test_copies_share_the_engine(llm: LLM, make_copy: Callable[[ChatPaged], ChatPaged]) -> None:
    model = ChatPaged(llm=llm, max_tokens=3)
    copied = make_copy(model)
    assert (copied, repr(copied)) == (model, repr(model))
    assert copied.invoke("Hello.").content == model.invoke("Hello.").content == "You"
    assert num_finished(llm) == 2


def test_a_changed_copy_uses_what_was_changed(llm: LLM) -> None:
    model = ChatPaged(llm=llm, max_tokens=3)
    assert model.model_copy(update={"max_tokens": 2}).invoke("Hello.").content == "Yo"
    configurable = model.configurable_fields(max_tokens=ConfigurableField(id="limit"))
    assert configurable.invoke("Hello.", {"configurable": {"limit": 1}}).content == "Y"
    assert joined(configurable.stream("Hello.", {"configurable": {"limit": 4}})).content == "You "


def test_objects_on_the_same_model_share_one_engine(folder: str) -> None:
    settings: dict[str, Any] = {"model": folder, "engine_kwargs": {"num_gpu_blocks_override": 62}}
    model = ChatPaged(**settings)
    models = [model, ChatPaged(**settings, temperature=0.5), pickle.loads(pickle.dumps(model))]
    for model in models:
        model.invoke("Hello.")
    assert num_finished(LLM.shared(folder, num_gpu_blocks_override=62)) == 3


def test_a_pickle_holds_settings_and_no_weights() -> None:
    model = ChatPaged(model="demo", temperature=0.5, stop=["x"])
    pickled = pickle.dumps(model)
    assert pickle.loads(pickled) == model
    assert len(pickled) < 5000


def test_a_model_with_an_engine_of_its_own_says_why_it_cannot_be_pickled(llm: LLM) -> None:
    with pytest.raises(TypeError, match="an engine lives in one process"):
        pickle.dumps(ChatPaged(llm=llm))


def test_nothing_shows_the_engine(llm: LLM) -> None:
    model = ChatPaged(llm=llm, temperature=0.5)
    shown = [repr(model), dumps(model), str(model.model_dump()), str(model.asdict())]
    assert not any(" at 0x" in text or "LLM object" in text for text in shown)
    assert not ChatPaged.is_lc_serializable()


def test_traces_name_provider_model_and_settings(llm: LLM) -> None:
    model = ChatPaged(llm=llm, temperature=0.5, max_tokens=9, stop="x")
    params = model._get_ls_params()
    assert (params["ls_provider"], params["ls_model_name"], params["ls_model_type"]) == ("paged", "echo", "chat")
    assert (params["ls_temperature"], params["ls_max_tokens"], params["ls_stop"]) == (0.5, 9, ["x"])
    assert model._get_ls_params(stop=["y"], model="other")["ls_stop"] == ["y"]
    assert model.metadata is not None
    assert "paged-backend" in model.metadata["lc_versions"]


def test_the_profile_knows_the_context_if_the_engine_is_there(llm: LLM) -> None:
    profile = ChatPaged(llm=llm).profile
    assert profile is not None
    assert profile["max_input_tokens"] == llm.max_model_len
    assert ChatPaged(model="demo", engine_kwargs={"max_model_len": 99}).profile["max_input_tokens"] == 99


def test_importing_without_langchain_names_the_extra(tmp_path: Path) -> None:
    code = "import sys; sys.modules['langchain_core'] = None; import langchain_paged"
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert run.stderr.strip().splitlines()[-1].endswith("pip install 'paged-backend[langchain]'")


def test_importing_and_making_a_model_loads_no_torch() -> None:
    code = "import sys, langchain_paged; langchain_paged.ChatPaged(model='demo'); print('torch' in sys.modules)"
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "False", run.stderr
