"""LangChain's own suites, on the demo model."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from helpers_langchain import (
    ignores_beta_warnings,
)
from langchain_paged import ChatPaged
from paged_backend import EngineConfig
from paged_backend.model.demo import demo_folder


@pytest.mark.filterwarnings("ignore:ChatPaged takes no argument '(api_key|max_retries)'")
class TestLangChainUnits(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[ChatPaged]:
        return ChatPaged

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "demo"}


@pytest.mark.slow
@ignores_beta_warnings
class TestLangChainIntegration(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[ChatPaged]:
        return ChatPaged

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": "demo",
            "temperature": 0,
            "max_tokens": 60,
            "engine_kwargs": {"kv_cache_memory": "128MiB"},
        }

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return str(demo_folder(EngineConfig().cache_folder))

    @property
    def supported_usage_metadata_details(self) -> Any:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = ChatPaged(**self.chat_model_params)
        question = "Name as many colours as you can. " * 5
        model.invoke(question)
        message: Any = None
        for chunk in model.stream(question):
            message = chunk if message is None else message + chunk
        answer: AIMessage = message if stream else model.invoke(question)
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["input_token_details"]["cache_read"] > 0
        return answer
