"""`paged-backend bench`: how fast a server, or an engine in this process, answers a load."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import paged_backend
from paged_backend import ConfigError
from paged_backend.cli.bench_data import Question, from_file, synthetic
from paged_backend.cli.bench_load import Answer, InProcess, Pace, Server, Target, http_client, put_load, served_model
from paged_backend.cli.bench_report import load_figure, plot, results_of, tables_of
from paged_backend.cli.options import FAILED, INCOMPLETE, Engine, command, start_logging
from paged_backend.cli.progress import progress_bar

_WARM_UP_TOKENS = 8


def _asked(text: str, *flags: str, **how: Any) -> Any:
    return typer.Option(*flags, help=text, rich_help_panel="What is asked", **how)


def _paced(text: str, **how: Any) -> Any:
    return typer.Option(help=text, rich_help_panel="How it is asked", **how)


def _written(text: str, *flags: str) -> Any:
    return typer.Option(*flags, help=text, rich_help_panel="Results")


_Model = Annotated[
    str | None,
    typer.Argument(help="demo, a folder, a .gguf file or a hub id; with --base-url, what the server calls it."),
]
_BaseUrl = Annotated[str | None, typer.Option(help="A server that speaks OpenAI's API, as http://127.0.0.1:8000.")]
_ApiKey = Annotated[str | None, typer.Option(help="The key that the server wants.")]
_NumPrompts = Annotated[int, _asked("How many.", min=1)]
_DatasetPath = Annotated[Path | None, _asked("Conversations in ShareGPT's form.")]
_InputLen = Annotated[int, _asked("Tokens, about.", "--input-len", "--random-input-len", min=1)]
_OutputLen = Annotated[
    int | None,
    _asked(
        "Tokens of an answer; with --dataset-path, as in the file unless given.",
        *("--output-len", "--random-output-len"),
        min=1,
        show_default="64",
    ),
]
_RangeRatio = Annotated[float, _asked("Share by which the two lengths vary.", min=0, max=1)]
_PrefixLen = Annotated[int, _asked("Tokens, about, with which all prompts begin.", min=0)]
_Chat = Annotated[bool, _asked("As chats, or as plain text.", "--chat/--completions")]
_IgnoreEos = Annotated[bool, _asked("Answers of full length.", "--ignore-eos/--no-ignore-eos")]
_RequestRate = Annotated[float, _paced("Requests per second, at random times; inf: all at once.")]
_Burstiness = Annotated[float, _paced("Below 1 they come in bursts, above 1 more evenly.")]
_MaxConcurrency = Annotated[int | None, _paced("Most at a time.")]
_NumWarmups = Annotated[int, _paced("Short requests before, which do not count.", min=0)]
_BenchSeed = Annotated[int, _paced("Of prompts and times.")]
_OutputJson = Annotated[Path | None, _written("Write all results there.")]
_Plot = Annotated[Path | None, _written("Draw them there, as out.png.", "--plot")]


@command
def bench(
    model: _Model = None,
    *,
    engine: Engine,
    base_url: _BaseUrl = None,
    api_key: _ApiKey = None,
    num_prompts: _NumPrompts = 100,
    dataset_path: _DatasetPath = None,
    input_len: _InputLen = 128,
    output_len: _OutputLen = None,
    range_ratio: _RangeRatio = 0.0,
    prefix_len: _PrefixLen = 0,
    chat: _Chat = True,
    ignore_eos: _IgnoreEos = True,
    request_rate: _RequestRate = math.inf,
    burstiness: _Burstiness = 1.0,
    max_concurrency: _MaxConcurrency = None,
    num_warmups: _NumWarmups = 1,
    bench_seed: _BenchSeed = 0,
    output_json: _OutputJson = None,
    plot_path: _Plot = None,
) -> None:
    """Measure a server (--base-url) or a model in this process under load.

    Prompts are random words, or conversations of a file. Answers are streamed and greedy. Shown are throughput, time to
    first token, time between tokens and the whole time, as mean, P50, P90 and P99.
    """
    start_logging("warning")
    _check_results_fit(output_json, plot_path)
    pace = Pace(request_rate=request_rate, burstiness=burstiness, max_concurrency=max_concurrency)
    if dataset_path is not None:
        questions = from_file(dataset_path, num_prompts, output_len=output_len, seed=bench_seed)
    else:
        lengths = {"input_len": input_len, "output_len": output_len or 64, "prefix_len": prefix_len}
        questions = synthetic(num_prompts, **lengths, range_ratio=range_ratio, seed=bench_seed)
    form = {"is_chat": chat, "ignore_eos": ignore_eos}
    target = _target(model, base_url, api_key, engine, form)
    answers = asyncio.run(_measure(target, questions, num_warmups, pace, bench_seed))
    results = results_of(answers)
    _show(results)
    if output_json is not None:
        settings = {
            "model": model,
            "base_url": base_url,
            "dataset": str(dataset_path or "synthetic"),
            "num_prompts": num_prompts,
            "request_rate": str(request_rate),
            "max_concurrency": max_concurrency,
            "version": paged_backend.__version__,
        }
        output_json.write_text(json.dumps(settings | results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if plot_path is not None and results["completed"]:
        plot(answers, plot_path)
    if results["failed"]:
        raise typer.Exit(INCOMPLETE if results["completed"] else FAILED)


def _check_results_fit(output_json: Path | None, plot_path: Path | None) -> None:
    """Before the work: what would keep its results from being written."""
    for path in (output_json, plot_path):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path} cannot be written, since its folder does not exist; make it, or give another")
    if plot_path is not None:
        load_figure()


async def _measure(
    target: contextlib.AbstractAsyncContextManager[Target],
    questions: list[Question],
    num_warmups: int,
    pace: Pace,
    seed: int,
) -> list[Answer]:
    async with target as measured:
        await _warm_up(measured, questions[:1] * num_warmups)
        with progress_bar(len(questions), 0) as bar:
            return await put_load(measured, questions, pace, seed, lambda answer: bar.advance(answer.num_output_tokens))


async def _warm_up(target: Target, questions: list[Question]) -> None:
    for question in questions:
        async for _ in target.pieces(question._replace(max_tokens=_WARM_UP_TOKENS)):
            pass


def _show(results: dict[str, Any]) -> None:
    console = Console()
    for table in tables_of(results):
        console.print(table)
    for error in results["errors"][:5]:
        console.print(error, style="red", markup=False)


def _target(
    model: str | None, base_url: str | None, api_key: str | None, engine: Engine, form: dict[str, bool]
) -> contextlib.AbstractAsyncContextManager[Target]:
    """What is measured, once it is entered; raises ConfigError if that is not clear."""
    if base_url is not None:
        if engine:
            raise ConfigError(
                f"--{next(iter(engine)).replace('_', '-')} is for a model in this process, not for a server"
            )
        return _server(model, base_url, api_key, form)
    if model is None:
        raise ConfigError("nothing is to be measured; give a model, or --base-url")
    return _engine(model, engine, form)


@contextlib.asynccontextmanager
async def _server(
    model: str | None, base_url: str, api_key: str | None, form: dict[str, bool]
) -> AsyncIterator[Target]:
    async with http_client(base_url.removesuffix("/").removesuffix("/v1"), api_key) as client:
        yield Server(client, model or await served_model(client), **form)


@contextlib.asynccontextmanager
async def _engine(model: str, engine: Engine, form: dict[str, bool]) -> AsyncIterator[Target]:
    tokenizer = engine.pop("tokenizer", None)
    with await asyncio.to_thread(paged_backend.LLM, model, tokenizer, **engine) as llm:
        yield InProcess(llm, **form)
