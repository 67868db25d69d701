"""Hugging Face transformers on a paged-backend engine in this process: `model.generate` and pipelines, unchanged.

>>> import transformers_paged
>>> transformers_paged.enable(model, tokenizer)
>>> pipeline("text-generation", model=model, tokenizer=tokenizer)(prompts, batch_size=32)

Importing this registers the task `paged-text-generation`, whose pipeline keeps many prompts in flight by itself.
"""

from __future__ import annotations

from transformers_paged.model import PagedModel, disable, enable
from transformers_paged.pipeline import PagedTextGenerationPipeline

__all__ = ["PagedModel", "PagedTextGenerationPipeline", "disable", "enable"]
