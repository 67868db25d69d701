"""`paged-backend generate`: a file of prompts to a file of completions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

import paged_backend
from paged_backend import ConfigError, EngineDeadError, PagedBackendError, RequestOutputKind
from paged_backend.cli.jsonl import JsonLines, input_lines, json_line, replace_atomically
from paged_backend.cli.options import INCOMPLETE, Engine, command, start_logging
from paged_backend.cli.progress import as_they_finish, at_once, progress_bar, watched

if TYPE_CHECKING:
    from paged_backend import LLM, RequestHandle

_SHOWN_ERRORS = 5


class _Line(NamedTuple):
    position: int
    text: str | None


@command
def generate(
    model: Annotated[str, typer.Argument(help="demo, a folder, a .gguf file or a hub id.")],
    *,
    engine: Engine,
    input_path: Annotated[Path, typer.Option("--input-path", "-i", help="A prompt a line, or JSON lines (.jsonl).")],
    output_path: Annotated[Path, typer.Option("--output-path", "-o", help="A line per prompt; .jsonl for details.")],
    max_tokens: Annotated[int, typer.Option(help="Most tokens per completion.")] = 200,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample among the likeliest tokens with this share.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample among this many tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends a completion; may be repeated.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt as a user's message to the model.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start again, whatever there is.")] = False,
) -> None:
    """Complete every prompt of a file.

    Results come in the order of the prompts; in plain text, a line break is written as \\n. Finished lines are kept in
    OUTPUT.partial until all are there: run the same command again after a crash, and only the rest is computed. A line
    of JSON is a prompt, or an object with "prompt" or "messages", and sampling parameters of its own.
    """
    start_logging("warning")
    given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "stop": stop}
    sampling = {name: value for name, value in given.items() if value is not None}
    partial = output_path.with_name(output_path.name + ".partial")
    if output_path.exists() and output_path.samefile(input_path):
        raise ConfigError(f"{output_path} is the input too; give another --output-path")
    if overwrite:
        partial.unlink(missing_ok=True)
    elif output_path.exists() and not partial.exists():
        raise ConfigError(f"{output_path} is there already; give another --output-path, or --overwrite")
    job = _Job(input_path, output_path, partial, {"model": model, "chat": chat, **sampling})
    lines = job.lines()
    tokenizer = engine.pop("tokenizer", None)
    limit = engine.pop("max_num_queued_reqs", None)  # a job keeps to it by itself: none of its lines is refused
    with paged_backend.LLM(model, tokenizer, **engine) as llm:
        errors = asyncio.run(job.run(llm, lines, limit))
    for number, error in errors[:_SHOWN_ERRORS]:
        typer.secho(f"prompt {number}: {error}", fg="yellow", err=True)
    if errors:
        typer.secho(f"{len(errors)} of {len(lines)} prompts failed", fg="yellow", err=True)
        raise typer.Exit(INCOMPLETE)


class _Job:
    """Takes the lines of a file that its journal has not, and turns a full journal into the results."""

    def __init__(self, source: Path, target: Path, partial: Path, settings: dict[str, Any]) -> None:
        self._source, self._target, self._partial = source, target, partial
        self._settings = settings
        self._is_json = source.suffix == ".jsonl"

    def lines(self) -> list[_Line]:
        numbered = list(input_lines(self._source))
        if self._is_json:
            numbered = [(number, text) for number, text in numbered if text is None or text.strip()]
        return [_Line(index, text) for index, (_, text) in enumerate(numbered)]

    async def run(self, llm: LLM, lines: list[_Line], limit: int | None) -> list[tuple[int, str]]:
        """The prompts that failed, counted from 1, and why."""
        with JsonLines(self._partial) as journal:
            entries = self._resumed(journal, lines)
            left = [line for line in lines if line.position not in entries]
            with progress_bar(len(lines), len(entries)) as bar:
                async with watched(bar, llm):
                    async for entry in as_they_finish(
                        left, lambda line: self._complete(llm, line), at_once=at_once(llm, limit)
                    ):
                        journal.append(entry)
                        entries[entry["index"]] = entry
                        bar.advance(entry["usage"]["completion_tokens"])
        replace_atomically(self._target, self._results(entries))
        self._partial.unlink()
        return [(index + 1, entries[index]["error"]) for index in sorted(entries) if "error" in entries[index]]

    def _resumed(self, journal: JsonLines, lines: list[_Line]) -> dict[int, dict[str, Any]]:
        """The lines that the journal has an answer to; raises ConfigError if it is about something else."""
        found = iter(journal.entries())
        head = next(found, None)
        if head is None:
            journal.append({"settings": self._settings})
            return {}
        if head.get("settings") != self._settings:
            raise ConfigError(
                f"{self._partial} was begun with other settings: {head.get('settings')}; use them, or --overwrite"
            )
        entries = {entry["index"]: entry for entry in found if "error" not in entry}
        return {line.position: entries[line.position] for line in lines if _is_of(entries.get(line.position), line)}

    async def _complete(self, llm: LLM, line: _Line) -> dict[str, Any]:
        entry: dict[str, Any] = {"index": line.position, "line": line.text}
        if line.text == "":
            return entry | {"text": "", "finish_reason": None, "usage": _usage(0, 0)}
        try:
            handle = await asyncio.to_thread(self._submit, llm, line)
            output = await handle.aresult()
        except EngineDeadError:  # no answer: the next run has to ask again
            raise
        except PagedBackendError as error:
            return entry | {"error": str(error), "usage": _usage(0, 0)}
        first = output.outputs[0]
        usage = _usage(len(output.prompt_token_ids), len(first.token_ids))
        return entry | {"text": first.text, "finish_reason": first.finish_reason, "usage": usage}

    def _submit(self, llm: LLM, line: _Line) -> RequestHandle:
        what, sampling = self._read(line)
        sampling |= {"output_kind": RequestOutputKind.FINAL_ONLY}
        if sampling.get("n", 1) != 1:
            raise ConfigError(f"n={sampling['n']!r} is not possible here; a line gets one completion")
        if isinstance(what, Mapping):
            return llm.stream_chat(what["messages"], llm.get_default_chat_params(**sampling))
        return llm.submit(what, llm.get_default_sampling_params(**sampling))

    def _read(self, line: _Line) -> tuple[Any, dict[str, Any]]:
        """The prompt, or a mapping with the messages of a chat; and how to sample."""
        sampling = {name: value for name, value in self._settings.items() if name not in ("model", "chat")}
        if line.text is None:
            raise ConfigError("the line is not UTF-8")
        prompt: Any = line.text
        if self._is_json:
            try:
                prompt = json.loads(line.text)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"the line is no JSON: {error}") from None
        if isinstance(prompt, dict):
            own = dict(prompt)
            messages, prompt = own.pop("messages", None), own.pop("prompt", None)
            if (messages is None) == (prompt is None):
                raise ConfigError("the line needs either 'prompt' or 'messages'")
            sampling |= own
            if messages is not None:
                return {"messages": messages}, sampling
        if self._settings["chat"]:
            return {"messages": [{"role": "user", "content": prompt}]}, sampling
        return prompt, sampling

    def _results(self, entries: Mapping[int, dict[str, Any]]) -> Iterator[str]:
        for index in sorted(entries):
            entry = entries[index]
            if self._target.suffix == ".jsonl":
                yield json_line(entry)
            else:
                yield entry.get("text", "").replace("\\", "\\\\").replace("\r", "\\r").replace("\n", "\\n")


def _is_of(entry: Mapping[str, Any] | None, line: _Line) -> bool:
    return entry is not None and entry["line"] == line.text


def _usage(num_prompt_tokens: int, num_completion_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_completion_tokens}
