"""The fields of a request that say how to sample, and those that all requests of the engine may have."""

from __future__ import annotations

from typing import Any

from paged_backend.server.protocol import ChatRequest, CompletionRequest, GenerationBody, JsonSchema, ResponseFormat
from paged_backend.server.serving import Serving

_SAME_NAMES = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "logit_bias",
    "bad_words",
    "allowed_token_ids",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "prompt_logprobs",
    "thinking_token_budget",
)


def given_sampling(body: GenerationBody) -> dict[str, Any]:
    """What the client set, however falsy; the model's recommendations fill the rest."""
    given = {name: getattr(body, name) for name in _SAME_NAMES if name in body.model_fields_set}
    if body.repetition_detection is not None:
        given["repetition_detection"] = body.repetition_detection.given()
    if (structure := _structure(body)) is not None:
        given["structured_outputs"] = structure
    return given


def _structure(body: GenerationBody) -> dict[str, Any] | None:
    """What the output must match, if the client said so in one of the two ways."""
    if body.structured_outputs is not None:
        return body.structured_outputs.given()
    match body.response_format:
        case ResponseFormat(type="json_object"):
            return {"json_object": True}
        case ResponseFormat(json_schema=JsonSchema(schema_=schema)):
            return {"json": schema}
    return None


def completion_sampling(body: CompletionRequest) -> dict[str, Any]:
    given = given_sampling(body)
    if body.logprobs is not None:
        given["logprobs"] = body.logprobs
        if body.echo:
            given["prompt_logprobs"] = max(body.logprobs, given.get("prompt_logprobs", 0))
    return given


def chat_sampling(body: ChatRequest) -> dict[str, Any]:
    given = given_sampling(body)
    if body.max_completion_tokens is not None:
        given["max_tokens"] = body.max_completion_tokens
    if body.logprobs:
        given["logprobs"] = body.top_logprobs or 0
    return given


def request_options(body: GenerationBody, serving: Serving) -> dict[str, Any]:
    return {
        "priority": body.priority,
        "cache_salt": body.cache_salt,
        "timeout": serving.settings.request_timeout,
        "lora_request": serving.lora_request(body.model),
    }
