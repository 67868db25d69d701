"""What a Paged is made of: settings, metadata, copies."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers_llama_index import (
    make_paged,
    saying,
    text_of,
)
from helpers_models import MAX_POSITIONS, make_model, make_tokenizer
from llama_index.llms.paged import Paged
from paged_backend import LLM

# What a Paged is made of.


def test_unknown_arguments_of_the_constructor_are_errors_that_name_the_nearest() -> None:
    with pytest.raises(ValueError, match="'max_new_tokens'; did you mean 'max_tokens'"):
        Paged(model="demo", max_new_tokens=5)
    with pytest.raises(ValueError, match="did you mean 'block_size'"):
        Paged(model="demo", engine_kwargs={"blocksize": 16})
    with pytest.raises(ValueError, match="did you mean 'min_tokens'"):
        Paged(model="demo", additional_kwargs={"min_token": 1})


@pytest.mark.parametrize(("name", "value"), [("temperature", -1), ("top_p", 0), ("seed", 2**64), ("min_tokens", -1)])
def test_an_impossible_setting_is_refused_when_the_model_is_made(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        Paged(model="demo", **{name: value})


@pytest.mark.parametrize("arguments", [{"model": object()}, {"model": None}, {"model": ""}, {}])
def test_without_a_model_the_error_says_what_to_give(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be a name, a path, a loaded model"):
        Paged(**arguments)


def test_metadata_comes_from_the_engine_and_the_settings(llm: LLM) -> None:
    metadata = make_paged(llm, max_tokens=30).metadata
    assert (metadata.context_window, metadata.num_output, metadata.model_name) == (llm.max_model_len, 30, "fake")
    assert (metadata.is_chat_model, metadata.is_function_calling_model) == (True, True)
    assert make_paged(llm, context_window=512).metadata.context_window == 512
    assert metadata.model_dump()["context_window"] == llm.max_model_len


def test_only_the_context_window_waits_for_the_model() -> None:
    code = """
        import sys
        from llama_index.llms.paged import Paged
        model = Paged(model='demo', temperature=0)
        assert model.metadata.is_chat_model and model.metadata.num_output
        model.to_payload(), model.to_dict(), model.model_copy(), repr(model), repr(model.metadata)
        print('torch' in sys.modules)
    """
    lines = "\n".join(line.strip() for line in code.splitlines())
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    run = subprocess.run([sys.executable, "-c", lines], env=environment, capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "False", run.stderr


def test_importing_without_llama_index_names_the_extra() -> None:
    code = "import sys; sys.modules['llama_index.core'] = None; import llama_index.llms.paged"
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert run.stderr.strip().splitlines()[-1].endswith("pip install 'paged-backend[llama-index]'")


def test_a_checkpoint_is_loaded_once_for_everybody_and_its_recommendations_count(folder: str) -> None:
    models = [Paged(model=folder, engine_kwargs={"num_gpu_blocks_override": 64}) for _ in range(2)]
    responses = [model.complete("Hi.", ignore_eos=True) for model in models]
    assert [response.raw["usage"]["completion_tokens"] for response in responses] == [7, 7]
    assert models[0].engine is models[1].engine is LLM.shared(folder, num_gpu_blocks_override=64)
    assert models[0].metadata.context_window == MAX_POSITIONS
    assert models[0].complete("Hi.", ignore_eos=True, max_tokens=3).raw["usage"]["completion_tokens"] == 3


def test_a_loaded_model_is_used_in_place() -> None:
    hf_model, tokenizer = make_model(), make_tokenizer()
    model = Paged(model=hf_model, tokenizer=tokenizer, max_tokens=5, ignore_eos=True, temperature=0)
    assert model.complete("Hi.").raw["usage"]["completion_tokens"] == 5
    assert model.engine is LLM.shared(hf_model, tokenizer)
    assert copy.deepcopy(model).engine is model.engine
    assert "loaded" not in model.to_dict()
    model.engine.close()


def test_an_engine_or_a_path_can_be_given_as_model(llm: LLM, tmp_path: Path) -> None:
    assert text_of(Paged(model=llm, **saying("Red")).complete("Hi.")) == "Red"
    assert Paged(model=tmp_path).model == str(tmp_path)


@pytest.mark.parametrize(
    "make_copy",
    [copy.copy, copy.deepcopy, lambda model: model.model_copy(), lambda model: model.model_copy(deep=True)],
)
def test_copies_share_the_engine(llm: LLM, make_copy: Callable[[Paged], Paged]) -> None:
    model = make_paged(llm, max_tokens=3, stop=["x"])
    copied = make_copy(model)
    assert copied.engine is model.engine
    assert copied.to_dict() == model.to_dict()
    assert text_of(copied.complete("Hi.")) == text_of(model.complete("Hi."))


@pytest.mark.parametrize(
    "revive",
    [
        lambda model: pickle.loads(pickle.dumps(model)),
        lambda model: Paged.from_dict(model.to_dict()),
        lambda model: Paged.from_json(model.to_json()),
    ],
)
def test_settings_survive_a_pickle_and_a_dict(revive: Callable[[Paged], Paged]) -> None:
    model = Paged(
        model="demo",
        temperature=0.0,
        stop=["x"],
        min_tokens=2,
        system_prompt="Be kind.",
        engine_kwargs={"block_size": 32},
        is_chat_model=False,
    )
    revived = revive(model)
    assert revived.to_dict() == model.to_dict()
    assert (revived.temperature, revived.additional_kwargs) == (0.0, {"min_tokens": 2})


def test_a_model_with_an_engine_of_its_own_says_why_it_cannot_be_pickled(llm: LLM) -> None:
    with pytest.raises(TypeError, match="an engine lives in one process"):
        pickle.dumps(make_paged(llm))


def test_nothing_shows_the_engine(llm: LLM) -> None:
    model = make_paged(llm)
    shown = [repr(model), str(model.to_dict()), model.to_json(), str(model.to_payload())]
    assert not any("LLM object" in text for text in shown)


def test_a_dropped_model_keeps_nothing_alive(llm: LLM) -> None:
    model = make_paged(llm)
    assert model.metadata.context_window
    model.complete("Hi.")
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
