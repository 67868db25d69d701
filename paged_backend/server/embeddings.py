"""`/v1/embeddings`."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable, Sequence
from typing import Any

from paged_backend import EmbeddingRequestOutput
from paged_backend.server.protocol import EmbeddingRequest, prompts_of
from paged_backend.server.serving import Serving


async def embed(serving: Serving, body: EmbeddingRequest) -> dict[str, Any]:
    """A vector per input; cancelling aborts it."""
    outputs = await _outputs(
        serving,
        body,
        prompts_of(body.input),
        dimensions=body.dimensions,
        cache_salt=body.cache_salt,
    )
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(_vector(output), body.encoding_format)}
        for index, output in enumerate(outputs)
    ]
    return {"object": "list", "model": serving.model_name(body.model), "data": data, "usage": _usage(outputs)}


async def _outputs(
    serving: Serving,
    body: EmbeddingRequest,
    prompts: Sequence[str | list[int]],
    **options: Any,
) -> list[EmbeddingRequestOutput]:
    return await serving.llm.aembed(
        prompts,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        priority=body.priority,
        timeout=serving.settings.request_timeout,
        lora_request=serving.lora_request(body.model),
        **options,
    )


def _vector(output: EmbeddingRequestOutput) -> list[float]:
    return output.outputs.embedding


def _encoded(vector: list[float], encoding: str) -> list[float] | str:
    """As numbers, or as the base64 of little-endian 32-bit floats."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if encoding == "base64" else vector


def _usage(outputs: Iterable[EmbeddingRequestOutput]) -> dict[str, int]:
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
