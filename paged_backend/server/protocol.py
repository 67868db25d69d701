"""What clients send, as pydantic models: OpenAI's fields, and our extensions under vLLM's names.

A field that is not here is refused; null means the same as leaving a field out. Ranges are `SamplingParams`' to check.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_N = 128
MAX_PROMPTS = 2048

TokenIds = list[int]
Sources = Mapping[str, tuple[str, ...]]
"""By the engine's name for something: the fields that it may be made of, if they are called otherwise, in order."""


def refused(param: str, message: str) -> PydanticCustomError:
    """What a validator raises about a field that does not go with the others."""
    return PydanticCustomError("refused", "{message}", {"param": param, "message": f"{param} {message}"})


def prompts_of(given: Any) -> Sequence[str | list[int]]:
    """`"a"` and `[1, 2]` are one prompt, `["a", "b"]` and `[[1, 2]]` are lists of them."""
    is_list = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
    return given if is_list else [given]


class Body(BaseModel):
    """A JSON object of known fields, none of which is converted from another type."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _null_means_absent(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: item for key, item in value.items() if item is not None}
        return value

    def given(self) -> dict[str, Any]:
        """What the client sent, by the names it was sent under; as deep as it was sent, where `model_dump` gives up."""
        aliases = {name: field.alias or name for name, field in type(self).model_fields.items()}
        return {aliases[name]: _plain(getattr(self, name)) for name in aliases if name in self.model_fields_set}


def _plain(value: Any) -> Any:
    if isinstance(value, Body):
        return value.given()
    return [_plain(item) for item in value] if isinstance(value, list) else value


class ModelBody(Body):
    sources: ClassVar[Sources] = {"lora_request": ("model",)}

    model: str | None = None
    """Absent: the first model that is served."""

    def source_of(self, field: str | None) -> str | None:
        """The field that was sent for what the engine calls `field`."""
        if field is None:
            return None
        sources = self.sources.get(field, (field,))
        return next((source for source in sources if source in self.model_fields_set), sources[0])


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class RepetitionDetectionBody(Body):
    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2


class StructuredOutputsBody(Body):
    """vLLM's; exactly one of the first five."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class JsonSchema(Body):
    name: str
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None
    """The schema is always followed to the letter."""


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise refused("response_format", "must have json_schema if its type is that, and only then")
        return self


class SamplingBody(ModelBody):
    """How to sample, and in what order to serve: what every route that generates honours under these names."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: TokenIds | None = None
    repetition_detection: RepetitionDetectionBody | None = None
    thinking_token_budget: int | None = None
    structured_outputs: StructuredOutputsBody | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    priority: int = 0
    cache_salt: str | None = None
    user: str | None = None
    """A label, which changes nothing."""
    safety_identifier: str | None = None
    """A label, which changes nothing."""
    prompt_cache_key: str | None = None
    """A label: prefixes are shared without it."""
    service_tier: Literal["auto", "default"] | None = None


class GenerationBody(SamplingBody):
    """What completions and chats share."""

    sources: ClassVar[Sources] = {**ModelBody.sources, "structured_outputs": ("structured_outputs", "response_format")}

    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    max_tokens: int | None = None
    response_format: ResponseFormat | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def _check_combinations(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options", "needs stream=true")
        if self.stream and self.prompt_logprobs is not None:
            raise refused("prompt_logprobs", "cannot be streamed; leave one of the two out")
        if self.response_format is not None and self.structured_outputs is not None:
            raise refused("response_format", "and structured_outputs exclude each other; give one")
        return self


class CompletionRequest(GenerationBody):
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None

    @model_validator(mode="after")
    def _check_best_of(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != self.n:
            raise refused("best_of", "other than n is not supported; leave it out")
        return self


class ChatRequest(GenerationBody):
    sources: ClassVar[Sources] = {
        **ModelBody.sources,
        "max_tokens": ("max_completion_tokens", "max_tokens"),
        "logprobs": ("top_logprobs",),
        "structured_outputs": ("structured_outputs", "response_format", "tools"),
    }

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool = True
    store: Literal[False] = False
    metadata: dict[str, str] | None = None
    """Labels, which change nothing."""
    verbosity: Literal["medium"] | None = None
    """Models have no other."""
    modalities: list[Literal["text"]] | None = None

    @model_validator(mode="after")
    def _check_pairs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise refused("top_logprobs", "needs logprobs=true")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise refused("max_tokens", "and max_completion_tokens differ; give one")
        return self


class AnthropicTool(Body):
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    type: Literal["custom"] | None = None
    cache_control: dict[str, Any] | None = None
    """A label: prefixes are shared without it."""


class AnthropicToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _check_name(self) -> AnthropicToolChoice:
        if (self.name is not None) != (self.type == "tool"):
            raise refused("tool_choice", "must have a name if its type is 'tool', and only then")
        return self


class Thinking(Body):
    """How much a model thinks is up to its template: `adaptive` is what it does anyhow."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None
    """Reasoning is shown in full, or not at all."""


class AnthropicOutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class AnthropicOutputConfig(Body):
    format: AnthropicOutputFormat | None = None


class AnthropicMessage(Body):
    role: Literal["user", "assistant"]
    content: str | list[dict[str, Any]]


class CountTokensRequest(ModelBody):
    sources: ClassVar[Sources] = {
        **ModelBody.sources,
        "stop": ("stop_sequences",),
        "structured_outputs": ("output_config", "tools"),
        "thinking_token_budget": ("thinking",),
        "parallel_tool_calls": ("tool_choice",),
    }

    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: AnthropicOutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    """A label: prefixes are shared without it."""


class MessagesRequest(CountTokensRequest):
    max_tokens: int
    stream: bool = False
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    """Labels, which change nothing."""
    service_tier: Literal["auto", "standard_only"] | None = None


class EmbeddingRequest(ModelBody):
    sources: ClassVar[Sources] = {**ModelBody.sources, "prompt": ("input",)}

    input: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    user: str | None = None
    """A label, which changes nothing."""


class ScoreRequest(ModelBody):
    text_1: str | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
    text_2: str | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
    truncate_prompt_tokens: int | None = None
    use_activation: bool = True
    """False: the numbers of a head as they are."""
    priority: int = 0

    @model_validator(mode="after")
    def _check_lengths(self) -> ScoreRequest:
        if isinstance(self.text_1, list) and (
            not isinstance(self.text_2, list) or len(self.text_1) != len(self.text_2)
        ):
            raise refused("text_2", "must be a list as long as text_1, if that is a list")
        return self


class RerankDocument(Body):
    text: str


class RerankRequest(ModelBody):
    sources: ClassVar[Sources] = {**ModelBody.sources, "text_1": ("query",), "text_2": ("documents",)}

    query: str
    documents: Annotated[list[str | RerankDocument], Field(min_length=1, max_length=MAX_PROMPTS)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = True
    truncate_prompt_tokens: int | None = None
    use_activation: bool = True
    """False: the numbers of a head as they are."""
    priority: int = 0


class LoadLoraRequest(Body):
    lora_name: Annotated[str, Field(min_length=1)]
    lora_path: Annotated[str, Field(min_length=1)]


class UnloadLoraRequest(Body):
    lora_name: str
    lora_int_id: int | None = None
    """A label, which changes nothing."""


class TokenizeRequest(ModelBody):
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """Absent: as for generation, where prompts get them. Chats have those of their template."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_one_of(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise refused("prompt", "or messages must be given, and not both")
        for name in ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if self.messages is None and name in self.model_fields_set:
                raise refused(name, "goes with messages only; leave it out")
        if self.messages is not None and self.add_special_tokens:
            raise refused("add_special_tokens", "does not go with messages, whose template has them")
        return self


class DetokenizeRequest(ModelBody):
    tokens: TokenIds
