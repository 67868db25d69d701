"""`paged-backend chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

import paged_backend
from paged_backend import InvalidRequestError
from paged_backend.cli.options import Engine, command, start_logging

if TYPE_CHECKING:
    from paged_backend import LLM, RequestHandle

_HELP = """/system TEXT  begin again, with these instructions
/reset        begin again
/help         this
/exit         leave; so does Ctrl-D. Ctrl-C ends an answer."""


@command
def chat(
    model: Annotated[str, typer.Argument(help="demo, a folder, a .gguf file or a hub id.")] = "demo",
    *,
    engine: Engine,
    system: Annotated[str | None, typer.Option(help="Instructions to begin with.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens per answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
) -> None:
    """Talk to a model; /help shows what else there is."""
    start_logging("warning")
    given = {"max_tokens": max_tokens, "temperature": temperature}
    console = Console(highlight=False)
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  lines can be edited and found again
    tokenizer = engine.pop("tokenizer", None)
    with console.status(escape(f"loading {model}")):
        llm = paged_backend.LLM(model, tokenizer, **engine)
    with llm:
        conversation = _Conversation(
            llm, console, system, {name: value for name, value in given.items() if value is not None}
        )
        console.print(f"{llm.model_name}: /help shows what else there is", style="dim", markup=False)
        with contextlib.suppress(EOFError, KeyboardInterrupt):
            while conversation.turn(console.input("[bold]> [/bold]").strip()):
                pass


class _Conversation:
    """The messages so far. A message whose answer failed or was broken off with nothing said is taken back."""

    def __init__(self, llm: LLM, console: Console, system: str | None, sampling: dict[str, Any]) -> None:
        self._llm, self._console = llm, console
        self._params = llm.get_default_chat_params(**sampling)
        self._system = system
        self._messages: list[dict[str, str]] = []
        self._reset()

    def turn(self, line: str) -> bool:
        """Do what a line asks for; False to leave."""
        name, _, rest = line.partition(" ")
        match name:
            case "/exit" | "/quit":
                return False
            case "/help":
                self._console.print(_HELP, markup=False)
            case "/reset":
                self._reset()
            case "/system":
                self._system = rest.strip() or None
                self._reset()
            case "":
                pass
            case _ if name.startswith("/"):
                self._console.print(f"{name} is not known; /help shows what is", markup=False)
            case _:
                self._answer(line)
        return True

    def _reset(self) -> None:
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    def _answer(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})
        try:
            answer = self._print(self._llm.stream_chat(self._messages, self._params))
        except InvalidRequestError as error:
            self._console.print(str(error), style="red", markup=False)
            answer = ""
        if answer:
            self._messages.append({"role": "assistant", "content": answer})
        else:
            self._messages.pop()

    def _print(self, handle: RequestHandle) -> str:
        """Show an answer as it grows; what was said of it until its end, or until Ctrl-C."""
        answer, num_tokens, start = "", 0, time.monotonic()
        with handle, contextlib.suppress(KeyboardInterrupt):
            for output in handle:
                piece = output.outputs[0]
                answer += piece.text
                num_tokens += len(piece.token_ids)
                self._console.print(piece.text, end="", markup=False, soft_wrap=True)
        seconds = max(time.monotonic() - start, 1e-6)
        self._console.print(f"\n[dim]{num_tokens} tokens, {num_tokens / seconds:.1f} tokens/s[/dim]")
        return answer
