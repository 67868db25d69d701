"""How the engine would run a model, found out without starting one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from paged_backend.config import EngineConfig
from paged_backend.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from paged_backend.model.ways import Verdict


def check_model(
    model: str | os.PathLike[str] | PreTrainedModel,
    tokenizer: str | PreTrainedTokenizerBase | None = None,
    **settings: Any,
) -> Verdict:
    """Load a model as `LLM` would, and say how it is run and what fits.

    Raises what `LLM` would raise: ModelError, with what was tried, if no way to run it gives what a plain run gives.
    """
    # Imported here, since torch and transformers take seconds.
    from paged_backend.model.loader import load
    from paged_backend.model.ranks import ranks_for
    from paged_backend.model.runner import ModelRunner

    config = EngineConfig(**settings)
    with ranks_for(config) as ranks:
        loaded = load(model, tokenizer, config, ranks)
        if not loaded.generates:
            kind = "an encoder" if loaded.classification is None else "a classifier"
            raise ModelError(f"{loaded.name} is {kind}: it has no KV cache, and runs on padded batches")
        runner = ModelRunner(loaded, config)
    runner.close()
    return runner.verdict
