"""`paged-backend run-batch`: OpenAI's batch files, offline."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

import paged_backend
from paged_backend import ConfigError
from paged_backend.cli import of_the_extra
from paged_backend.cli.options import INCOMPLETE, Engine, command, start_logging
from paged_backend.server.settings import ServerSettings


@command
def run_batch(
    *,
    engine: Engine,
    input_file: Annotated[Path, typer.Option("--input-file", "-i", help="Requests, as JSON lines.")],
    output_file: Annotated[Path, typer.Option("--output-file", "-o", help="Answers, a line per request.")],
    model: Annotated[str, typer.Option(help="demo, a folder, a .gguf file or a hub id.")],
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What requests call the model; may be repeated.")
    ] = None,
    error_file: Annotated[
        Path | None, typer.Option(help="Where the answers of failed lines are repeated.", show_default="OUTPUT.errors")
    ] = None,
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    Each answer is written when it is there, also that of a bad line. Run the same command again after a crash, and
    only what has no answer yet is done; answers are found by their custom_id.
    """
    start_logging("warning")
    if output_file.exists() and output_file.samefile(input_file):
        raise ConfigError(f"{output_file} is the input too; give another --output-file")
    with of_the_extra():  # here, since it takes a second
        from paged_backend.cli.batch_job import BatchJob
        from paged_backend.server.models import Models
        from paged_backend.server.serving import Serving

    names = (*(served_model_name or ()), model)
    tokenizer = engine.pop("tokenizer", None)
    limit = engine.pop("max_num_queued_reqs", None)  # a job keeps to it by itself: none of its lines is refused
    job = BatchJob(input_file, output_file, error_file or output_file.with_name(output_file.name + ".errors"), limit)
    with paged_backend.LLM(model, tokenizer, **engine) as llm:
        settings = ServerSettings(served_model_names=names)
        num_failed = asyncio.run(job.run(llm, Models(settings, [Serving(settings, model=model, llm=llm)])))
    if num_failed:
        typer.secho(f"{num_failed} lines failed; they are in {job.error_file}", fg="yellow", err=True)
        raise typer.Exit(INCOMPLETE)
