"""`paged-backend demo`: what batching and paging do, in a minute."""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table

import paged_backend
from paged_backend.cli.options import Engine, command, start_logging

_SYSTEM = "You are a helpful assistant who answers in one short sentence."
_QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Why is the sky blue?",
    "What do bees make?",
    "How many days are in a week?",
    "What is water made of?",
    "Name a planet.",
    "What is two plus two?",
)


@command
def demo(*, engine: Engine) -> None:
    """Ask a small model eight questions, one after another and then all at once."""
    start_logging("warning")
    console = Console()
    tokenizer = engine.pop("tokenizer", None)
    with console.status("loading the demo model (the first time, it is converted: about 20 s)"):
        llm = paged_backend.LLM("demo", tokenizer, **engine)
    with llm:
        chats = [
            [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": question}] for question in _QUESTIONS
        ]
        params = llm.get_default_chat_params(max_tokens=48, temperature=0.0)
        llm.chat(chats[:1], params, use_tqdm=False)  # warm
        start = time.monotonic()
        for chat in chats:
            llm.chat(chat, params, use_tqdm=False)
        alone = time.monotonic() - start
        start = time.monotonic()
        outputs = llm.chat(chats, params, use_tqdm=False)
        together = time.monotonic() - start
        num_tokens = sum(output.num_output_tokens for output in outputs)
        stats = llm.stats()
    table = Table("question", "answer")
    for question, output in zip(_QUESTIONS, outputs, strict=True):
        table.add_row(question, output.outputs[0].text.strip())
    console.print(table)
    console.print(f"one after another: {alone:.1f} s, {num_tokens / alone:.0f} tokens/s")
    console.print(f"all at once:       {together:.1f} s, {num_tokens / together:.0f} tokens/s")
    console.print(
        f"prompt tokens found in the prefix cache: {stats.num_prefix_hit_tokens} of {stats.num_prefix_queried_tokens}; "
        f"KV cache wasted: {stats.kv_waste_ratio:.1%}"
    )
