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
from paged_backend import LLM, ConfigError
from paged_backend.cli.bench_data import Question, from_file, synthetic
from paged_backend.cli.bench_load import Answer, InProcess, Pace, Server, Target, http_client, put_load, served_model
from paged_backend.cli.bench_report import plot, results_of, tables_of
from paged_backend.cli.options import FAILED, INCOMPLETE, Engine, command, start_logging
from paged_backend.cli.progress import progress_bar

_DATA, _LOAD, _RESULTS = "What is asked", "How it is asked", "Results"
_WARM_UP_TOKENS = 8


@command
def bench(
    model: Annotated[
        str | None,
        typer.Argument(help="demo, a folder, a .gguf file or a hub id; with --base-url, what the server calls it."),
    ] = None,
    *,
    engine: Engine,
    base_url: Annotated[
        str | None, typer.Option(help="A server that speaks OpenAI's API, as http://127.0.0.1:8000.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="The key that the server wants.")] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="How many.", rich_help_panel=_DATA)] = 100,
    dataset_path: Annotated[
        Path | None,
        typer.Option(help="Conversations in ShareGPT's form.", rich_help_panel=_DATA),
    ] = None,
    input_len: Annotated[
        int, typer.Option("--input-len", "--random-input-len", min=1, help="Tokens, about.", rich_help_panel=_DATA)
    ] = 128,
    output_len: Annotated[
        int | None,
        typer.Option(
            "--output-len",
            "--random-output-len",
            min=1,
            help="Tokens of an answer; with --dataset-path, as in the file unless given.",
            show_default="64",
            rich_help_panel=_DATA,
        ),
    ] = None,
    range_ratio: Annotated[
        float, typer.Option(min=0, max=1, help="Share by which the two lengths vary.", rich_help_panel=_DATA)
    ] = 0.0,
    prefix_len: Annotated[
        int, typer.Option(min=0, help="Tokens, about, with which all prompts begin.", rich_help_panel=_DATA)
    ] = 0,
    chat: Annotated[
        bool, typer.Option("--chat/--completions", help="As chats, or as plain text.", rich_help_panel=_DATA)
    ] = True,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos/--no-ignore-eos", help="Answers of full length.", rich_help_panel=_DATA),
    ] = True,
    request_rate: Annotated[
        float, typer.Option(help="Requests per second, at random times; inf: all at once.", rich_help_panel=_LOAD)
    ] = math.inf,
    burstiness: Annotated[
        float, typer.Option(help="Below 1 they come in bursts, above 1 more evenly.", rich_help_panel=_LOAD)
    ] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option(help="Most at a time.", rich_help_panel=_LOAD)] = None,
    num_warmups: Annotated[
        int, typer.Option(min=0, help="Short requests before, which do not count.", rich_help_panel=_LOAD)
    ] = 1,
    bench_seed: Annotated[int, typer.Option(help="Of prompts and times.", rich_help_panel=_LOAD)] = 0,
    output_json: Annotated[Path | None, typer.Option(help="Write all results there.", rich_help_panel=_RESULTS)] = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", help="Draw them there, as out.png.", rich_help_panel=_RESULTS)
    ] = None,
) -> None:
    """Measure a server (--base-url) or a model in this process under load.

    Prompts are random words, or conversations of a file. Answers are streamed and greedy. Shown are throughput, time to
    first token, time between tokens and the whole time, as mean, P50, P90 and P99.
    """
    start_logging("warning")
    if base_url is None and model is None:
        raise ConfigError("nothing is to be measured; give a model, or --base-url")
    if base_url is not None and engine:
        raise ConfigError(f"--{next(iter(engine)).replace('_', '-')} is for a model in this process, not for a server")
    pace = Pace(request_rate=request_rate, burstiness=burstiness, max_concurrency=max_concurrency)
    if dataset_path is not None:
        questions = from_file(dataset_path, num_prompts, output_len=output_len, seed=bench_seed)
    else:
        questions = synthetic(
            num_prompts,
            input_len=input_len,
            output_len=output_len or 64,
            range_ratio=range_ratio,
            prefix_len=prefix_len,
            seed=bench_seed,
        )

    async def run() -> list[Answer]:
        target = _server if base_url is not None else _engine
        async with target(model, base_url, api_key, engine, {"is_chat": chat, "ignore_eos": ignore_eos}) as measured:
            await _warm_up(measured, questions[:1] * num_warmups)
            with progress_bar(len(questions), 0) as bar:
                return await put_load(
                    measured, questions, pace, bench_seed, lambda answer: bar.advance(answer.num_output_tokens)
                )

    answers = asyncio.run(run())
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


@contextlib.asynccontextmanager
async def _server(
    model: str | None, base_url: str | None, api_key: str | None, engine: dict[str, Any], form: dict[str, bool]
) -> AsyncIterator[Target]:
    assert base_url is not None
    async with http_client(base_url.removesuffix("/").removesuffix("/v1"), api_key) as client:
        yield Server(client, model or await served_model(client), **form)


@contextlib.asynccontextmanager
async def _engine(
    model: str | None, base_url: str | None, api_key: str | None, engine: dict[str, Any], form: dict[str, bool]
) -> AsyncIterator[Target]:
    assert model is not None
    tokenizer = engine.pop("tokenizer", None)
    with await asyncio.to_thread(LLM, model, tokenizer, **engine) as llm:
        yield InProcess(llm, **form)
