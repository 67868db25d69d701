"""Adapters that come and go while the server runs, in vLLM's form."""

from __future__ import annotations

from paged_backend import LoRARequest
from paged_backend.server.errors import ApiError
from paged_backend.server.protocol import LoadLoraRequest, UnloadLoraRequest
from paged_backend.server.serving import Serving


async def load(serving: Serving, body: LoadLoraRequest) -> None:
    """From now on, the adapter's name is that of a model."""
    if body.lora_name in (*serving.model_names, *serving.lora_modules):
        raise ApiError(400, f"the name {body.lora_name!r} is in use; unload it, or choose another", param="lora_name")
    wanted = LoRARequest(body.lora_name, body.lora_path)
    await serving.prepare(serving.llm.add_lora, wanted)
    serving.lora_modules[body.lora_name] = wanted


def unload(serving: Serving, body: UnloadLoraRequest) -> None:
    """Requests that have begun go on with it."""
    if serving.lora_modules.pop(body.lora_name, None) is None:
        raise ApiError(404, f"there is no adapter {body.lora_name!r}", param="lora_name", code="model_not_found")
    serving.llm.remove_lora(body.lora_name)
