"""Pipelines on the engine: the unmodified one, and the one that keeps many prompts in flight."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import Dataset
from transformers import PreTrainedModel, TextGenerationPipeline, TextStreamer, pipeline
from transformers.pipelines.pt_utils import KeyDataset

import transformers_paged
from helpers import is_idle, num_ended, wait_until
from helpers_models import make_model, make_tokenizer, save_model
from helpers_transformers import ENGINE, Held, cases, engine_of, on_engine
from transformers_paged import PagedTextGenerationPipeline

TEXTS = ["Once upon a time", "a", "How do you do, my friend?", "The end", "Ten", "x" * 40]
CHATS = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}],
    [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "1, 2,"}],
]
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


class Texts(Dataset):  # type: ignore[misc, type-arg]
    """A dataset that knows its end only by its length."""

    def __len__(self) -> int:
        return len(TEXTS)

    def __getitem__(self, index: int) -> dict[str, str]:
        return {"text": TEXTS[index % len(TEXTS)]}


@pytest.fixture(scope="module")
def right() -> TextGenerationPipeline:
    """Transformers' own pipeline on a model of its own."""
    return pipeline("text-generation", model=make_model("llama"), tokenizer=make_tokenizer(), device="cpu")


@pytest.fixture(scope="module")
def llama() -> Iterator[PreTrainedModel]:
    with on_engine(make_model("llama")) as model:
        yield model


@pytest.fixture(scope="module")
def plain(llama: PreTrainedModel) -> TextGenerationPipeline:
    return pipeline("text-generation", model=llama, tokenizer=make_tokenizer(), device="cpu")


@pytest.fixture(scope="module")
def paged(llama: PreTrainedModel) -> PagedTextGenerationPipeline:
    return pipeline("paged-text-generation", model=llama, tokenizer=make_tokenizer(), device="cpu")


