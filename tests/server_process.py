"""The command line on an engine without a model: `server_process.py STEP_SECONDS COMMAND ...`."""

from __future__ import annotations

import sys
import time
from typing import Any

import paged_backend
from helpers_server import make_scripted_llm
from paged_backend import LLM


def main() -> None:
    step_seconds, *arguments = sys.argv[1:]

    def fake_llm(model: str, tokenizer: str | None, **config: Any) -> LLM:
        llm, runner, sampler = make_scripted_llm(num_blocks=4096, **config)
        sampler.script = [*b"abcdefgh"]
        runner.on_step = lambda output: time.sleep(float(step_seconds))
        return llm

    paged_backend.LLM = fake_llm  # type: ignore[assignment, misc]
    from paged_backend.cli.app import app

    app(arguments, prog_name="paged-backend")


if __name__ == "__main__":
    main()
