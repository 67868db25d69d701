"""The commands, run in this process or in one of their own, on engines without a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from helpers_server import CHAT_TEMPLATE, ScriptedSampler, make_scripted_llm
from paged_backend import LLM
from paged_backend.cli.app import app
from paged_backend.engine.scheduler import SchedulerOutput

ROOT = Path(__file__).parents[1]


def run(*arguments: str, text: str | None = None, columns: int = 200) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)], input=text, env={"COLUMNS": str(columns)})


def failed(result: Result, code: int = 1) -> str:
    """What a failing command says: one line, without a traceback."""
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output


@dataclasses.dataclass
class Fakes:
    """What the commands load instead of models."""

    made: list[tuple[str, dict[str, Any]]]
    script: list[int]
    template: str = CHAT_TEMPLATE
    on_step: Callable[[SchedulerOutput], object] = lambda output: None
    sampler: ScriptedSampler | None = None

    def make(self, model: str, tokenizer: str | None = None, **config: Any) -> LLM:
        self.made.append((model, config))
        llm, runner, self.sampler = make_scripted_llm(template=self.template, **config)
        self.sampler.script, runner.on_step = self.script, self.on_step
        return llm
