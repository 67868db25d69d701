"""`paged-backend check`: how a model would be run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

import paged_backend
from paged_backend.cli.options import Engine, command, start_logging

if TYPE_CHECKING:
    from paged_backend import Verdict


@command
def check(
    model: Annotated[str, typer.Argument(help="demo, a folder, a .gguf file or a hub id.")],
    *,
    engine: Engine,
) -> None:
    """Say whether and how a model can be run, and how much fits.

    The model is loaded and computes a few dozen tokens as the engine would, in chunks and among others, and in the
    plain way of transformers. Where the results differ, the next way is tried; if there is none, the model is refused,
    and the exit code is 1.
    """
    start_logging("warning")
    tokenizer = engine.pop("tokenizer", None)
    for name, value in _lines(paged_backend.check_model(model, tokenizer, **engine)):
        typer.echo(f"{name:<13}{value}")


def _lines(verdict: Verdict) -> Iterator[tuple[str, str]]:
    yield "tier", f"{verdict.way}: {verdict.explanation}"
    for kind, count in verdict.layers.items():
        yield "layers", f"{count} x {kind}"
    yield "self-check", f"{verdict.difference:.2g} standard deviations of the logits from a plain run"
    yield "memory", f"{verdict.bytes_per_token} bytes per token"
    is_limited = verdict.bytes_per_old_token < verdict.bytes_per_token
    if is_limited:
        yield "", f"{verdict.bytes_per_old_token} bytes per token that is behind all windows"
    if verdict.bytes_per_sequence:
        yield "", f"{verdict.bytes_per_sequence} bytes per sequence"
    of_length = f" in sequences of {verdict.max_model_len}" if is_limited else ""
    yield "fits", f"{verdict.num_tokens} tokens{of_length}, {verdict.max_num_seqs} sequences at once"
    reason = "no: the pages of a prefix are not all that going on from it takes" if verdict.keeps_state else "yes"
    yield "prefix cache", reason
