"""What clients of `/v1/responses` send. Nothing is stored, so what asks for something stored is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from paged_backend.server.protocol import Body, SamplingBody, Sources, refused

_NOT_STORED = "this server stores no responses"
_LOGPROBS = "message.output_text.logprobs"


class ResponseTextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    description: str | None = None
    strict: bool | None = None
    """The schema is always followed to the letter."""

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseTextFormat:
        is_schema = self.type == "json_schema"
        if (self.schema_ is not None) != is_schema or (self.name is not None) != is_schema:
            raise refused("text", "must have a format with name and schema if its type is json_schema, and only then")
        return self


class ResponseText(Body):
    format: ResponseTextFormat | None = None
    verbosity: Literal["medium"] | None = None
    """Models have no other."""


class ResponseReasoning(Body):
    """How much a model thinks is up to its template: see `chat_template_kwargs` and `thinking_token_budget`."""

    effort: None = None
    summary: None = None


class ResponseStreamOptions(Body):
    include_obfuscation: Literal[False] = False


class FunctionTool(Body):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(Body):
    type: Literal["function"]
    name: str


class ResponsesRequest(SamplingBody):
    sources: ClassVar[Sources] = {
        **SamplingBody.sources,
        "messages": ("input",),
        "max_tokens": ("max_output_tokens",),
        "logprobs": ("top_logprobs",),
        "structured_outputs": ("structured_outputs", "text", "tools"),
    }

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: int | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: ResponseText | None = None
    reasoning: ResponseReasoning | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    """Reasoning is shown in the open, and may be sent back as it is: the second adds nothing."""
    include_reasoning: bool = True
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    """Labels, which come back with the response."""
    truncation: Literal["disabled"] | None = None
    store: bool = False
    background: bool = False
    previous_response_id: str | None = None
    conversation: Any = None

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None or _LOGPROBS in (self.include or ())

    @model_validator(mode="after")
    def _check_nothing_is_stored(self) -> ResponsesRequest:
        if self.store:
            raise refused("store", f"must be false: {_NOT_STORED}")
        if self.background:
            raise refused("background", f"must be false: {_NOT_STORED}")
        if self.previous_response_id is not None:
            raise refused("previous_response_id", f"names nothing: {_NOT_STORED}; send its input and output again")
        if self.conversation is not None:
            raise refused("conversation", f"names nothing: {_NOT_STORED}; send its items as input")
        return self

    @model_validator(mode="after")
    def _check_combinations(self) -> ResponsesRequest:
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options", "needs stream=true")
        if self.text is not None and self.text.format is not None and self.structured_outputs is not None:
            raise refused("text", "with a format and structured_outputs exclude each other; give one")
        return self