INPUTS: dict[str, Any] = {
    "text": lambda: TEXTS[0],
    "texts": lambda: TEXTS,
    "one text in a list": lambda: TEXTS[:1],
    "chat": lambda: CHATS[0],
    "chats": lambda: CHATS,
    "generator": lambda: (text for text in TEXTS),
    "generator of chats": lambda: (chat for chat in CHATS),
    "empty generator": lambda: (text for text in TEXTS[:0]),
    "dataset": lambda: KeyDataset(Texts(), "text"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "new text": {"return_full_text": False},
    "ids": {"return_tensors": True},
    "several": {"num_return_sequences": 2, "do_sample": True, "top_k": 1},
    "stop": {"stop_sequence": ["j", "e", "d"]},
    "batched": {"batch_size": 3},
    "special tokens": {"skip_special_tokens": False, "return_full_text": False},
    "beams": {"num_beams": 2},
}


def results(pipe: TextGenerationPipeline, inputs: str, options: dict[str, Any]) -> Any:
    output = pipe(INPUTS[inputs](), **GREEDY | options)
    return output if isinstance(output, list) else list(output)


@pytest.mark.parametrize("inputs", cases(INPUTS, everyday="text, chats, dataset"))
def test_every_kind_of_input_gives_what_transformers_gives(right: Any, plain: Any, paged: Any, inputs: str) -> None:
    expected = results(right, inputs, {})
    assert results(plain, inputs, {}) == expected
    assert results(paged, inputs, {}) == expected


@pytest.mark.parametrize("options", cases(OPTIONS, everyday="new text"))
def test_every_form_of_result_is_that_of_transformers(right: Any, plain: Any, paged: Any, options: str) -> None:
    for inputs in ("texts", "chats"):
        expected = results(right, inputs, OPTIONS[options])
        assert results(plain, inputs, OPTIONS[options]) == expected
        assert results(paged, inputs, OPTIONS[options]) == expected


@pytest.mark.slow
def test_prompts_share_steps_without_padding(llama: PreTrainedModel, paged: Any) -> None:
    texts = [f"{i} " + "long " * (i % 7) for i in range(24)]
    before = engine_of(llama).stats()
    paged(texts, max_new_tokens=30, do_sample=False, eos_token_id=None)
    after = engine_of(llama).stats()
    assert after.num_steps - before.num_steps < 24 * 30 / 3


def test_batch_size_bounds_what_is_read_ahead_and_nothing_is_read_before_the_first_step(paged: Any) -> None:
    num_read = 0

    def texts() -> Iterator[str]:
        nonlocal num_read
        for text in TEXTS:
            num_read += 1
            yield text

    iterator = paged(texts(), batch_size=2, **GREEDY)
    assert num_read == 1, "the first one is looked at by the base class"
    seen = [num_read for _ in iterator]
    assert seen == [2, 3, 4, 5, 6, 6]


def test_one_at_a_time_suits_inputs_that_follow_from_results(paged: Any) -> None:
    answers: list[str] = []

    def texts() -> Iterator[str]:
        yield "a"
        for _ in range(2):
            yield answers[-1]

    for (result,) in paged(texts(), batch_size=1, max_new_tokens=2, do_sample=False):
        answers.append(result["generated_text"])
    assert len(answers) == 3 and answers[2].startswith(answers[1])


@pytest.mark.slow
def test_results_have_the_length_of_their_inputs_and_can_be_read_again(paged: Any) -> None:
    output = paged(KeyDataset(Texts(), "text"), **GREEDY)
    assert len(output) == len(TEXTS)
    assert list(output) == list(output)


def test_an_error_comes_in_its_place_and_the_others_are_not_lost(right: Any, paged: Any) -> None:
    expected = results(right, "texts", {})
    inputs: list[Any] = [*TEXTS[:2], None, *TEXTS[2:]]
    collected: list[Any] = []
    iterator = iter(paged((text for text in inputs), **GREEDY))
    while len(collected) < len(inputs):
        try:
            collected.append(next(iterator))
        except TypeError as error:
            collected.append(type(error))
    assert collected == [*expected[:2], TypeError, *expected[2:]]
    with pytest.raises(StopIteration):
        next(iterator)

    output = paged(inputs, return_exceptions=True, **GREEDY)
    assert isinstance(output.pop(2), TypeError)
    assert output == expected
    assert isinstance(paged(3, return_exceptions=True, **GREEDY), TypeError)


def test_an_error_ends_a_list_and_leaves_nothing_running(llama: PreTrainedModel, paged: Any) -> None:
    before = num_ended(engine_of(llama).stats())
    with Held() as arguments, pytest.raises(TypeError):
        paged([None, *TEXTS], **arguments)
    wait_until(lambda: is_idle(engine_of(llama).stats()))
    assert num_ended(engine_of(llama).stats()) == before
    assert len(paged(TEXTS, **GREEDY)) == len(TEXTS)


def test_an_error_of_the_inputs_comes_after_the_results_before_it(paged: Any) -> None:
    def texts() -> Iterator[str]:
        yield from TEXTS[:3]
        raise ConnectionResetError("no more")

    collected = []
    with pytest.raises(ConnectionResetError):
        for result in paged(texts(), **GREEDY):
            collected.append(result)
    assert len(collected) == 3


@pytest.mark.slow
def test_results_that_nobody_reads_any_more_are_aborted(llama: PreTrainedModel, paged: Any) -> None:
    endless = {"max_new_tokens": 400, "do_sample": False, "eos_token_id": None}
    iterator = iter(paged((text for text in ["a", *TEXTS]), batch_size=7, **endless))
    next(iterator)
    before = engine_of(llama).stats().num_steps
    del iterator
    gc.collect()
    wait_until(lambda: is_idle(engine_of(llama).stats()))
    assert engine_of(llama).stats().num_steps - before < 200

    iterator = iter(paged((text for text in [*TEXTS, *TEXTS]), batch_size=3, **endless))
    reader = threading.Thread(target=next, args=(iterator, None), daemon=True)
    reader.start()
    wait_until(lambda: engine_of(llama).stats().num_running == 3)
    iterator.close()
    reader.join(20)
    assert not reader.is_alive() and is_idle(engine_of(llama).stats())


def test_a_streamer_gets_one_prompt_after_the_other(right: Any, paged: Any, capsys: pytest.CaptureFixture[str]) -> None:
    streamer = TextStreamer(make_tokenizer())
    right(TEXTS[:3], streamer=streamer, **GREEDY)
    expected = capsys.readouterr().out
    paged(TEXTS[:3], streamer=streamer, **GREEDY)
    assert capsys.readouterr().out == expected


@pytest.mark.slow
def test_a_pipeline_is_made_from_a_folder_with_settings_for_its_engine(tmp_path: Any, right: Any) -> None:
    folder = save_model(tmp_path)
    pipe = pipeline(
        "paged-text-generation", model=str(folder), device="cpu", engine_kwargs=ENGINE | {"max_num_seqs": 3}
    )
    assert engine_of(pipe.model).config.max_num_seqs == 3
    assert pipe(TEXTS, **GREEDY) == right(TEXTS, **GREEDY)
    transformers_paged.disable(pipe.model)
    by_class = pipeline("text-generation", model=pipe.model, tokenizer=make_tokenizer(), device="cpu")
    assert by_class(TEXTS, **GREEDY) == right(TEXTS, **GREEDY)


@pytest.mark.slow
def test_recommended_settings_of_a_model_count(tmp_path: Any) -> None:
    """lm-evaluation-harness#3154"""
    recommended = {"do_sample": True, "temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1, "max_new_tokens": 7}
    folder = str(save_model(tmp_path, generation_config=recommended | {"eos_token_id": [2, 0], "pad_token_id": 2}))
    pipe = pipeline("paged-text-generation", model=folder, device="cpu", engine_kwargs=ENGINE)
    own = pipeline("text-generation", model=folder, device="cpu")
    ids = pipe("abc", return_tensors=True)[0]["generated_token_ids"]
    assert len(ids) <= 3 + 7
    explicit = {"do_sample": False, "repetition_penalty": 1.0}
    assert pipe("abc", **explicit) == own("abc", **explicit)
    transformers_paged.disable(pipe.model)


def test_chats_are_not_given_a_second_bos(right: Any, paged: Any) -> None:
    """vllm#27515"""
    ids = paged(CHATS[0], return_tensors=True, **GREEDY)[0]["generated_token_ids"]
    rendered = make_tokenizer().apply_chat_template(CHATS[0], add_generation_prompt=True)["input_ids"]
    assert ids[: len(rendered)] == rendered


@pytest.mark.slow
def test_a_finished_script_ends_by_itself() -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from helpers_models import make_model, make_tokenizer\n"
        "from transformers import pipeline\n"
        "import transformers_paged\n"
        "pipe = pipeline('paged-text-generation', model=make_model('llama'), tokenizer=make_tokenizer(), device='cpu',"
        " engine_kwargs={'kv_cache_memory': '4MiB'})\n"
        "results = iter(pipe((str(i) for i in range(20)), max_new_tokens=300, eos_token_id=None))\n"
        "print(len(next(results)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr
