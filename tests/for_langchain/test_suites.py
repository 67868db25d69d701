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
@pytest.mark.timeout(300)
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
            "frequency_penalty": 1.0,  # greedy texts of so small a model repeat themselves without end
            "max_tokens": 150,
            "parallel_tool_calls": False,  # the demo model would repeat its call until that
            "engine_kwargs": {"kv_cache_memory": "128MiB"},
        }

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        # Where the prompt does not show the schema, as by json_schema, the demo model writes texts without end.
        return {"method": "function_calling"}

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

    @pytest.mark.xfail(reason="a model of 135M parameters writes JSON, but not with the keys that the prompt asks for")
    def test_json_mode(self, model: ChatPaged) -> None:
        super().test_json_mode(model)

    @pytest.mark.xfail(reason="a model of 135M parameters does not choose to call a tool without being forced")
    def test_agent_loop(self, model: ChatPaged) -> None:
        super().test_agent_loop(model)
