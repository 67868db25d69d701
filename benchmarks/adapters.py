"""What an adapter costs, and what its peers do with the same model: seconds for one batch of chats, in one run.

    python benchmarks/adapters.py --rounds 5

`ChatPaged.batch` against `LLM.chat`, and against the local adapters of other packages that are installed:
langchain-huggingface's ChatHuggingFace and HuggingFacePipeline, and LlamaIndex's HuggingFaceLLM
(`pip install -e ".[bench]"`). Each lives in a process of its own, and they take turns round by round. Run it on a quiet
machine; the ratios count. An answer may end before `--tokens`, in all of them alike, since not every adapter can be
kept from that.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import transformers

import paged_backend
from rounds import start, take_turns, versions
from workloads import Workload

Answer = Callable[[list[str]], None]


def llm_chat(model: str, num_tokens: int) -> Answer:
    llm = paged_backend.LLM(model)
    params = paged_backend.SamplingParams(temperature=0, max_tokens=num_tokens)

    def answer(questions: list[str]) -> None:
        llm.chat([[{"role": "user", "content": question}] for question in questions], params, use_tqdm=False)

    return answer


def chat_paged(model: str, num_tokens: int) -> Answer:
    from langchain_paged import ChatPaged

    chat = ChatPaged(model=model, temperature=0, max_tokens=num_tokens)
    return lambda questions: _done(chat.batch(questions), questions)


def chat_hugging_face(model: str, num_tokens: int) -> Answer:
    """In threads, as many as `batch` likes: faster than one question after the other."""
    from langchain_huggingface import ChatHuggingFace

    pipeline, folder = _pipeline(model, batch_size=1)
    chat = ChatHuggingFace(llm=pipeline, model_id=folder)

    return lambda questions: _done(chat.batch(questions, pipeline_kwargs=_greedy(num_tokens)), questions)


def hugging_face_pipeline(model: str, num_tokens: int, batch_size: int = 4) -> Answer:
    """4 is its default."""
    pipeline, folder = _pipeline(model, batch_size)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def answer(questions: list[str]) -> None:
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
            )
            for question in questions
        ]
        _done(pipeline.batch(prompts, pipeline_kwargs=_greedy(num_tokens)), questions)

    return answer


def hugging_face_llm(model: str, num_tokens: int) -> Answer:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.huggingface import HuggingFaceLLM

    folder = _folder(model)
    llm: Any = HuggingFaceLLM(
        model_name=folder,
        tokenizer_name=folder,
        device_map="cpu",
        max_new_tokens=num_tokens,
        generate_kwargs={"do_sample": False},
    )
    return lambda questions: _done([llm.chat([ChatMessage(content=question)]) for question in questions], questions)


ENGINES: dict[str, tuple[Callable[[str, int], Answer], str]] = {
    "LLM.chat": (llm_chat, "paged_backend"),
    "ChatPaged.batch": (chat_paged, "langchain_paged"),
    "ChatHuggingFace.batch": (chat_hugging_face, "langchain_huggingface"),
    "HuggingFacePipeline.batch": (hugging_face_pipeline, "langchain_huggingface"),
    "HuggingFacePipeline(batch_size=32).batch": (
        functools.partial(hugging_face_pipeline, batch_size=32),
        "langchain_huggingface",
    ),
    "HuggingFaceLLM.chat": (hugging_face_llm, "llama_index.llms.huggingface"),
}


def is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def _done(answers: list[Any], questions: list[str]) -> None:
    assert len(answers) == len(questions)


def _greedy(num_tokens: int) -> dict[str, Any]:
    return {"max_new_tokens": num_tokens, "do_sample": False, "return_full_text": False}


def _folder(model: str) -> str:
    if model != "demo":
        return model
    from paged_backend import demo_folder

    return str(demo_folder())


def _pipeline(model: str, batch_size: int) -> tuple[Any, str]:
    from langchain_huggingface import HuggingFacePipeline

    folder = _folder(model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    pipeline = transformers.pipeline("text-generation", model=loaded, tokenizer=tokenizer, batch_size=batch_size)
    return HuggingFacePipeline(pipeline=pipeline, batch_size=batch_size, model_id=folder), folder


def questions_of(workload: Workload, round_: int) -> list[str]:
    return [conversation[-1]["content"] for conversation in workload.conversations(round_)]


def serve(connection: Connection, name: str, model: str, num_tokens: int) -> None:
    """The process of one engine: does each (workload, round) it is sent and answers with the seconds it took."""
    answer = ENGINES[name][0](model, num_tokens)
    answer(["Say hello."])
    connection.send("ready")
    while (task := connection.recv()) is not None:
        workload, round_ = task
        questions = questions_of(workload, round_)
        start = time.perf_counter()
        answer(questions)
        connection.send(time.perf_counter() - start)


def main() -> None:
    installed = [name for name, (_, package) in ENGINES.items() if is_installed(package)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, or a model folder (default: demo)")
    parser.add_argument("--engines", nargs="+", default=installed, choices=list(ENGINES), metavar="NAME")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()

    print(
        f"{versions()}, {arguments.model}, "
        f"{arguments.requests} questions, answers of up to {arguments.tokens} tokens, {arguments.rounds} rounds"
    )
    for name in ENGINES.keys() - set(installed):
        print(f"not installed, not compared: {name}")
    workload = Workload("adapters", arguments.requests, arguments.tokens)
    engines = {name: start(serve, name, arguments.model, arguments.tokens) for name in arguments.engines}
    seconds = take_turns(engines, arguments.rounds, lambda round_: (workload, round_))
    first = arguments.engines[0]
    for name, values in seconds.items():
        speed = statistics.median(a / b for a, b in zip(seconds[first], values, strict=True))
        print(f"{name:40} median {statistics.median(values):7.2f} s   {speed:.2f}x the speed of {first}")
    for engine in engines.values():
        engine.send(None)


if __name__ == "__main__":
    main()
