"""Reasoning before the answer: how a model marks it, and where its output begins."""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple

from paged_backend.chat.pieces import Pieces
from paged_backend.chat.source import Reading, Source


class Stage(enum.Enum):
    """Where an output begins."""

    BEFORE = "before"
    """The model opens the reasoning itself, or goes without."""
    INSIDE = "inside"
    """The prompt has opened it."""
    AFTER = "after"
    """The prompt has closed it, or has begun the answer."""


class ReasoningFormat(NamedTuple):
    """What stands before and after the reasoning."""

    start: str
    end: str
    stage: Stage = Stage.BEFORE
    """Where outputs begin if the prompt does not say."""
    after: str = ""
    """What stands between the end of the reasoning and whatever follows."""
    answer: str = ""
    """What opens an answer after that."""

    def closing(self, *, is_answer: bool) -> str:
        """What ends the reasoning, such that an answer follows; or else an answer or a call, whichever is next."""
        return self.end + self.after + (self.answer if is_answer else "")

    def stage_after(self, prompt: str) -> Stage:
        """Where the output begins that follows a prompt."""
        prompt = prompt.rstrip()
        if prompt.endswith(self.start):
            return Stage.INSIDE
        return Stage.AFTER if prompt.endswith(self.end) else self.stage

    def stage_within(self, answer: str) -> Stage:
        """Where the output begins that goes on with an answer."""
        if self.end in answer:
            return Stage.AFTER
        if self.start in answer:
            return Stage.INSIDE
        return Stage.AFTER if answer.strip() else self.stage


@dataclasses.dataclass(frozen=True, slots=True)
class Reasoning:
    """Reads the reasoning of one output, up to where the answer begins.

    Only what an output begins with is reasoning; later marks are text. Without an end mark, all of it is.
    """

    form: ReasoningFormat
    stage: Stage

    def read(self, source: Source, pieces: Pieces) -> Reading[None]:
        if self.stage is Stage.AFTER:
            return
        is_opened = yield from source.skip(self.form.start, after_space=True)
        if not (is_opened or self.stage is Stage.INSIDE):
            return
        source.settle()
        yield from source.through([self.form.end], pieces.add_reasoning)
        yield from source.skip_space()
        source.settle()


HARMONY = ReasoningFormat(
    "<|channel|>analysis<|message|>", "<|end|>", after="<|start|>assistant", answer="<|channel|>final<|message|>"
)
"""Part of a markup that has more to it: what reads the calls reads the reasoning too."""

_THINK = ReasoningFormat("<think>", "</think>")

REASONING_PARSERS: dict[str, ReasoningFormat] = {
    "deepseek_r1": _THINK._replace(stage=Stage.INSIDE),
    "qwen3": _THINK,
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "openai": HARMONY,
    "openai_gptoss": HARMONY,
    "gptoss": HARMONY,
}
"""By the names that vLLM gives them."""


def detect_reasoning_parser(template: str) -> str | None:
    """The format whose marks a chat template knows; None if it knows none."""
    signs = {
        "openai": ("<|channel|>",),
        "mistral": ("[THINK]",),
        "seed_oss": ("<seed:think>",),
        "qwen3": ("<think>", "</think>"),
        "granite": ("Here is my thought process:",),
    }
    return next((name for name, texts in signs.items() if any(text in template for text in texts)), None)
