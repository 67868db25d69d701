"""All commands."""

from __future__ import annotations

from typing import Annotated

import typer

import paged_backend
from paged_backend.cli.bench import bench
from paged_backend.cli.chat import chat
from paged_backend.cli.check import check
from paged_backend.cli.demo import demo
from paged_backend.cli.generate import generate
from paged_backend.cli.options import Command, ManyValuesCommand
from paged_backend.cli.run_batch import run_batch
from paged_backend.cli.serve import serve

app = typer.Typer(
    name="paged-backend",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # whose tables cut long names off
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 failed, 2 wrong usage, 3 done but for some lines of a file, 130 interrupted.",
)
app.command(cls=ManyValuesCommand)(serve)
app.command(cls=Command)(chat)
app.command(cls=Command)(generate)
app.command("run-batch", cls=Command)(run_batch)
app.command(cls=Command)(check)
app.command(cls=Command, short_help="Measure a server or a model under load.")(bench)
app.command(cls=Command, short_help="Show on a small model what batching does.")(demo)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(paged_backend.__version__)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Batched, paged LLM inference: a server, a chat, and jobs over files."""
