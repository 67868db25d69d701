"""Tool calls on the demo model: it must call the tool, the tool runs, and the model answers with its result.

pip install -c constraints.txt -e ".[demo,grammar]" && python examples/tool_calls.py
"""

from __future__ import annotations

import json
from typing import Any

from paged_backend import LLM, SamplingParams, ToolCall

WEATHER = {"Oslo": "snow, -4 °C", "Cairo": "sun, 31 °C", "Lima": "fog, 17 °C"}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city now.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": list(WEATHER)}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def run(call: ToolCall) -> str:
    """The arguments follow the schema: the grammar sees to it, however small the model is."""
    assert call.name == "get_weather"
    return WEATHER[json.loads(call.arguments)["city"]]


def as_message(calls: list[ToolCall]) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ],
    }


def main() -> None:
    params = SamplingParams(temperature=0, max_tokens=60)
    with LLM("demo") as llm:
        for city in WEATHER:
            messages: list[dict[str, Any]] = [{"role": "user", "content": f"How is the weather in {city}?"}]
            [output] = llm.chat(messages, params, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
            [call] = output.outputs[0].tool_calls
            result = run(call)
            print(f"{call.name}({call.arguments}) -> {result}")

            messages += [as_message([call]), {"role": "tool", "tool_call_id": call.id, "content": result}]
            for news in llm.stream_chat(messages, params, tools=TOOLS, tool_choice="none"):
                print(news.outputs[0].text, end="", flush=True)
            print("\n")


if __name__ == "__main__":
    main()
